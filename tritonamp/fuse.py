"""Takes over an optimizer of torch's, with its GradScaler, wherever the training stands."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .adam import Adam, AdamW
from .grad_scaler import GradScaler
from .loss_scale import LossScale
from .optimizer import FusedOptimizer
from .sgd import SGD
from .state import prepare_state, state_keys

_CLASSES: dict[type[Optimizer], type[SGD | Adam]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def fuse(
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler | LossScale | None = None,
    *,
    max_norm: float | None = None,
    **common: Any,
) -> SGD | Adam:
    """Take over an optimizer of torch's, and training goes on as if nothing had happened, in one launch per step.

    Args:
        optimizer: a ``torch.optim.SGD``, ``Adam`` or ``AdamW``. ``foreach``, ``fused`` and ``capturable``, which say
            how to compute, are passed over; a tensor ``lr`` is kept.
        scaler: its GradScaler, whose scale, growth tracker and settings are taken over; or the :class:`LossScale`
            to use. None, or a scaler that is disabled: the loss is not scaled.
        max_norm: gradients are clipped to this global L2 norm; None: not at all. A group that has a ``max_norm``
            of its own keeps it.
        **common: ``skip_nonfinite``, ``skip_norm``, ``master_weights``, ``rounding``, ``process_group``, ``backend``:
            see :class:`~tritonamp.optimizer.FusedOptimizer`.

    Returns:
        An optimizer of the class of the same name. Its groups and state *are* those of the old one, not copies;
        only state tensors of another form (in half precision, say) are converted. Hooks come along.

    The old optimizer stays what an LR scheduler needs, whether it was made before or is made afterwards: what
    changes its groups changes ours, groups added later included. Its ``zero_grad``, ``state_dict``,
    ``load_state_dict`` and ``add_param_group`` act on ours, and its ``step`` raises RuntimeError. Drop the scaler:
    its scale does not move any more. For several optimizers under one scaler, pass one :class:`LossScale` for all,
    or none and keep the scaler, as :class:`~tritonamp.GradScaler`.

    Gradients may be there, and are accumulated on: ``step()`` asks for one more loss to be scaled first.

    Raises:
        TypeError: for any other optimizer or scaler, one derived with methods of its own included; for options that
            are tensors, other than ``lr``; for parameters that cannot be fused.
        ValueError: for ``differentiable=True``, a parameter named twice in a group, and options out of their range.
        RuntimeError: for an optimizer that was fused before or whose ``step`` was replaced; for a scaler between
            ``unscale_()`` or ``step()`` and ``update()``; for parameters without data. Nothing is changed then.
    """
    if "loss_scale" in common:
        raise TypeError("fuse() has no loss_scale: pass a LossScale as scaler")
    kind = _class_for(optimizer)
    _check(optimizer)
    names = inspect.signature(kind).parameters
    fused = kind(
        [_completed(group, max_norm) for group in optimizer.param_groups],
        **{name: value for name, value in optimizer.defaults.items() if name in names},
        **{**common, "max_norm": max_norm, "loss_scale": _loss_scale_of(scaler)},
    )
    try:
        fused._plan.look(fused)
        fused._plan.release()
        _adopt_state(fused, optimizer)
    except BaseException:
        if fused.loss_scale is not None:
            fused.loss_scale._optimizers.discard(fused)
        raise

    # Nothing fails from here on.
    for group, completed in zip(optimizer.param_groups, fused.param_groups, strict=True):
        group.update(completed, params=group["params"])
    optimizer.state.update(fused.state)
    fused.param_groups, fused.state = optimizer.param_groups, optimizer.state
    for name in _HOOKS:  # the dicts themselves, so that handles still remove what they registered
        setattr(fused, name, getattr(optimizer, name))
    _retire(optimizer, fused)
    return fused


def _class_for(optimizer: Optimizer) -> type[SGD | Adam]:
    """Our class for an optimizer that is exactly torch's, but for its constructor."""
    kind = type(optimizer)
    if isinstance(optimizer, FusedOptimizer):
        raise TypeError(f"fuse() takes an optimizer of torch's, got {kind.__name__} of tritonamp, which is fused")
    base = next((cls for cls in kind.__mro__ if cls in _CLASSES), None)
    if base is None:
        raise TypeError(f"fuse() takes a torch.optim.SGD, Adam or AdamW, got {kind.__module__}.{kind.__qualname__}")
    overridden = _overridden(kind, base)
    if overridden:
        raise TypeError(
            f"{kind.__qualname__} is no plain {base.__name__}: it has a {overridden[0]} of its own, which would be lost"
        )
    return _CLASSES[base]


def _overridden(kind: type, base: type) -> list[str]:
    """Methods of ``base`` that ``kind`` has replaced, its constructor apart."""
    derived = kind.__mro__[: kind.__mro__.index(base)]
    names = [name for cls in derived for name, value in vars(cls).items() if callable(value) and hasattr(base, name)]
    # torch itself wraps the `step` of every class.
    is_own = {name: inspect.unwrap(getattr(kind, name)) is not inspect.unwrap(getattr(base, name)) for name in names}
    return [name for name in names if name != "__init__" and is_own[name]]


def _check(optimizer: Optimizer) -> None:
    """Raise for what has no equivalent."""
    if "_fused_as" in vars(optimizer):
        raise RuntimeError("this optimizer was fused before: use what fuse() returned then")
    step = vars(optimizer).get("step")
    if step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step:
        raise RuntimeError(f"the optimizer's step() was replaced by {step!r}, which would be lost: fuse it before that")
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError(f"group {number} has differentiable=True: a fused step cannot be differentiated")
        for name, value in group.items():
            values = value if isinstance(value, tuple) else (value,)
            if name in optimizer.defaults and name != "lr" and any(isinstance(v, Tensor) for v in values):
                raise TypeError(f"group {number} has a tensor in {name}: set group[{name!r}] to numbers first")
        if len(set(group["params"])) < len(group["params"]):
            raise ValueError(f"group {number} names a parameter twice, and torch updates it twice: name it once")


def _completed(group: dict[str, Any], max_norm: float | None) -> dict[str, Any]:
    """A copy of a group, for the constructor to check and complete."""
    completed = {name: value for name, value in group.items() if name != "loss_scale"}
    if completed.get("max_norm") is None:
        completed["max_norm"] = max_norm
    return completed


def _loss_scale_of(scaler: torch.amp.GradScaler | LossScale | None) -> LossScale | None:
    if scaler is None or isinstance(scaler, LossScale):
        return scaler
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, a LossScale or None, got {type(scaler).__name__}")
    kind = type(scaler)
    overridden = _overridden(kind, GradScaler if issubclass(kind, GradScaler) else torch.amp.GradScaler)
    if overridden:
        raise TypeError(
            f"{kind.__qualname__} is no plain GradScaler: it has a {overridden[0]} of its own, which would be lost"
        )
    if not scaler.is_enabled():
        return None
    states = scaler._per_optimizer_states.values()
    if any(state["stage"] is not OptState.READY for state in states):
        raise RuntimeError("the scaler is between unscale_() or step() and update(): fuse before or after that")
    loss_scale = LossScale()
    loss_scale.load_state_dict(scaler.state_dict())
    return loss_scale


def _adopt_state(fused: SGD | Adam, optimizer: Optimizer) -> None:
    """Bring state into our form: the tensors are shared where they have it."""
    for group in fused.param_groups:
        for param in group["params"]:
            if optimizer.state.get(param):
                state = fused.state[param] = dict(optimizer.state[param])
                fused._import_state(state)
                if state:
                    prepare_state(state, param, state_keys(fused, group, param))


def _retire(optimizer: Any, fused: SGD | Adam) -> None:
    """Leave of the old optimizer what LR schedulers hold it for."""
    old: weakref.ref[Any] = weakref.ref(optimizer)

    @_disable_dynamo  # which would lose it
    def note_step(*_: Any) -> None:  # schedulers warn unless the optimizer that they hold has stepped
        if (retired := old()) is not None:
            retired._opt_called = True

    def share_loaded(loaded: Optimizer) -> None:  # loading makes new groups and a new state
        if (retired := old()) is not None:
            retired.param_groups, retired.state = loaded.param_groups, loaded.state

    fused.register_step_pre_hook(note_step)
    fused.register_load_state_dict_post_hook(share_loaded)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("step() of an optimizer that was fused: call step() of what tritonamp.fuse() returned")

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler leaves it as it is, and is content
    optimizer.step, optimizer._fused_as = refuse, fused
    for name in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        setattr(optimizer, name, getattr(fused, name))

"""The ``torch.optim.Optimizer`` contract, once for all fused optimizers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from . import checkpoint
from .backends import (
    GRAD_NORM,
    PENDING_INF,
    SKIPPED_STEPS,
    Request,
    check_backend,
)
from .backends.devices import Devices
from .distributed import Agreement
from .loss_scale import LossScale
from .plan import Plan
from .report import StepReport
from .scaling import as_scalar, make_loss_scale, scale_outputs, unscale_grads
from .state import MASTER, how_kept, prepare_state, state_keys
from .wrapping import of_itself


class FusedOptimizer(StepReport):
    """An optimizer whose ``step()`` does all that follows ``backward()``.

    Unscale, finiteness check, global norm, clip, update, loss-scale growth or backoff: in one launch on a GPU.
    Subclasses say which rule, state and hyperparameters there are.

    Args:
        params: parameters or groups, as for any ``torch.optim.Optimizer``.
        defaults: the group options with their defaults.
        max_norm: gradients are clipped to this global L2 norm; None: not at all. A group option.
        loss_scale: ``"auto"``: dynamic from the first :meth:`scale` or :meth:`backward` on; ``"dynamic"``, a
            number (static) or a :class:`LossScale`: from the start; None: never.
        skip_nonfinite: leave everything as it is when a gradient is inf or NaN.
        skip_norm: skip a step whose norm, before clipping, exceeds this; the loss scale takes it for a good step.
        master_weights: keep a float32 copy of every float16 or bfloat16 parameter (state ``"master_param"``), which
            is updated, and of which the parameter is the rounding. What others write to such a parameter is taken
            over into the copy at the next step, but for writes through ``.data`` and between replays of a CUDA graph.
        rounding: ``"nearest"``, or ``"stochastic"`` for bfloat16 parameters without master copies: up or down, so
            that the mean is exact. The random numbers depend on the group option ``rounding_seed`` (0; replicas have
            to agree on it), the parameter's place, its applied steps and the element, and on nothing else.
        process_group: ranks of ``torch.distributed`` that hold other parameters, as plain tensors or in other meshes:
            pipeline stages, experts, a sharding scheme of one's own. Norm and inf or NaN are those of all of them, and
            the loss scale of the first is taken over, in the constructor and when a checkpoint is loaded. Every rank
            has to load it then, and to call ``step()`` as often as the others, with gradients or without; ``scale()``
            too, where its gradients carry the loss scale. Not for replicas (DDP), whose squares would be added up; not
            needed for DTensors.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
        RuntimeError: for a backend that cannot run here.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler hands its scale and flag to step()
    _rule: ClassVar[str]
    _numbers: ClassVar[tuple[str, ...]]  # the options that are numbers, max_norm apart
    _inseparable: ClassVar[tuple[str, ...]] = ()  # state that has to be there once steps have been counted

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        max_norm: float | None,
        loss_scale: str | float | LossScale | None,
        skip_nonfinite: bool,
        skip_norm: float | None,
        master_weights: bool,
        rounding: str,
        process_group: Any,
        backend: str,
    ) -> None:
        check_backend(backend)
        if process_group is not None and not hasattr(process_group, "rank"):
            raise TypeError(f"process_group must be a torch.distributed.ProcessGroup or None, got {process_group!r}")
        self.process_group = process_group
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
        if master_weights and rounding == "stochastic":
            raise ValueError("rounding='stochastic' is for parameters without master copies: master_weights=False")
        self.master_weights, self.rounding = bool(master_weights), rounding
        self._loss_scale, self._is_armed = make_loss_scale(loss_scale)
        if self._loss_scale is not None and not skip_nonfinite and self._is_armed:
            raise ValueError(
                f"skip_nonfinite=False needs loss_scale=None, got {loss_scale!r}: a scale backs off by skipping"
            )
        if skip_norm is not None:
            check_at_least_0("skip_norm", skip_norm)
        self._skip_nonfinite = bool(skip_nonfinite)
        self._skip_norm = math.inf if skip_norm is None else float(skip_norm)
        self._backend_name = backend
        self._outcome: Tensor | None = None
        defaults = {**defaults, "max_norm": max_norm, "loss_scale": self._scale_numbers()}
        if rounding == "stochastic":
            defaults["rounding_seed"] = 0  # not drawn: replicas have to agree
        super().__init__(params, defaults)
        self._start()
        self._agree_on_scale()

    def _start(self) -> None:
        """Set up what is neither copied nor pickled, after what is."""
        self._itself = weakref.ref(self)
        self._plan = Plan()
        self._devices = Devices(self._backend_name)
        self._outer_found_inf: Any = None
        self._has_outer_scaler = False
        self._had_gradients = False  # in the last step
        self._is_unscaled: bool = self.__dict__.get("_is_unscaled", False)  # by unscale_(); copied with the gradients
        self._loading: dict[str, Any] | None = None  # the checkpoint, while it is loaded
        if self._loss_scale is not None:
            self._loss_scale._attach(self)

    # What a subclass says.

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Keys of the state tensors of a parameter in this group, ``"step"`` apart."""
        raise NotImplementedError

    def _hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        """The rule's own numbers, in the order of ``kernels/rules.py``."""
        raise NotImplementedError

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for an option out of its range, TypeError for one that is no number."""
        self._check_numbers(group)
        check_at_least_0("lr", group["lr"])

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        """Of :meth:`_check_group` what is checked at every step, without a look at a tensor's value.

        Ranges are not: a scheduler may leave an ``lr`` slightly below 0.
        """
        lr = group["lr"]
        if isinstance(lr, Tensor) and (lr.numel() != 1 or lr.dtype not in (torch.float32, torch.float64)):
            raise ValueError(
                f"a tensor lr must have one element, float32 or float64, got shape {tuple(lr.shape)}, {lr.dtype}"
            )
        for name in self._numbers:
            check_number(name, group[name])
            if name != "lr" and isinstance(group[name], Tensor) and group[name].dim():
                raise ValueError(f"{name} must be a number, got a tensor of shape {tuple(group[name].shape)}")
        check_max_norm(group["max_norm"])
        seed = group.get("rounding_seed", 0)
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ValueError(f"rounding_seed must be an integer in [0, 2**63), got {seed!r}")

    def _import_state(self, state: dict[str, Any]) -> None:
        """Complete one parameter's state as loaded from a checkpoint, in place."""

    # The step. All of it stays out of torch.compile's tracing, which does not see raw pointers, and does not carry out
    # what scale() notes down. (`torch.compiler.disable` would import the compiler with this module.)

    @_disable_dynamo
    @of_itself
    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the loss scale; what ``torch.amp.GradScaler.scale`` takes is taken.

        Arms ``loss_scale="auto"``. Returns ``outputs`` as they are with ``loss_scale=None``.

        Raises:
            RuntimeError: under a ``torch.amp.GradScaler``, which scales the loss itself; while there are gradients
                that :meth:`unscale_` has unscaled, to which a scaled loss's would be added; with
                ``skip_nonfinite=False``.
        """
        if self._loss_scale is None:
            return outputs
        self._refuse_outer_scaler("scale()")
        if not self._skip_nonfinite:
            raise RuntimeError("scale() with skip_nonfinite=False: a loss scale backs off by skipping steps")
        if self._is_unscaled:
            if any(param.grad is not None for param in self._params()):
                raise RuntimeError("scale() after unscale_(): call step() or zero_grad() of this optimizer first")
            self._clear_unscaled()
        scaled = scale_outputs(outputs, self._scale_state()[0].to(torch.float32))
        self._is_armed = self._loss_scale._is_scaled = True
        return scaled

    def _refuse_outer_scaler(self, what: str) -> None:
        if self._has_outer_scaler:
            raise RuntimeError(f"{what} under a GradScaler: the scaler scales and unscales itself, with its own {what}")

    @_disable_dynamo
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss and run its backward pass; keywords go to ``Tensor.backward``."""
        self.scale(loss).backward(**kwargs)

    @_disable_dynamo
    @of_itself
    def unscale_(self) -> None:
        """Divide the gradients by the loss scale in place, to look at them or change them before ``step()``.

        ``step()`` then knows, and so do further calls, which do nothing. The check for inf and NaN is made here
        and again in ``step()``.
        """
        if self._loss_scale is not None:
            self._refuse_outer_scaler("unscale_()")
        if self._is_unscaled or self._loss_scale is None or not self._is_armed:
            return
        try:
            has_gradients = self._plan.look(self) and any(grad is not None for grad in self._plan.grads)
            if has_gradients:
                found_inf = torch.zeros(1, dtype=torch.float32, device=self._device())
                inv_scale = self._scale_state()[0].reciprocal().to(torch.float32)
                unscale_grads(self._params(), inv_scale, found_inf)
                self._outcome_state()[PENDING_INF] += found_inf[0]
        finally:
            self._plan.release()
        self._is_unscaled = has_gradients  # what comes later is scaled

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their gradients, unless the step is to be skipped; one launch on a GPU.

        Args:
            closure: evaluated first, with gradients enabled; its value is returned.

        Raises:
            RuntimeError: if a loss scale is armed and nothing was scaled since the last step; or for gradients
                that cannot be updated from. Everything is as before then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            # What is made in inference mode could not be updated outside of it.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                self._had_gradients = self._plan.look(self)
                if self._had_gradients:
                    self._apply()
                else:
                    self._do_nothing()
        finally:
            self._plan.release()
        return loss

    def _apply(self) -> None:
        """The step, from the gradients that the plan has found."""
        device = self._device()
        if self._plan.is_stale:
            devices = self._plan.devices()
            if any(each.type == "cuda" for each in devices) and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a step() that makes state or tables cannot be captured in a CUDA graph: run one before"
                )
            for each in devices:
                self._devices.on(each)  # which may refuse
        request = self._request(device)
        self._plan.prepare(self)
        self._devices.step(self, self._plan, request)
        self._plan.updated_masters()
        self._is_unscaled = False
        if self._loss_scale is not None and request.loss_scale is not None:
            self._loss_scale._end_step(self)

    def _scale_in_force(self) -> LossScale | None:
        """The own loss scale, if this step's gradients carry it; raises where it would train wrongly."""
        scale = self._loss_scale if self._is_armed else None
        if scale is None:
            return None
        if self._outer_found_inf is not None:
            if scale._is_scaled:
                raise RuntimeError(
                    "the loss was scaled by this optimizer's scale() and by a GradScaler: use one of them"
                )
            return None
        if not scale._is_scaled and self._waits_for_others():
            return scale
        if not scale._is_scaled:
            if any(float(group["lr"]) != 0 for group in self.param_groups):
                raise RuntimeError(
                    "step() with a loss scale, but nothing was scaled since the last step: call opt.backward(loss) "
                    "or opt.scale(loss).backward(), or pass loss_scale=None if the loss is not to be scaled"
                )
            return None
        if scale._is_shared and self in scale._recorded:
            raise RuntimeError(
                f"second step() in one iteration on a loss scale that {len(scale._optimizers)} optimizers share: call "
                "loss_scale.update() first; or let go of the others, if they are no longer used"
            )
        return scale

    def _waits_for_others(self) -> bool:
        """Whether there is nothing to do but to agree with other ranks."""
        return self.process_group is not None and all(grad is None for grad in self._plan.grads)

    def _request(self, device: torch.device) -> Request:
        """What this step asks of the backend."""
        scale = self._scale_in_force()
        is_outer = self._outer_found_inf is not None
        skip_nonfinite = self._skip_nonfinite or is_outer
        needs_norm = skip_nonfinite or self._skip_norm < math.inf
        for group in self.param_groups:
            self._check_numbers(group)
            needs_norm = needs_norm or group["max_norm"] is not None
        self._has_outer_scaler |= is_outer
        return Request(
            outcome=self._outcome_state(),
            loss_scale=None if scale is None else self._scale_state(),
            unscale=scale is not None and not self._is_unscaled,
            advance=0 if scale is None or not scale._is_dynamic else 2 if scale._is_shared else 1,
            skip_nonfinite=skip_nonfinite,
            skip_norm=self._skip_norm,
            grad_scale=as_scalar(getattr(self, "grad_scale", None), device),
            found_inf=as_scalar(self._outer_found_inf, device),
            needs_norm=needs_norm,
            lrs=[_lr_on(group["lr"], device) for group in self.param_groups],
        )

    def _do_nothing(self) -> None:
        """A step without gradients: nothing moves, not even the loss scale."""
        if self._outcome is not None:
            self._outcome[:SKIPPED_STEPS] = 0.0
        elif self._plan.device is not None:
            self._outcome_state()[GRAD_NORM] = 0.0
        self._clear_unscaled()
        if self._loss_scale is not None and not self._loss_scale._is_shared:
            self._loss_scale._is_scaled = False

    def _advance_shared(self, state: Tensor) -> None:
        self._devices.advance(state)

    def _clear_unscaled(self) -> None:
        if self._is_unscaled and self._outcome is not None:
            self._outcome[PENDING_INF] = 0.0
        self._is_unscaled = False

    @_disable_dynamo
    @of_itself
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as ``torch.optim.Optimizer.zero_grad``; forgets that they were unscaled."""
        self._clear_unscaled()
        super().zero_grad(set_to_none)

    @property
    def loss_scale(self) -> LossScale | None:
        """The :class:`LossScale` in use; None where there is none."""
        return self._loss_scale

    def _params(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _device(self) -> torch.device:
        """Where loss scale and outcome lie: with the first parameter that is not frozen."""
        if self._plan.device is not None:
            return self._plan.device
        used = (param for param in self._params() if param.requires_grad or param.grad is not None)
        return next((param.device for param in chain(used, self._params())), torch.device("cpu"))

    def _agree_on_scale(self) -> None:
        """Take over the loss scale of the first of the ranks, where there are others."""
        agreement = Agreement(self._params(), self.process_group)
        if agreement.is_needed and self._loss_scale is not None:
            agreement.broadcast(self._scale_state())

    def _scale_state(self) -> Tensor:
        assert self._loss_scale is not None
        device = self._device()
        if device.type == "meta":
            raise RuntimeError("the parameters have no data: make the optimizer after the model has got its memory")
        return self._loss_scale._on(device)

    # Groups, checkpoints, copies.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Optimizer.add_param_group``; a parameter named twice counts once."""
        if isinstance(param_group, dict):
            self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.rounding == "stochastic" and any(param.dtype == torch.float16 for param in group["params"]):
            self.param_groups.pop()
            raise TypeError(
                "rounding='stochastic' is for bfloat16 parameters, got float16 ones: use master_weights=True"
            )
        # By its first place, which is the last to be written.
        places = {param: at for at, param in reversed(list(enumerate(group["params"])))}
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][at] for at in sorted(places.values())]

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``; every group carries the loss scale as plain numbers."""
        numbers = self._scale_numbers()
        for group in self.param_groups:
            group["loss_scale"] = numbers and dict(numbers)
        return super().state_dict()

    def _scale_numbers(self) -> dict[str, float | int] | None:
        """The loss scale as it travels in the groups."""
        if self._loss_scale is None:
            return None
        return {**self._loss_scale.state_dict(), "_is_armed": int(self._is_armed)}

    @of_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint of ours or of torch's optimizer of the same name.

        Options that it lacks take the constructor's values. State is copied, and stays float32 for parameters of
        lower precision. ``loss_scale="auto"`` is armed if it was when the checkpoint was made.
        """
        # torch's own loading would cast state to the parameters' dtypes. The last of the pre-hooks sees what the
        # others have made of the checkpoint; `__setstate__` takes state and scale from there.
        hook = self.register_load_state_dict_pre_hook(lambda _, final: self._before_load(final))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            self._loading = None

    def _before_load(self, state_dict: dict[str, Any]) -> None:
        checkpoint.check(self.param_groups, state_dict, self._inseparable)
        self._loading = state_dict

    def _take_loaded(self, state_dict: dict[str, Any]) -> None:
        for param, group, saved in checkpoint.states_of(self.param_groups, state_dict):
            state = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in saved.items()}
            self._import_state(state)
            self.state[param] = state
            if how_kept(self, param) != MASTER:
                state.pop("master_param", None)
            # A master copy that is missing is made by the first step: the parameter may be loaded after this.
            keys = [key for key in state_keys(self, group, param) if key != "master_param" or key in state]
            if state:
                prepare_state(state, param, keys)
        numbers = checkpoint.loss_scale_of(state_dict)
        if numbers is not None and self._loss_scale is not None:
            self._loss_scale.load_state_dict(numbers)
            self._agree_on_scale()
            self._is_armed = self._is_armed or bool(numbers.get("_is_armed", True))

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError("an optimizer with a process_group cannot be copied or pickled: use its state_dict()")
        kept = (
            "_loss_scale",
            "_is_armed",
            "_is_unscaled",
            "_skip_nonfinite",
            "_skip_norm",
            "_backend_name",
            "_outcome",
            "master_weights",
            "rounding",
            "process_group",
        )
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # which torch adds, and a group would then have
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
        if "_plan" not in self.__dict__:
            self._start()
        if self._loading is not None:
            self._take_loaded(self._loading)


def _lr_on(lr: Any, device: torch.device) -> float | Tensor:
    """A learning rate as a launch takes it: a tensor on the device, which reads its value there; else a number."""
    if isinstance(lr, Tensor) and (lr.device == device or lr.device.type == device.type == "cuda"):
        return lr.to(device, non_blocking=True)
    return float(lr)


def check_max_norm(max_norm: Any) -> None:
    """Raise unless ``max_norm`` is None or a number of at least 0."""
    if isinstance(max_norm, Tensor):
        raise TypeError("max_norm must be a number or None, got a tensor, which the host would have to wait for")
    if max_norm is not None:
        check_at_least_0("max_norm", max_norm)


def check_number(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a number or a tensor."""
    if not isinstance(value, (float, int, Tensor, Real)):
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_at_least_0(name: str, value: Any) -> None:
    """Raise ValueError unless ``value >= 0``; NaN is not. TypeError for what is no number."""
    check_number(name, value)
    if not value >= 0:
        raise ValueError(f"{name} must be at least 0, got {value!r}")

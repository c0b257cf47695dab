"""The step, done dully: float64, plain torch on CPU, one parameter after the other.

What it computes is what ``torch.amp.GradScaler``, ``torch.nn.utils.clip_grad_norm_`` and the non-fused optimizers
of ``torch.optim`` compute, but for what tritonamp decides otherwise: non-finite gradients are looked for as read
and after unscaling, the norm is a float64 one over all gradients, and each group is clipped by its own
``max_norm``. With every value comes the error permitted to a computation in the parameter's compute dtype, float32
or (for float64 parameters) float64; :mod:`tritonamp.testing.bounds` derives it.

Compute the same step with an optimizer of your own, and compare::

    expected = oracle.expect(optimizer)
    optimizer.step()
    expected.check()
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.layout import dense_strides
from tritonamp.rounding import noise, round_stochastically
from tritonamp.testing.bounds import Bounded, Format, assert_within
from tritonamp.testing.scale import ScaleState, next_scale, round_to_float32

__all__ = ["Expectation", "ScaleState", "Step", "expect", "next_scale", "step"]

# Relative error permitted to the global norm.
NORM_ERROR = 5e-7
# Absolute error of ``1 - beta ** t``, formed in float64.
_CANCELLATION = 4 * 2.0**-53

_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master_param")

Numbers = dict[str, Bounded]


@dataclass(frozen=True)
class Step:
    """What a step gives. Tensors are float64, on CPU, complex ones as pairs of reals (one dimension more).

    Attributes:
        params, states: the new values, in the order of the parameters.
        param_errors, state_errors: the absolute error permitted to each element.
        norm: the L2 norm over all unscaled gradients, before clipping, as a float32 would tell it: infinite
            beyond the range. Inf or NaN if one of the gradients is.
        norm_error: the absolute error permitted to it.
        found_inf: whether a gradient was inf or NaN as read or after unscaling, or the caller said so.
        skipped: whether the step was skipped.
        scale: the loss scale after the step; as given where it is not dynamic.
    """

    params: list[Tensor]
    states: list[dict[str, Tensor]]
    param_errors: list[Tensor]
    state_errors: list[dict[str, Tensor]]
    norm: float
    norm_error: float
    found_inf: bool
    skipped: bool
    scale: ScaleState | float | None


def _reals(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().resolve_conj()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _compute_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype in (torch.float64, torch.complex128) else torch.float32


def _global_norm(unscaled: Sequence[Tensor]) -> float:
    """L2 norm in float64, scaled by the largest element: squares of float64 gradients may leave the range."""
    flat = torch.cat([grad.flatten() for grad in unscaled])
    largest = flat.abs().max()
    if largest == 0 or not largest.isfinite():
        return float(largest)
    return float(largest * torch.linalg.vector_norm(flat / largest))


def _reported(norm: float) -> Bounded:
    """The norm as a float32, infinite beyond the range."""
    value = torch.tensor(norm, dtype=torch.float64)
    error = value * NORM_ERROR if math.isfinite(norm) else torch.zeros_like(value)
    return Bounded(value, error, Format.of(torch.float64)).stored(torch.float32)


def _clip_coefficient(max_norm: float | None, norm: float, form: Format) -> Bounded:
    """``min(1, max_norm / (norm + 1e-6))``, with the error that the norm's permitted error makes."""
    if max_norm is None or max_norm == math.inf:
        return Bounded.exact(torch.ones(()), form)
    raw = torch.tensor(float(max_norm), dtype=torch.float64) / (norm + 1e-6)
    coefficient = raw.clamp(max=1.0)
    # The norm's error carries over only as far as the coefficient stays below 1.
    above = (raw * (1 + NORM_ERROR)).clamp(max=1.0) - coefficient
    below = coefficient - (raw * (1 - NORM_ERROR)).clamp(max=1.0)
    active = raw * (1 - NORM_ERROR) < 1
    error = torch.maximum(above, below) + coefficient * form.unit
    return Bounded(coefficient, torch.where(active, error, 0.0), form)


def _sgd(p: Bounded, g: Bounded, state: Numbers, group: Mapping[str, Any]) -> tuple[Bounded, Numbers]:
    def number(x: float) -> Bounded:
        return Bounded.constant(x, p.form)

    momentum = number(group["momentum"])
    if "step" in state:  # where stochastic rounding goes by it
        state = {**state, "step": Bounded.exact(state["step"].value + 1, p.form)}
    if group["weight_decay"] != 0:
        g = g + number(group["weight_decay"]) * p
    if group["momentum"] != 0:
        buf = state.get("momentum_buffer")
        # The first buffer is the gradient, not dampened.
        buf = g if buf is None else momentum * buf + number(1 - group["dampening"]) * g
        state = {**state, "momentum_buffer": buf}
        g = g + momentum * buf if group["nesterov"] else buf
    return p - number(float(group["lr"])) * g, state


def _adam(p: Bounded, g: Bounded, state: Numbers, group: Mapping[str, Any]) -> tuple[Bounded, Numbers]:
    def number(x: float, error: float = 0.0) -> Bounded:
        return Bounded.constant(x, p.form, error)

    lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), float(group["weight_decay"])
    zero = Bounded.exact(torch.zeros_like(g.value), p.form)
    t = int(state["step"].value) + 1 if "step" in state else 1
    m, v = state.get("exp_avg", zero), state.get("exp_avg_sq", zero)

    if decay != 0 and group.get("decoupled_weight_decay", False):
        p = p * number(1 - lr * decay, p.form.unit * lr * decay)
    elif decay != 0:
        g = g + number(decay) * p
    m = m + number(1 - beta1) * (g - m)
    v = number(beta2) * v + (number(1 - beta2) * g) * g
    state = {**state, "step": Bounded.exact(torch.tensor(float(t)), p.form), "exp_avg": m, "exp_avg_sq": v}
    if group["amsgrad"]:
        # Of the uncorrected second moment.
        v = state["max_exp_avg_sq"] = v.maximum(state.get("max_exp_avg_sq", zero))

    correction1, correction2 = 1 - beta1**t, 1 - beta2**t
    step_size = number(lr / correction1, lr / correction1 * _CANCELLATION / correction1)
    root = number(math.sqrt(correction2), math.sqrt(correction2) * _CANCELLATION / correction2)
    denom = v.sqrt() / root + number(group["eps"])
    return p - (step_size * m) / denom, state


def _unscaled(grad: Bounded, inv_scale: float, form: Format) -> Bounded:
    """``grad / scale``. The reciprocal may be rounded to float32, as torch does, whatever the compute dtype."""
    if inv_scale == 1.0:
        return grad
    rounding = abs(round_to_float32(inv_scale) - inv_scale)
    return grad * Bounded(
        torch.tensor(inv_scale, dtype=torch.float64),
        torch.tensor(rounding + inv_scale * form.unit, dtype=torch.float64),
        form,
    )


def _update(
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    inv_scale: float,
    norm: float,
    position: int,
) -> tuple[Bounded, Numbers]:
    """One parameter's update: unscale, clip, then the rule that the group's keys ask for."""
    dtype = _compute_dtype(param)
    form = Format.of_computation(dtype)
    p, numbers = _kept(param, state)
    is_low = _reals(param).dtype != dtype
    has_master = is_low and ("master_param" in numbers or bool(group.get("master_weights")))
    p = numbers.pop("master_param", p)
    g = _unscaled(Bounded.exact(_reals(grad).to(dtype), form), inv_scale, form)
    coefficient = _clip_coefficient(group.get("max_norm"), norm, form)
    if group.get("max_norm") is not None:
        g = g * coefficient
    if group["maximize"]:
        g = -g
    p, numbers = (_adam if "betas" in group else _sgd)(p, g, numbers, group)
    if has_master:
        numbers["master_param"] = p
    if is_low and group.get("rounding") == "stochastic":
        step = int(state["step"]) + 1 if "step" in state else 1
        random = noise(group.get("rounding_seed", 0), position, step, param.numel())
        return _stochastically_stored(p, random, param), numbers
    return p.stored(_reals(param).dtype), numbers


def _stochastically_stored(p: Bounded, random: Tensor, param: Tensor) -> Bounded:
    """Rounded to bfloat16 with the random bits that belong to this step: from any number within the error.

    Rounding with given bits is monotonic, so that the ends of the interval bound the result.
    """
    random = random.as_strided(param.shape, dense_strides(param))
    low, high = (
        round_stochastically(end.to(torch.float32), random).double() for end in (p.value - p.error, p.value + p.error)
    )
    known = p.error.isfinite()
    middle, error = (low + high) / 2, (high - low) / 2
    same = (low == high) | (low.isnan() & high.isnan())
    value = torch.where(known, torch.where(same, low, middle), p.value)
    return Bounded(value, torch.where(same, 0.0, torch.where(known, error, math.inf)), Format.of(param.dtype))


def _kept(param: Tensor, state: Mapping[str, Any]) -> tuple[Bounded, Numbers]:
    form = Format.of_computation(_compute_dtype(param))
    numbers = {k: Bounded.exact(_reals(v), form) for k, v in state.items() if isinstance(v, Tensor)}
    return Bounded.exact(_reals(param), form), numbers


def _look(params: Sequence[Tensor], grads: Sequence[Tensor | None], inv_scale: float) -> tuple[float, bool] | None:
    """Return the global norm and whether a gradient is not finite; None if there is no element at all."""
    unscaled, finite = [], True
    for param, grad in zip(params, grads, strict=True):
        if grad is not None and grad.numel() > 0:
            dtype = _compute_dtype(param)
            as_read = _reals(grad).to(dtype).double()
            unscaled.append(as_read * inv_scale)
            finite &= bool(as_read.isfinite().all() and unscaled[-1].to(dtype).isfinite().all())
    if not unscaled:
        return None
    if finite:
        return _global_norm(unscaled), False
    return (math.nan if any(bool(g.isnan().any()) for g in unscaled) else math.inf), True


def step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    states: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    *,
    scale: ScaleState | float | None = None,
    unscaled: bool = False,
    found_inf: bool = False,
    skip_nonfinite: bool = True,
    skip_norm: float | None = None,
) -> Step:
    """Compute one step, modifying nothing.

    Args:
        params: of float16, bfloat16, float32, float64 or complex dtypes, on any device.
        grads: for each parameter its gradient, still scaled, of any such dtype; or None.
        states: for each parameter its state, with the keys of ``torch.optim`` and ``master_param``. An absent
            ``momentum_buffer`` has not been seeded.
        groups: for each parameter the options of its group: those of ``torch.optim.Adam`` (with ``betas``) or
            ``torch.optim.SGD`` (without), and optionally ``max_norm``, ``rounding`` with ``rounding_seed``,
            ``master_weights``.
        scale: the loss scale: dynamic, fixed, or none.
        unscaled: the gradients have been unscaled before; the loss scale still advances.
        found_inf: an overflow that was seen elsewhere.
        skip_nonfinite: whether a non-finite gradient skips the step.
        skip_norm: skip the step, without counting it as an overflow, if the norm is larger.

    Raises:
        ValueError: if the sequences differ in length.
    """
    lengths = [len(params), len(grads), len(states), len(groups)]
    if len(set(lengths)) > 1:
        raise ValueError("got {} params, {} grads, {} states and {} groups".format(*lengths))
    value = scale.scale if isinstance(scale, ScaleState) else scale
    inv_scale = 1.0 if value is None or unscaled else 1 / value
    looked = _look(params, grads, inv_scale)
    norm, nonfinite = (0.0, False) if looked is None else looked
    found_inf = looked is not None and (found_inf or nonfinite)
    skipped = (found_inf and skip_nonfinite) or (skip_norm is not None and norm > skip_norm)
    if looked is not None and isinstance(scale, ScaleState):
        scale = next_scale(scale, found_inf)
    outputs = [
        _kept(param, state)
        if skipped or grad is None or grad.numel() == 0
        else _update(param, grad, state, group, inv_scale, norm, position)
        for position, (param, grad, state, group) in enumerate(zip(params, grads, states, groups, strict=True))
    ]
    reported = _reported(norm)
    return Step(
        params=[p.value for p, _ in outputs],
        states=[{k: n.value for k, n in state.items()} for _, state in outputs],
        param_errors=[p.error for p, _ in outputs],
        state_errors=[{k: n.error for k, n in state.items()} for _, state in outputs],
        norm=float(reported.value),
        norm_error=float(reported.error),
        found_inf=found_inf,
        skipped=skipped,
        scale=scale,
    )


@dataclass(frozen=True)
class Expectation:
    """What an optimizer's next step has to give; made by :func:`expect` ahead of it."""

    optimizer: Optimizer
    step: Step

    def check(self) -> None:
        """Compare the optimizer, after the step, with what was expected.

        Parameters, state, and what a tritonamp optimizer reports: ``grad_norm``, ``found_inf``,
        ``step_was_skipped`` and the loss scale.

        Raises:
            AssertionError: naming what differs, and by how much.
        """
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = self.optimizer.state_dict()["state"]
        for i, param in enumerate(params):
            assert_within(param, self.step.params[i], self.step.param_errors[i], f"param {i}")
            self._check_state(i, states.get(i, {}))
            master = states.get(i, {}).get("master_param")
            if master is not None and not torch.equal(master.to(param.dtype).nan_to_num(), param.nan_to_num()):
                raise AssertionError(f"param {i} is not the rounding of its master copy")
        if hasattr(self.optimizer, "grad_norm"):
            self._check_report(self.optimizer)

    def _check_state(self, i: int, actual: Mapping[str, Any]) -> None:
        want, error = self.step.states[i], self.step.state_errors[i]
        for key in _STATE_KEYS:
            value = actual.get(key)
            if key in want:
                if not isinstance(value, Tensor):
                    raise AssertionError(f"state {key!r} of param {i}: expected a tensor, got {value!r}")
                assert_within(value, want[key], error[key], f"state {key!r} of param {i}")
            # State may be made ahead of the first applied step, and a count or a master copy kept besides.
            elif key not in ("step", "master_param") and isinstance(value, Tensor) and bool((value != 0).any()):
                raise AssertionError(f"state {key!r} of param {i}: expected none before an applied step")

    def _check_report(self, optimizer: Any) -> None:
        want = self.step
        outcome = (bool(optimizer.found_inf), bool(optimizer.step_was_skipped))
        is_silent = bool(optimizer.grad_norm.isnan()) and outcome == (False, False)
        if _needs_norm(optimizer) or not is_silent:  # else nobody has looked
            self._check_norm(optimizer.grad_norm, outcome)
        if isinstance(want.scale, ScaleState):
            scale = ScaleState.from_state_dict(optimizer.loss_scale.state_dict())
            if scale != want.scale:
                raise AssertionError(f"loss scale: {scale}, expected {want.scale}")

    def _check_norm(self, grad_norm: Tensor, outcome: tuple[bool, bool]) -> None:
        want = self.step
        norm, error = (torch.tensor(x, dtype=torch.float64) for x in (want.norm, want.norm_error))
        if not want.found_inf or want.norm < math.inf:
            assert_within(grad_norm, norm, error, "grad_norm")
        elif bool(grad_norm.isfinite()):
            raise AssertionError(f"grad_norm: {float(grad_norm)!r} although a gradient is not finite")
        if outcome != (want.found_inf, want.skipped):
            raise AssertionError(f"(found_inf, skipped): {outcome}, expected {(want.found_inf, want.skipped)}")


def _needs_norm(optimizer: Any) -> bool:
    """Whether anything depends on the norm: a step that may be skipped, or a group that is clipped."""
    may_skip = getattr(optimizer, "_skip_nonfinite", True) or getattr(optimizer, "_skip_norm", math.inf) < math.inf
    return may_skip or any(group.get("max_norm") is not None for group in optimizer.param_groups)


def _own_scale(optimizer: Any) -> ScaleState | float | None:
    """The loss scale that the optimizer will take its gradients to carry; fixed if its step does not move it."""
    loss_scale = getattr(optimizer, "loss_scale", None)
    if loss_scale is None or not getattr(optimizer, "_is_armed", True):
        return None
    state = ScaleState.from_state_dict(loss_scale.state_dict())
    moves = getattr(loss_scale, "_is_dynamic", True) and not getattr(loss_scale, "_is_shared", False)
    return state if moves else state.scale


def expect(
    optimizer: Optimizer,
    *,
    scale: ScaleState | float | Literal["own"] | None = "own",
    unscaled: bool | None = None,
    found_inf: bool = False,
) -> Expectation:
    """Compute what the optimizer's next step has to give, from its present parameters, gradients and state.

    Call it when the gradients are there, ahead of ``step()``, and :meth:`Expectation.check` after it.

    Args:
        optimizer: a tritonamp optimizer, or an SGD, Adam or AdamW of ``torch.optim``; the latter have no loss
            scale, and look at no gradient.
        scale: the loss scale that the gradients carry, as in :func:`step`; ``"own"`` is the optimizer's, if armed.
        unscaled: as in :func:`step`; by default whether the optimizer's ``unscale_()`` was called.
        found_inf: as in :func:`step`.
    """
    own: Any = optimizer
    options = {name: getattr(own, name) for name in ("rounding", "master_weights") if hasattr(own, name)}
    pairs = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    # Not `optimizer.state`: that may hold momentum buffers which are not seeded yet.
    states = optimizer.state_dict()["state"]
    is_torch = type(optimizer).__module__.startswith("torch.")
    return Expectation(
        optimizer,
        step(
            [param for param, _ in pairs],
            [param.grad for param, _ in pairs],
            [states.get(i, {}) for i in range(len(pairs))],
            [{**options, **group} for _, group in pairs],
            scale=_own_scale(own) if scale == "own" else scale,
            unscaled=getattr(own, "_is_unscaled", False) if unscaled is None else unscaled,
            found_inf=found_inf,
            skip_nonfinite=getattr(own, "_skip_nonfinite", not is_torch),
            skip_norm=getattr(own, "_skip_norm", None),
        ),
    )

"""The torch backend: for CPUs, and wherever there is no Triton.

On fp32 and fp64 tensors it runs torch's own fused kernels, with unscaling and clipping folded into their division of
the gradient; on other dtypes and layouts plain torch operations, one tensor after the other. It decides on the host,
so on another device than a CPU it waits for it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed import WHOLE, Share
from ..loss_scale import FOUND_INF as RECORDED_INF
from ..loss_scale import SCALE, advance
from ..plan import MASTER, STOCHASTIC, Entry, Plan, compute_dtype, dense_strides, layout_of, real_dtype
from ..rounding import noise, round_stochastically
from . import CONSECUTIVE_SKIPS, FOUND_INF, GRAD_NORM, PENDING_INF, SKIPPED, SKIPPED_STEPS, Request

if TYPE_CHECKING:
    from ..optimizer import FusedOptimizer

_BLOCK = 1 << 18  # elements summed at a time in float64
_LARGEST_NORM = 2.0**450  # of what one rank adds: finite float64 gradients are no overflow
_FLOAT32_LIMIT = 2.0**128 - 2.0**103  # what is not below it rounds to inf

Item = tuple[Entry, Tensor, Tensor | None, list[Tensor]]  # a parameter, its gradient, step counter and state


class TorchBackend:
    """Carries out steps with torch operations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generation = -1
        self._is_fused: list[bool] = []

    @torch.no_grad()
    def step(self, optimizer: FusedOptimizer, plan: Plan, request: Request) -> None:
        """One step; see :class:`~tritonamp.backends.Backend`."""
        groups = optimizer.param_groups
        scale = request.loss_scale.tolist() if request.loss_scale is not None else None
        inv_scale = 1.0 / scale[SCALE] if scale is not None and request.unscale else 1.0
        if request.grad_scale is not None:
            inv_scale /= request.grad_scale.item()
        outcome = request.outcome.tolist()

        norm, found_inf, skip = math.nan, False, False
        if request.needs_norm:
            found_inf = outcome[PENDING_INF] != 0
            if request.found_inf is not None:
                found_inf = found_inf or request.found_inf.item() != 0
            norm = self._agreed_norm(plan, inv_scale, found_inf)
            found_inf = found_inf or not norm < math.inf
            skip = (found_inf and request.skip_nonfinite) or norm > request.skip_norm
        if not skip:
            self._update(optimizer, plan, [inv_scale * _clip(group["max_norm"], norm) for group in groups])
            torch.autograd.graph.increment_version(plan.updated())  # torch's fused kernels do not

        outcome[GRAD_NORM], outcome[FOUND_INF], outcome[SKIPPED], outcome[PENDING_INF] = norm, found_inf, skip, 0.0
        outcome[SKIPPED_STEPS] += skip
        outcome[CONSECUTIVE_SKIPS] = outcome[CONSECUTIVE_SKIPS] + 1 if skip else 0.0
        request.outcome.copy_(torch.tensor(outcome, dtype=torch.float64))
        if scale is not None and request.loss_scale is not None and request.advance:
            if request.advance == 1:
                advance(scale, found_inf)
            else:
                scale[RECORDED_INF] = max(scale[RECORDED_INF], float(found_inf))
            request.loss_scale.copy_(torch.tensor(scale, dtype=torch.float64))

    def _agreed_norm(self, plan: Plan, inv_scale: float, found_inf: bool) -> float:
        """The norm over all ranks; not finite if any of them has found an inf or NaN."""
        grads: dict[Share, list[Tensor]] = {}
        for entry, grad in zip(plan.entries, plan.grads, strict=True):
            if grad is not None:
                grads.setdefault(entry.share._replace(shard=0), []).append(_narrowed(grad, compute_dtype(entry.param)))
        agreement = plan.agreement
        if not agreement.is_needed:
            return global_norm(grads.get(WHOLE, []), inv_scale)
        sums = torch.zeros(agreement.slots, 2, dtype=torch.float64, device=self.device)
        sums[0, 1] = math.nan if found_inf else 0.0
        for share, of_share in grads.items():
            norm = global_norm(of_share, inv_scale)
            square = norm * norm if norm < _LARGEST_NORM else _LARGEST_NORM**2 if norm < math.inf else norm
            sums[share.slot, 0 if share.counts else 1] += square if share.counts else square - square
        return math.sqrt(float(agreement.reduce(sums).sum()))

    def advance(self, loss_scale: Tensor) -> None:
        """See :class:`~tritonamp.backends.Backend`."""
        state = loss_scale.tolist()
        advance(state, state[RECORDED_INF] != 0)
        state[RECORDED_INF] = 0.0
        loss_scale.copy_(torch.tensor(state, dtype=torch.float64))

    def _update(self, optimizer: FusedOptimizer, plan: Plan, factors: Sequence[float]) -> None:
        """Apply the rule to every parameter that has a gradient; ``factors`` are the groups'."""
        if self._generation != plan.generation:
            self._is_fused = [self._can_fuse(entry, optimizer.param_groups[entry.group]) for entry in plan.entries]
            self._generation = plan.generation
        fused: dict[tuple[int, torch.dtype], list[Item]] = {}
        plain: list[Item] = []
        for entry, grad, is_fused in zip(plan.entries, plan.grads, self._is_fused, strict=True):
            if grad is None:
                continue
            item = (entry, grad, *plan.state_of(entry))
            if is_fused and _is_divisor(factors[entry.group], entry.param.dtype):
                fused.setdefault((entry.group, entry.param.dtype), []).append(item)
            else:
                plain.append(item)
        run_fused, run_plain = _RULES[optimizer._rule]
        for (number, _), items in fused.items():
            run_fused(optimizer.param_groups[number], items, factors[number])
        for item in plain:
            group = item[0].group
            _run_plain(run_plain, optimizer.param_groups[group], item, factors[group])

    def _can_fuse(self, entry: Entry, group: dict[str, Any]) -> bool:
        """Whether torch's fused kernels, which walk flat memory of one dtype, take it."""
        if group.get("amsgrad"):
            return False  # they drop a NaN from the maximum, in the last elements of a tensor
        dtype = entry.param.dtype
        same = dtype == entry.grad_dtype == compute_dtype(entry.param)
        return self.device.type == "cpu" and same and layout_of(entry.param, entry.grad_strides) is None


# The norm.


def global_norm(grads: Sequence[Tensor], inv_scale: float) -> float:
    """L2 norm of the unscaled gradients; inf or NaN if one is, as read or after unscaling.

    Squares are formed and added in float64.
    """
    total = 0.0
    small = [grad for grad in grads if grad.numel() <= _BLOCK or not grad.is_contiguous() or grad.is_complex()]
    if small:
        norms = torch._foreach_norm([_as_real(grad) for grad in small], 2, dtype=torch.float64)
        total += float(torch.stack(norms).square().sum())
    chosen = set(map(id, small))
    large = [grad for grad in grads if id(grad) not in chosen]
    if large:
        buffer = torch.empty(_BLOCK, dtype=torch.float64, device=large[0].device)
        for grad in large:
            for block in grad.view(-1).split(_BLOCK):
                square = buffer[: block.numel()].copy_(block)
                total += float(torch.dot(square, square))
    norm = math.sqrt(total) * inv_scale
    if not norm < math.inf or inv_scale > 1:
        return _careful_norm(grads, inv_scale, norm)
    return norm


def _careful_norm(grads: Sequence[Tensor], inv_scale: float, norm: float) -> float:
    """The norm where a value may be non-finite, may become so by unscaling, or has a square beyond float64."""
    tops = [float(torch.linalg.vector_norm(_as_real(grad), math.inf, dtype=torch.float64)) for grad in grads]
    for grad, top in zip(grads, tops, strict=True):
        limit = math.inf if _as_real(grad).dtype == torch.float64 else _FLOAT32_LIMIT
        if not top * inv_scale < limit:
            return top if not top < math.inf else math.inf
    if norm < math.inf:
        return norm
    top = max(tops)
    squares = [float(_as_real(grad).to(torch.float64).div(top).square().sum()) for grad in grads]
    return min(math.sqrt(sum(squares)) * top * inv_scale, sys.float_info.max)  # finite gradients are no overflow


def _clip(max_norm: float | None, norm: float) -> float:
    """The clip coefficient, as in ``torch.nn.utils.clip_grad_norm_``."""
    if max_norm is None or max_norm == math.inf:
        return 1.0
    coefficient = max_norm / (norm + 1e-6)
    return coefficient if coefficient < 1 or math.isnan(coefficient) else 1.0


# The update.


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _narrowed(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """A float64 gradient of a parameter that is computed in float32, as the update will read it."""
    is_wider = dtype == torch.float32 and real_dtype(grad.dtype) == torch.float64
    return _as_real(grad).to(dtype) if is_wider else grad


def _is_divisor(factor: float, dtype: torch.dtype) -> bool:
    """Whether the fused kernels can divide by the factor's reciprocal, which they take in float32."""
    return factor == 1 or (dtype == torch.float32 and (factor == 0 or 2.0**-126 <= factor <= 2.0**126))


def _run_plain(
    update: Callable[[dict[str, Any], Tensor, Tensor, Sequence[Tensor], float], None],
    group: dict[str, Any],
    item: Item,
    factor: float,
) -> None:
    """One parameter, in its compute dtype. The gradient is left unscaled and clipped, as torch's recipe leaves it."""
    entry, grad, counter, states = item
    dtype = compute_dtype(entry.param)
    param = _as_real(entry.param)
    g = _as_real(grad).to(dtype)
    if factor != 1:
        # Two factors: one may be subnormal in float32, or beyond it.
        rescue = 2.0**-100 if factor < 2.0**-100 else 2.0**100 if factor > 2.0**100 else 1.0
        g = g * (factor / rescue) * rescue
        if 0 in grad.stride():  # expanded: its elements share memory
            grad = grad.clone(memory_format=torch.contiguous_format)
            if entry.owner is entry.param:
                entry.param.grad = grad
        _as_real(grad).copy_(g)
    step = 1.0 if counter is None else float(counter.add_(1))
    *states, p = states if entry.kept == MASTER else (*states, param.to(dtype))
    update(group, p, -g if group["maximize"] else g, list(map(_as_real, states)), step)
    if entry.kept == STOCHASTIC:
        random = noise(group["rounding_seed"], entry.position, int(step), param.numel(), param.device)
        param.copy_(round_stochastically(p, random.as_strided(param.shape, dense_strides(param))))
    elif p is not param:
        param.copy_(p)


def _divisor(factor: float, device: torch.device) -> Tensor | None:
    return (
        None if factor == 1 else torch.full((), 1 / factor if factor else math.inf, dtype=torch.float32, device=device)
    )


def _columns(items: Sequence[Item], factor: float) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor | None]:
    """Params, grads, step counters (advanced), and what the gradients are to be divided by."""
    params, grads = [item[0].param for item in items], [item[1] for item in items]
    steps = [item[2] for item in items if item[2] is not None]
    if steps:
        torch._foreach_add_(steps, 1.0)
    return params, grads, steps, _divisor(factor, params[0].device)


def _sgd_fused(group: dict[str, Any], items: Sequence[Item], factor: float) -> None:
    # A buffer starts at zero, so that without dampening a first step is like any other.
    parts = [(items, False)]
    if group["momentum"] != 0 and group["dampening"] != 0:
        first = [item for item in items if item[2] is not None and item[2] == 0]
        later = [item for item in items if item[2] is None or item[2] != 0]
        parts = [(part, part is first) for part in (first, later) if part]
    for part, is_first in parts:
        params, grads, _, divisor = _columns(part, factor)
        torch._fused_sgd_(
            params,
            grads,
            [states[0] for *_, states in part] if group["momentum"] != 0 else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=is_first,
            grad_scale=divisor,
        )


def _sgd_plain(group: dict[str, Any], p: Tensor, g: Tensor, states: Sequence[Tensor], step: float) -> None:
    momentum = group["momentum"]
    if group["weight_decay"] != 0:
        g = g.add(p, alpha=group["weight_decay"])
    if momentum != 0:
        undampened = 1.0 if step == 1 else 1 - group["dampening"]
        buf = states[0].mul_(momentum).add_(g, alpha=undampened)
        g = g.add(buf, alpha=momentum) if group["nesterov"] else buf
    p.sub_(g, alpha=float(group["lr"]))


def _adam_fused(group: dict[str, Any], items: Sequence[Item], factor: float) -> None:
    params, grads, steps, divisor = _columns(items, factor)
    beta1, beta2 = map(float, group["betas"])
    fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    fused(
        params,
        grads,
        [states[0] for *_, states in items],
        [states[1] for *_, states in items],
        [],
        steps,
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        grad_scale=divisor,
    )


def _adam_plain(group: dict[str, Any], p: Tensor, g: Tensor, states: Sequence[Tensor], step: float) -> None:
    beta1, beta2 = map(float, group["betas"])
    lr, weight_decay = float(group["lr"]), group["weight_decay"]
    if weight_decay != 0 and group["decoupled_weight_decay"]:
        p.mul_(1 - lr * weight_decay)
    elif weight_decay != 0:
        g = g.add(p, alpha=weight_decay)
    m, v = states[0], states[1]
    m.add_(g - m, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    largest = torch.maximum(states[2], v, out=states[2]) if group["amsgrad"] else v
    denom = (largest.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    p.addcdiv_(m, denom, value=-lr / (1 - beta1**step))


_RULES = {"SGD": (_sgd_fused, _sgd_plain), "ADAM": (_adam_fused, _adam_plain)}

"""The torch backend: for CPUs, and wherever there is no Triton.

On fp32 and fp64 tensors it runs torch's own fused kernels, with unscaling and clipping folded into their division of
the gradient; on other dtypes and layouts plain torch operations, one tensor after the other. It decides on the host,
so on another device than a CPU it waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed import WHOLE, Share, like
from ..layout import compute_dtype, dense_strides, layout_of, real_dtype
from ..loss_scale import FOUND_INF as RECORDED_INF
from ..loss_scale import SCALE, advance
from ..plan import Entry, Plan
from ..rounding import noise, round_stochastically
from ..state import MASTER, STOCHASTIC
from . import CONSECUTIVE_SKIPS, FOUND_INF, GRAD_NORM, PENDING_INF, SKIPPED, SKIPPED_STEPS, Request
from .norm import as_real, global_norm

if TYPE_CHECKING:
    from ..optimizer import FusedOptimizer

_LARGEST_NORM = 2.0**450  # of what one rank adds: finite float64 gradients are no overflow

Item = tuple[Entry, Tensor, Tensor | None, list[Tensor]]  # a parameter, its gradient, step counter and state


class TorchBackend:
    """Carries out steps with torch operations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generation = -1
        self._fused: dict[tuple[int, torch.dtype], list[int]] = {}
        self._plain: list[int] = []
        self._has_wider_grads = False

    @torch.no_grad()
    def step(self, optimizer: FusedOptimizer, plan: Plan, request: Request) -> None:
        """One step; see :class:`~tritonamp.backends.Backend`."""
        if self._generation != plan.generation:
            self._part(optimizer, plan)
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
        request.outcome.copy_(torch.tensor(outcome, dtype=torch.float64, device="cpu"))
        if scale is not None and request.loss_scale is not None and request.advance:
            if request.advance == 1:
                advance(scale, found_inf)
            else:
                scale[RECORDED_INF] = max(scale[RECORDED_INF], float(found_inf))
            request.loss_scale.copy_(torch.tensor(scale, dtype=torch.float64, device="cpu"))

    def _agreed_norm(self, plan: Plan, inv_scale: float, found_inf: bool) -> float:
        """The norm over all ranks; not finite if any of them has found an inf or NaN."""
        agreement = plan.agreement
        if not agreement.is_needed and not self._has_wider_grads:
            return global_norm([grad for grad in plan.grads if grad is not None and grad.numel()], inv_scale)
        grads: dict[Share, list[Tensor]] = {}
        for entry, grad in zip(plan.entries, plan.grads, strict=True):
            if grad is not None and grad.numel():
                grads.setdefault(entry.share._replace(shard=0), []).append(_narrowed(grad, compute_dtype(entry.param)))
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
        loss_scale.copy_(torch.tensor(state, dtype=torch.float64, device="cpu"))

    def _update(self, optimizer: FusedOptimizer, plan: Plan, factors: Sequence[float]) -> None:
        """Apply the rule to every parameter that has a gradient; ``factors`` are the groups'."""
        run_fused, run_plain = _RULES[optimizer._rule]
        plain = self._plain
        for (number, dtype), part in self._fused.items():
            if _is_divisor(factors[number], dtype):
                chosen = [i for i in part if plan.grads[i] is not None]
                if chosen:
                    run_fused(optimizer.param_groups[number], plan, chosen, factors[number])
            else:
                plain = plain + part
        for i in plain:
            grad = plan.grads[i]
            if grad is not None:
                entry = plan.entries[i]
                item = (entry, grad, *plan.state_of(entry))
                _run_plain(run_plain, optimizer.param_groups[entry.group], item, factors[entry.group])

    def _part(self, optimizer: FusedOptimizer, plan: Plan) -> None:
        """Part the plan's entries, by number, into those that fused kernels take together and all others."""
        self._fused, self._plain = {}, []
        for i, entry in enumerate(plan.entries):
            if self._can_fuse(entry, optimizer.param_groups[entry.group]):
                self._fused.setdefault((entry.group, entry.param.dtype), []).append(i)
            else:
                self._plain.append(i)
        self._has_wider_grads = any(_is_wider(entry.grad_dtype, compute_dtype(entry.param)) for entry in plan.entries)
        self._generation = plan.generation

    def _can_fuse(self, entry: Entry, group: dict[str, Any]) -> bool:
        """Whether torch's fused kernels, which walk flat memory of one dtype, take it."""
        if group.get("amsgrad"):
            return False  # they drop a NaN from the maximum, in the last elements of a tensor
        dtype = entry.param.dtype
        same = dtype == entry.grad_dtype == compute_dtype(entry.param)
        return self.device.type == "cpu" and same and layout_of(entry.param, entry.grad_strides) is None


def _clip(max_norm: float | None, norm: float) -> float:
    """The clip coefficient, as in ``torch.nn.utils.clip_grad_norm_``."""
    if max_norm is None or max_norm == math.inf:
        return 1.0
    coefficient = max_norm / (norm + 1e-6)
    return coefficient if coefficient < 1 or math.isnan(coefficient) else 1.0


# The update.


def _is_wider(grad_dtype: torch.dtype, compute: torch.dtype) -> bool:
    return compute == torch.float32 and real_dtype(grad_dtype) == torch.float64


def _narrowed(grad: Tensor, compute: torch.dtype) -> Tensor:
    """A float64 gradient of a parameter that is computed in float32, as the update will read it."""
    return as_real(grad).to(compute) if _is_wider(grad.dtype, compute) else grad


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
    param = as_real(entry.param)
    g = as_real(grad).to(dtype)
    if factor != 1:
        # Two factors: one may be subnormal in float32, or beyond it.
        rescue = 2.0**-100 if factor < 2.0**-100 else 2.0**100 if factor > 2.0**100 else 1.0
        g = g * (factor / rescue) * rescue
        if 0 in grad.stride():  # expanded: its elements share memory
            grad = grad.clone(memory_format=torch.contiguous_format)
            entry.owner.grad = like(entry.owner, grad)
        as_real(grad).copy_(g)
    step = 1.0 if counter is None else float(counter.add_(1))
    *states, p = states if entry.kept == MASTER else (*states, param.to(dtype))
    update(group, p, -g if group["maximize"] else g, list(map(as_real, states)), step)
    if entry.kept == STOCHASTIC:
        random = noise(group["rounding_seed"], entry.stream, int(step), param.numel(), param.device)
        param.copy_(round_stochastically(p, random.as_strided(param.shape, dense_strides(param))))
    elif p is not param:
        param.copy_(p)


def _divisor(factor: float) -> Tensor | None:
    """What fused kernels divide the gradients by, to multiply them by ``factor``."""
    divisor = 1 / factor if factor else math.inf
    return None if factor == 1 else torch.full((), divisor, dtype=torch.float32, device="cpu")


def _columns(plan: Plan, numbers: Sequence[int]) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Params, grads and states of some entries; the first of the states, where there are any, are step counters."""
    entries = [plan.entries[i] for i in numbers]
    grads = [grad for i in numbers if (grad := plan.grads[i]) is not None]
    places = [entry.at for entry in entries]
    n_states = 1 + entries[0].n_states if places[0] >= 0 else 0
    return [entry.param for entry in entries], grads, [[plan.state[at + k] for at in places] for k in range(n_states)]


def _count(steps: list[Tensor]) -> None:
    torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1.0)  # a tensor: faster than a number


def _sgd_fused(group: dict[str, Any], plan: Plan, numbers: Sequence[int], factor: float) -> None:
    has_momentum = group["momentum"] != 0
    # A buffer starts at zero, so that without dampening a first step is like any other.
    parts = [(numbers, False)]
    if has_momentum and group["dampening"] != 0:
        is_first = [bool(plan.state[plan.entries[i].at] == 0) for i in numbers]
        parts = [([i for i, is_ in zip(numbers, is_first, strict=True) if is_ is kind], kind) for kind in set(is_first)]
    for part, kind in parts:
        params, grads, states = _columns(plan, part)
        if has_momentum:
            _count(states[0])
        torch._fused_sgd_(
            params,
            grads,
            states[1] if has_momentum else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=kind,
            grad_scale=_divisor(factor),
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


def _adam_fused(group: dict[str, Any], plan: Plan, numbers: Sequence[int], factor: float) -> None:
    params, grads, (steps, exp_avgs, exp_avg_sqs) = _columns(plan, numbers)
    _count(steps)
    beta1, beta2 = map(float, group["betas"])
    fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    fused(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        grad_scale=_divisor(factor),
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

"""The torch backend: for CPUs, and wherever there is no Triton.

On fp32 and fp64 tensors it runs torch's own fused kernels, with unscaling and clipping folded into their division of
the gradient; on other dtypes and layouts plain torch operations, one tensor after the other. It decides on the host,
so on another device than a CPU it waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed import Share, like
from ..layout import compute_dtype, dense_strides, layout_of, real_dtype
from ..loss_scale import FOUND_INF as RECORDED_INF
from ..loss_scale import SCALE, advance
from ..plan import Entry, Part
from ..rounding import noise, round_stochastically
from ..state import MASTER, STOCHASTIC
from . import CONSECUTIVE_SKIPS, FOUND_INF, GRAD_NORM, PENDING_INF, SKIPPED, SKIPPED_STEPS, Request
from .norm import as_real, global_norm

if TYPE_CHECKING:
    from ..optimizer import FusedOptimizer

_LARGEST_NORM = 2.0**450  # of what a rank or device adds: squares of larger ones, of float64 gradients, have no sum

Item = tuple[Entry, Tensor, Tensor | None, list[Tensor]]  # a parameter, its gradient, step counter and state


class TorchBackend:
    """Carries out steps with torch operations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generation = -1
        self._fused: dict[tuple[int, torch.dtype], list[int]] = {}
        self._plain: list[int] = []
        self._of_share: dict[Share, tuple[list[int], list[int]]] = {}  # float32 in flat memory, and all others

    @torch.no_grad()
    def step(self, optimizer: FusedOptimizer, part: Part, request: Request) -> None:
        """One step; see :class:`~tritonamp.backends.Backend`."""
        inv_scale, norm = _inv_scale(request), math.nan
        if request.needs_norm:
            norm = math.hypot(*(norm for _, norm in self._norms(optimizer, part, inv_scale)))
        self._finish(optimizer, part, request, inv_scale, norm)

    @torch.no_grad()
    def local_sums(self, optimizer: FusedOptimizer, part: Part, request: Request) -> Tensor | None:
        """See :class:`~tritonamp.backends.Backend`."""
        if not request.needs_norm:
            return None
        sums = torch.zeros(part.agreement.slots, 2, dtype=torch.float64, device=self.device)
        sums[0, 1] = math.nan if _was_found(request) else 0.0
        for share, norm in self._norms(optimizer, part, _inv_scale(request)):
            square = math.inf if norm >= _LARGEST_NORM else norm * norm
            sums[share.slot, 0 if share.counts else 1] += square if share.counts else square - square
        return sums

    @torch.no_grad()
    def apply(self, optimizer: FusedOptimizer, part: Part, request: Request, agreed: Tensor | None) -> None:
        """See :class:`~tritonamp.backends.Backend`."""
        norm = math.nan if agreed is None else math.sqrt(float(agreed.sum()))
        self._finish(optimizer, part, request, _inv_scale(request), norm)

    def _finish(self, optimizer: FusedOptimizer, part: Part, request: Request, inv_scale: float, norm: float) -> None:
        """What follows the norm, which is NaN where it is not needed, or where others have found an inf or NaN."""
        if self._generation != part.generation:
            self._sort(optimizer, part)
        found_inf, skip = False, False
        if request.needs_norm:
            found_inf = _was_found(request) or not norm < math.inf
            skip = (found_inf and request.skip_nonfinite) or norm > request.skip_norm
        if not skip:
            self._update(optimizer, part, [inv_scale * _clip(g["max_norm"], norm) for g in optimizer.param_groups])
            torch.autograd.graph.increment_version(part.updated())  # torch's fused kernels do not

        outcome = request.outcome.tolist()
        outcome[GRAD_NORM], outcome[FOUND_INF], outcome[SKIPPED], outcome[PENDING_INF] = norm, found_inf, skip, 0.0
        outcome[SKIPPED_STEPS] += skip
        outcome[CONSECUTIVE_SKIPS] = outcome[CONSECUTIVE_SKIPS] + 1 if skip else 0.0
        request.outcome.copy_(torch.tensor(outcome, dtype=torch.float64, device="cpu"))
        if request.loss_scale is not None and request.advance:
            scale = request.loss_scale.tolist()
            if request.advance == 1:
                advance(scale, found_inf)
            else:
                scale[RECORDED_INF] = max(scale[RECORDED_INF], float(found_inf))
            request.loss_scale.copy_(torch.tensor(scale, dtype=torch.float64, device="cpu"))

    def _norms(self, optimizer: FusedOptimizer, part: Part, inv_scale: float) -> Iterator[tuple[Share, float]]:
        """The norm of the gradients that are there, for each share."""
        if self._generation != part.generation:
            self._sort(optimizer, part)
        for share, (in_rows, one_by_one) in self._of_share.items():
            flat = _grads(part, in_rows)
            others = [
                _narrowed(grad, compute_dtype(part.entries[i].param))
                for i in one_by_one
                if (grad := part.grads[i]) is not None
            ]
            if flat or others:
                yield share, global_norm(flat, others, inv_scale)

    def advance(self, loss_scale: Tensor) -> None:
        """See :class:`~tritonamp.backends.Backend`."""
        state = loss_scale.tolist()
        advance(state, state[RECORDED_INF] != 0)
        state[RECORDED_INF] = 0.0
        loss_scale.copy_(torch.tensor(state, dtype=torch.float64, device="cpu"))

    def _update(self, optimizer: FusedOptimizer, part: Part, factors: Sequence[float]) -> None:
        """Apply the rule to every parameter that has a gradient; ``factors`` are the groups'."""
        run_fused, run_plain = _RULES[optimizer._rule]
        plain = self._plain
        if any(factor != 1 for factor in factors):
            _separate_grads(part)
        for (number, dtype), numbers in self._fused.items():
            if _is_divisor(factors[number], dtype):
                chosen = [i for i in numbers if part.grads[i] is not None]
                if chosen:
                    run_fused(optimizer.param_groups[number], part, chosen, factors[number])
                    if factors[number] != 1:
                        torch.autograd.graph.increment_version(_grads(part, chosen))
            else:
                plain = plain + numbers
        for i in plain:
            grad = part.grads[i]
            if grad is not None:
                entry = part.entries[i]
                item = (entry, grad, *part.state_of(entry))
                _run_plain(run_plain, optimizer.param_groups[entry.group], item, factors[entry.group])

    def _sort(self, optimizer: FusedOptimizer, part: Part) -> None:
        """Sort the entries, by number: how they are updated, and how their gradients' squares are added up."""
        self._fused, self._plain, self._of_share = {}, [], {}
        for i, entry in enumerate(part.entries):
            is_flat = self.device.type == "cpu" and layout_of(entry.param, entry.grad_strides) is None
            if is_flat and _can_fuse(entry, optimizer.param_groups[entry.group]):
                self._fused.setdefault((entry.group, entry.param.dtype), []).append(i)
            else:
                self._plain.append(i)
            if entry.param.numel():
                in_rows, one_by_one = self._of_share.setdefault(entry.share._replace(shard=0), ([], []))
                (in_rows if is_flat and entry.grad_dtype == torch.float32 else one_by_one).append(i)
        self._generation = part.generation


def _inv_scale(request: Request) -> float:
    """What unscales the gradients: of the own loss scale and of an outer scaler's."""
    inv_scale = 1.0 / request.loss_scale.tolist()[SCALE] if request.loss_scale is not None and request.unscale else 1.0
    return inv_scale if request.grad_scale is None else inv_scale / request.grad_scale.item()


def _was_found(request: Request) -> bool:
    """Whether an inf or NaN was seen before this step: by unscaling in place, or by an outer scaler."""
    flag = 0.0 if request.found_inf is None else request.found_inf.item()
    return flag != 0 or request.outcome.tolist()[PENDING_INF] != 0


def _clip(max_norm: float | None, norm: float) -> float:
    """The clip coefficient, as in ``torch.nn.utils.clip_grad_norm_``."""
    if max_norm is None or max_norm == math.inf:
        return 1.0
    coefficient = max_norm / (norm + 1e-6)
    return coefficient if coefficient < 1 or math.isnan(coefficient) else 1.0


# The update.


def _can_fuse(entry: Entry, group: dict[str, Any]) -> bool:
    """Whether torch's fused kernels, which walk flat memory of one dtype, take it."""
    if group.get("amsgrad"):
        return False  # they drop a NaN from the maximum, in the last elements of a tensor
    return entry.param.dtype == entry.grad_dtype == compute_dtype(entry.param)


def _narrowed(grad: Tensor, compute: torch.dtype) -> Tensor:
    """A float64 gradient of a parameter that is computed in float32, as the update will read it."""
    is_wider = compute == torch.float32 and real_dtype(grad.dtype) == torch.float64
    return as_real(grad).to(compute) if is_wider else grad


def _is_divisor(factor: float, dtype: torch.dtype) -> bool:
    """Whether the fused kernels can divide by the factor's reciprocal, which they take in float32."""
    return factor == 1 or (dtype == torch.float32 and (factor == 0 or 2.0**-126 <= factor <= 2.0**126))


def _separate_grads(part: Part) -> None:
    """Give every parameter a gradient of its own: each is going to be unscaled and clipped in place."""
    if len(set(map(id, part.grads))) == len(part.grads):
        return
    seen = set()
    for i, (entry, grad) in enumerate(zip(part.entries, part.grads, strict=True)):
        if grad is not None and id(grad) in seen:
            part.grads[i] = grad = grad.clone()
            entry.owner.grad = like(entry.owner, grad)
        seen.add(id(grad))


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
        random = noise(group.get("rounding_seed", 0), entry.stream, int(step), param.numel(), param.device)
        param.copy_(round_stochastically(p, random.as_strided(param.shape, dense_strides(param))))
    elif p is not param:
        param.copy_(p)


def _divisor(factor: float) -> Tensor | None:
    """What fused kernels divide the gradients by, to multiply them by ``factor``."""
    divisor = 1 / factor if factor else math.inf
    return None if factor == 1 else torch.full((), divisor, dtype=torch.float32, device="cpu")


def _grads(part: Part, numbers: Sequence[int]) -> list[Tensor]:
    """The gradients of some entries, where there are any."""
    return [grad for i in numbers if (grad := part.grads[i]) is not None]


def _columns(part: Part, numbers: Sequence[int]) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Params, grads and states of some entries; the first of the states, where there are any, are step counters."""
    entries = [part.entries[i] for i in numbers]
    places = [entry.at for entry in entries]
    n_states = 1 + entries[0].n_states if places[0] >= 0 else 0
    states = [[part.state[at + k] for at in places] for k in range(n_states)]
    return [entry.param for entry in entries], _grads(part, numbers), states


def _count(steps: list[Tensor]) -> None:
    torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1.0)  # a tensor: faster than a number


def _sgd_fused(group: dict[str, Any], part: Part, numbers: Sequence[int], factor: float) -> None:
    has_momentum = group["momentum"] != 0
    # A buffer starts at zero, so that without dampening a first step is like any other.
    kinds = [(numbers, False)]
    if has_momentum and group["dampening"] != 0:
        is_first = [bool(part.state[part.entries[i].at] == 0) for i in numbers]
        kinds = [([i for i, is_ in zip(numbers, is_first, strict=True) if is_ is kind], kind) for kind in set(is_first)]
    for chosen, kind in kinds:
        params, grads, states = _columns(part, chosen)
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


def _adam_fused(group: dict[str, Any], part: Part, numbers: Sequence[int], factor: float) -> None:
    params, grads, (steps, exp_avgs, exp_avg_sqs) = _columns(part, numbers)
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

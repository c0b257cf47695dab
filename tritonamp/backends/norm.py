"""The global norm in torch operations: right to 5e-7, in hardly more time than one float32 norm takes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors  # one operator, where `cat` of views takes one for each tensor

# Elements whose squares are added in float32. torch's norm of rows adds in vectors of 4 or 8 lanes, then lane by lane:
# at most 8 + 3 or 4 + 7 roundings of 2**-24, half of which reach the norm, and one more of its root: 3.9e-7.
_ROW = 32
_BLOCK = 1 << 18  # elements of a large tensor, which is taken alone; one of another dtype in parts of that size
_GATHERED = 1 << 19  # elements of small tensors taken together
_SAFE = 2.0**-100  # mean square that no square too small for float32 can matter to
_FLOAT32_LIMIT = 2.0**128 - 2.0**103  # what is not below it rounds to inf


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def global_norm(flat: Sequence[Tensor], others: Sequence[Tensor], inv_scale: float) -> float:
    """L2 norm of the unscaled gradients; inf or NaN if one is, as read or after unscaling.

    Args:
        flat: those of float32 in dense memory of the CPU, in any order of dimensions; these are fast.
        others: all others.
        inv_scale: what unscales them.
    """
    total = _sum_in_rows(flat) if flat else math.inf
    if _SAFE * sum(map(Tensor.numel, flat)) <= total < math.inf:
        if others:
            total += _sum_in_float64(others)
    else:
        total = _sum_in_float64([*flat, *others])
    norm = math.sqrt(total) * inv_scale
    if not norm < math.inf or inv_scale > 1:
        return _careful_norm([*flat, *others], inv_scale, norm)
    return norm


def _sum_in_rows(grads: Sequence[Tensor]) -> float:
    """Sum of squares of dense float32 tensors: in float32 within a row, in float64 over the rows."""
    total, few, size = 0.0, [], 0
    for grad in grads:
        if not grad.is_contiguous():
            grad = grad.as_strided((grad.numel(),), (1,))
        if grad.numel() >= _BLOCK:
            total += sum(map(_sum_of_flat, grad.view(-1).split(16 * _BLOCK)))
            continue
        few.append(grad)
        size += grad.numel()
        if size >= _GATHERED:
            total += _sum_of_flat(_flatten_dense_tensors(few))
            few, size = [], 0
    return total + (_sum_of_flat(_flatten_dense_tensors(few)) if few else 0.0)


def _sum_of_flat(flat: Tensor) -> float:
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in (rows, flat[whole:]))


def _sum_in_float64(grads: Sequence[Tensor]) -> float:
    sums = [torch.zeros((), dtype=torch.float64, device=grads[0].device)] if grads else []
    small, large = list[Tensor](), list[Tensor]()
    for grad in grads:
        is_small = grad.numel() <= _BLOCK or not grad.is_contiguous() or grad.is_complex()
        (small if is_small else large).append(grad)
    if small:
        norms = torch._foreach_norm([as_real(grad) for grad in small], 2, dtype=torch.float64)
        sums.append(torch.stack(norms).square().sum())
    if large:
        buffer = torch.empty(_BLOCK, dtype=torch.float64, device=large[0].device)
        for grad in large:
            for block in grad.view(-1).split(_BLOCK):
                square = buffer[: block.numel()].copy_(block)
                sums.append(torch.dot(square, square))
    return float(torch.stack(sums).sum())


def _careful_norm(grads: Sequence[Tensor], inv_scale: float, norm: float) -> float:
    """The norm where a value may be non-finite, may become so by unscaling, or has a square beyond float64."""
    tops = [float(torch.linalg.vector_norm(as_real(grad), math.inf, dtype=torch.float64)) for grad in grads]
    for grad, top in zip(grads, tops, strict=True):
        limit = math.inf if as_real(grad).dtype == torch.float64 else _FLOAT32_LIMIT
        if not top * inv_scale < limit:
            return top if not top < math.inf else math.inf
    if norm < math.inf:
        return norm
    top = max(tops)
    squares = [float(as_real(grad).to(torch.float64).div(top).square().sum()) for grad in grads]
    return min(math.sqrt(sum(squares)) * top * inv_scale, sys.float_info.max)  # finite gradients are no overflow

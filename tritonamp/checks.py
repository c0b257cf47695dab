"""Which parameters and gradients can be updated, and what is said of one that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .layout import DTYPES
from .state import STOCHASTIC, how_kept

if TYPE_CHECKING:
    from .optimizer import FusedOptimizer


def check(
    optimizer: FusedOptimizer, params: Sequence[Tensor], grads: Sequence[Tensor | None], used: Sequence[bool]
) -> None:
    """Raise for the first parameter or gradient that is used and cannot be updated.

    Raises:
        RuntimeError, TypeError: naming it.
    """
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if used[i]:
            which = f"parameter {i} (shape {tuple(param.shape)}, {param.dtype}, {param.device})"
            _check_param(which, param)
            if param.dtype == torch.float16 and how_kept(optimizer, param) == STOCHASTIC:
                raise TypeError(f"{which}: rounding='stochastic' is for bfloat16 parameters; use master_weights=True")
            if grad is not None:
                _check_grad(which, param, grad)
    _check_apart([param for param in compress(params, used) if param.numel()])


def _check_apart(params: Sequence[Tensor]) -> None:
    """Raise for parameters that share memory: a launch updates all at once. Views of one another's gaps do not."""
    spans = sorted((str(param.device), param.data_ptr(), _extent(param), i) for i, param in enumerate(params))
    before: list[tuple[str, int, Tensor]] = []  # those that end beyond the next one's begin
    for device, begin, extent, i in spans:
        before = [(where, end, param) for where, end, param in before if where == device and end > begin]
        for _, _, param in before:
            if np.shares_memory(_Memory(param), _Memory(params[i])):
                raise RuntimeError(
                    f"two parameters share memory (shapes {tuple(param.shape)} and {tuple(params[i].shape)}), and "
                    "would be updated at once: make the two modules use one Parameter"
                )
        before.append((device, begin + extent, params[i]))


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class _Memory:
    """Where a tensor's elements lie, as NumPy takes it; on any device, since nothing is read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


def _check_param(which: str, param: Tensor) -> None:
    if is_traceable_wrapper_subclass(param):
        raise TypeError(f"{which} is a {type(param).__name__}: only plain tensors and DTensors can be fused")
    if param.dtype not in DTYPES or param.layout != torch.strided:
        raise TypeError(f"{which} cannot be optimized: dense tensors of {', '.join(map(str, DTYPES))} can")
    if param.device.type == "meta":
        raise RuntimeError(f"{which} has no data: make the optimizer after the model has got its memory")
    if param.is_conj() or param.is_neg():
        raise RuntimeError(f"{which} is lazily conjugated or negated: optimize its resolve_conj().resolve_neg()")
    span = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1 and stride < span:
            raise RuntimeError(f"{which} has elements that share memory (strides {param.stride()}): optimize its base")
        span += max(size - 1, 0) * stride


def _check_grad(which: str, param: Tensor, grad: Tensor) -> None:
    if is_traceable_wrapper_subclass(grad):
        raise TypeError(f"{which} has a gradient that is a {type(grad).__name__}: only plain tensors can be fused")
    if grad.layout != torch.strided:
        raise RuntimeError(f"{which} has a sparse gradient ({grad.layout}): only dense ones can be fused")
    if grad.device != param.device:
        raise RuntimeError(f"{which} has a gradient on {grad.device}")
    if grad.shape != param.shape:
        raise RuntimeError(f"{which} has a gradient of shape {tuple(grad.shape)}")
    if grad.dtype not in DTYPES or grad.is_complex() != param.is_complex():
        raise RuntimeError(f"{which} has a gradient of {grad.dtype}")

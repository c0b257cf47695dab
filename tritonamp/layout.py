"""Dtypes, strides and layouts: how a parameter, its gradient and its state lie in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *_REAL)

Strides = tuple[int, ...]


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the reals that a tensor is updated as: complex tensors are pairs of them."""
    return _REAL.get(dtype, dtype)


def compute_dtype(param: Tensor) -> torch.dtype:
    """Dtype of arithmetic and state: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if real_dtype(param.dtype) == torch.float64 else torch.float32


def state_dtype(param: Tensor) -> torch.dtype:
    """Dtype of a state tensor: the compute dtype, complex for complex parameters."""
    compute = compute_dtype(param)
    return compute.to_complex() if param.is_complex() else compute


def dense_strides(tensor: Tensor) -> Strides:
    """Strides of a dense tensor with the given one's order of dimensions: those of its state."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


class Layout(NamedTuple):
    """How the logical elements of a tensor lie, innermost dimension first; the state lies densely in that order."""

    sizes: tuple[int, ...]
    grad: Strides
    param: Strides


def layout_of(param: Tensor, grad_strides: Strides) -> Layout | None:
    """The layout in which param, grad and state are walked together; None where all are flat memory alike."""
    state = dense_strides(param)
    dims = [d for d in range(param.dim()) if param.shape[d] != 1]
    if all(state[d] == param.stride(d) == grad_strides[d] for d in dims):
        return None
    dims.sort(key=lambda d: state[d])
    sizes, grads, params = [], [], []
    if param.is_complex():  # the pair is the innermost dimension
        sizes, grads, params = [2], [1], [1]
    unit = 2 if param.is_complex() else 1
    for d in dims:
        size, grad, stride = param.shape[d], grad_strides[d] * unit, param.stride(d) * unit
        if sizes and grads[-1] * sizes[-1] == grad and params[-1] * sizes[-1] == stride:
            sizes[-1] *= size
        else:
            sizes.append(size)
            grads.append(grad)
            params.append(stride)
    return Layout(tuple(sizes), tuple(grads), tuple(params))

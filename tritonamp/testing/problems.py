"""What an optimizer is given: parameters, and the gradients of its steps, some of them hard or missing.

Problems are written down, or drawn by :mod:`tritonamp.testing.strategies`::

    problem = Problem((TensorSpec((2, 3)), TensorSpec((1024,), torch.float16, layout="sliced", grad="hard")))
    params = problem.params()
    problem.set_grads(params, scale=65536.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["GradKind", "Hard", "Layout", "Overflow", "Problem", "StepSpec", "TensorSpec"]

Layout = Literal["contiguous", "misaligned", "transposed", "sliced", "expanded"]
"""How a tensor lies in memory: in order; in order, one element past an aligned address; with its dimensions in
reverse order; every other element; or (gradients only) one row for all, with stride 0."""

GradKind = Literal["normal", "hard", "zeros", "none"]
"""What a gradient holds: normal numbers of a given magnitude; random bit patterns; zeros; or it is None."""

Hard = tuple[int, float]
"""A value put at a position, taken modulo the number of elements (flat, by logical index)."""


@dataclass(frozen=True)
class Overflow:
    """An infinity or NaN in one element of one gradient.

    Attributes:
        tensor: which gradient: the ``tensor``-th, in turn, of those that have elements.
        position: which element, modulo their number.
        value: inf, -inf or NaN.
    """

    tensor: int
    position: int
    value: float


@dataclass(frozen=True)
class StepSpec:
    """What is particular to one step of a sequence.

    Attributes:
        seed: of the gradients' values, together with each tensor's own.
        missing: the tensors whose gradient is None in this step; others than there are do not matter.
        overflow: the one non-finite element, if any.
    """

    seed: int = 0
    missing: frozenset[int] = frozenset()
    overflow: Overflow | None = None


@dataclass(frozen=True)
class TensorSpec:
    """One parameter and its gradients.

    Attributes:
        shape: of both.
        dtype, grad_dtype: float16, bfloat16, float32 or float64.
        layout, grad_layout: see :data:`Layout`.
        grad: see :data:`GradKind`.
        exponent: the magnitude of normal gradients is two to this power.
        seed: of all values.
        hard: elements put into the parameter.
        grad_hard: elements put into each gradient; finite.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    layout: Layout = "contiguous"
    grad_layout: Layout = "contiguous"
    grad: GradKind = "normal"
    exponent: int = 0
    seed: int = 0
    hard: tuple[Hard, ...] = ()
    grad_hard: tuple[Hard, ...] = ()

    def param(self, device: torch.types.Device = None) -> Tensor:
        """Return the parameter: a leaf that requires a gradient, of ``grad_dtype``."""
        numbers = _place(_normal(self.shape, self.seed), self.hard)
        param = _laid_out(numbers, self.dtype, self.layout, device).requires_grad_()
        if self.grad_dtype != self.dtype:
            param.grad_dtype = self.grad_dtype
        return param

    def gradient(
        self, scale: float = 1.0, seed: int = 0, bad: tuple[Hard, ...] = (), device: torch.types.Device = None
    ) -> Tensor | None:
        """Return a gradient, as a loss scaled by ``scale`` would leave it, or None.

        Values beyond the range of ``grad_dtype`` are replaced by the largest finite one: only ``bad`` overflows.

        Args:
            scale: what the true gradient is multiplied by.
            seed: of this gradient, together with the tensor's own.
            bad: non-finite elements to put in.
            device: of the gradient.
        """
        if self.grad == "none":
            return None
        is_expanded = self.grad_layout == "expanded" and len(self.shape) > 0 and self.shape[0] > 1
        shape = (1, *self.shape[1:]) if is_expanded else self.shape
        mixed = self.seed * 1_000_003 + seed + 1
        if self.grad == "zeros":
            numbers = torch.zeros(shape, dtype=torch.float64, device="cpu")
        elif self.grad == "hard":
            numbers = _bit_patterns(shape, self.grad_dtype, mixed)
        else:
            numbers = _normal(shape, mixed) * 2.0**self.exponent
        limit = min(torch.finfo(self.grad_dtype).max, 2.0**400)  # of float64 gradients, squares are in range below that
        numbers = (_place(numbers, self.grad_hard) * scale).clamp(-limit, limit)
        grad = _laid_out(_place(numbers, bad), self.grad_dtype, self.grad_layout, device)
        return grad.expand(self.shape) if is_expanded else grad


@dataclass(frozen=True)
class Problem:
    """The parameters of an optimizer, and the gradients of its steps."""

    tensors: tuple[TensorSpec, ...]

    def params(self, device: torch.types.Device = None) -> list[Tensor]:
        """Return new parameters, the same ones at each call."""
        return [tensor.param(device) for tensor in self.tensors]

    def set_grads(self, params: Sequence[Tensor], scale: float = 1.0, step: StepSpec | None = None) -> None:
        """Set the gradients of one step.

        Args:
            params: what :meth:`params` has returned.
            scale: what the loss was multiplied by; see :meth:`TensorSpec.gradient`.
            step: the step; by default one with seed 0 in which nothing is missing and nothing overflows.
        """
        step = step or StepSpec()
        present = [i for i in range(len(self.tensors)) if self._has_elements(i, step)]
        bad = step.overflow
        at = present[bad.tensor % len(present)] if bad is not None and present else None
        for i, (param, tensor) in enumerate(zip(params, self.tensors, strict=True)):
            elements = ((bad.position, bad.value),) if bad is not None and i == at else ()
            is_missing = i in step.missing
            param.grad = None if is_missing else tensor.gradient(scale, step.seed, elements, param.device)

    def has_elements(self, step: StepSpec | None = None) -> bool:
        """Whether there is any element of a gradient in this step: only then can it overflow, or do anything."""
        return any(self._has_elements(i, step or StepSpec()) for i in range(len(self.tensors)))

    def _has_elements(self, i: int, step: StepSpec) -> bool:
        return i not in step.missing and self.tensors[i].grad != "none" and math.prod(self.tensors[i].shape) > 0


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=_generator(seed), dtype=torch.float64, device="cpu")


def _bit_patterns(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bit patterns of ``dtype`` as float64, those of infinities and NaN replaced by the largest number."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.iinfo(integer)
    bits = torch.randint(info.min, info.max, shape, generator=_generator(seed), dtype=integer, device="cpu")
    numbers = bits.view(dtype).double()
    return torch.where(numbers.isfinite(), numbers, torch.finfo(dtype).max)


def _place(numbers: Tensor, hard: Sequence[Hard]) -> Tensor:
    for position, value in hard:
        if numbers.numel() > 0:
            numbers.view(-1)[position % numbers.numel()] = value
    return numbers


def _laid_out(numbers: Tensor, dtype: torch.dtype, layout: Layout, device: torch.types.Device) -> Tensor:
    """Return the numbers (contiguous) in a new tensor of the dtype and layout."""
    shape, n = numbers.shape, numbers.numel()
    if layout == "misaligned":
        result = torch.zeros(n + 2, dtype=dtype, device=device)[1 : n + 1].view(shape)
    elif layout == "transposed":
        backwards = tuple(reversed(range(len(shape))))
        result = torch.zeros(tuple(reversed(shape)), dtype=dtype, device=device).permute(backwards)
    elif layout == "sliced":
        result = torch.zeros((*shape, 2), dtype=dtype, device=device)[..., 1]
    else:
        result = torch.zeros(shape, dtype=dtype, device=device)
    return result.copy_(numbers)

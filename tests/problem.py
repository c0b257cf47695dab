"""Small optimization problems for the tests: parameters, scaled gradients, steps checked against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonamp.testing import expect

# Around the borders of accesses (8), of a block (512, 128 when narrow) and of a chunk (512 in tests).
SHAPES = [(1,), (), (7,), (0,), (8, 3), (130,), (511,), (512,), (3, 171), (1030,), (1, 2, 600)]


def make_params(shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def set_grads(params: Sequence[Tensor], scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
    """Random gradients, as a backward pass of a loss scaled by ``scale`` would leave them."""
    for param in params:
        dtype_ = dtype or param.dtype
        if dtype_ != param.dtype:
            param.grad_dtype = dtype_  # type: ignore[attr-defined]
        param.grad = (torch.randn_like(param, dtype=torch.float64) * scale).to(dtype_)


def scaled(optimizer: Any) -> float:
    """Tell the optimizer that a loss was scaled; returns the scale."""
    return float(optimizer.scale(torch.ones(())))


def checked_step(optimizer: Any, **expected: Any) -> None:
    """One step, compared with the oracle."""
    expectation = expect(optimizer, **expected)
    optimizer.step()
    expectation.check()


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all parameters and state tensors, for bitwise comparison."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in params for t in optimizer.state.get(p, {}).values() if isinstance(t, Tensor)]
    return [t.detach().clone() for t in params + states]


def assert_same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        x, y = (t.detach().clone(memory_format=torch.contiguous_format).flatten() for t in (x, y))
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def assert_refused(optimizer: Any, error: type[Exception], message: str) -> None:
    """The step raises; parameters, state, scale, counters are as before, and the next good step works."""
    before, scale = values(optimizer), optimizer.loss_scale.state_dict()
    counts = optimizer._outcome_state().clone()
    with pytest.raises(error, match=message):
        optimizer.step()
    assert_same_bits([*values(optimizer), optimizer._outcome_state()], [*before, counts])
    assert optimizer.loss_scale.state_dict() == scale

"""The torch backend's norm: right however its tensors are taken together or cut up."""

from __future__ import annotations

import math
import operator
from itertools import compress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tritonamp.backends import norm
from tritonamp.layout import layout_of
from tritonamp.testing.oracle import NORM_ERROR

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


def exact(grads: list[Tensor]) -> float:
    reals = [norm.as_real(grad).double().flatten() for grad in grads]
    return math.sqrt(math.fsum(float(x.square().sum()) for x in reals))


def sorted_out(grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    is_flat = [grad.dtype == torch.float32 and layout_of(grad, grad.stride()) is None for grad in grads]
    return [*compress(grads, is_flat)], [*compress(grads, map(operator.not_, is_flat))]


@given(
    st.lists(
        st.tuples(st.integers(1, 300) | st.integers(1000, 2500), st.sampled_from(DTYPES), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 2**16),
)
def test_the_norm_of_tensors_around_the_block_size(drawn: list[tuple[int, torch.dtype, bool]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = []
    for numel, dtype, is_strided in drawn:
        grad = torch.randn(2 * numel, dtype=torch.float64, generator=generator).to(dtype)
        grads.append(grad[::2] if is_strided else grad[:numel])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "_BLOCK", 64)
        patch.setattr(norm, "_GATHERED", 256)
        found = norm.global_norm(*sorted_out(grads), 1.0)
    assert found == pytest.approx(exact(grads), rel=NORM_ERROR)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beyond", [-1, 0, 1, 40])
def test_the_norm_of_large_tensors(dtype: torch.dtype, beyond: int) -> None:
    """Every eighth element is 1, so that the norm of a row is 2, exactly: one left out or counted twice shows."""
    sizes = [norm._BLOCK + beyond, 100, norm._BLOCK // 2, norm._BLOCK // 2, 3 * norm._BLOCK + 1]
    if dtype == torch.float32:
        sizes.append(16 * norm._BLOCK + beyond)
    grads = [(torch.arange(size) % 8 == 0).to(dtype) for size in sizes]
    count = sum(math.ceil(size / 8) for size in sizes)
    assert norm.global_norm(*sorted_out(grads), 1.0) == pytest.approx(math.sqrt(count), rel=1e-9)


@pytest.mark.parametrize("size", [9, 600])
def test_a_dense_tensor_in_another_order_is_flat_memory(size: int) -> None:
    grad = torch.arange(4.0 * size * size).view(2, 2, size, size).contiguous(memory_format=torch.channels_last)
    flat, others = sorted_out([grad])
    assert not others and norm.global_norm(flat, [], 1.0) == pytest.approx(exact([grad]), rel=NORM_ERROR)

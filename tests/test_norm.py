"""The torch backend's norm: right however its tensors are taken together or cut up."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tritonamp.backends import norm
from tritonamp.testing.oracle import NORM_ERROR

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


def exact(grads: list[Tensor]) -> float:
    reals = [norm.as_real(grad).double().flatten() for grad in grads]
    return math.sqrt(math.fsum(float(x.square().sum()) for x in reals))


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
        found = norm.global_norm(grads, 1.0)
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
    assert norm.global_norm(grads, 1.0) == pytest.approx(math.sqrt(count), rel=1e-9)

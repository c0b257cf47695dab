"""Running error analysis: the numbers under the oracle's bounds."""

import math

import pytest
import torch

from tritonamp.testing.bounds import Bounded, Format, assert_within


def _hard(n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.ldexp(torch.randn(n, generator=generator), torch.randint(-30, 8, (n,), generator=generator))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_an_ulp_is_half_the_distance_of_neighbours(dtype: torch.dtype) -> None:
    form, info = Format.of(dtype), torch.finfo(dtype)
    values = torch.tensor([0.0, info.tiny * info.eps, info.tiny, 1.0, 2 - info.eps, 2.0, info.max])
    spacings = [info.tiny * info.eps] * 3 + [info.eps] * 2 + [2 * info.eps, info.max / (2 / info.eps - 1)]
    want = torch.tensor(spacings, dtype=torch.float64) / 2
    assert torch.equal(form.half_ulp(values.double()), want)
    # The limit is the first number that rounds to infinity.
    limit = torch.tensor(form.limit, dtype=torch.float64)
    # (torch converts from float64 by way of float32, so step down in the latter for the short formats.)
    wide = limit.to(torch.float64 if dtype == torch.float32 else torch.float32)
    assert wide.to(dtype).isinf() and not torch.nextafter(wide, torch.zeros_like(wide)).to(dtype).isinf()


def test_running_errors_cover_float32_arithmetic() -> None:
    """Deep expressions with cancellation, against the same in float32."""
    form = Format.of_computation(torch.float32)
    a, b, c = _hard(2000, 0), _hard(2000, 1), _hard(2000, 2)
    x, y, z = (Bounded.exact(t, form) for t in (a, b, c))
    for wide, narrow in [
        ((x * y + z) * x - z, (a * b + c) * a - c),
        ((x - y) / (z + x), (a - b) / (c + a)),
        ((x * x + y * y).sqrt() / z, (a * a + b * b).sqrt() / c),
        ((x * y).maximum(y * z) - x * y, torch.maximum(a * b, b * c) - a * b),
    ]:
        assert_within(narrow, wide.value, wide.error)


def test_overflow_is_certain_possible_or_out_of_reach() -> None:
    form = Format.of_computation(torch.float32)
    x = Bounded.exact(torch.tensor([3e38, torch.finfo(torch.float32).max, 1e38]), form)
    total = x + Bounded.exact(torch.tensor([3e38, 1e31, 1e38]), form)
    assert total.value[0] == math.inf and total.error[0] == 0
    assert total.error[1] == math.inf
    assert total.error[2] < 1e32


def test_a_divisor_that_may_be_zero_lets_anything_pass() -> None:
    form = Format.of_computation(torch.float32)
    tiny = Bounded.exact(torch.tensor([1e-30, 0.0]), form)
    # The square underflows in float32, and may be zero there; the square of zero is.
    quotient = Bounded.exact(torch.ones(2), form) / (tiny * tiny)
    assert quotient.error.tolist() == [math.inf, 0.0]
    assert quotient.value[1] == math.inf
    # What may be zero over zero, and infinity times it.
    infinite = Bounded.exact(torch.full((2,), math.inf), form)
    for result in (tiny * tiny / Bounded.exact(torch.zeros(2), form), infinite * (tiny * tiny)):
        assert result.error.tolist() == [math.inf, 0.0]


def test_the_worst_element_is_named() -> None:
    want = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"it: 2 of 4 elements .* worst is element 2 .*off by 3 where 0.5"):
        assert_within(torch.tensor([0.4, 1.0, -3.0, 0.0]), want, torch.full_like(want, 0.5), "it")
    with pytest.raises(AssertionError, match="element 0"):
        assert_within(torch.full((4,), math.nan), want, torch.full_like(want, 0.5))
    with pytest.raises(AssertionError, match="shape"):
        assert_within(torch.zeros(3), want, want)
    assert_within(
        torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf]).double(), torch.zeros(2).double()
    )

"""Exactness of the arithmetic, against rational numbers and the C library."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tritonamp.testing.virtual_gpu import floats, integers
from tritonamp.testing.virtual_gpu.ptx_types import Array

pytestmark = [pytest.mark.compiled, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

rng = np.random.default_rng(0)
BITS: dict[Any, Any] = {np.float16: np.uint16, np.float32: np.uint32, np.float64: np.uint64}
MODES = ["rn", "rz", "rm", "rp"]


def samples(dtype: Any, n: int) -> Array:
    """Random bit patterns, ordinary numbers and special values."""
    info = np.finfo(dtype)
    tiny, top = info.smallest_subnormal, info.max
    special = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, top, info.tiny, tiny, -tiny, 1 + info.eps, 2 - info.eps]
    u = BITS[dtype]
    raw = rng.integers(0, np.iinfo(u).max, n, dtype=u, endpoint=True).view(dtype)
    ordinary = rng.standard_normal(n).astype(dtype)
    return rng.permutation(np.concatenate([raw, ordinary, rng.choice(np.array(special, dtype), n)]))


def same(a: Array, b: Array) -> bool:
    a, b = np.broadcast_arrays(a, b)
    numbers = ~np.isnan(a)
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a)[numbers], np.signbit(b)[numbers])


def rounded(x: Fraction, dtype: Any, mode: str) -> float:
    """Correctly rounded, by a search around the nearest double."""
    r = dtype(np.float64(x.numerator / x.denominator if x else 0.0))  # true division of ints is correctly rounded
    near = {float(r), float(np.nextafter(r, dtype(np.inf))), float(np.nextafter(r, dtype(-np.inf)))}
    finite = sorted(v for v in near if np.isfinite(v))
    below, above = [v for v in finite if Fraction(v) <= x], [v for v in finite if Fraction(v) >= x]
    if mode == "rn":
        return min(finite, key=lambda v: (abs(Fraction(v) - x), int(dtype(v).view(BITS[dtype])) & 1))
    if mode == "rm":
        return max(below)
    if mode == "rp":
        return min(above)
    return max(below) if x > 0 else min(above)


def test_fma_of_float32_near_ties() -> None:
    """Sums a little off a tie, where going through float64 rounds twice."""
    one, eps = np.ones(1, np.float32), np.float32(2.0**-23)
    for k in range(-90, 100, 7):
        scale = np.float32(2.0**k)
        a, b, c = scale * np.float32(2.0**-24) * (1 + eps), 1 - eps, scale * (1 + eps)  # tie - 2**-70
        assert np.float32(float(a) * float(b) + float(c)) == scale * (1 + 2 * eps)
        assert floats.fma32(one * a, one * b, one * c)[0] == scale * (1 + eps)
    a, b, c = np.float32(2.0**-126), np.float32(2.0**-24 * (1 + 2.0**-23)), np.float32(2.0**-149)
    assert floats.fma32(one * a, one * b, one * c)[0] == np.float32(2.0**-148)


def test_fma_of_float32_with_subnormal_results() -> None:
    """Ties of subnormals lie elsewhere than those of normal numbers."""
    n = 3000
    c = (rng.integers(-(1 << 23), 1 << 23, n) * 2.0**-149).astype(np.float32)
    a = (rng.integers(1, 1 << 24, n) * 2.0**-100).astype(np.float32)
    b = (rng.integers(1, 1 << 24, n) * 2.0**-98).astype(np.float32)
    b[::2] = np.float32(2.0**-50) * (1 + np.float32(2.0**-23))
    a[::2] = np.float32(2.0**-100) * (1 - np.float32(2.0**-24))
    got = floats.fma32(a, b, c)
    for x, y, z, r in zip(*(v.tolist() for v in (a, b, c, got)), strict=True):
        assert r == rounded(Fraction(x) * Fraction(y) + Fraction(z), np.float32, "rn")


@pytest.mark.parametrize("mode", MODES)
def test_fma_of_float32(mode: str) -> None:
    a, b, c = (samples(np.float32, 300) for _ in range(3))
    c[::2] = (-a * b * np.float32(1.0000001))[::2]
    got = floats.fma32(a, b, c, mode)
    for i in range(len(a)):
        if not np.isfinite([a[i], b[i], c[i]]).all():
            assert same(got[i : i + 1], np.float32([np.float64(a[i]) * np.float64(b[i]) + np.float64(c[i])]))
            continue
        x = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if abs(x) < Fraction(3.4e38):
            assert got[i] == rounded(x, np.float32, mode), (a[i], b[i], c[i])


@pytest.mark.parametrize("n", [3000, 4])  # few values take another way
def test_fma_of_float64(n: int) -> None:
    a, b, c = (samples(np.float64, n)[: max(n, floats.FEW)] for _ in range(3))
    c[::3] = (-a * b)[::3]
    c[1::3] = (a * b * (1 + 2.0**-52))[1::3]
    fma = floats.libm_fma()
    assert same(floats.fma64(a, b, c), np.array([fma(*x) for x in zip(a, b, c, strict=True)]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_directed_rounding(op: str, mode: str) -> None:
    a, b = samples(np.float32, 300), samples(np.float32, 300)
    b[::2] = (a * np.float32(rng.standard_normal()))[::2]
    exact: Callable[..., Fraction] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
    }[op]
    for x, y, r in zip(a, b, floats.rounded(op, mode)(a, b), strict=True):
        if np.isfinite(x) and np.isfinite(y):
            e = exact(Fraction(float(x)), Fraction(float(y)))
            if abs(e) < Fraction(3.4e38):
                assert r == rounded(e, np.float32, mode)


def test_halves_from_float32() -> None:
    x = samples(np.float32, 20000)
    assert same(floats.narrow(x.astype(np.float64), np.float16), torch.from_numpy(x).half().numpy())
    assert same(floats.from_bf16(floats.to_bf16(x)), torch.from_numpy(x).bfloat16().float().numpy())


def test_minima_of_zeros_and_nans() -> None:
    a, b = np.float32([0.0, -0.0, np.nan, 1, np.nan]), np.float32([-0.0, 0.0, 2, np.nan, np.nan])
    assert same(floats.minmax("min", False, np.float32)(a, b), np.float32([-0.0, -0.0, 2, 1, np.nan]))
    assert same(floats.minmax("max", False, np.float32)(a, b), np.float32([0, 0, 2, 1, np.nan]))
    assert same(floats.minmax("max", True, np.float32)(a, b), np.float32([0, 0, np.nan, np.nan, np.nan]))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_integers(dtype: Any) -> None:
    info = np.iinfo(dtype)
    a = np.concatenate(
        [rng.integers(info.min, info.max, 500, dtype, True), np.array([info.min, info.max, 0, 1], dtype)]
    )
    b = np.concatenate([rng.integers(info.min, info.max, 400, dtype, True), rng.integers(1, 9, 104).astype(dtype)])
    b[:3] = 0

    def wrap(v: int) -> int:
        return (v - int(info.min)) % (1 << info.bits) + int(info.min)

    results = integers.mulhi(a, b), integers.idiv(a, b), integers.irem(a, b)
    for x, y, high, quotient, remainder in zip(*(v.tolist() for v in (a, b, *results)), strict=True):
        assert high == x * y >> info.bits
        q = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) if y else -1
        assert quotient == wrap(q)
        assert remainder == (wrap(x - q * y) if y else x)

"""Floating-point arithmetic as PTX defines it, on NumPy arrays.

Results of a single rounding (fma, directed rounding, narrowing) are computed in float64 *rounded to odd* (the last
place keeps the exact result's sticky bit), after which a second rounding to a format of at most 51 bits is exact
(Boldo & Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
The ``approx`` functions give the correctly rounded value: evaluated in float64, rounded once.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .ptx_types import Array

F16, F32, F64 = np.float16, np.float32, np.float64
I64, U16, U32, U64 = np.int64, np.uint16, np.uint32, np.uint64
TINY = F32(2.0**-126)
Function = Callable[..., Array]

# float64 bits: what float32 cannot hold, half of its last place, all but the sign, and 2**-126.
_LOST, _HALF = np.array(0x1FFFFFFF, I64), np.array(0x10000000, I64)
_MAGNITUDE, _ONE = np.array((1 << 63) - 1, U64), np.array(1, U64)
_TINY_BITS = np.array(2.0**-126, F64).view(U64)
FEW = 12  # up to so many values, calls of libm take less time than array arithmetic


def ftz(x: Array) -> Array:
    """Flush float32 denormals to zero, keeping the sign."""
    return np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x)


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes +0."""
    result: Array = np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))
    return result


def relu(x: Array) -> Array:
    """Clamp to [0, inf)."""
    return np.where(x < 0, x.dtype.type(0), x)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """``a + b`` rounded, and what the rounding lost."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def to_odd(s: Array, e: Array) -> Array:
    """The exact sum ``s + e`` (float64, ``|e| <= ulp(s) / 2``), rounded to odd."""
    b = s.view(I64)
    fix = (e != 0) & (b & 1 == 0) & np.isfinite(s)
    return np.where(fix, b + np.where((e > 0) == (s > 0), 1, -1), b).view(F64)


def narrow(s: Array, dtype: type[np.generic], mode: str = "rn") -> Array:
    """float64, exact or rounded to odd, to float16 or float32 with a rounding mode."""
    r = s.astype(dtype)
    if mode == "rn" or dtype is F64:
        return r
    w = r.astype(F64)
    number: Any = dtype
    if mode in ("rz", "odd"):
        r = np.where(np.abs(w) > np.abs(s), np.nextafter(r, number(0)), r)
        if mode == "odd":
            lost = (r.astype(F64) != s) & np.isfinite(s)
            r = (r.view(U32) | lost).astype(U32).view(F32)
        return r
    if mode == "rm":
        return np.where(w > s, np.nextafter(r, number(-np.inf)), r)
    if mode == "rp":
        return np.where(w < s, np.nextafter(r, number(np.inf)), r)
    raise NotImplementedError(f"rounding mode {mode}")


def from_bf16(x: Array) -> Array:
    """bfloat16 bits to float32."""
    return (x.astype(U32) << 16).view(F32)


def to_bf16(x: Array, mode: str = "rn") -> Array:
    """float32 or float64 to bfloat16 bits; NaN becomes 0x7fff."""
    if x.dtype == F64:
        x = narrow(x, F32, "odd")
    u = np.ascontiguousarray(x).view(U32)
    if mode == "rn":
        r = (u + (((u >> 16) & 1) + U32(0x7FFF))) >> 16
    elif mode == "rz":
        r = u >> 16
    else:
        raise NotImplementedError(f"bf16 rounding mode {mode}")
    result: Array = np.where(np.isnan(x), U16(0x7FFF), r.astype(U16))
    return result


# ---------------------------------------------------------------- fma


def fma32(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """float32 ``a * b + c`` in a single rounding."""
    p, c = a.astype(F64) * b.astype(F64), c.astype(F64)  # the product is exact
    s = p + c
    if mode == "rn":
        bits = s.view(I64)
        # Rounding twice is wrong only where the first rounding made a tie. Subnormal results have theirs elsewhere.
        tie = (bits & _LOST) == _HALF
        subnormal = (bits.view(U64) & _MAGNITUDE) - _ONE < _TINY_BITS - _ONE
        if not np.count_nonzero(tie) and not np.count_nonzero(subnormal):
            return s.astype(F32)
    return narrow(to_odd(*two_sum(p, c)), F32, mode)


def fma_odd(a: Array, b: Array, c: Array) -> Array:
    """float16 or float32 ``a * b + c`` in float64, rounded to odd."""
    return to_odd(*two_sum(np.multiply(a, b, dtype=F64), c.astype(F64)))


def fma16(a: Array, b: Array, c: Array) -> Array:
    """float16 ``a * b + c`` in a single rounding."""
    return fma_odd(a, b, c).astype(F16)


@cache
def libm_fma() -> Callable[[float, float, float], float]:
    """The C library's float64 fma; Python's own, from 3.13 on, raises on overflow."""
    f: Any = ctypes.CDLL("libm.so.6").fma
    f.restype, f.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    return f  # type: ignore[no-any-return]


def _split(a: Array) -> tuple[Array, Array]:
    t = a * 134217729.0
    hi = t - (t - a)
    return hi, a - hi


def fma64(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """float64 ``a * b + c`` in a single rounding (Boldo & Melquiond); near the ends of the range, by libm."""
    if mode != "rn":
        raise NotImplementedError(f"fma.{mode}.f64")
    if len(a) <= FEW:
        return np.array(list(map(libm_fma(), a.tolist(), b.tolist(), c.tolist())))
    p = a * b
    (ah, al), (bh, bl) = _split(a), _split(b)
    e = ((ah * bh - p) + ah * bl + al * bh) + al * bl
    uh, ul = two_sum(c, e)
    th, tl = two_sum(p, uh)
    r = th + to_odd(*two_sum(tl, ul))
    size = np.abs(p)
    zero = (a == 0) | (b == 0)
    big = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.maximum(size, np.abs(c)))
    hard = ~((big < 2.0**990) & ((size > 2.0**-900) | zero))
    if hard.any():
        r[hard] = list(map(libm_fma(), a[hard].tolist(), b[hard].tolist(), c[hard].tolist()))
    return np.where(zero & ~hard, p + c, r)


# ---------------------------------------------------------------- other arithmetic


def rounded(op: str, mode: str) -> Function:
    """``add``, ``sub``, ``mul`` or ``div`` with a rounding mode: nearest for all types, others for float32."""
    plain: np.ufunc = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[op]
    if mode == "rn":
        return plain

    def f(a: Array, b: Array) -> Array:
        if a.dtype != F32 or op == "div":
            raise NotImplementedError(f"{op}.{mode} for {a.dtype}")
        a, b = a.astype(F64), b.astype(F64)
        return narrow(a * b if op == "mul" else to_odd(*two_sum(a, b if op == "add" else -b)), F32, mode)

    return f


def minmax(kind: str, nan: bool, dtype: type[np.generic]) -> Function:
    """``min`` or ``max``: -0 < +0; a NaN operand loses, or wins if ``nan``."""
    if np.dtype(dtype).kind != "f":
        return np.minimum if kind == "min" else np.maximum
    bits_type = {2: U16, 4: U32, 8: U64}[np.dtype(dtype).itemsize]
    pick: np.ufunc = np.fmin if kind == "min" else np.fmax
    bits: np.ufunc = np.bitwise_or if kind == "min" else np.bitwise_and
    not_a_number = np.array(np.nan, dtype)

    def f(a: Array, b: Array) -> Array:
        r: Array = pick(a, b)
        zero = r == 0
        if np.count_nonzero(zero):
            zero &= a == b
            r = np.where(zero, bits(a.view(bits_type), b.view(bits_type)).view(dtype), r)
        return np.where(np.isnan(a) | np.isnan(b), not_a_number, r) if nan else r

    return f


def in_float64(f: Function) -> Function:
    """Evaluate f in float64, then round once."""
    return lambda x: f(x.astype(F64)).astype(x.dtype)


APPROXIMATE: dict[str, Function] = {
    "ex2": in_float64(np.exp2),
    "lg2": in_float64(np.log2),
    "sin": in_float64(np.sin),
    "cos": in_float64(np.cos),
    "tanh": in_float64(np.tanh),
    "sqrt": np.sqrt,
    "rcp": lambda x: x.dtype.type(1) / x,
    "rsqrt": in_float64(lambda x: 1 / np.sqrt(x)),
}

# ---------------------------------------------------------------- to and from integers

TO_INTEGRAL: dict[str, np.ufunc] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def float_to_int(x: Array, dtype: type[np.generic], mode: str, source_bits: int) -> Array:
    """Saturating; NaN gives 0, or the top bit where a 64-bit type is involved."""
    number: Any = dtype
    info = np.iinfo(number)
    r = TO_INTEGRAL[mode](x.astype(F64))
    nan = np.isnan(r)
    over = r >= (float(info.max) + 1.0 if info.bits < 64 else float(info.max))
    under = r < float(info.min)
    y = np.where(nan | over | under, 0.0, r).astype(number)
    y = np.where(over, number(info.max), np.where(under, number(info.min), y))
    top = (1 << info.bits - 1) - (1 << info.bits if info.min else 0)
    return np.where(nan, number(0 if source_bits < 64 and info.bits < 64 else top), y)


def int_to_float(x: Array, dtype: type[np.generic] | None, mode: str) -> Array:
    """To ``dtype``, or to bfloat16 if that is None."""
    if dtype is F64 and (mode == "rn" or x.itemsize < 8):
        return x.astype(F64)
    if dtype is F64:
        raise NotImplementedError(f"cvt.{mode}.f64 from 64-bit integers")
    s = x.astype(F64)
    if x.itemsize == 8:  # may not fit float64: keep a sticky bit
        i = x.dtype.type
        sticky = x & ~i(0x7FF) | np.where(x & i(0x7FF) != 0, i(0x400), i(0))
        s = np.where(np.abs(s) < 2.0**52, s, sticky.astype(F64))
    return narrow(s, dtype, mode) if dtype else to_bf16(s, mode)

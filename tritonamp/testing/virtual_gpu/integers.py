"""Integer arithmetic as PTX defines it, on NumPy arrays."""

import numpy as np

from .ptx_types import Array

I64, U32, U64 = np.int64, np.uint32, np.uint64


def idiv(a: Array, b: Array) -> Array:
    """C division, towards zero; x / 0 is all ones."""
    if a.dtype.kind == "u":
        zero = b == 0
        if not np.count_nonzero(zero):
            return a // b
        return np.where(zero, ~a.dtype.type(0), a // np.where(zero, a.dtype.type(1), b))
    u = f"u{a.itemsize}"
    q = idiv(np.abs(a).view(u), np.abs(b).view(u)).view(a.dtype)
    return np.where(((a < 0) != (b < 0)) & (b != 0), -q, q)


def irem(a: Array, b: Array) -> Array:
    """The remainder of :func:`idiv`, with the sign of ``a``; x % 0 is x."""
    result: Array = a - np.where(b == 0, b, idiv(a, b)) * b
    return result


def mulhi(a: Array, b: Array) -> Array:
    """The upper half of the product."""
    if a.itemsize < 8:
        w = np.dtype(f"{a.dtype.kind}{2 * a.itemsize}")
        product: Array = a.astype(w) * b.astype(w) >> w.type(8 * a.itemsize)
        return product.astype(a.dtype)
    ua, ub, m, s = a.view(U64), b.view(U64), U64(0xFFFFFFFF), U64(32)
    al, ah, bl, bh = ua & m, ua >> s, ub & m, ub >> s
    mid = ah * bl + (al * bl >> s)
    low = al * bh + (mid & m)
    hi = ah * bh + (mid >> s) + (low >> s)
    if a.dtype.kind == "i":
        hi = hi - np.where(a < 0, ub, U64(0)) - np.where(b < 0, ua, U64(0))
    result: Array = hi.view(a.dtype)
    return result


def shift(a: Array, n: Array, left: bool) -> Array:
    """Shift by ``n`` (uint32), which is clamped to the width; signed types keep their sign."""
    w = 8 * a.itemsize
    k = np.minimum(n, w - 1).astype(a.dtype)
    shifted: Array = a << k if left else a >> k
    return shifted if a.dtype.kind == "i" and not left else np.where(n >= w, a.dtype.type(0), shifted)


def funnel(a: Array, b: Array, n: Array, left: bool, wrap: bool) -> Array:
    """Shift the 64 bits of b:a; the upper word of a left shift, the lower word of a right one."""
    n = (n & 31 if wrap else np.minimum(n, 32)).astype(U64)
    x = b.astype(U64) << U64(32) | a
    result: Array = ((x << n) >> U64(32) if left else x >> n).astype(U32)
    return result


def bfe(a: Array, pos: Array, length: Array) -> Array:
    """Bit field extract; the signed form replicates the field's top bit."""
    w, u = 8 * a.itemsize, np.dtype(f"u{a.itemsize}").type
    pos, length = pos & 0xFF, length & 0xFF
    x = shift(a, pos, False).view(u)
    keep = np.minimum(length, w)
    mask = np.where(keep >= w, ~u(0), (u(1) << np.minimum(keep, w - 1).astype(u)) - u(1))
    r = x & mask
    if a.dtype.kind == "i":
        top = np.minimum(pos.astype(I64) + length - 1, w - 1)
        sign = (a.view(u) >> np.maximum(top, 0).astype(u)) & u(1)
        r = np.where((sign == 1) & (length > 0), r | ~mask, r)
    result: Array = r.view(a.dtype)
    return result


def bfi(a: Array, b: Array, pos: Array, length: Array) -> Array:
    """Bit field insert: the low bits of ``a`` into ``b``."""
    u, w = a.dtype.type, 8 * a.itemsize
    pos, length = pos & 0xFF, length & 0xFF
    ones = np.where(length >= w, ~u(0), (u(1) << np.minimum(length, w - 1).astype(u)) - u(1))
    mask = shift(ones, pos, True)
    return (shift(a, pos, True) & mask) | (b & ~mask)


def lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Any logical function of three operands, from its truth table."""
    r = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            r |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return r


def prmt(a: Array, b: Array, selector: Array) -> Array:
    """Byte permute, generic mode."""
    both = a.astype(U64) | b.astype(U64) << U64(32)
    r = np.zeros_like(a)
    for i in range(4):
        n = selector >> U32(4 * i)
        byte = (both >> ((n & 7) * 8).astype(U64)).astype(U32) & 0xFF
        byte = np.where(n & 8 != 0, np.where(byte & 0x80 != 0, U32(0xFF), U32(0)), byte)
        r |= byte << U32(8 * i)
    return r


def popc(a: Array) -> Array:
    """Number of bits set."""
    return np.bitwise_count(a).astype(U32)


def clz(a: Array) -> Array:
    """Number of leading zeros."""
    n = np.zeros(a.shape, U32)
    x = a.astype(U64)
    for k in (32, 16, 8, 4, 2, 1):
        big = x >= (U64(1) << U64(k))
        n += np.where(big, U32(k), U32(0))
        x = np.where(big, x >> U64(k), x)
    result: Array = U32(8 * a.itemsize) - np.where(a == 0, U32(0), n + U32(1))
    return result


def find_leading(a: Array) -> Array:
    """Position of the most significant bit (of a negative number: the highest zero); all ones if there is none."""
    z = clz((np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a).view(f"u{a.itemsize}"))
    bits = 8 * a.itemsize
    result: Array = np.where(z == bits, U32(0xFFFFFFFF), U32(bits - 1) - z)
    return result


def brev(a: Array) -> Array:
    """Bits in reverse."""
    b = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)[:, ::-1], axis=1)
    result: Array = np.packbits(b[:, ::-1], axis=1)[:, ::-1].copy().view(a.dtype)[:, 0]
    return result

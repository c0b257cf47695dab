"""Sums of squares that neither overflow nor vanish, and the global norm they add up to.

Accuracy: what a thread loads at once, 8 elements at most, is added up in float32, then ``UNROLL`` such sums; from
there on it is float64. So a sum is right to 11 roundings of 2**-24 (the square's own included), and the norm to half
of that, 3.3e-7, however many elements there are. Squares of float32 values outside of [2**-40, 2**61) may leave the
range in which this holds: a chunk whose largest value lies there is summed a second time, scaled by a power of two.
(float64 gradients get no second look: their norm is right between 2**-450 and 2**450, and beyond counts as infinite.)
"""

import triton
import triton.language as tl

from .table import positions

UNROLL = tl.constexpr(4)
SMALL = tl.constexpr(2.0**-40)
LARGE = tl.constexpr(2.0**61)  # 32 squares do not overflow
FLOAT32_LIMIT = tl.constexpr(2.0**128 - 2.0**103)  # what is not below it rounds to inf
CAP = tl.constexpr(2.0**900)  # of a chunk's sum


@triton.jit
def magnitude_bits(x, C: tl.constexpr):
    """The bits of ``|x|``, ordered as integers: finite < inf < NaN. ``tl.max`` on floats drops NaN."""
    if C == tl.float64:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def sum_region(
    grad, begin, lo, hi, layout, factor,
    C: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum of squares of the elements ``begin + [lo, hi)``.

    ``WIDE``: flat memory aligned to 16 bytes, ``hi`` a multiple of 8.

    Returns:
        float64 sum of ``(factor * x) ** 2``, and the bits of the largest ``|x|``.
    """
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([THREADS], tl.float64)
    largest = magnitude_bits(tl.zeros([THREADS], C), C)
    REPEAT: tl.constexpr = UNROLL if WIDE else 1
    for start in range(lo, hi, BLOCK * REPEAT):
        partial = tl.zeros([THREADS], C)
        for k in tl.static_range(REPEAT):
            offsets = start + k * BLOCK + lanes
            if WIDE:
                pointers = tl.multiple_of(grad + begin, 16) + offsets
            else:
                in_grad, _ = positions(begin + offsets, layout)
                pointers = grad + in_grad
            x = tl.load(pointers, mask=offsets < hi, other=0.0).to(C)
            bits = magnitude_bits(x, C)
            x *= factor
            square = x * x
            if WIDE:  # one number per thread: of what it has loaded, which needs no exchange
                square = tl.sum(tl.reshape(square, [THREADS, BLOCK // THREADS]), 1)
                bits = tl.max(tl.reshape(bits, [THREADS, BLOCK // THREADS]), 1)
            partial += square
            largest = tl.maximum(largest, bits)
        total += partial.to(tl.float64)
    return tl.sum(total), tl.max(largest)


@triton.jit
def chunk_sum(
    address, begin, count, layout, inv_scale,
    G: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Sum of squares of one chunk's gradients as they lie in memory, still scaled.

    Args:
        address: int64, the tensor's grad.
        begin, count: the chunk, in elements.
        inv_scale: float64, what unscaling multiplies by.
        G, C: dtypes of the grad and of the computation.
        BLOCK: elements per turn, as many as fit into one 16-byte access of each thread.

    Returns:
        float64; inf or NaN if a gradient is, as read or after unscaling in ``C``.
    """
    grad = address.to(tl.pointer_type(G))
    is_wide = (address % 16 == 0) & (tl.load(layout) == 0)
    whole = tl.where(is_wide, count // 8 * 8, 0)
    factor = tl.full((), 1.0, C)
    undo = tl.full((), 1.0, tl.float64)
    looking = tl.full((), 1, tl.int32)
    result = tl.full((), 0.0, tl.float64)
    # That `whole` is a multiple of 8, by this very expression, lets masked accesses be 16 bytes wide.
    while looking > 0:
        more, larger = sum_region(grad, begin, whole, count, layout, factor, C, THREADS, THREADS, False)
        total, largest = sum_region(grad, begin, 0, whole, layout, factor, C, BLOCK, THREADS, True)
        top = tl.maximum(largest, larger).to(C, bitcast=True).to(tl.float64)
        result = (total + more) * undo
        result = tl.where(result < CAP, result, float("inf"))
        if C == tl.float64:
            limit = float("inf")
            looking = 0
        else:
            limit = FLOAT32_LIMIT
            unsafe = (top >= LARGE) | (top < SMALL)
            again = (looking == 1) & unsafe & (top > 0) & (top < float("inf"))
            factor = tl.where(top >= LARGE, 2.0**-70, 2.0**100).to(C)
            undo = tl.where(top >= LARGE, 2.0**140, 2.0**-200).to(tl.float64)
            looking = tl.where(again, 2, 0)
        overflowed = tl.where(top < float("inf"), float("inf"), top)
        result = tl.where(top * inv_scale < limit, result, overflowed)
    return result


@triton.jit
def add_up(partials, n_chunks, BLOCK: tl.constexpr):
    """Sum of the chunks' float64 partials, always in the same order. Reads what other programs wrote."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n_chunks, BLOCK):
        offsets = start + lanes
        total += tl.load(partials + offsets, mask=offsets < n_chunks, other=0.0, cache_modifier=".cg")
    return tl.sum(total)

"""Stochastic rounding of float32 to bfloat16: up or down, with the odds that make its mean exact.

The random numbers are a function of seed, parameter, step and element alone, so that they depend on neither grid nor
layout, and a checkpoint needs no more than the seed. They are Philox 4x32's with 7 rounds (Salmon, Moraes, Dror, Shaw:
"Parallel random numbers: as easy as 1, 2, 3", SC 2011, which found no fault with 7): one counter for 4 elements.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def noise(stream, begin, offsets):
    """32 random bits for each of the elements ``begin + offsets`` of a parameter.

    Args:
        stream: seed (int64), the parameter's place in the optimizer and its shard from bit 48 on (int64), its count
            of applied steps, this one included (float64).
        begin: int64, a multiple of 4.
        offsets: int32.
    """
    seed, place, step = stream
    # Four neighbours, which one thread has, share the counter: the compiler sees that, and runs Philox once for them.
    block = (begin >> 2) + (offsets >> 2)
    low = block.to(tl.uint32)
    zero = low ^ low
    r0, r1, r2, r3 = tl.philox(
        seed,
        low,
        ((block >> 32) + (place >> 32)).to(tl.uint32),
        zero + step.to(tl.uint32),
        zero + place.to(tl.uint32),
        ROUNDS,
    )
    lane = offsets & 3
    return tl.where(lane < 2, tl.where(lane == 0, r0, r1), tl.where(lane == 2, r2, r3))


@triton.jit
def round_stochastically(x, random):
    """float32 to bfloat16; ``random`` has 32 bits for each element, of which the lower 16 are used."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + (random & 0xFFFF)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, rounded, x.to(tl.bfloat16))

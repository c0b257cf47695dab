"""The loss scale's state machine, on a device vector of float64.

Source of the rule: ``torch._amp_update_scale_``, with bounds, hysteresis, and ``>=`` where it tests ``==``.
"""

import triton
import triton.language as tl

SCALE = tl.constexpr(0)
GROWTH_TRACKER = tl.constexpr(1)  # good steps since the last change or overflow
HYSTERESIS_TRACKER = tl.constexpr(2)  # overflows since the last good step
FOUND_INF = tl.constexpr(3)  # recorded for a scale that several optimizers share
GROWTH_FACTOR = tl.constexpr(4)
BACKOFF_FACTOR = tl.constexpr(5)
GROWTH_INTERVAL = tl.constexpr(6)
MIN_SCALE = tl.constexpr(7)
MAX_SCALE = tl.constexpr(8)
HYSTERESIS = tl.constexpr(9)
WORDS = tl.constexpr(10)


@triton.jit
def advance(state, found_inf):
    """Grow or back off the scale after an iteration; rounds to float32, one rounding of the double product.

    Args:
        state: ``[WORDS]`` float64, as laid out above; updated in place.
        found_inf: whether any gradient of the iteration was inf or NaN.
    """
    scale = tl.load(state + SCALE)
    if found_inf:
        overflows = tl.load(state + HYSTERESIS_TRACKER) + 1
        backed_off = (scale * tl.load(state + BACKOFF_FACTOR)).to(tl.float32).to(tl.float64)
        backed_off = tl.maximum(backed_off, tl.load(state + MIN_SCALE))
        tl.store(state + SCALE, tl.where(overflows >= tl.load(state + HYSTERESIS), backed_off, scale))
        tl.store(state + HYSTERESIS_TRACKER, overflows)
        tl.store(state + GROWTH_TRACKER, 0.0)
    else:
        good = tl.load(state + GROWTH_TRACKER) + 1
        grows = good >= tl.load(state + GROWTH_INTERVAL)
        grown = (scale * tl.load(state + GROWTH_FACTOR)).to(tl.float32).to(tl.float64)
        grown = tl.where(grown < float("inf"), tl.minimum(grown, tl.load(state + MAX_SCALE)), scale)
        tl.store(state + SCALE, tl.where(grows, grown, scale))
        tl.store(state + HYSTERESIS_TRACKER, 0.0)
        tl.store(state + GROWTH_TRACKER, tl.where(grows, 0.0, good))


@triton.jit
def update_scale_kernel(state):
    """End an iteration of a shared loss scale: advance by the recorded flag, and clear it."""
    if tl.program_id(0) == 0:
        advance(state, tl.load(state + FOUND_INF) != 0)
        tl.store(state + FOUND_INF, 0.0)

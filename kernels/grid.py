"""The grid barrier, and which program leaves last.

Both need two int32 counters in device memory, zero before the launch and left zero by it. A program that waits
here stays on its multiprocessor until all others have arrived: launch cooperatively, so that the device refuses
a grid that cannot be resident as a whole, instead of hanging. After an aborted launch the counters are worthless.
"""

import triton
import triton.language as tl


@triton.jit
def grid_barrier(counters):
    """Wait until every program of the grid has arrived; what each stored before is then visible to all."""
    tl.debug_barrier()  # the whole program has stored before its one arrival
    tl.atomic_add(counters, 1, sem="release", scope="gpu")
    arrived = tl.full((), 0, tl.int32)
    while arrived < tl.num_programs(0):
        arrived = tl.atomic_add(counters, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def is_last_out(counters):
    """True in the program that leaves last: all others are done. It resets the counters."""
    tl.debug_barrier()
    last = tl.atomic_add(counters + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.store(counters, 0)
        tl.store(counters + 1, 0)
    return last

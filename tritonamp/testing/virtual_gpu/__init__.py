"""A virtual GPU for Triton: runs the PTX of compiled kernels on CPU tensors.

    with virtual_gpu(arch=90, sms=4, race=True) as stats:
        register(*grads, *params)  # tensors that are reached only through pointers in memory
        kernel[(8,)](table, x, n, BLOCK=1024, launch_cooperative_grid=True)
    assert stats.last.cooperative and stats.last.spills == 0

It checks bounds, alignment, residency of cooperative launches, deadlocks and races, and counts instructions and memory
traffic. Which PTX it knows, and how true it is to hardware: docs/virtual_gpu.md. It imports triton, and needs a process
in which kernels are compiled (``TRITON_INTERPRET`` unset).
"""

from .driver import register, virtual_gpu
from .errors import DeadlockError, DeviceTrap, DivergenceError, LaunchError, MemoryFault, RaceError, SimError
from .machine import occupancy
from .stats import LaunchStats, Stats

__all__ = [
    "DeadlockError",
    "DeviceTrap",
    "DivergenceError",
    "LaunchError",
    "LaunchStats",
    "MemoryFault",
    "RaceError",
    "SimError",
    "Stats",
    "occupancy",
    "register",
    "virtual_gpu",
]

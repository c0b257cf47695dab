"""The machine: its limits, its global memory, its settings."""

from typing import Literal

import numpy as np

from .kernel import Kernel
from .memory import Memory, Region
from .stats import Stats

# Per compute capability: threads, blocks and bytes of shared memory per multiprocessor; shared memory per block.
LIMITS = {
    75: (1024, 16, 65536, 65536),
    80: (2048, 32, 167936, 166912),
    86: (1536, 16, 102400, 101376),
    87: (1536, 16, 167936, 166912),
    89: (1536, 24, 102400, 101376),
    90: (2048, 32, 233472, 232448),
    100: (2048, 32, 233472, 232448),
    103: (2048, 32, 233472, 232448),
    120: (1536, 24, 102400, 101376),
}
REGISTERS = 65536  # per multiprocessor, in four parts
MAX_REGISTERS = 255  # per thread


def occupancy(arch: int, threads: int, registers: int, shared: int) -> int:
    """Blocks that fit one multiprocessor.

    Registers are given to warps 256 at a time, each warp from one of the four parts of the multiprocessor; shared
    memory to blocks 128 bytes at a time (256 before compute capability 8.0), plus 1 KiB from 8.0 on.

    Args:
        arch: compute capability, e.g. 90.
        threads: per block.
        registers: per thread.
        shared: bytes per block.
    """
    max_threads, max_blocks, shared_per_sm, shared_per_block = LIMITS[arch]
    warps = -(-threads // 32)
    if registers > MAX_REGISTERS or shared > shared_per_block:
        return 0
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    if per_warp * -(-warps // 4) * 4 > REGISTERS:
        return 0
    warps_by_registers = REGISTERS // 4 // per_warp * 4
    unit = 128 if arch >= 80 else 256
    reserved = -(-(shared + (1024 if arch >= 80 else 0)) // unit) * unit
    by_shared = shared_per_sm // reserved if reserved else max_blocks
    return min(max_blocks, max_threads // (warps * 32), warps_by_registers // warps, by_shared)


class Machine:
    """A virtual GPU: configuration, global memory, statistics."""

    def __init__(
        self,
        arch: int = 90,
        sms: int = 4,
        *,
        seed: int | None = None,
        quantum: int = 200,
        l2_bytes: int = 32 << 20,
        traffic: bool = True,
        race: bool | Literal["threads"] = False,
        idle_limit: int = 5_000_000,
    ) -> None:
        if arch not in LIMITS:
            raise ValueError(f"arch must be one of {', '.join(map(str, LIMITS))}, got {arch!r}")
        if race not in (False, True, "threads"):
            raise ValueError(f"race must be False, True or 'threads', got {race!r}")
        for name, value, least in (("sms", sms, 1), ("quantum", quantum, 1), ("l2_bytes", l2_bytes, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value!r}")
        self.arch, self.sms, self.seed, self.quantum, self.l2_bytes = arch, sms, seed, quantum, l2_bytes
        self.count_traffic, self.detect_races, self.idle_limit = traffic, race, idle_limit
        self.memory, self.stats = Memory(), Stats()
        self.max_shared = LIMITS[arch][3]
        self._symbols: dict[tuple[int, str], tuple[int, Kernel]] = {}

    def occupancy(self, threads: int, registers: int, shared: int) -> int:
        """Blocks of this size that fit one multiprocessor."""
        return occupancy(self.arch, threads, registers, shared)

    def symbol_address(self, kernel: Kernel, name: str) -> int:
        """Address of a global or constant array, allocated at first use."""
        key = id(kernel), name
        if key not in self._symbols:
            symbol = kernel.program.symbols[name]
            array = np.zeros(symbol.size + 64, np.uint8)
            lo = (array.ctypes.data + 31) // 32 * 32
            array[lo - array.ctypes.data :][: len(symbol.value)] = np.frombuffer(symbol.value, np.uint8)
            self._symbols[key] = lo, kernel
            self.memory.add(Region(lo, symbol.size, f"symbol {name}", owner=array))
        return self._symbols[key][0]

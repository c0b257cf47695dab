"""One kernel launch: what its blocks share, and their scheduler.

Blocks are interleaved in turns of some instructions. Without a seed, resident blocks form groups that execute
together, which is much faster than one after the other; with a seed, each block is scheduled by itself, at random,
and may be interrupted after any access to global memory.
"""

import random
import time
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from .errors import DeadlockError, LaunchError
from .group import Group
from .kernel import Kernel, pool
from .race import RaceDetector
from .stats import LaunchStats
from .traffic import L2, Traffic

if TYPE_CHECKING:
    from .machine import Machine

TOGETHER = 2048  # threads of a group: beyond, arrays leave the cache


class Launch:
    """A launch of a kernel on a machine."""

    def __init__(
        self,
        machine: "Machine",
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: int,
        params: dict[str, bytes],
        *,
        dynamic_shared: int = 0,
        cooperative: bool = False,
        registers: int = 32,
        spills: int = 0,
        name: str = "",
    ) -> None:
        self.machine, self.kernel, self.grid, self.threads = machine, kernel, grid, threads
        if threads % 32 or not 0 < threads <= 1024:
            raise LaunchError(f"{threads} threads per block")
        self.params, self.dynamic_shared = params, dynamic_shared
        self.shared = kernel.shared + dynamic_shared
        self.total = prod(grid)
        per_sm = machine.occupancy(threads, registers, self.shared)
        self.stats = LaunchStats(
            name=name or kernel.program.name,
            grid=grid,
            cooperative=cooperative,
            threads=threads,
            registers=registers,
            spills=spills,
            shared=self.shared,
            resident=per_sm * machine.sms,
            blocks_per_sm=per_sm,
        )
        self.resident = self.stats.resident
        if self.resident == 0:
            raise LaunchError(
                f"{self.stats.name}: {threads} threads, {registers} registers, {self.shared} bytes of shared memory "
                "do not fit a multiprocessor"
            )
        if cooperative and self.total > self.resident:
            raise LaunchError(
                f"Triton Error [CUDA]: too many blocks in cooperative launch ({self.total} blocks of "
                f"{self.stats.name}, {self.resident} can be resident)"
            )
        l2 = L2(machine.l2_bytes)
        self.traffic = Traffic(self.stats, l2) if machine.count_traffic else None
        self.race = RaceDetector(self, self.total, machine.detect_races) if machine.detect_races else None

    def block_id(self, number: int) -> tuple[int, int, int]:
        """A block's coordinates in the grid."""
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def address(self, symbol: str) -> int:
        """Where a declared array lies."""
        if symbol in self.kernel.offsets:
            return self.kernel.offsets[symbol]
        return self.machine.symbol_address(self.kernel, symbol)

    def run(self) -> None:
        """Run all blocks to the end.

        Raises:
            SimError: what the kernel did wrong.
        """
        start = time.perf_counter()
        self.machine.stats.launches.append(self.stats)
        groups: list[Group] = []
        try:
            with np.errstate(all="ignore"):
                self.schedule(groups)
        finally:
            for group in groups:  # after an error: their frames are not used again
                group.count()
            if self.traffic:
                self.traffic.finish()
            self.stats.seconds = time.perf_counter() - start

    def schedule(self, groups: list[Group]) -> None:
        """Start blocks and give groups turns until all are done."""
        machine, memory = self.machine, self.machine.memory
        rng = random.Random(machine.seed)
        started = turn = idle = 0
        changed = memory.version
        while True:
            started = self.start(groups, started)
            if not groups:
                return
            ready = [g for g in groups if g.asleep != memory.version]
            if not ready:
                raise self.deadlock(groups, started, "no block can make progress")
            if idle > machine.idle_limit:
                raise self.deadlock(groups, started, f"no change of global memory in {idle} instructions")
            if machine.seed is None:
                group, n = ready[turn % len(ready)], machine.quantum
                turn += 1
            else:
                group, n = rng.choice(ready), rng.randint(1, machine.quantum)
            group.asleep = -1
            idle += group.step(n)
            if group.done:
                groups.remove(group)
                group.count()
                pool.give_back(group.frame)
                idle = 0
            if changed != memory.version:
                changed, idle = memory.version, 0

    def start(self, groups: list[Group], started: int) -> int:
        """Let blocks take free places; returns how many have started by now."""
        together = 1 if self.machine.seed is not None else max(1, TOGETHER // self.threads)
        while started < self.total:
            free = self.resident - sum(g.blocks_alive for g in groups)
            n = min(free, together, self.total - started)
            if n <= 0:
                break
            groups.append(Group(self, list(range(started, started + n))))
            started += n
        return started

    def deadlock(self, groups: list[Group], started: int, what: str) -> DeadlockError:
        """The error that tells where all blocks are."""
        waiting = ""
        if started < self.total:
            waiting = f"; {self.total - started} blocks never started (at most {self.resident} are resident)"
        places: dict[str, list[str]] = {}
        for g in groups:
            for b, number in enumerate(g.block_numbers):
                if g.alive_in[b]:
                    places.setdefault(g.where(b), []).append(str(number))
        lines = [f"  blocks {', '.join(numbers)}: {where}" for where, numbers in places.items()]
        return DeadlockError("\n".join([f"{self.stats.name}: {what}{waiting}", *lines]))

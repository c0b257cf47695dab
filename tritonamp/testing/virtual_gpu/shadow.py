"""What the race detector remembers of the accesses to each location."""

import bisect

import numpy as np

from .memory import Memory, Region
from .ptx_types import Array

# An access, packed into an int64: pc, thread, block, clock, from the low bits up. 0: there was none.
PC, THREAD, BLOCK, CLOCK = 0, 16, 28, 40
SEVERAL = 0xFFF  # in place of a thread
MAX_PC, MAX_BLOCKS = 1 << THREAD - PC, 1 << CLOCK - BLOCK
FLAG = 1 << 62  # on a write: there were strong accesses, too
MAX_ROOM = 1 << 20  # locations to have room for at first
LARGE = 1 << 22  # bytes of a region of which only the parts touched are remembered
MANY = -1  # in place of a reader: several blocks


def fields(packed: Array) -> tuple[Array, Array, Array, Array]:
    """Clock, block, thread and pc."""
    return packed >> CLOCK, packed >> BLOCK & 0xFFF, packed >> THREAD & 0xFFF, packed & 0xFFFF


class Shadow:
    """The last accesses to every location of the regions touched; a location is ``unit`` bytes.

    Attributes:
        write: ``[size]``, the last plain write.
        reads: ``[blocks * size]``, each block's last plain read.
        readers: ``[size]``, the block that has read since the last write, counted from 1; 0 for none, or ``MANY``.
    """

    def __init__(self, memory: Memory, blocks: int, unit: int) -> None:
        self.memory, self.blocks, self.unit, self.shift = memory, blocks, unit, unit.bit_length() - 1
        total = sum(r.hi - r.lo for r in memory.regions.values()) // unit + 1024
        self.size, self.used = min(total, MAX_ROOM), 0
        self.write, self.readers = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)
        self.reads = np.zeros(self.size * blocks, np.int64)
        self._offsets: tuple[int, Array, set[int]] = (-1, self.write, set())
        memory.invalidate()
        self.spans: list[tuple[int, int, int]] = []  # (start, end, its first location), by address

    def offsets(self, numbers: Array) -> Array:
        """:meth:`offset` of regions given by their numbers in the memory's table."""
        generation, offsets, known = self._offsets
        while generation != self.memory.generation or not known.issuperset(numbers.tolist()):
            if generation != self.memory.generation:
                generation, offsets, known = self.memory.generation, np.zeros(len(self.memory.starts), np.int64), set()
            for number in set(numbers.tolist()) - known:
                offsets[number] = self.offset(self.memory.regions[self.memory.starts[number]])
                known.add(number)
            self._offsets = generation, offsets, known
        return offsets[numbers]

    def locations(self, addresses: Array) -> Array:
        """The location of each address, wherever it lies."""
        parts = [self.part(a) for a in addresses.tolist()]
        for _ in range(2):  # as spans are made, others may move
            offsets = [self.offset(part) for part in parts]
        locations: Array = (addresses >> np.uint64(self.shift)).view(np.int64) + np.array(offsets)
        return locations

    def part(self, address: int) -> Region:
        """The region of an address, or a part of it if it is large."""
        region = self.memory.known(address)
        if region is None:
            raise ValueError(f"no region holds {address:#x}")
        if region.hi - region.lo <= LARGE:
            return region
        lo = address // LARGE * LARGE
        return Region(max(lo, region.lo), min(lo + LARGE, region.hi) - max(lo, region.lo), region.name)

    def offset(self, region: Region) -> int:
        """What to add to ``address >> shift`` for a location of the region."""
        lo, hi = region.lo >> self.shift, -(-region.hi >> self.shift)
        i = bisect.bisect(self.spans, (lo, 1 << 60, 0)) - 1
        if i >= 0 and hi <= self.spans[i][1]:
            return self.spans[i][2] - self.spans[i][0]
        # Storages may overlap: a new span takes over the accesses to those within it.
        overlapping = [s for s in self.spans if s[0] < hi and lo < s[1]]
        lo, hi = min([lo, *(s[0] for s in overlapping)]), max([hi, *(s[1] for s in overlapping)])
        if overlapping:
            self.memory.invalidate()
        first = self.used
        if first + hi - lo > self.size:
            self.grow(max(first + hi - lo, 2 * self.size))
        self.used += hi - lo
        for start, end, old in overlapping:
            new = first + start - lo
            for rows in (self.write[None], self.reads.reshape(self.blocks, -1), self.readers[None]):
                rows[:, new : new + end - start] = rows[:, old : old + end - start]
            self.spans.remove((start, end, old))
        bisect.insort(self.spans, (lo, hi, first))
        return first - lo

    def grow(self, size: int) -> None:
        """Make room."""
        rows = [self.write[None], self.reads.reshape(self.blocks, -1), self.readers[None]]
        new = [np.zeros((len(r), size), np.int64) for r in rows]
        for old, r in zip(rows, new, strict=True):
            r[:, : self.used] = old[:, : self.used]
        self.write, self.reads, self.readers = (r.ravel() for r in new)
        self.size = size

    def address(self, location: int) -> int:
        """The address of a location."""
        for start, end, first in self.spans:
            if first <= location < first + end - start:
                return location - first + start << self.shift
        raise ValueError(f"no location {location}")

    def note_reader(self, locations: Array, blocks: Array) -> None:
        """Locations have been read by blocks."""
        mine, before = blocks + 1, self.readers[locations]
        if not np.count_nonzero(before != mine):
            return
        new = np.where((before == 0) | (before == mine), mine, MANY)
        self.readers[locations] = new
        differs = self.readers[locations] != new
        if np.count_nonzero(differs):  # several blocks read there at once
            self.readers[locations[differs]] = MANY

    def others_read(self, locations: Array, blocks: Array) -> Array:
        """Which of the locations were read by other blocks since they were last written."""
        readers = self.readers[locations]
        result: Array = (readers != 0) & (readers != blocks + 1)
        return result

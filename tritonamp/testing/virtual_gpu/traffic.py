"""Global memory traffic: requests of warps as the coalescer sees them, and an L2 cache in front of DRAM."""

from itertools import pairwise

import numpy as np

from .ptx_types import Array
from .stats import SECTOR, LaunchStats

KINDS = ("ld", "st", "atom")
# A key holds, from the top: the request, the warp, the sector (48-bit addresses: 43 bits).
SECTOR_BITS, WARP_BITS = np.uint64(43), np.uint64(8)
REQUEST = SECTOR_BITS + WARP_BITS
SECTOR_MASK = (np.uint64(1) << SECTOR_BITS) - np.uint64(1)
MAX_REQUESTS = 1 << 12
MAX_LANES = 1 << 14  # of requests that are evaluated at a time


class L2:
    """A write-back cache of 32-byte sectors; a written sector is not fetched first.

    Least recently used, except that the oldest eighth is evicted at once. Pages of arrays, indexed by sector number,
    hold the time of the last use (0: absent) and the dirty flags.
    """

    PAGE = 1 << 12

    def __init__(self, capacity: int) -> None:
        self.capacity, self.count, self.time = capacity // SECTOR, 0, 0
        self.pages: dict[int, tuple[Array, Array]] = {}
        self.read = self.written = 0  # bytes of DRAM

    def access(self, sectors: Array, fetches: Array, dirties: Array) -> None:
        """Distinct, ascending sectors: are they fetched where absent, are they dirty afterwards?"""
        self.time += 1
        pages = sectors // self.PAGE
        bounds = np.flatnonzero(np.diff(pages, prepend=-1, append=-1)).tolist()
        for begin, end in pairwise(bounds):
            part, page = slice(begin, end), int(pages[begin])
            if page not in self.pages:
                self.pages[page] = np.zeros(self.PAGE, np.int64), np.zeros(self.PAGE, np.bool_)
            used, dirty = self.pages[page]
            i = sectors[part] % self.PAGE
            absent = used[i] == 0
            used[i] = self.time
            dirty[i] |= dirties[part]
            self.count += int(np.count_nonzero(absent))
            self.read += SECTOR * int(np.count_nonzero(absent & fetches[part]))
        if self.count > self.capacity:
            self.evict(self.capacity * 7 // 8)

    def evict(self, keep: int) -> None:
        """Evict all but the ``keep`` sectors used last."""
        ages = np.concatenate([used[used > 0] for used, _ in self.pages.values()])
        oldest = np.partition(ages, len(ages) - keep - 1)[len(ages) - keep - 1] if keep else self.time
        for used, dirty in self.pages.values():
            gone = (used > 0) & (used <= oldest)
            self.written += SECTOR * int(np.count_nonzero(dirty & gone))
            self.count -= int(np.count_nonzero(gone))
            used[gone], dirty[gone] = 0, False

    def flush(self) -> None:
        """Write back everything."""
        if self.count:
            self.evict(0)


class Traffic:
    """Counts the requests of a launch. They are collected, and evaluated many at a time."""

    def __init__(self, stats: LaunchStats, l2: L2) -> None:
        self.stats, self.l2 = stats, l2
        self.max_lanes = min(MAX_LANES, l2.capacity // 8) if l2.capacity else MAX_LANES
        self.clear()

    def clear(self) -> None:
        """Forget what was collected."""
        self.addresses: list[Array] = []
        self.warps: list[Array] = []
        self.what: list[tuple[str, int, int]] = []  # kind, bytes, threads per lane
        self.lanes = 0

    def request(self, kind: str, width: int, addresses: Array, warps: Array, span: int) -> None:
        """An access.

        Args:
            kind: of access.
            width: bytes per thread.
            addresses: uint64, per active lane; not changed afterwards.
            warps: uint64, a number of each lane's warp or block, in the bits of a key.
            span: threads that a lane stands for, all of which access the same address.
        """
        self.addresses.append(addresses)
        self.warps.append(warps)
        self.what.append((kind, width, span))
        self.lanes += len(addresses)
        if self.lanes >= self.max_lanes or len(self.what) == MAX_REQUESTS:
            self.evaluate()

    def evaluate(self) -> None:
        """Count what was collected."""
        if not self.what:
            return
        lengths = [len(a) for a in self.addresses]
        number = np.repeat(np.arange(len(lengths), dtype=np.uint64) << REQUEST, lengths)
        keys = np.concatenate(self.addresses) >> np.uint64(5) | np.concatenate(self.warps) | number
        keys = distinct(keys)
        request = (keys >> REQUEST).astype(np.int64)
        warp = keys >> SECTOR_BITS
        first_of_warp = np.concatenate(([True], warp[1:] != warp[:-1]))
        sectors = np.bincount(request, minlength=len(lengths)).tolist()
        warps = np.bincount(request[first_of_warp], minlength=len(lengths)).tolist()
        s, fetched, stored = self.stats, 0, 0
        for (kind, width, span), n, n_sectors, n_warps in zip(self.what, lengths, sectors, warps, strict=True):
            per_lane = max(span // 32, 1)
            s.bytes[kind] += n * span * width
            s.accesses[kind, width] += n * span
            s.requests[kind, width] += n_warps * per_lane
            s.sectors[kind] += n_sectors * per_lane
            fetched += n_sectors * per_lane * (kind != "st")
            stored += n_sectors * per_lane * (kind != "ld")
        if self.l2.capacity:
            self.through_l2(keys & SECTOR_MASK, request)
        else:
            self.l2.read += SECTOR * fetched
            self.l2.written += SECTOR * stored
        self.clear()

    def through_l2(self, sectors: Array, request: Array) -> None:
        """Look up the sectors of all requests; those of one sector keep their order."""
        loads = np.array([kind != "st" for kind, _, _ in self.what])[request]
        stores = np.array([kind != "ld" for kind, _, _ in self.what])[request]
        order = np.argsort(sectors, kind="stable")
        sectors, loads, stores = sectors[order], loads[order], stores[order]
        first = np.concatenate(([True], sectors[1:] != sectors[:-1]))
        dirty = np.logical_or.reduceat(stores, first.nonzero()[0])
        self.l2.access(sectors[first].view(np.int64), loads[first], dirty)

    def finish(self) -> None:
        """Evaluate the rest, and write back the cache."""
        self.evaluate()
        self.l2.flush()
        self.stats.dram_read, self.stats.dram_written = self.l2.read, self.l2.written


def distinct(x: Array) -> Array:
    """The distinct values, ascending."""
    if (x[1:] < x[:-1]).any():
        return np.unique(x)
    return x[np.concatenate(([True], x[1:] != x[:-1]))]

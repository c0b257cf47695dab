"""Address spaces. Global addresses are host addresses, of which only registered ranges may be touched."""

import bisect
import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from .ptx_types import Array

BASE = 4096  # addresses below it are never valid
_SPAN = (1 << 48) - BASE
_host: dict[tuple[type[np.generic], int], Array] = {}
_generations = itertools.count()


def host_rows(dtype: type[np.generic], lanes: int) -> Array:
    """All of this process' memory from ``BASE`` on, as rows of ``lanes`` elements. Nothing is checked here."""
    key = dtype, lanes
    if key not in _host:
        memory: Any = (ctypes.c_uint8 * _SPAN).from_address(BASE)
        whole = np.frombuffer(memory, np.uint8)
        rows = whole.view(dtype)
        _host[key] = rows if lanes == 1 else rows[: len(rows) // lanes * lanes].reshape(-1, lanes)
    return _host[key]


class Region:
    """A registered range of addresses. It keeps ``owner``, whose memory it is, alive."""

    __slots__ = ("hi", "lo", "name", "owner")

    def __init__(self, lo: int, size: int, name: str, owner: object = None) -> None:
        self.lo, self.hi, self.name, self.owner = lo, lo + size, name, owner


class Memory:
    """Global memory: the registered regions."""

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}
        self.starts: list[int] = []
        self.version = 0  # advances with every change of the contents
        self.generation = next(_generations)  # with every change of the regions; unique in the process
        self._table: tuple[int, Array, Array] | None = None
        self.on_miss: Callable[[int], None] | None = None  # told of an address that is in no region

    def add(self, region: Region) -> None:
        """Register a region; the larger of two that start at the same address counts."""
        old = self.regions.get(region.lo)
        if old is None:
            bisect.insort(self.starts, region.lo)
        if old is None or old.hi < region.hi:
            self.regions[region.lo] = region
        self.invalidate()

    def drop(self, lo: int) -> None:
        """Forget the region that starts at ``lo``."""
        if self.regions.pop(lo, None):
            self.starts.remove(lo)
            self.invalidate()

    def invalidate(self) -> None:
        """Have all that was remembered about regions looked up again."""
        self.generation = next(_generations)

    def table(self) -> tuple[Array, Array]:
        """Starts, less ``BASE``, and sizes of the regions, by address; uint64."""
        if self._table is None or self._table[0] != self.generation:
            sizes = [self.regions[lo].hi - lo for lo in self.starts]
            starts = np.array(self.starts, np.uint64) - np.uint64(BASE)
            self._table = self.generation, starts, np.array(sizes, np.uint64)
        return self._table[1:]

    def find(self, address: int, width: int = 1) -> Region | None:
        """The region that holds an access, if any, even if it has to be searched for."""
        found = self.known(address, width)
        if found is None and self.on_miss:
            self.on_miss(address)
            found = self.known(address, width)
        return found

    def known(self, address: int, width: int = 1) -> Region | None:
        """The registered region that holds an access, if any."""
        for i in range(bisect.bisect(self.starts, address) - 1, -1, -1):  # storages may overlap: search on
            region = self.regions[self.starts[i]]
            if address + width <= region.hi:
                return region
        return None

    def near(self, address: int) -> str:
        """What error messages say about an address."""
        i = bisect.bisect(self.starts, address) - 1
        if i >= 0:
            region = self.regions[self.starts[i]]
            if address < region.hi + (1 << 24):
                return f"; {address - region.lo} bytes into {region.name} of {region.hi - region.lo} bytes"
        return ""


class Scratch:
    """Shared memory of blocks, or local memory of threads: ``owners`` parts of ``size`` bytes, one after another."""

    def __init__(self, kind: str, size: int, owners: int) -> None:
        self.kind, self.size, self.stride = kind, size, (size + 31) // 32 * 32
        self.array = np.zeros(self.stride * owners, np.uint8)

    def rows(self, dtype: type[np.generic], lanes: int) -> Array:
        """The memory as rows of ``lanes`` elements."""
        rows = self.array.view(dtype)
        return rows if lanes == 1 else rows.reshape(-1, lanes)

"""Happens-before race detection on global memory, by vector clocks with one component per block.

Each block has a clock that advances at every block-wide barrier and at every release. Accesses up to the last barrier
are known to all its threads, later ones only to the thread that made them. A release publishes what its thread knows
at the address it writes; an acquire that reads there lets its *thread* know it, and the next barrier the whole block.
Read-modify-writes continue a release sequence, other stores end it. Atomic, volatile and relaxed ("strong") accesses
do not race with each other, only with plain ones; those of .cta scope count as plain.

Of every location, the last plain write is remembered, and each block's last plain read, strong read and strong write
(Flanagan & Freund, "FastTrack: efficient and precise dynamic race detection", 2009). A race is reported only if it
exists in this execution.
"""

from typing import TYPE_CHECKING, Literal

import numpy as np

from .errors import RaceError
from .ptx_types import Array
from .shadow import BLOCK, CLOCK, FLAG, MAX_BLOCKS, MAX_PC, SEVERAL, THREAD, Shadow, fields

if TYPE_CHECKING:
    from .access import Access
    from .launch import Launch

ANY_THREAD = SEVERAL << THREAD
READ, WRITE, STRONG_READ, STRONG_WRITE = "read", "write", "strong read", "strong write"


class Known:
    """What an observer knows: all accesses of block b up to clock[b], those of single threads up to extra[b, t]."""

    def __init__(self, clock: Array) -> None:
        self.clock = clock
        self.extra: dict[tuple[int, int], int] = {}

    def join(self, other: "Known | None") -> "Known":
        """Also know what another knows."""
        if other is not None:
            np.maximum(self.clock, other.clock, out=self.clock)
            for key, v in other.extra.items():
                self.extra[key] = max(v, self.extra.get(key, 0))
        return self


class RaceDetector:
    """The state of one launch of ``n`` blocks. ``mode="threads"``: also check the threads of a block."""

    def __init__(self, launch: "Launch", n: int, mode: bool | Literal["threads"]) -> None:
        self.launch, self.memory, self.n, self.threads = launch, launch.machine.memory, n, mode == "threads"
        if len(launch.kernel.program.code) > MAX_PC or n > MAX_BLOCKS:
            raise NotImplementedError("race detection in kernels or grids that large")
        self.shadow = Shadow(self.memory, n, launch.kernel.smallest_access)
        self.steps = np.arange(256)
        self.now = np.ones(n, np.int64)
        self.clocks = np.zeros((n, n), np.int64)  # [b]: the clocks that every thread of block b knows
        self.known = [Known(row) for row in self.clocks]
        self.acquired: list[dict[int, Known]] = [{} for _ in range(n)]  # thread -> Known, until the next barrier
        self.seen: list[dict[int, Known]] = [{} for _ in range(n)]  # what relaxed reads would acquire at a fence
        self.fenced: list[dict[int, Known]] = [{} for _ in range(n)]  # what relaxed writes release after a fence
        self.published: dict[int, Known] = {}  # by location
        self.strong: dict[int, dict[tuple[str, int], int]] = {}  # location -> (kind, block) -> packed access

    # ---------------------------------------------------------------- synchronisation

    def barrier(self, blocks: Array) -> None:
        """Blocks pass a barrier, each its own."""
        for b in blocks.tolist():
            k = self.known[b]
            if self.acquired[b]:
                for other in self.acquired[b].values():
                    k.join(other)
                self.acquired[b].clear()
            if k.extra:
                k.extra = {key: v for key, v in k.extra.items() if key[0] != b and v > k.clock[key[0]]}
        self.clocks[blocks, blocks] = self.now[blocks]
        self.now[blocks] += 1

    def release(self, b: int, t: int) -> Known:
        """What thread t of block b makes known by a release."""
        k = Known(np.zeros(self.n, np.int64)).join(self.known[b]).join(self.acquired[b].get(t))
        k.extra[b, t] = int(self.now[b])
        self.now[b] += 1
        return k

    def acquire(self, table: dict[int, Known], t: int, known: Known | None) -> None:
        """Thread t comes to know something."""
        if known is not None:
            table.setdefault(t, Known(np.zeros(self.n, np.int64))).join(known)

    def fence(self, b: int, threads: Array) -> None:
        """Threads of block b execute a fence."""
        for t in threads.tolist():
            self.acquire(self.acquired[b], t, self.seen[b].pop(t, None))
            self.fenced[b][t] = self.release(b, t)

    def synchronise(self, b: int, t: int, access: "Access", unit: int, kind: str) -> None:
        """A strong access by thread t of block b."""
        at = self.published.get(unit)
        if kind != "st":
            self.acquire(self.acquired[b] if access.order in ("acquire", "acq_rel") else self.seen[b], t, at)
        if kind != "ld":
            out = self.release(b, t) if access.order in ("release", "acq_rel") else self.fenced[b].get(t)
            if kind == "atom" and at is not None:
                out = at if out is None else Known(np.zeros(self.n, np.int64)).join(out).join(at)
            if out is None:
                self.published.pop(unit, None)
            else:
                self.published[unit] = out

    # ---------------------------------------------------------------- accesses

    def access(self, access: "Access", units: Array, blocks: Array, threads: Array, kind: str) -> None:
        """Threads access global memory, all by the same instruction.

        Args:
            access: the instruction's memory operand.
            units: ``[lanes, 1]``, the first location of each lane.
            blocks: ``[lanes, 1]``, the block of each lane.
            threads: ``[lanes, 1]``, the thread of each lane; ``SEVERAL``: a load by the whole block.
            kind: "ld", "st" or "atom".
        """
        per_lane = max(access.width >> self.shadow.shift, 1)
        if per_lane > 1:
            units = units + self.steps[:per_lane]
        if (kind == "atom" or access.order != "weak") and access.scope != "cta":
            self.strong_access(access, units, blocks, threads, kind)
        elif kind == "ld":
            self.read(access, units, blocks, threads)
        else:
            self.write(access, units, blocks, threads)

    def read(self, access: "Access", units: Array, blocks: Array, threads: Array) -> None:
        """Plain loads."""
        shadow = self.shadow
        written = shadow.write[units]
        if np.count_nonzero(written):
            self.check_writes(access, READ, units, blocks, threads, written)
        new = self.now[blocks] << CLOCK | (blocks << BLOCK | threads << THREAD | access.ins.pc)
        at = blocks * shadow.size + units
        if threads[0, 0] == SEVERAL:
            shadow.reads[at] = new
        else:
            old = shadow.reads[at]
            if np.count_nonzero(old):
                others = (old >> CLOCK > self.clocks[blocks, blocks]) & ((old ^ new) & ANY_THREAD != 0)
                new = np.where(others, new | ANY_THREAD, new)
            shadow.reads[at] = new
            twice = shadow.reads[at] != new
            if np.count_nonzero(twice):
                shadow.reads[at[twice]] |= ANY_THREAD
        shadow.note_reader(units, blocks)

    def write(self, access: "Access", units: Array, blocks: Array, threads: Array) -> None:
        """Plain stores."""
        shadow = self.shadow
        written = shadow.write[units]
        is_written = np.count_nonzero(written) > 0
        if is_written:
            self.check_writes(access, WRITE, units, blocks, threads, written)
        if self.threads or np.count_nonzero(shadow.others_read(units, blocks)):
            self.check_reads(access, WRITE, units, blocks, threads)
        new = self.now[blocks] << CLOCK | (blocks << BLOCK | threads << THREAD | access.ins.pc)
        shadow.write[units] = new | written & FLAG if is_written else new
        shadow.readers[units] = 0
        clash = (shadow.write[units] & ~FLAG) >> BLOCK != new >> BLOCK
        if np.count_nonzero(clash):  # several blocks write there by one instruction
            i, j = np.argwhere(clash)[0].tolist()
            last, unit = int(shadow.write[units[i, j]]) & ~FLAG, int(units[i, j])
            raise self.report(access, unit, int(blocks[i, 0]), int(threads[i, 0]), (WRITE, WRITE), last)
        if is_written and self.published:
            for unit in units[written & FLAG != 0].tolist():
                self.published.pop(unit, None)

    def strong_access(self, access: "Access", units: Array, blocks: Array, threads: Array, kind: str) -> None:
        """Atomic operations and strong loads and stores, one lane after the other."""
        what = STRONG_READ if kind == "ld" else STRONG_WRITE
        lanes = zip(units.tolist(), blocks[:, 0].tolist(), threads[:, 0].tolist(), strict=True)
        for unit, b, t in ((unit, b, t) for all_units, b, t in lanes for unit in all_units):
            one = np.array([[unit]]), np.array([[b]]), np.array([[t]])
            self.check_writes(access, what, *one, self.shadow.write[one[0]] & ~FLAG)
            if what == STRONG_WRITE:
                self.check_reads(access, what, *one)
            entries = self.strong.setdefault(unit, {})
            entries[what, b] = int(self.now[b] << CLOCK | b << BLOCK | t << THREAD | access.ins.pc)
            self.shadow.write[unit] |= FLAG
            for thread in range(self.launch.threads) if t == SEVERAL else (t,):
                self.synchronise(b, thread, access, unit, kind)

    # ---------------------------------------------------------------- comparisons

    def check_writes(
        self, access: "Access", kind: str, units: Array, blocks: Array, threads: Array, written: Array
    ) -> None:
        """Compare accesses with earlier writes to the same locations, and with strong accesses."""
        clock, block, _, _ = fields(written & ~FLAG)
        unordered = clock > self.clocks[blocks, block]
        if not self.threads:
            unordered &= block != blocks
        for i, j in np.argwhere(unordered).tolist() if np.count_nonzero(unordered) else []:
            b, t, entry = int(blocks[i, 0]), int(threads[i, 0]), int(written[i, j]) & ~FLAG
            self.exact(access, int(units[i, j]), b, t, (kind, WRITE), entry)
        flagged = written & FLAG
        for i, j in np.argwhere(flagged).tolist() if np.count_nonzero(flagged) else []:
            for (other, _), entry in self.strong[int(units[i, j])].items():
                if kind == WRITE or other == STRONG_WRITE:
                    self.exact(access, int(units[i, j]), int(blocks[i, 0]), int(threads[i, 0]), (kind, other), entry)

    def check_reads(self, access: "Access", kind: str, units: Array, blocks: Array, threads: Array) -> None:
        """Compare writes with all blocks' earlier reads of the same locations."""
        reads = self.shadow.reads.reshape(self.n, -1)[:, units]  # [n, lanes, per lane]
        unordered = reads >> CLOCK > self.clocks[blocks[:, 0]].T[:, :, None]
        if not self.threads:
            unordered[blocks[:, 0], np.arange(len(blocks))] = False
        for b, i, j in np.argwhere(unordered).tolist():
            entry = int(reads[b, i, j])
            self.exact(access, int(units[i, j]), int(blocks[i, 0]), int(threads[i, 0]), (kind, READ), entry)

    def exact(self, access: "Access", unit: int, b: int, t: int, kinds: tuple[str, str], entry: int) -> None:
        """Compare an access of thread t of block b with an earlier one, taking into account what threads know."""
        clock, block, thread, _ = (int(x) for x in fields(np.int64(entry)))
        if block == b and not (self.threads and thread != t):
            return
        observers = [self.known[b]]
        acquired = self.acquired[b]
        if t in acquired:
            observers.append(acquired[t])
        elif t == SEVERAL and len(acquired) == self.launch.threads:
            for each in acquired:
                self.exact(access, unit, b, each, kinds, entry)
            return
        if clock > max(max(int(k.clock[block]), k.extra.get((block, thread), 0)) for k in observers):
            raise self.report(access, unit, b, t, kinds, entry)

    def report(self, access: "Access", unit: int, b: int, t: int, kinds: tuple[str, str], entry: int) -> RaceError:
        """The error for a conflict of thread t of block b with an earlier access."""
        code, block_id = self.launch.kernel.program.code, self.launch.block_id
        _, block, thread, pc = (int(x) for x in fields(np.int64(entry)))
        address = self.shadow.address(unit)
        region = self.memory.find(address)
        place = f"byte {address - region.lo} of {region.name}" if region else f"{address:#x}"

        def who(number: int, thread: int) -> str:
            several = thread == SEVERAL
            return f"block {block_id(number)}, " + ("several threads" if several else f"thread {thread}")

        return RaceError(
            f"data race at {place}:\n  {kinds[0]} by {who(b, t)}\n    {access.ins.where()}\n  is not ordered after "
            f"the {kinds[1]} by {who(block, thread)}\n    {code[pc].where()}"
        )

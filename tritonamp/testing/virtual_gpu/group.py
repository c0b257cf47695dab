"""Blocks that execute together.

All threads of a group that share a program counter (a *fragment*) execute one instruction at a time. After
divergence the fragment with the lowest pc runs first, and fragments that meet are merged, so that threads reconverge.

A group in a provable spin (same registers, shared memory and pc as before, no change of global memory in between)
sleeps until global memory changes.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .code import EVERYWHERE, IN_THREADS, Code
from .control import Arrive, Exit, Park, Split
from .errors import DeadlockError, DivergenceError
from .kernel import pool
from .lanes import Active
from .ptx_types import Array

if TYPE_CHECKING:
    from .launch import Launch

SPIN = 256  # loop edges without a change of global memory before a spin is suspected
FAIR = 4096  # loop edges before a diverged fragment lets the others run
FAR = 1 << 60


class Fragment:
    """Threads with the same pc."""

    __slots__ = ("blocks", "edges", "first", "n", "parked", "pc", "threads", "turns", "warps")

    def __init__(self, pc: int, mask: Array | None, n: int, per_block: int, uniform: bool, turns: int = 0) -> None:
        self.pc, self.turns, self.parked, self.edges = pc, turns, False, 0
        self.n, self.warps, self.first = n, n // 32, 0
        self.threads: Active | None = None  # None: all threads of the group
        self.blocks: Active | None = None  # None: all, or fragments that are not made of whole blocks
        if mask is not None:
            threads = Active(mask)
            if threads.n < n:
                self.threads, self.n, self.first = threads, threads.n, int(mask.argmax())
                self.warps = int(np.count_nonzero(mask.reshape(-1, 32).any(1)))
                if uniform:
                    self.blocks = Active(mask[::per_block].copy())


class Group:
    """Blocks of a launch that run together, and where they are."""

    def __init__(self, launch: "Launch", block_numbers: list[int]) -> None:
        self.launch, self.block_numbers = launch, block_numbers
        self.machine, self.memory = launch.machine, launch.machine.memory
        self.traffic, self.race = launch.traffic, launch.race
        self.shadow = launch.race.shadow if launch.race else None
        self.numbers = np.array(block_numbers)
        self.per_block, self.n = launch.threads, launch.threads * len(block_numbers)
        self.frame = pool.take(launch.kernel, len(block_numbers), launch.threads, launch.shared)
        self.frame.start(self)
        self.uncounted: Counter[str] = Counter()  # executions by warps that segments count too much
        self.uncounted_lanes = 0
        self.fine = launch.machine.seed is not None
        self.code = self.code_for(uniform=not self.race or not self.race.threads)
        self.alive = np.ones(self.n, np.bool_)
        self.alive_in = np.full(len(block_numbers), self.per_block)
        self.fragments = [self.fragment(0, None)]
        # (block, barrier) -> (fragment's threads in the block, event, pc after it)
        self.waiting: dict[tuple[int, int], list[tuple[Array, Arrive, int]]] = {}
        self.limit = FAR
        self.edges = self.spins = 0  # loop edges, proven spins since the last change of global memory
        self.seen = self.asleep = self.snap_version = -1
        self.snap: object = None
        self.snap_next = 0

    def code_for(self, uniform: bool) -> Code:
        """The code bound to the frame."""
        key = uniform, self.fine
        if key not in self.frame.codes:
            self.frame.codes[key] = Code(self.frame, *key)
        return self.frame.codes[key]

    def fragment(self, pc: int, mask: Array | None, turns: int = 0) -> Fragment:
        """A fragment of this group."""
        return Fragment(pc, mask, self.n, self.per_block, self.code.uniform, turns)

    def block_id(self, block: int) -> tuple[int, int, int]:
        """The coordinates in the grid of the group's n-th block."""
        return self.launch.block_id(self.block_numbers[block])

    def mask(self, f: Fragment) -> Array:
        """A fragment's threads."""
        return np.ones(self.n, np.bool_) if f.threads is None else f.threads.mask

    # ---------------------------------------------------------------- execution

    def pick(self) -> Fragment | None:
        """Merge fragments that met; choose the lowest pc, and how far it may run alone."""
        self.limit = FAR
        if len(self.fragments) == 1 and not self.fragments[0].parked:
            return self.fragments[0]
        by_pc: dict[int, list[Fragment]] = {}
        for f in self.fragments:
            by_pc.setdefault(f.pc, []).append(f)
        if len(by_pc) < len(self.fragments):
            self.fragments = [fs[0] if len(fs) == 1 else self.merged(fs) for fs in by_pc.values()]
        ready = [f for f in self.fragments if not f.parked]
        if not ready:
            return None
        f = min(ready, key=lambda f: (f.turns, f.pc))
        self.limit = min((g.pc for g in self.fragments if g.pc > f.pc), default=FAR)
        return f

    def merged(self, fragments: list[Fragment]) -> Fragment:
        """One fragment of several with the same pc."""
        mask = np.logical_or.reduce([self.mask(f) for f in fragments])
        return self.fragment(fragments[0].pc, mask, min(f.turns for f in fragments))

    def step(self, budget: int) -> int:
        """Run about ``budget`` instructions; returns how many were run."""
        done = 0
        while done < budget and self.asleep < 0:
            f = self.pick()
            if f is None:
                if self.fragments or self.waiting:
                    self.stuck()
                break
            done += self.advance(f, budget - done)
        return done

    def advance(self, f: Fragment, budget: int) -> int:
        """Run one fragment until something happens; returns how many instructions were run."""
        whole, pc, done = f.threads is None, f.pc, 0
        code = self.code
        table = code.whole if whole else code.partial
        while done < budget:
            segment = table.get(pc) or code.segment(pc, whole)
            if whole:
                for step in segment.whole:
                    step()
            else:
                self.run_partial(segment.partial, f)
            segment.count += f.warps
            segment.lanes += f.n
            done += segment.length
            to = segment.control(f) if segment.control else segment.following
            if type(to) is not int:
                f.pc = segment.last
                self.control(f, to)
                break
            if to <= segment.last and self.edge(f, to):
                f.pc = to
                break
            f.pc = pc = to
            if pc >= self.limit:
                break
        return done

    @staticmethod
    def run_partial(steps: list[tuple[int, Callable[..., object]]], f: Fragment) -> None:
        """Run steps in a part of the threads."""
        threads, blocks = f.threads, f.blocks
        for where, step in steps:
            if where == EVERYWHERE:
                step()
            else:
                step(threads if where == IN_THREADS else blocks)

    def control(self, f: Fragment, event: Any) -> None:
        """Handle the event that ended a fragment's segment at ``f.pc``."""
        self.spins = 0
        if isinstance(event, Park):
            self.uncount(f, f.pc)
            f.parked = True
            return
        self.fragments.remove(f)
        if isinstance(event, Split):
            self.split(f, event)
        elif isinstance(event, Exit):
            self.exit(f)
        else:
            self.arrive(f, event)
        for g in self.fragments:
            g.parked = False

    def uncount(self, f: Fragment, pc: int) -> None:
        """Take back that a fragment executed an instruction: it will, later."""
        self.uncounted[self.launch.kernel.program.code[pc].op] += f.warps
        self.uncounted_lanes += f.n

    def split(self, f: Fragment, event: Split) -> None:
        """Threads of a fragment go separate ways."""
        if self.code.uniform and any(self.cuts_blocks(mask) for _, mask in event.ways):
            self.separate()
        new = [self.fragment(pc, mask, f.turns) for pc, mask in event.ways]
        self.fragments += new
        if event.again:
            self.uncount(new[0], f.pc)
        elif new[0].pc <= f.pc:
            self.edge(new[0], new[0].pc)

    def separate(self) -> None:
        """From now on, every thread has registers of its own."""
        wide, scalar = self.frame.wide, self.frame.scalar
        for name in scalar.rows:
            wide.row(name)[...] = self.frame.expand(scalar.row(name))
        self.code = self.code_for(uniform=False)
        for g in self.fragments:
            g.blocks = None

    def exit(self, f: Fragment) -> None:
        """Threads end. Barriers no longer wait for them."""
        self.alive &= ~self.mask(f)
        self.alive_in = self.alive.reshape(-1, self.per_block).sum(1)
        for key in list(self.waiting):
            self.release(key)

    @property
    def done(self) -> bool:
        """Whether all threads have ended."""
        return not self.fragments and not self.waiting

    @property
    def blocks_alive(self) -> int:
        """Number of blocks that still occupy a place."""
        return int(np.count_nonzero(self.alive_in))

    def count(self) -> None:
        """Hand over what was counted."""
        stats = self.launch.stats
        for code in self.frame.codes.values():
            executed, lanes = code.harvest()
            stats.executed += executed
            stats.lanes += lanes
        if self.uncounted:
            stats.executed.append((self.uncounted, -1))
            stats.lanes -= self.uncounted_lanes

    # ---------------------------------------------------------------- barriers

    def by_block(self, mask: Array) -> Array:
        """A mask of threads as ``[blocks, threads]``."""
        return mask.reshape(-1, self.per_block)

    def cuts_blocks(self, mask: Array) -> bool:
        """Whether a mask holds some, but not all of a block's threads."""
        m = self.by_block(mask)
        return bool((m.any(1) != m.all(1)).any())

    def cuts_warps(self, mask: Array) -> bool:
        """Whether a mask holds some, but not all of a warp's threads that are alive."""
        w = mask.reshape(-1, 32)
        return bool((w.any(1) & (w != self.alive.reshape(-1, 32)).any(1)).any())

    def has_whole_blocks(self, f: Fragment) -> bool:
        """Whether a fragment holds all threads alive of its blocks."""
        counts = self.by_block(self.mask(f)).sum(1)
        return bool(((counts == 0) | (counts == self.alive_in)).all())

    def blocks_of(self, f: Fragment) -> list[int]:
        """The blocks that have threads in a fragment."""
        blocks: list[int] = self.by_block(self.mask(f)).any(1).nonzero()[0].tolist()
        return blocks

    def passed(self, f: Fragment) -> None:
        """Whole blocks pass a barrier."""
        if self.race:
            self.race.barrier(self.numbers if f.threads is None else self.numbers[self.blocks_of(f)])

    def arrive(self, f: Fragment, event: Arrive) -> None:
        """Threads arrive at a barrier."""
        after, mask = f.pc + 1, self.mask(f)
        if not event.waits:
            self.fragments.append(self.fragment(after, mask, f.turns))
        for b in self.blocks_of(f):
            mine = np.zeros_like(mask)
            self.by_block(mine)[b] = self.by_block(mask)[b]
            self.waiting.setdefault((b, event.barrier), []).append((mine, event, after))
            self.release((b, event.barrier))

    def release(self, key: tuple[int, int]) -> None:
        """Let threads go on if all have arrived."""
        arrived = self.waiting[key]
        expected = arrived[0][1].expected or int(self.alive_in[key[0]])
        if sum(int(np.count_nonzero(mask)) for mask, _, _ in arrived) < expected:
            return
        del self.waiting[key]
        for mask, event, after in arrived:
            if event.aligned and self.cuts_warps(mask):
                raise DivergenceError(
                    f"bar.sync executed by part of a warp in block {self.block_id(key[0])}\n    "
                    + self.launch.kernel.program.code[after - 1].where()
                )
            if event.waits:
                self.fragments.append(self.fragment(after, mask))
        if self.race:
            self.race.barrier(self.numbers[key[0] : key[0] + 1])

    def stuck(self) -> None:
        """Raise the error for threads that wait for each other."""
        parked = [f for f in self.fragments if f.parked]
        kind = DivergenceError if parked else DeadlockError
        b = self.blocks_of(parked[0])[0] if parked else next(iter(self.waiting))[0]
        raise kind(f"threads of block {self.block_id(b)} wait for each other forever\n    {self.where(b)}")

    def where(self, block: int) -> str:
        """What error messages say about the place of a block's threads."""
        code = self.launch.kernel.program.code
        out = []
        for f in self.fragments:
            n = int(np.count_nonzero(self.by_block(self.mask(f))[block]))
            if n:
                out.append(f"{n} threads at {code[min(f.pc, len(code) - 1)].where()}")
        for (b, barrier), arrived in self.waiting.items():
            for mask, _, after in arrived if b == block else []:
                out.append(f"{np.count_nonzero(mask)} threads in barrier {barrier} at {code[after - 1].where()}")
        return "\n    ".join(out)

    def fence(self, m: Active | None) -> None:
        """A fence, for the race detector."""
        assert self.race
        index = np.arange(self.n) if m is None else m.index
        block = index // self.per_block
        for b in np.unique(block).tolist():
            self.race.fence(self.block_numbers[b], index[block == b] % self.per_block)

    # ---------------------------------------------------------------- spins

    def edge(self, f: Fragment, pc: int) -> bool:
        """Note that a loop edge was taken. True if others should run.

        Either fragments may have met, or the group is provably spinning (Brent's search for cycles).
        """
        diverged = len(self.fragments) > 1
        if diverged:
            f.edges += 1
            f.turns += f.edges % FAIR == 0
        version = self.memory.version
        if version != self.seen:
            self.seen, self.edges, self.spins = version, 0, 0
        self.edges += 1
        if self.snap is None and self.edges < SPIN:
            return diverged
        state = self.state(f, pc)
        if self.snap == state:
            if self.snap_version == version:  # it spins; so does the group when all its fragments do, in turn
                f.turns += 1
                self.spins += 1
                self.snap = None if diverged else state
                if self.spins >= sum(not g.parked for g in self.fragments):
                    self.asleep = version
                return True
            self.snap_version = version
        elif self.edges < SPIN:
            self.snap = None
        elif self.snap is None or self.edges >= self.snap_next:
            self.snap, self.snap_version, self.snap_next = state, version, 2 * self.edges
        return diverged

    def state(self, f: Fragment, pc: int) -> object:
        """Everything that decides what the group does next, but for global memory."""
        flow, frame = self.launch.kernel.flow, self.frame
        live = flow.live_at(pc)
        for g in self.fragments:
            live |= flow.live_at(g.pc)
        for arrived in self.waiting.values():
            for _, _, after in arrived:
                live |= flow.live_at(after)
        lanes = (frame.wide, frame.scalar) if self.code.uniform else (frame.wide,)
        rows = [x.rows[name].tobytes() for name in flow.names(live) for x in lanes if name in x.rows]
        others = [(g.pc, self.mask(g).tobytes()) for g in self.fragments if g is not f]
        return pc, others, self.mask(f).tobytes(), rows, frame.shared.array.tobytes(), frame.local.array.tobytes()

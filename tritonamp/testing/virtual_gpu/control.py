"""Control flow: branches, exits, barriers of a block.

A control instruction ends a segment of code. Bound to lanes, it is a function of the fragment that executes it, and
returns the next pc, or an event for the fragment's group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .decode import UNKNOWN, Masked, guard_of, predicate, source, target, unsupported_message, write
from .errors import DeviceTrap
from .lanes import Active, Frame, Lanes
from .parser import Instr, Program
from .ptx_types import Array

if TYPE_CHECKING:
    from .group import Fragment


@dataclass(frozen=True, slots=True)
class Park:
    """Wait until more threads arrive here."""


@dataclass(frozen=True, slots=True)
class Split:
    """Go separate ways. With ``again``, the first part has yet to execute the instruction, now without the others."""

    ways: list[tuple[int, Array]]  # pc, mask of threads
    again: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """End."""


@dataclass(frozen=True, slots=True)
class Arrive:
    """Arrive at a barrier of the block, and wait there if ``waits``."""

    barrier: int
    expected: int  # number of threads, 0: all
    aligned: bool
    waits: bool


Outcome = int | Park | Split | Exit | Arrive
Control = Callable[["Fragment"], Outcome]
# Binds to the frame; the lanes are those in which the instruction's own operands are evaluated.
ControlBinder = Callable[[Frame, Lanes], Control]
ControlBuilder = Callable[[Program, Instr, list[str]], ControlBinder]
BUILDERS: dict[str, ControlBuilder] = {}


def control(*roots: str) -> Callable[[ControlBuilder], ControlBuilder]:
    """Register the builder of control instructions."""

    def register(builder: ControlBuilder) -> ControlBuilder:
        BUILDERS.update(dict.fromkeys(roots, builder))
        return builder

    return register


def is_control(ins: Instr) -> bool:
    """Whether an instruction is handled here."""
    if ins.root in ("bar", "barrier"):
        return ".warp." not in ins.op
    return ins.root in BUILDERS


def decode_control(program: Program, ins: Instr) -> ControlBinder:
    """The binder of a control instruction."""
    try:
        bind = BUILDERS[ins.root](program, ins, ins.op.split(".")[1:])
    except UNKNOWN as e:
        message = unsupported_message(ins, e)

        def fail(_f: "Fragment") -> Outcome:
            raise NotImplementedError(message)

        def bind(_frame: Frame, _lanes: Lanes) -> Control:
            return fail

    if ins.guard is None or ins.root == "bra":
        return bind
    return lambda frame, lanes: guarded(ins, frame, lanes, bind(frame, lanes))


def active_in(f: "Fragment", lanes: Lanes) -> Active | None:
    """The lanes that a fragment executes."""
    return f.threads if lanes.span == 1 else f.blocks


def spread(frame: Frame, lanes: Lanes, mask: Array) -> Array:
    """A mask of lanes as one of threads."""
    return mask if lanes.span == 1 else frame.expand(mask)


def guarded(ins: Instr, frame: Frame, lanes: Lanes, inner: Control) -> Control:
    """Have the threads whose guard is true execute the instruction by themselves."""
    guard, here = predicate(guard_of(ins))(lanes), ins.pc

    def run(f: "Fragment") -> Outcome:
        active = active_in(f, lanes)
        p = guard() if active is None else guard() & active.mask
        n, total = int(np.count_nonzero(p)), lanes.n if active is None else active.n
        if n == total:
            return inner(f)
        if n == 0:
            return here + 1
        rest = ~p if active is None else active.mask & ~p
        return Split([(here, spread(frame, lanes, p.copy())), (here + 1, spread(frame, lanes, rest))], again=True)

    return run


@control("bra")
def _bra(program: Program, ins: Instr, _words: list[str]) -> ControlBinder:
    to, following = program.labels[ins.args[0][1]], ins.pc + 1
    if ins.guard is None:
        return lambda frame, lanes: lambda f: to

    def bind(frame: Frame, lanes: Lanes) -> Control:
        p = lanes[source(("reg", ins.guard), "pred")]
        on_true, on_false = (following, to) if ins.negate else (to, following)
        ones, zeros = lanes.ones, lanes.zeros

        def run(f: "Fragment") -> Outcome:
            active = active_in(f, lanes)
            if active is None:
                seen = p.tobytes()
                if seen == ones:
                    return on_true
                if seen == zeros:
                    return on_false
                true, false = p.copy(), ~p
            else:
                true = p & active.mask
                n = np.count_nonzero(true)
                if n == active.n:
                    return on_true
                if n == 0:
                    return on_false
                false = active.mask & ~p
            return Split([(on_true, spread(frame, lanes, true)), (on_false, spread(frame, lanes, false))])

        return run

    return bind


@control("brx")
def _brx(program: Program, ins: Instr, _words: list[str]) -> ControlBinder:
    spec = source(ins.args[0], "u32")
    ways: list[int] = [program.labels[t] for t in program.tables[ins.args[1][1]]]

    def bind(frame: Frame, lanes: Lanes) -> Control:
        index = lanes[spec]

        def run(f: "Fragment") -> Outcome:
            active = active_in(f, lanes)
            on = np.ones(lanes.n, np.bool_) if active is None else active.mask
            values: list[int] = np.unique(index[on]).tolist()
            if len(values) == 1:
                return ways[values[0]]
            return Split([(ways[v], spread(frame, lanes, (index == v) & on)) for v in values])

        return run

    return bind


@control("ret", "exit")
def _exit(_program: Program, _ins: Instr, _words: list[str]) -> ControlBinder:
    return lambda frame, lanes: lambda f: Exit()


@control("trap")
def _trap(_program: Program, ins: Instr, _words: list[str]) -> ControlBinder:
    def bind(frame: Frame, lanes: Lanes) -> Control:
        def run(f: "Fragment") -> Outcome:
            block = frame.group.block_id(f.first // frame.threads)
            raise DeviceTrap(f"trap in block {block}\n    {ins.where()}")

        return run

    return bind


@control("call")
def _call(_program: Program, ins: Instr, _words: list[str]) -> ControlBinder:
    name = next(a[1] for a in ins.args if a[0] == "sym")
    if name == "vprintf":  # is ignored
        return lambda frame, lanes: lambda f: ins.pc + 1
    if name != "__assertfail":
        raise NotImplementedError(f"call of {name}")

    def bind(frame: Frame, lanes: Lanes) -> Control:
        def run(f: "Fragment") -> Outcome:
            block, thread = divmod(f.first, frame.threads)
            raise DeviceTrap(
                f"device assertion failed in block {frame.group.block_id(block)}, thread {thread}\n    {ins.where()}"
            )

        return run

    return bind


@control("bar", "barrier")
def _bar(program: Program, ins: Instr, words: list[str]) -> ControlBinder:
    kind, *rest = [w for w in words if w not in ("cta", "aligned")]
    aligned = ins.root == "bar" or "aligned" in words
    if kind == "red":
        return _bar_red(program, ins, rest)
    if kind not in ("sync", "arrive"):
        raise NotImplementedError(kind)
    number, count = (source(a, "u32") for a in (*ins.args, ("imm", "0"), ("imm", "0"))[:2])
    following = ins.pc + 1

    def bind(frame: Frame, lanes: Lanes) -> Control:
        numbers, counts = lanes[number], lanes[count]
        by_all = (0, frame.threads)

        def run(f: "Fragment") -> Outcome:
            first = f.first // lanes.span
            if kind == "sync" and counts[first] in by_all and (f.blocks is not None or f.threads is None):
                frame.group.passed(f)  # whole blocks arrive at once
                return following
            return Arrive(int(numbers[first]), int(counts[first]), aligned, kind == "sync")

        return run

    return bind


def _bar_red(program: Program, ins: Instr, words: list[str]) -> ControlBinder:
    """``bar.red.{popc.u32, and.pred, or.pred} d, barrier{, count}, p``: a barrier that reduces a predicate."""
    condition = predicate(ins.args[-1])
    to = target(program, ins.args[0], "u32" if words[0] == "popc" else "pred")
    reduce: np.ufunc = {"popc": np.add, "and": np.logical_and, "or": np.logical_or}[words[0]]
    following = ins.pc + 1

    def bind(frame: Frame, lanes: Lanes) -> Control:
        read, out = condition(lanes), None if to is None else lanes[to]
        identity = words[0] == "and"

        def run(f: "Fragment") -> Outcome:
            if not frame.group.has_whole_blocks(f):
                return Park()
            m = f.threads
            p = read() if m is None else np.where(m.mask, read(), identity)
            counted = p.reshape(-1, frame.threads).astype(np.uint32 if words[0] == "popc" else np.bool_)
            write(out, frame.expand(reduce.reduce(counted, axis=1)), m)
            frame.group.passed(f)
            return following

        return run

    return bind


def parking(ins: Instr, frame: Frame, masked: Masked) -> Control:
    """An operation across a warp, executed by part of the block: it waits for the rest of its warps."""
    following = ins.pc + 1

    def run(f: "Fragment") -> Outcome:
        assert f.threads is not None
        if frame.group.cuts_warps(f.threads.mask):
            return Park()
        masked(f.threads)
        return following

    return run

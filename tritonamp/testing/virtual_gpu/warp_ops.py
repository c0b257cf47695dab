"""Operations across the threads of a warp."""

import numpy as np

from . import floats
from .arithmetic import flags
from .decode import Binder, Bound, nothing, op, predicate, source, target, write
from .floats import U32, Function
from .lanes import Active, Lanes
from .parser import Instr, Program
from .ptx_types import Array, dtype

# Those that wait for the rest of the warp.
SYNCHRONISING = {"shfl", "vote", "redux"}
FULL = np.array(0xFFFFFFFF, U32)


def per_warp(x: Array) -> Array:
    """One value per warp, for each of its threads."""
    return np.repeat(x, 32)


def ballot(x: Array) -> Array:
    """The predicate of each thread's warp, as a bit mask."""
    return per_warp(np.packbits(x.reshape(-1, 32), axis=1, bitorder="little").view(U32)[:, 0])


def shuffle_source(kind: str, lane: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """The lane that each thread reads, and whether it is in range (if not, a thread reads its own)."""
    n, clamp, segment = b & 31, c & 31, c >> 8 & 31
    last = lane & segment | clamp & ~segment
    j = {"up": lane - n, "down": lane + n, "bfly": lane ^ n, "idx": lane & segment | n & ~segment}[kind]
    in_range = j >= last if kind == "up" else j <= last
    return np.where(in_range, j, lane), in_range


@op("shfl")
def _shfl(program: Program, ins: Instr, words: list[str]) -> Binder:
    kind, first = words[1], ins.args[0]
    d, valid = first[1:] if first[0] == "pair" else (first, ("sink",))
    to, to_valid = target(program, d, "b32"), target(program, valid, "pred")
    a, b, c = (source(x, t) for x, t in zip(ins.args[1:4], ("b32", "s32", "s32"), strict=True))
    is_fixed = b[0] == c[0] == "imm"

    def bind(lanes: Lanes) -> Bound:
        lane, warp_base = lanes.frame.lane, lanes.frame.warp_base
        x, y, z = lanes[a], lanes[b], lanes[c]
        out, out_valid = (None if s is None else lanes[s] for s in (to, to_valid))
        fixed = shuffle_source(kind, lane, y, z) if is_fixed else None
        fixed_index = warp_base + fixed[0] if fixed else None

        def run(m: Active | None = None) -> None:
            j, in_range = fixed or shuffle_source(kind, lane, y, z)
            write(out, x[warp_base + j if fixed_index is None else fixed_index], m)
            write(out_valid, in_range, m)

        return [run], run

    return bind


@op("vote")
def _vote(program: Program, ins: Instr, words: list[str]) -> Binder:
    kind, condition = words[1], predicate(ins.args[1])
    to, members = target(program, ins.args[0], words[-1]), source(ins.args[2], "b32")

    def bind(lanes: Lanes) -> Bound:
        read, out, mask = condition(lanes), None if to is None else lanes[to], lanes[members]

        def run(m: Active | None = None) -> None:
            member = (mask >> lanes.frame.lane.astype(U32) & 1).astype(bool)
            x, n = ballot(read() & member), ballot(member)
            write(out, {"ballot": x, "all": x == n, "any": x != 0, "uni": (x == n) | (x == 0)}[kind], m)

        return [run], run

    return bind


@op("activemask")
def _activemask(program: Program, ins: Instr, _words: list[str]) -> Binder:
    to = target(program, ins.args[0], "b32")

    def bind(lanes: Lanes) -> Bound:
        out = None if to is None else lanes[to]

        def run(m: Active | None = None) -> None:
            write(out, ballot(np.ones(lanes.n, np.bool_) if m is None else m.mask), m)

        return [run], run

    return bind


@op("redux")
def _redux(program: Program, ins: Instr, words: list[str]) -> Binder:
    kind, (t,) = words[1], flags(words)[0]
    functions: dict[str, Function] = {
        "add": np.add,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    f = functions.get(kind) or floats.minmax(kind, "NaN" in words, dtype(t)[0])

    to, a, members = target(program, ins.args[0], t), source(ins.args[1], t), source(ins.args[2], "b32")

    def bind(lanes: Lanes) -> Bound:
        out, x, mask = None if to is None else lanes[to], lanes[a], lanes[members]

        def run(m: Active | None = None) -> None:
            if np.count_nonzero((mask if m is None else mask[m.index]) != FULL):
                raise NotImplementedError(f"a member mask that is not full\n    {ins.where()}")
            r = (np.abs(x) if "abs" in words else x).reshape(-1, 32)
            for n in (16, 8, 4, 2, 1):
                r = f(r[:, :n], r[:, n:])
            write(out, per_warp(r[:, 0]), m)

        return [run], run

    return bind


@op("bar", "barrier")
def _bar_warp(program: Program, ins: Instr, words: list[str]) -> Binder:
    """``bar.warp.sync``; barriers of a block are control flow."""
    if words[0] != "warp":
        raise NotImplementedError("this form of barrier")
    return nothing(program, ins, words)


@op("nanosleep")
def _nanosleep(program: Program, ins: Instr, words: list[str]) -> Binder:
    return nothing(program, ins, words)

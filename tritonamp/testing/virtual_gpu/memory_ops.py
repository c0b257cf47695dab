"""Loads, stores, atomic operations, fences."""

from typing import Any

import numpy as np

from . import floats
from .access import Access, Port
from .arithmetic import floating
from .decode import Binder, Bound, nothing, op, operands, source, target
from .floats import F32, Function
from .lanes import Active, Lanes
from .parser import Instr, Program
from .ptx_types import Array, size

MEMORY = {"ld", "ldu", "st", "atom", "red", "fence", "membar"}


def is_param(words: list[str]) -> bool:
    """Whether parameters are accessed, and not memory."""
    return any(w.partition("::")[0] == "param" for w in words)


@op("ld", "ldu")
def _ld(program: Program, ins: Instr, words: list[str]) -> Binder:
    dst, address = ins.args[:2]
    if is_param(words):
        return load_parameters(program, ins, words[-1])
    access = Access(program, ins, words, address)
    targets = [target(program, x, access.type) for x in operands(dst)]

    def bind(lanes: Lanes) -> Bound:
        port, outs = access.port(lanes), [None if t is None else lanes[t] for t in targets]
        out = outs[0]

        def single() -> None:
            rows, position = port.locate("ld", None)
            out[...] = rows[position]  # type: ignore[index]

        def several() -> None:
            rows, position = port.locate("ld", None)
            values = rows[position]
            for j, x in enumerate(outs):
                if x is not None:
                    x[...] = values[:, j]

        def masked(m: Active) -> None:
            rows, position = port.locate("ld", m)
            values = rows[position]
            for j, x in enumerate(outs):
                if x is not None:
                    x[m.index] = values if access.n == 1 else values[:, j]

        return [single if access.n == 1 and out is not None else several], masked

    return bind


def load_parameters(program: Program, ins: Instr, t: str) -> Binder:
    """The binder of ``ld.param``: the values are operands of the launch."""
    dst, (_, base, offset) = ins.args[:2]
    targets = [target(program, x, t) for x in operands(dst)]
    params = [("param", base[1], offset + j * size(t), t) for j in range(len(targets))]
    if base[1] not in {name for name, _, _ in program.params}:
        raise NotImplementedError("the result of a call")

    def bind(lanes: Lanes) -> Bound:
        pairs = [(lanes[to], lanes[p]) for to, p in zip(targets, params, strict=True) if to is not None]

        def whole() -> None:
            for out, value in pairs:
                out[...] = value

        def masked(m: Active) -> None:
            for out, value in pairs:
                np.copyto(out, value, where=m.over(out), casting="unsafe")

        return [whole], masked

    return bind


@op("st")
def _st(program: Program, ins: Instr, words: list[str]) -> Binder:
    if is_param(words):
        return nothing(program, ins, words)  # arguments of a call
    address, value = ins.args[:2]
    access = Access(program, ins, words, address)
    sources = [source(x, access.type) for x in operands(value)]

    def bind(lanes: Lanes) -> Bound:
        port, columns = access.port(lanes), [lanes[s] for s in sources]

        def run(m: Active | None = None) -> None:
            rows, position = port.locate("st", m)
            values = columns if m is None else [c[m.index] for c in columns]
            rows[position] = values[0] if access.n == 1 else np.stack(values, 1)
            port.touch()

        return [run], run

    return bind


def increment(x: Array, limit: Array) -> Array:
    """atom.inc: back to 0 after the limit."""
    above: Array = x + x.dtype.type(1)
    return np.where(x >= limit, x.dtype.type(0), above)


def decrement(x: Array, limit: Array) -> Array:
    """atom.dec: from 0, or from above the limit, to the limit."""
    below: Array = x - x.dtype.type(1)
    return np.where((x == 0) | (x > limit), limit, below)


def compare_and_swap(x: Array, b: Array, c: Array) -> Array:
    """atom.cas: c if the old value is b."""
    return np.where(x == b, c, x)


ATOMIC: dict[str, Function] = {
    "exch": lambda x, b: b,
    "cas": compare_and_swap,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": increment,
    "dec": decrement,
}


def atomic_function(name: str, access: Access) -> Function:
    """What an atomic operation makes of the old value and its operands."""
    if name in ATOMIC:
        return ATOMIC[name]
    t = access.type
    f = np.add if name == "add" else floats.minmax(name, False, F32 if t.startswith("bf16") else access.dtype)
    flushes = (name, t, access.space) == ("add", "f32", "global")  # .add.f32 flushes denormals there
    return floating(t, f, {"ftz"} if flushes else set())


@op("atom", "red")
def _atom(program: Program, ins: Instr, words: list[str]) -> Binder:
    """Threads one after the other."""
    returns = ins.root == "atom"
    d, address, *srcs = ins.args if returns else [("sink",), *ins.args]
    access = Access(program, ins, words, address)
    if access.n > 1:
        raise NotImplementedError("vectors of atomic operations")
    f = atomic_function(next(w for w in words if w in ATOMIC or w in ("add", "min", "max")), access)
    sources, to = [source(s, access.type) for s in srcs], target(program, d, access.type)

    def bind(lanes: Lanes) -> Bound:
        port, values, out = access.port(lanes), [lanes[s] for s in sources], None if to is None else lanes[to]

        def run(m: Active | None = None) -> None:
            atomic(port, f, values, out, m)

        return [run], run

    return bind


def atomic(port: Port, f: Function, values: list[Array], out: Array | None, m: Active | None) -> None:
    """Perform an atomic operation in the active lanes, in their order."""
    rows, position = port.locate("atom", m)
    lanes: Any = range(port.lanes.n) if m is None else m.index.tolist()
    operand = [v.copy() for v in values]  # the destination may be one of them
    for at, lane in zip(position.tolist(), lanes, strict=True):
        old = rows[at : at + 1].copy()
        new = f(old, *[v[lane : lane + 1] for v in operand])
        if old.tobytes() != new.tobytes():
            rows[at : at + 1] = new
            port.touch()
        if out is not None:
            out[lane] = old[0]


@op("fence", "membar")
def _fence(_program: Program, _ins: Instr, words: list[str]) -> Binder:
    is_between_blocks = "cta" not in words and "proxy" not in words

    def bind(lanes: Lanes) -> Bound:
        frame = lanes.frame

        def run(m: Active | None = None) -> None:
            group = frame.group
            if group.race and is_between_blocks:
                group.fence(m)

        return [run], run

    return bind

"""Moves and conversions."""

from typing import Any

import numpy as np

from . import floats
from .access import WINDOW
from .arithmetic import MODES, flags
from .decode import Binder, alu, moves, op, source, target
from .floats import F16, F32, F64, TO_INTEGRAL, U64, Function
from .parser import Instr, Program
from .ptx_types import Array, dtype, is_float, size


@op("mov")
def _mov(program: Program, ins: Instr, words: list[str]) -> Binder:
    t = "pred" if words[0] == "pred" else "b" + words[0].lstrip("busf")
    d, s = ins.args
    if d[0] != "vec" and s[0] != "vec":
        to, a = target(program, d, t), source(s, t)
        return moves(lambda lanes: [(None if to is None else lanes[to], lanes[a])])
    vector = d[1] if d[0] == "vec" else s[1]
    part = f"b{8 * size(t) // len(vector)}"
    packed = f"{part}x{len(vector)}"
    if d[0] == "vec":
        a, outs = source(s, packed), [target(program, x, part) for x in vector]
        return moves(lambda lanes: [(None if o is None else lanes[o], lanes[a][:, j]) for j, o in enumerate(outs)])
    whole, parts = target(program, d, packed), [source(x, part) for x in vector]
    if whole is None:
        return moves(lambda lanes: [])
    return moves(lambda lanes: [(lanes[whole][:, j], lanes[x]) for j, x in enumerate(parts)])


@op("cvta")
def _cvta(program: Program, ins: Instr, words: list[str]) -> Binder:
    """Global addresses are generic ones; the shared and the local window are marked by high bits."""
    base = U64(next((WINDOW[s] for w in words if (s := w.partition("::")[0]) in WINDOW), 0))
    f: Function = (lambda a: a & ~base) if "to" in words else (lambda a: a | base)
    return alu(program, f, ins.args[0], words[-1], ins.args[1:], [words[-1]])


@op("createpolicy")
def _createpolicy(program: Program, ins: Instr, _words: list[str]) -> Binder:
    return alu(program, lambda a: a, ins.args[0], "b64", [("imm", "0")], ["b64"])


def to_int(dt: str, st: str, saturating: bool) -> Function:
    """From integers to integers."""
    d = dtype(dt)[0]
    if not saturating:
        return lambda x: x.astype(d)
    infos: list[Any] = [np.iinfo(x) for x in (d, dtype(st)[0])]
    lo, hi = max(i.min for i in infos), min(i.max for i in infos)
    return lambda x: np.clip(x, lo, hi).astype(d)


def convert(dt: str, st: str, mode: str, modifiers: set[str]) -> Function:
    """A function from arrays of scalar type ``st`` to ``dt``."""
    integral = next((w for w in modifiers if w in TO_INTEGRAL), None)
    d = dtype(dt)[0]
    if not is_float(dt) and not is_float(st):
        return to_int(dt, st, "sat" in modifiers)
    flush = "ftz" in modifiers
    if not is_float(st):
        if "sat" in modifiers:
            raise NotImplementedError(".sat from integers to floats")
        return lambda x: floats.int_to_float(x, None if dt == "bf16" else d, mode)

    def widen(x: Array) -> Array:
        return floats.from_bf16(x) if st == "bf16" else floats.ftz(x) if flush and st == "f32" else x

    if not is_float(dt):
        return lambda x: floats.float_to_int(widen(x), d, integral or "rzi", 8 * size(st))

    def f(x: Array) -> Array:
        x = widen(x)
        x = TO_INTEGRAL[integral](x) if integral else x
        x = floats.relu(x) if "relu" in modifiers else x
        if "sat" in modifiers:
            x = floats.saturate(x)
        if dt == "bf16":
            return floats.to_bf16(x.astype(F32) if x.dtype == F16 else x, mode)
        x = floats.narrow(x.astype(F64), d, mode) if x.dtype != d else x
        return floats.ftz(x) if flush and dt == "f32" else x

    return f


def by_assignment(dt: str, st: str, mode: str, modifiers: set[str]) -> bool:
    """Whether NumPy's own conversion upon assignment does the same."""
    if modifiers - {mode} or "bf16" in (dt, st):
        return False
    return (is_float(dt) and mode == "rn" and (is_float(st) or dt != "f16")) or (not is_float(dt) and not is_float(st))


@op("cvt")
def _cvt(program: Program, ins: Instr, words: list[str]) -> Binder:
    types, mode, modifiers = flags(words)
    if extra := modifiers - {*MODES.split(), *TO_INTEGRAL, "sat", "ftz", "relu"}:
        raise NotImplementedError(f"modifier {extra}")
    (dt, st), (d, *srcs) = types, ins.args
    f = convert(dt.removesuffix("x2"), st.removesuffix("x2"), mode, modifiers)
    to = target(program, d, dt)
    if len(srcs) == 2:  # the first goes to the high half
        return alu(program, lambda a, b: np.stack([f(b), f(a)], 1), d, dt, srcs, [st, st])
    if to is None or to[2] != dt or not by_assignment(dt, st, mode, modifiers):
        return alu(program, f, d, dt, srcs, [st])
    a = source(srcs[0], st)
    return moves(lambda lanes: [(lanes[to], lanes[a])])

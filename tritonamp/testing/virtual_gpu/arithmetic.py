"""Arithmetic, logic, comparison and selection."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import floats, integers
from .decode import Binder, Bound, Step, alu, op, predicate, source, target, write
from .floats import F32, F64, U16, U64, Function
from .lanes import Active, Lanes
from .parser import Instr, Operand, Program
from .ptx_types import Array, dtype, is_float, is_type, size

MODES = "rn rz rm rp"
Maker = Callable[[str, str, set[str], str], Function]
# Opcode, with a modifier where it matters -> (operand types, other modifiers, maker).
ALU: dict[str, tuple[str, set[str], Maker]] = {}


def define(names: str, operand_types: str, make: Maker, modifiers: str = "") -> None:
    """Declare opcodes.

    Operand types, destination first: T the instruction's type, U the same but unsigned, W twice as wide, u = u32,
    p = pred. ``make(name, type, modifiers, rounding mode)`` returns the function.
    """
    for n in names.split():
        ALU[n] = operand_types, set(modifiers.split()), make


def flags(words: list[str]) -> tuple[list[str], str, set[str]]:
    """Types, rounding mode and modifiers of an opcode's parts."""
    mode = next((w for w in words if w in MODES.split()), "rn")
    return [w for w in words if is_type(w)], mode, {w for w in words if not is_type(w)}


def build(program: Program, ins: Instr, words: list[str]) -> Binder:
    """The builder of what :func:`define` declares."""
    name = ins.root
    key = next((f"{name}.{w}" for w in words if f"{name}.{w}" in ALU), name)
    operand_types, allowed, make = ALU[key]
    (t, *narrow), mode, modifiers = flags(words)
    if extra := modifiers - allowed - {key[len(name) + 1 :]}:
        raise NotImplementedError(f"modifier {extra}")
    if name in ("min", "max"):
        operand_types = "T" * len(ins.args)
    u = "u" + t.lstrip("busf")
    names = {"T": t, "U": u, "W": t[0] + str(16 * size(t)), "u": "u32", "p": "pred"}
    dst, *src = [names[c] for c in operand_types]
    f = make(name, t, modifiers, mode)
    if narrow:
        if name not in ("add", "sub", "fma") or t != "f32" or narrow not in (["f16"], ["bf16"]):
            raise NotImplementedError(f"types {t}, {narrow}")
        f, src = mixed(f, narrow[0]), [*narrow * (len(src) - 1), t]
    return alu(program, f, ins.args[0], dst, ins.args[1:], src)


def mixed(f: Function, t: str) -> Function:
    """Adapt f, defined on float32 arrays, to operands of the narrower type t, all but the last."""
    widen = floats.from_bf16 if t == "bf16" else lambda x: x.astype(F32)
    return lambda *a: f(*map(widen, a[:-1]), a[-1])


def floating(t: str, f: Function, modifiers: set[str]) -> Function:
    """Adapt f, defined on float16, float32 and float64 arrays, to type t and to .ftz, .sat and .relu."""
    base = t.partition("x")[0]
    if not is_float(t):
        if modifiers & {"ftz", "sat", "relu"}:
            raise NotImplementedError(f"{modifiers} on {t}")
        return f
    post = floats.saturate if "sat" in modifiers else floats.relu if "relu" in modifiers else None
    flush = "ftz" in modifiers and base == "f32"
    if not (flush or post or base == "bf16"):
        return f

    def g(*a: Array) -> Array:
        r = f(*[floats.ftz(x) if flush else floats.from_bf16(x) if base == "bf16" else x for x in a])
        r = post(r) if post else r
        return floats.ftz(r) if flush else floats.to_bf16(r) if base == "bf16" else r

    return g


def arithmetic(name: str, t: str, modifiers: set[str], mode: str) -> Function:
    """add, sub, mul, div."""
    if name == "div" and not is_float(t):
        return integers.idiv
    return floating(t, floats.rounded(name, mode), modifiers)


def fused(_name: str, t: str, modifiers: set[str], mode: str) -> Function:
    """mad, fma."""
    if not is_float(t):
        return lambda a, b, c: a * b + c
    base = t.partition("x")[0]
    exact: dict[str, Function] = {
        "f32": floats.fma32,
        "f64": floats.fma64,
        "f16": floats.fma16,
        "bf16": floats.fma_odd,
    }
    f = exact[base]
    return floating(t, f if mode == "rn" else lambda a, b, c: f(a, b, c, mode), modifiers)


def sign(name: str, t: str, modifiers: set[str], _mode: str) -> Function:
    """abs, neg."""
    if t.startswith("bf16"):
        return (lambda a: a & U16(0x7FFF)) if name == "abs" else (lambda a: a ^ U16(0x8000))
    return floating(t, np.abs if name == "abs" else np.negative, modifiers)


def extremum(name: str, t: str, modifiers: set[str], _mode: str) -> Function:
    """min, max, of two or three."""
    f = floats.minmax(name, "NaN" in modifiers, F32 if t.startswith("bf16") else dtype(t)[0])
    if modifiers & {"abs", "xorsign"}:
        if not is_float(t) or t.startswith("bf16"):
            raise NotImplementedError(f"{modifiers} on {t}")
        f = of_magnitudes(f, "xorsign" in modifiers)
    if not is_float(t):
        return f
    return floating(t, lambda a, *b: f(a, b[0]) if len(b) == 1 else f(f(a, b[0]), b[1]), modifiers)


def of_magnitudes(f: Function, xorsign: bool) -> Function:
    """Apply f to absolute values; the result's sign is the exclusive or of the operands' signs if asked."""

    def g(a: Array, b: Array) -> Array:
        r = f(np.abs(a), np.abs(b))
        return np.where(np.signbit(a) ^ np.signbit(b), -r, r) if xorsign else r

    return g


def approximate(name: str, t: str, modifiers: set[str], mode: str) -> Function:
    """sqrt, rcp, ex2 and the like."""
    f = floats.APPROXIMATE[name]
    if mode != "rn":
        raise NotImplementedError(f"rounding mode {mode}")
    if t == "f64" and "ftz" in modifiers:  # a "gross" approximation, of which the hardware gives the high word
        return lambda x: (f(x).view(U64) & U64(0xFFFFFFFF00000000)).view(F64)
    return floating(t, f, modifiers)


def wide(f: Callable[..., Array]) -> Maker:
    """mul.wide, mad.wide: f of the product, twice as wide."""

    def make(_name: str, t: str, _modifiers: set[str], _mode: str) -> Function:
        d = dtype(t[0] + str(16 * size(t)))[0]
        return lambda a, b, *c: f(a.astype(d) * b.astype(d), *c)

    return make


def plain(f: Function) -> Maker:
    """A function that no modifier changes."""
    return lambda *_: f


def funnel(name: str, _t: str, modifiers: set[str], _mode: str) -> Function:
    """Shf."""
    return lambda a, b, n: integers.funnel(a, b, n, "l" in modifiers, "wrap" in modifiers)


define("add sub", "TTT", arithmetic, MODES + " ftz sat")
define("mul", "TTT", arithmetic, MODES + " ftz sat lo")
define("mul.hi", "TTT", plain(integers.mulhi))
define("mul.wide", "WTT", wide(lambda x: x))
define("mad", "TTTT", fused, MODES + " ftz sat lo")
define("mad.hi", "TTTT", plain(lambda a, b, c: integers.mulhi(a, b) + c))
define("mad.wide", "WTTW", wide(lambda x, c: x + c))
define("fma", "TTTT", fused, MODES + " ftz sat relu")
define("div", "TTT", arithmetic, MODES + " ftz approx full")
define("rem", "TTT", plain(integers.irem))
define("abs neg", "TT", sign, "ftz")
define("min max", "TTT", extremum, "ftz NaN abs relu xorsign")
define("sqrt rsqrt rcp ex2 lg2 sin cos tanh", "TT", approximate, MODES + " approx ftz")
define("copysign", "TTT", plain(lambda a, b: np.copysign(b, a)))
define("and", "TTT", plain(np.bitwise_and))
define("or", "TTT", plain(np.bitwise_or))
define("xor", "TTT", plain(np.bitwise_xor))
define("not", "TT", plain(np.invert))
define("cnot", "TT", plain(lambda a: (a == 0).astype(a.dtype)))
define("shf.l shf.r", "TTTu", funnel, "wrap clamp")
define("bfe", "TTuu", plain(integers.bfe))
define("bfi", "TTTuu", plain(integers.bfi))
define("lop3", "TTTTu", plain(integers.lop3))
define("prmt", "TTTu", plain(integers.prmt))
define("popc", "uU", plain(integers.popc))
define("clz", "uU", plain(integers.clz))
define("brev", "TT", plain(integers.brev))
define("bfind", "uT", plain(integers.find_leading))
op(*{key.partition(".")[0] for key in ALU})(build)


@op("shl", "shr")
def _shift(program: Program, ins: Instr, words: list[str]) -> Binder:
    (t,), left = flags(words)[0], ins.root == "shl"
    d, a, n = ins.args
    if n[0] == "imm" and int(n[1], 0) < 8 * size(t):  # as nearly always
        return alu(program, np.left_shift if left else np.right_shift, d, t, [a, n], [t, t])
    return alu(program, lambda x, k: integers.shift(x, k, left), d, t, [a, n], [t, "u32"])


# ---------------------------------------------------------------- comparison and selection

COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
COMBINE: dict[str, np.ufunc] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@op("setp")
def _setp(program: Program, ins: Instr, words: list[str]) -> Binder:
    """setp.cmp{.bool}{.ftz}.type p{|q}, a, b{, c}; q is the packed types' second lane, or the negation."""
    (t,), _, modifiers = flags(words)
    compare = np.not_equal if words[0] == "ne" and not is_float(t) else COMPARE[words[0]]
    first, *rest = ins.args
    combine = next((COMBINE[w] for w in words[1:] if w in COMBINE), None)
    adapt = floats.from_bf16 if t.startswith("bf16") else floats.ftz if {"ftz"} & modifiers and t == "f32" else None
    if first[0] == "reg" and combine is None and adapt is None:
        return alu(program, compare, first, "pred", rest, [t, t])
    dst: tuple[Operand, Operand] = first[1:] if first[0] == "pair" else (first, ("sink",))
    p, q = (target(program, x, "pred") for x in dst)
    a, b = source(rest[0], t), source(rest[1], t)
    condition = predicate(rest[2]) if combine else None

    def bind(lanes: Lanes) -> Bound:
        x, y = lanes[a], lanes[b]
        outs = [None if s is None else lanes[s] for s in (p, q)]
        read = condition(lanes) if condition else None

        def run(m: Active | None = None) -> None:
            r = compare(adapt(x), adapt(y)) if adapt else compare(x, y)
            results: list[Any] = [r, ~r] if r.ndim == 1 else list(r.T)
            if combine and read:
                c = read().copy()  # the destination may be the same register
                results = [combine(v, c) for v in results]
            for out, v in zip(outs, results, strict=False):
                write(out, v, m)

        return [run], run

    return bind


@op("selp")
def _selp(program: Program, ins: Instr, words: list[str]) -> Binder:
    t = words[0]
    to, a, b = target(program, ins.args[0], t), source(ins.args[1], t), source(ins.args[2], t)
    p = source(ins.args[3], "pred")

    def bind(lanes: Lanes) -> Bound:
        if to is None:
            return [], lambda m: None
        out, x, y, c = lanes[to], lanes[a], lanes[b], lanes[p]
        where = c if out.ndim == 1 else c[:, None]

        def masked(m: Active) -> None:
            np.copyto(out, np.where(where, x, y), where=m.over(out), casting="unsafe")

        def whole() -> None:
            out[...] = np.where(where, x, y)

        copies: list[Step] = [partial(np.copyto, out, y, "unsafe"), partial(np.copyto, out, x, "unsafe", where)]
        return [whole] if ins.args[0] == ins.args[1] else copies, masked

    return bind

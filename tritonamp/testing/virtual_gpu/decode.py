"""From instructions to functions that can be bound to operand arrays.

A *builder* turns an instruction into a *binder*, which for given lanes returns two forms of it:

- the steps that execute it in all lanes, called without arguments: often a ufunc and its arrays, nothing else
- a function that executes it in the active lanes only

The opcodes are in ``arithmetic``, ``conversions``, ``memory_ops`` and ``warp_ops``, control flow is in ``control``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import ptx_types
from .lanes import Active, Lanes, Spec
from .parser import Instr, Operand, Program
from .ptx_types import Array

Step = Callable[[], object]
Masked = Callable[[Active], object]
Bound = tuple[list[Step], Masked]
Binder = Callable[[Lanes], Bound]
Builder = Callable[[Program, Instr, list[str]], Binder]

BUILDERS: dict[str, Builder] = {}
# What a form that is not known makes of an instruction: an error when it is reached.
UNKNOWN = (KeyError, ValueError, IndexError, StopIteration, NotImplementedError)


def op(*roots: str) -> Callable[[Builder], Builder]:
    """Register the builder of opcodes."""

    def register(builder: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(roots, builder))
        return builder

    return register


def source(a: Operand, t: str) -> Spec:
    """A source operand, read as type ``t``."""
    if a[0] == "vec" and len(a[1]) == 1:
        a = a[1][0]
    if a[0] not in ("imm", "reg", "special", "sym"):
        raise NotImplementedError(f"operand {a}")
    return a[0], a[1], t


def target(program: Program, a: Operand, t: str) -> Spec | None:
    """A destination of type ``t``, widened to the register by extending sign or zero; None: the result is dropped."""
    if a[0] == "vec" and len(a[1]) == 1:
        a = a[1][0]
    if a[0] == "sink":
        return None
    bits = program.registers[a[1]]
    if bits > 8 * ptx_types.size(t) and t != "pred":
        t = ("s" if t[0] == "s" else "u") + str(bits)
    return "reg", a[1], t


def predicate(a: Operand) -> Callable[[Lanes], Callable[[], Array]]:
    """A source predicate, possibly negated: bound to lanes, a function that reads it."""
    spec = source(a[1] if a[0] == "not" else a, "pred")

    def bind(lanes: Lanes) -> Callable[[], Array]:
        p = lanes[spec]
        return (lambda: ~p) if a[0] == "not" else (lambda: p)

    return bind


def guard_of(ins: Instr) -> Operand:
    """The predicate under which an instruction executes."""
    return ("not", ("reg", ins.guard)) if ins.negate else ("reg", ins.guard)


def operands(a: Operand) -> list[Operand]:
    """The elements of a vector operand, or the one operand."""
    return list(a[1]) if a[0] == "vec" else [a]


def write(out: Array | None, value: Any, m: Active | None) -> None:
    """Assign a result to a destination (None: dropped) in the active lanes."""
    if out is None:
        return
    if m is None:
        out[...] = value
    else:
        np.copyto(out, value, where=m.over(out), casting="unsafe")


def nothing(_program: Program, _ins: Instr, _words: list[str]) -> Binder:
    """The builder of instructions without an effect."""
    return lambda lanes: ([], lambda m: None)


def alu(
    program: Program, f: Callable[..., Any], dst: Operand, dt: str, srcs: list[Operand], types: list[str]
) -> Binder:
    """The binder of ``dst = f(srcs)``. A ufunc whose result has the destination's type writes it directly."""
    sources = [source(a, t) for a, t in zip(srcs, types, strict=True)]
    to = target(program, dst, dt)

    def bind(lanes: Lanes) -> Bound:
        if to is None:
            return [], lambda m: None
        arrays, out = [lanes[s] for s in sources], lanes[to]

        def whole() -> None:
            out[...] = f(*arrays)

        def masked(m: Active) -> None:
            np.copyto(out, f(*arrays), where=m.over(out), casting="unsafe")

        if isinstance(f, np.ufunc) and f(*arrays).dtype == out.dtype:
            by_name = f in (np.minimum, np.maximum)  # which deprecate the third positional argument
            return [partial(f, *arrays, out=out) if by_name else partial(f, *arrays, out)], masked
        return [whole], masked

    return bind


def moves(pairs: Callable[[Lanes], list[tuple[Array | None, Array]]]) -> Binder:
    """The binder of assignments of arrays to arrays, with conversion by NumPy."""

    def bind(lanes: Lanes) -> Bound:
        bound = [(out, a) for out, a in pairs(lanes) if out is not None]

        def masked(m: Active) -> None:
            for out, a in bound:
                np.copyto(out, a, where=m.over(out), casting="unsafe")

        return [partial(np.copyto, out, a, "unsafe") for out, a in bound], masked

    return bind


def decode(program: Program, ins: Instr) -> Binder:
    """The binder of an instruction that is not control flow."""
    try:
        bind = BUILDERS[ins.root](program, ins, ins.op.split(".")[1:])
    except UNKNOWN as e:
        bind = unsupported(ins, e)

    def guarded(lanes: Lanes) -> Bound:
        try:
            bound = bind(lanes)
        except UNKNOWN as e:
            bound = unsupported(ins, e)(lanes)
        return bound if ins.guard is None else with_guard(lanes, predicate(guard_of(ins))(lanes), bound)

    return guarded


def unsupported_message(ins: Instr, error: Exception) -> str:
    """What is said about an instruction that the simulator does not know."""
    return f"{ins.op} is not supported ({type(error).__name__}: {error})\n    {ins.where()}"


def unsupported(ins: Instr, error: Exception) -> Binder:
    """The binder of an instruction that raises when it is reached."""
    message = unsupported_message(ins, error)

    def fail(_m: Active | None = None) -> None:
        raise NotImplementedError(message)

    return lambda lanes: ([fail], fail)


def with_guard(lanes: Lanes, guard: Callable[[], Array], bound: Bound) -> Bound:
    """The bound form of an instruction with a guard."""
    steps, inner = bound
    ones, zeros = lanes.ones, lanes.zeros

    def whole() -> None:
        p = guard()
        seen = p.tobytes()
        if seen == ones:
            for step in steps:
                step()
        elif seen != zeros:
            inner(Active(p.copy()))

    def masked(m: Active) -> None:
        active = Active(guard() & m.mask)
        if active.n:
            inner(active)

    return [whole], masked

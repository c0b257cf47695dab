"""What is known about a program's registers before it runs: which are live where, which are uniform.

Sets of registers are ints, one bit per register.

Liveness tells which registers may be read before they are written (those start as zero), which make up the state
of a spinning block, and which may be overwritten in threads that do not execute the instruction, because those
threads cannot read them: most, and that spares a masked assignment.

A register is *uniform* if all threads of a block hold the same value in it, as long as the threads of a block stay
together. Table look-ups, loop counters, hyperparameters are; they are evaluated once per block.
"""

import bisect
from collections.abc import Iterable, Iterator
from functools import cache

from .parser import Instr, Operand, Program

WRITES_NOTHING = {"st", "red", "bra", "brx", "bar", "barrier", "fence", "membar", "ret", "exit", "trap", "nanosleep"}
CONTROL = {"bra", "brx", "ret", "exit", "trap"}
# Results differ from thread to thread, or depend on which threads take part.
PER_THREAD = {"atom", "st", "red", "shfl", "vote", "redux", "activemask", "bar", "barrier", "call", "fence", "membar"}
PER_THREAD_SPECIALS = ("%tid", "%laneid", "%warpid", "%lanemask")


def registers(operand: Operand) -> Iterator[str]:
    """Names of the registers in an operand."""
    kind, *rest = operand
    if kind == "reg":
        yield rest[0]
    elif kind in ("vec", "list"):
        for a in rest[0]:
            yield from registers(a)
    elif kind in ("not", "pair", "addr"):
        for a in rest:
            if isinstance(a, tuple):
                yield from registers(a)


def special_registers(operand: Operand) -> Iterator[str]:
    """Names of the special registers in an operand."""
    kind, *rest = operand
    if kind == "special":
        yield rest[0]
    elif kind in ("vec", "addr"):
        for a in rest[0] if kind == "vec" else rest[:1]:
            yield from special_registers(a)


def writes_first(ins: Instr) -> bool:
    """Whether the first operand is a destination."""
    return bool(ins.args) and (ins.root not in WRITES_NOTHING or ".red." in ins.op)


class Dataflow:
    """Liveness and uniformity of one program's registers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.bit = {name: 1 << i for i, name in enumerate(program.registers)}
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.kills: list[int] = []
        for ins in program.code:
            n = 1 if writes_first(ins) else 0
            guard = self.bit[ins.guard] if ins.guard else 0
            first = ins.args[0] if n else ("sink",)
            self.reads.append(guard | self.bits(r for a in ins.args[n:] for r in registers(a)))
            self.writes.append(self.bits(registers(first)))
            self.kills.append(0 if guard else self.writes[-1])
        self.leaders = self._leaders()
        self.live_in = self._liveness()
        self.live_at = cache(self._live_at)
        self.names = cache(self._names)

    def bits(self, names: Iterable[str]) -> int:
        """The set of the named registers."""
        r = 0
        for name in names:
            r |= self.bit[name]
        return r

    def _names(self, bits: int) -> list[str]:
        """The registers in a set."""
        return [name for name, bit in self.bit.items() if bit & bits]

    def _leaders(self) -> list[int]:
        """The first instructions of basic blocks."""
        p = self.program
        after = {i.pc + 1 for i in p.code if i.root in CONTROL}
        return sorted(pc for pc in {0, *p.labels.values(), *after} if pc < len(p.code))

    def _blocks(self) -> Iterator[tuple[int, int]]:
        return zip(self.leaders, [*self.leaders[1:], len(self.program.code)], strict=True)

    def successors(self, ins: Instr) -> list[int]:
        """Where threads may be after an instruction."""
        labels = self.program.labels
        targets = {
            "bra": lambda: [labels[ins.args[0][1]]],
            "brx": lambda: [labels[t] for t in self.program.tables[ins.args[1][1]]],
        }.get(ins.root, list)()
        if ins.root not in CONTROL or ins.guard:
            targets.append(ins.pc + 1)
        return [t for t in targets if t < len(self.program.code)]

    def _liveness(self) -> dict[int, int]:
        """Block -> registers that may be read from its start on before they are written."""
        code, blocks = self.program.code, list(self._blocks())
        live = dict.fromkeys(self.leaders, 0)
        successors = {begin: self.successors(code[end - 1]) for begin, end in blocks}
        summary = {}
        for begin, end in blocks:
            used = killed = 0
            for pc in range(begin, end):
                used |= self.reads[pc] & ~killed
                killed |= self.kills[pc]
            summary[begin] = used, killed
        changed = True
        while changed:
            changed = False
            for begin, _ in reversed(blocks):
                used, killed = summary[begin]
                now = used
                for s in successors[begin]:
                    now |= live[s] & ~killed
                changed |= now != live[begin]
                live[begin] = now
        return live

    def _live_at(self, pc: int) -> int:
        """Registers that may be read from ``pc`` on before they are written."""
        following = bisect.bisect_right(self.leaders, pc)
        end = self.leaders[following] if following < len(self.leaders) else len(self.program.code)
        live = 0
        for s in self.successors(self.program.code[end - 1]):
            live |= self.live_in[s]
        for i in range(end - 1, pc - 1, -1):
            live = live & ~self.kills[i] | self.reads[i]
        return live

    def live_anywhere(self, pcs: Iterable[int]) -> int:
        """Registers that are live at one of several places, or at the start of any block."""
        live = 0
        for s in self.live_in.values():
            live |= s
        for pc in pcs:
            if pc < len(self.program.code):
                live |= self.live_at(pc)
        return live

    def varying(self) -> int:
        """The registers that may differ between the threads of a block that stay together."""
        code = self.program.code
        result = self._bits_written(i for i in code if self.is_per_thread(i))
        rest = [i.pc for i in code if self.writes[i.pc] and not self.is_per_thread(i)]
        while True:
            before = result
            for pc in rest:
                if self.reads[pc] & result:
                    result |= self.writes[pc]
            if result == before:
                return result

    def _bits_written(self, instructions: Iterable[Instr]) -> int:
        r = 0
        for i in instructions:
            r |= self.writes[i.pc]
        return r

    def is_per_thread(self, ins: Instr) -> bool:
        """Whether results may differ between threads even where the registers read do not."""
        if ins.root in PER_THREAD:
            return True
        if ins.root in ("ld", "ldu"):
            spaces = {word.partition("::")[0] for word in ins.op.split(".")}
            is_local = any(s.space == "local" for s in self.program.symbols.values())
            if "local" in spaces or (is_local and not spaces & {"global", "shared", "param", "const"}):
                return True
        return any(s.startswith(PER_THREAD_SPECIALS) for a in ins.args for s in special_registers(a))

"""Bound code: straight runs of instructions, as lists of functions to call."""

from collections import Counter
from functools import partial

import numpy as np

from .control import Control, is_control, parking
from .decode import Masked, Step
from .lanes import Active, Frame, Lanes
from .memory_ops import MEMORY
from .parser import Instr
from .ptx_types import Array
from .warp_ops import SYNCHRONISING

EVERYWHERE, IN_THREADS, IN_BLOCKS = range(3)
LONG = 64  # instructions after which a segment ends at the next label


class Segment:
    """A run of instructions that ends with a control instruction, or where threads may meet."""

    __slots__ = ("control", "count", "following", "lanes", "last", "length", "opcodes", "partial", "whole")

    def __init__(self, code: list[Instr], control: Control | None) -> None:
        self.whole: list[Step] = []  # steps where all threads execute them
        self.partial: list[tuple[int, Step | Masked]] = []  # where some do: (a mask of what it takes, step)
        self.control = control
        self.last = code[-1].pc
        self.following, self.length = self.last + 1, len(code)
        self.opcodes = Counter(i.op for i in code)
        self.count = self.lanes = 0  # executions by warps, by threads


class Code:
    """A kernel's code bound to a frame; segments are made when they are reached.

    Args:
        uniform: keep uniform registers per block. The threads of a block must then stay together.
        fine: end segments after every access to global memory, so that blocks can be interleaved there.
    """

    def __init__(self, frame: Frame, uniform: bool, fine: bool) -> None:
        kernel = frame.kernel
        self.frame, self.kernel, self.uniform, self.fine = frame, kernel, uniform, fine
        self.program, self.flow = kernel.program, kernel.flow
        self.labels = set(self.program.labels.values())
        self.bound: dict[int, tuple[list[Step], list[tuple[int, Step | Masked]]]] = {}
        self.whole: dict[int, Segment] = {}
        self.partial: dict[int, Segment] = {}
        self.kept = kernel.kept(uniform, fine)

    def ends(self, ins: Instr) -> bool:
        """Whether other fragments may run after an instruction, other than control flow."""
        return self.fine and ins.root in MEMORY and ".shared" not in ins.op and ".param" not in ins.op

    def lanes_of(self, pc: int) -> Lanes:
        """Where an instruction is evaluated: per thread, or per block."""
        scalar = self.uniform and self.kernel.is_uniform(pc)
        return self.frame.scalar if scalar else self.frame.wide

    def segment(self, pc: int, whole: bool) -> Segment:
        """The segment that starts at ``pc``, for fragments that are all threads, or not."""
        table = self.whole if whole else self.partial
        if pc not in table:
            table[pc] = self.make(pc, whole)
        return table[pc]

    def make(self, start: int, whole: bool) -> Segment:
        """Bind a segment."""
        control: Control | None = None
        code: list[Instr] = []
        for ins in self.program.code[start:]:
            if code and ins.pc in self.labels and (not whole or len(code) > LONG):
                break
            code.append(ins)
            if is_control(ins):
                control = self.kernel.control_binder(ins)(self.frame, self.lanes_of(ins.pc))
                break
            if not whole and not self.uniform and ins.root in SYNCHRONISING:
                control = parking(ins, self.frame, self.kernel.binder(ins)(self.frame.wide)[1])
                break
            if self.ends(ins):
                break
        segment = Segment(code, control)
        for ins in code[:-1] if control else code:
            steps, masked = self.bind(ins)
            segment.whole += steps
            segment.partial += masked
        return segment

    def bind(self, ins: Instr) -> tuple[list[Step], list[tuple[int, Step | Masked]]]:
        """The steps of one instruction, in both forms."""
        pc = ins.pc
        if pc not in self.bound:
            lanes = self.lanes_of(pc)
            steps, masked = self.kernel.binder(ins)(lanes)
            steps = list(steps)
            partly: list[tuple[int, Step | Masked]] = [(IN_THREADS if lanes.span == 1 else IN_BLOCKS, masked)]
            if lanes is self.frame.scalar:
                for name in self.kernel.expanded(ins):
                    step, masked_step = self.expansion(name)
                    steps.append(step)
                    partly.append((IN_BLOCKS, masked_step))
            is_pure = ins.root not in MEMORY and ins.root not in SYNCHRONISING
            if is_pure and not self.flow.writes[pc] & self.kept:
                partly = [(EVERYWHERE, s) for s in steps]  # nobody else can read what is overwritten
            self.bound[pc] = steps, partly
        return self.bound[pc]

    def expansion(self, name: str) -> tuple[Step, Masked]:
        """Steps that copy a uniform register to the threads."""
        frame = self.frame
        to = frame.wide.row(name).reshape(frame.blocks, frame.threads)
        column: Array = frame.scalar.row(name)[:, None]

        def masked(m: Active) -> None:
            np.copyto(to, column, where=m.mask[:, None])

        return partial(np.copyto, to, column), masked

    def harvest(self) -> tuple[list[tuple[Counter[str], int]], int]:
        """What was executed since the last time: (opcodes, executions by warps) of segments; thread instructions."""
        executed, lanes = [], 0
        for segment in (*self.whole.values(), *self.partial.values()):
            if segment.count:
                executed.append((segment.opcodes, segment.count))
                lanes += segment.lanes * segment.length
                segment.count = segment.lanes = 0
        return executed, lanes

"""The kernels, compiled ahead of time as the backend launches them, and what their listings say. Needs no GPU."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tritonamp.kernels import rules, step, table

from tritonamp.backends.triton import BLOCK, compile_options

Dtype = Any  # Triton's, which has no types
Accesses = Counter[tuple[str, int]]  # by kind, "load" or "store", and bytes
Variant = tuple[Dtype, Dtype, Dtype, int, int]  # of grad, param, computation and state; number of states; how kept

F32, F64, BF16 = tl.float32, tl.float64, tl.bfloat16
ROUNDED, STOCHASTIC, MASTER = table.ROUNDED.value, table.STOCHASTIC.value, table.MASTER.value
SINGLE_OR_HALF = {"f32": tl.float32, "f16": tl.float16, "bf16": tl.bfloat16}

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

MIXES: dict[str, tuple[Any, tuple[Variant, ...]]] = {
    "sgd": (rules.SGD, ((F32, F32, F32, 0, ROUNDED),)),
    "sgd_momentum": (rules.SGD, ((F32, F32, F32, 1, ROUNDED),)),
    "sgd_f64": (rules.SGD, ((F64, F64, F64, 1, ROUNDED),)),
    **{
        f"adam_{grad}_{param}": (rules.ADAM, ((SINGLE_OR_HALF[grad], SINGLE_OR_HALF[param], F32, 2, ROUNDED),))
        for grad, param in itertools.product(SINGLE_OR_HALF, repeat=2)
    },
    "adam_f64": (rules.ADAM, ((F64, F64, F64, 2, ROUNDED),)),
    "adam_master": (rules.ADAM, ((BF16, BF16, F32, 2, MASTER),)),
    "adam_stochastic": (rules.ADAM, ((BF16, BF16, F32, 2, STOCHASTIC),)),
    "amsgrad": (rules.ADAM, ((F32, F32, F32, 3, ROUNDED),)),
    "mixed": (
        rules.ADAM,
        (
            (BF16, BF16, F32, 2, ROUNDED),
            (tl.float16, F32, F32, 3, ROUNDED),
            (F32, F32, F32, 2, ROUNDED),
            (F64, F64, F64, 2, ROUNDED),
        ),
    ),
}

# Kernel, mix and target. All mixes for all targets would take minutes.
CASES = [
    *[("step", mix, "sm90") for mix in MIXES],
    *[
        ("step", mix, target)
        for mix in ("adam_f32_f32", "adam_bf16_bf16", "adam_master", "adam_stochastic", "mixed")
        for target in ("sm80", "sm100", "gfx942")
    ],
    *[(kernel, "mixed", target) for kernel in ("statistics", "apply") for target in ("sm90", "gfx942")],
]

KERNELS = {"step": step.step_kernel, "statistics": step.statistics_kernel, "apply": step.apply_kernel}
POINTERS = {"words": "*i64", "partials": "*fp64", "counters": "*i32", "outcome": "*fp64", "loss_scale": "*fp64"}


def grad_kinds(variants: tuple[Variant, ...]) -> tuple[tuple[Dtype, Dtype], ...]:
    return tuple(dict.fromkeys((grad, compute) for grad, _, compute, *_ in variants))


def source_of(kernel: str, rule: Any, variants: tuple[Variant, ...]) -> ASTSource:
    """What Triton compiles when the backend launches ``kernel``: all pointers aligned, no other run-time arguments."""
    function = KERNELS[kernel]
    constants = {"SCALARS": rule[0], "UPDATE": rule[1], "VARIANTS": variants, "GRADS": grad_kinds(variants)}
    constants.update(BLOCK=BLOCK, DECIDE=True)
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    pointers = {name: dtype for name, dtype in POINTERS.items() if name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    return ASTSource(function, {**pointers, **dict.fromkeys(constants, "constexpr")}, constants, aligned)


@functools.cache
def compiled(kernel: str, mix: str, target: str) -> Compiled:
    options = {**compile_options(TARGETS[target]), "launch_cooperative_grid": kernel == "step"}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True  # what is tested is what is there now
        binary = triton.compile(source_of(kernel, *MIXES[mix]), target=TARGETS[target], options=options)
    return Compiled(target, binary)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    Attributes:
        registers: 32-bit registers per thread.
        spills: whatever was not kept in registers: bytes of stack, or registers spilled.
        shared: bytes of shared memory, without the 1024 that CUDA keeps from compute capability 9 on.
    """

    registers: int
    spills: int
    shared: int


class Compiled:
    """A kernel for one target: its intermediate code, the loops of its listing, its resources."""

    def __init__(self, target: str, binary: Any) -> None:
        self.target = target
        self.is_nvidia = TARGETS[target].backend == "cuda"
        self.ttir: str = binary.asm["ttir"]
        self.text: str = binary.asm["ptx" if self.is_nvidia else "amdgcn"]
        self.listing = Listing(self.text)
        self._binary = binary

    @functools.cached_property
    def resources(self) -> Resources:
        dynamic = self._binary.metadata.shared
        if not self.is_nvidia:
            notes = {name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", self.text, re.MULTILINE)}
            spills = notes["vgpr_spill_count"] + notes["sgpr_spill_count"] + notes["private_segment_fixed_size"]
            return Resources(notes["vgpr_count"], spills, notes["group_segment_fixed_size"] + dynamic)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(self._binary.asm["cubin"])
            cubin.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", printed)}
        reserved = 1024 if TARGETS[self.target].arch >= 90 else 0
        return Resources(used["REG"], used["STACK"] + used["LOCAL"], used["SHARED"] - reserved + dynamic)


# What the next instruction does not follow. Those that have a predicate get the suffix ".if".
ENDS = ("bra", "bra.uni", "brx.idx", "ret", "exit", "trap", "s_branch", "s_endpgm")


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: str

    @property
    def is_jump(self) -> bool:
        return self.opcode.startswith(("bra", "brx", "s_branch", "s_cbranch"))

    @property
    def falls_through(self) -> bool:
        return self.opcode not in ENDS

    @property
    def access(self) -> tuple[str, int] | None:
        """``("load" or "store", bytes)`` of an access to global memory that is not atomic."""
        if re.match(r"(ld|st)\.(.+\.)?global\.", self.opcode):
            vector = re.search(r"\.v(\d)", self.opcode)
            bits = int(re.sub(r"\D", "", self.opcode.rsplit(".", 1)[1]))
            kind = "load" if self.opcode.startswith("ld") else "store"
            return kind, (int(vector[1]) if vector else 1) * bits // 8
        if match := re.match(r"(?:global|flat|buffer)_(load|store)_(?:dwordx?(\d?)|u?short|[us]?byte)", self.opcode):
            size = {"short": 2, "byte": 1}
            narrow = next((n for name, n in size.items() if name in self.opcode), None)
            return match[1], narrow or 4 * int(match[2] or 1)
        return None

    @property
    def is_exchange(self) -> bool:
        """Whether it waits for, or takes values from, other threads."""
        return bool(
            re.match(r"bar\.|barrier|(ld|st)\.shared|shfl|redux|ds_|s_barrier", self.opcode) or "dpp" in self.operands
        )


class Loop(NamedTuple):
    """A loop of the listing: all its instructions, and those of them that are in no loop inside of it."""

    instructions: list[Instruction]
    own: list[Instruction]
    is_innermost: bool

    @property
    def accesses(self) -> Accesses:
        """How often it accesses global memory per turn, by kind and width, not counting loops inside of it."""
        return Counter(access for instruction in self.own if (access := instruction.access))


class Listing:
    """PTX or AMDGCN assembly: its instructions and its loops."""

    def __init__(self, text: str) -> None:
        self.blocks: list[list[Instruction]] = [[]]
        labels: dict[str, int] = {}
        tables = dict(re.findall(r"(\$L_brx_\d+): \.branchtargets([^;]*);", text))
        for line in text.splitlines():
            line = re.split(r"//|;\s|;$", line)[0].strip()
            if match := re.fullmatch(r"(\$?\.?L\w+):", line):
                self.blocks.append([])
                labels[match[1]] = len(self.blocks) - 1
            elif match := re.fullmatch(r"(@!?%p\d+)?\s*([a-z]\w+(?:[.:]+\w+)*)\s*(.*)", line):
                predicate, opcode, operands = match.groups()
                if predicate and opcode in ENDS:
                    opcode += ".if"
                if opcode == "brx.idx":
                    operands = tables[operands.split()[-1]]
                self.blocks[-1].append(Instruction(opcode, operands))
                if self.blocks[-1][-1].is_jump:
                    self.blocks.append([])
        self._successors = [self._successors_of(i, labels) for i in range(len(self.blocks))]
        self.loops = list(self._find_loops())

    @property
    def instructions(self) -> list[Instruction]:
        return [instruction for block in self.blocks for instruction in block]

    def loop_with(self, test: Callable[[Instruction], bool]) -> Loop:
        """The one innermost loop with such an instruction."""
        (loop,) = (loop for loop in self.loops if loop.is_innermost and any(map(test, loop.instructions)))
        return loop

    def _successors_of(self, i: int, labels: dict[str, int]) -> set[int]:
        following = {i + 1} if i + 1 < len(self.blocks) else set()
        if not self.blocks[i]:
            return following
        last = self.blocks[i][-1]
        targets = {labels[label] for label in re.findall(r"[$.]L\w+", last.operands)} if last.is_jump else set()
        return targets | (following if last.falls_through else set())

    def _find_loops(self) -> Iterator[Loop]:
        bodies: dict[int, set[int]] = {}  # by header
        for tail, header in self._back_edges():
            body = bodies.setdefault(header, {header})
            pending = [tail]
            while pending:  # all that reaches the tail without passing the header
                block = pending.pop()
                if block not in body:
                    body.add(block)
                    pending += [i for i, targets in enumerate(self._successors) if block in targets]
        for body in bodies.values():
            nested = set().union(*(other for other in bodies.values() if other < body))
            instructions, own = (
                [instruction for i in sorted(blocks) for instruction in self.blocks[i]]
                for blocks in (body, body - nested)
            )
            yield Loop(instructions, own, not nested)

    def _back_edges(self) -> Iterator[tuple[int, int]]:
        """Edges to a block that is on the path to them."""
        path, seen = [(0, iter(self._successors[0]))], {0}
        while path:
            block, successors = path[-1]
            target = next(successors, None)
            if target is None:
                path.pop()
            elif target not in seen:
                seen.add(target)
                path.append((target, iter(self._successors[target])))
            elif any(target == on_path for on_path, _ in path):
                yield block, target

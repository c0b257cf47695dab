"""A kernel: its program, what is known about it, and its frames."""

from functools import cached_property

from . import arithmetic, conversions  # noqa: F401 (they fill the decoder's table)
from .control import ControlBinder, decode_control, is_control
from .dataflow import Dataflow, registers
from .decode import Binder, decode
from .lanes import Frame
from .memory_ops import MEMORY
from .parser import Instr, Program, parse
from .ptx_types import is_type, size
from .warp_ops import SYNCHRONISING


class Kernel:
    """A parsed kernel, shared by all launches of it."""

    def __init__(self, ptx: str) -> None:
        self.program: Program = parse(ptx)
        self.flow = Dataflow(self.program)
        self.offsets: dict[str, int] = {}  # of shared and local arrays
        sizes = {"shared": 0, "local": 0}
        symbols = self.program.symbols
        for name in sorted(symbols, key=lambda s: symbols[s].size == 0):  # the one whose size the launch gives last
            symbol = symbols[name]
            if symbol.space in sizes:
                at = -(-sizes[symbol.space] // symbol.align) * symbol.align
                self.offsets[name], sizes[symbol.space] = at, at + symbol.size
        self.shared, self.local = sizes["shared"], sizes["local"]
        self.read_first = self.flow.names(self.flow.live_in.get(0, 0))  # registers that must start as zero
        self._binders: dict[int, Binder] = {}
        self._control_binders: dict[int, ControlBinder] = {}
        self._kept: dict[tuple[bool, bool], int] = {}

    def binder(self, ins: Instr) -> Binder:
        """The binder of an instruction that is not control flow."""
        if ins.pc not in self._binders:
            self._binders[ins.pc] = decode(self.program, ins)
        return self._binders[ins.pc]

    def control_binder(self, ins: Instr) -> ControlBinder:
        """The binder of a control instruction."""
        if ins.pc not in self._control_binders:
            self._control_binders[ins.pc] = decode_control(self.program, ins)
        return self._control_binders[ins.pc]

    def expanded(self, ins: Instr) -> list[str]:
        """Uniform registers that an instruction writes and others read per thread."""
        return [r for r in registers(ins.args[0]) if self.flow.bit[r] & self.read_per_thread]

    @cached_property
    def varying(self) -> int:
        """Registers that may differ between the threads of a block."""
        return self.flow.varying()

    @cached_property
    def read_per_thread(self) -> int:
        """Uniform registers that are read where an instruction is evaluated per thread."""
        flow, r = self.flow, 0
        for ins in self.program.code:
            if not self.is_uniform(ins.pc):
                r |= flow.reads[ins.pc]
        return r & ~self.varying

    @cached_property
    def smallest_access(self) -> int:
        """Bytes of the smallest element that is accessed in global memory."""
        sizes = [8]
        for ins in self.program.code:
            words = ins.op.split(".")
            if ins.root in MEMORY and not {w.partition("::")[0] for w in words} & {"param", "shared", "local"}:
                sizes += [size(w) for w in words if is_type(w)][-1:]
        return min(sizes)

    def is_uniform(self, pc: int) -> bool:
        """Whether an instruction does the same in all threads of a block."""
        ins, flow = self.program.code[pc], self.flow
        if (flow.reads[pc] | flow.writes[pc]) & self.varying:
            return False
        if is_control(ins):
            return ins.root in ("bra", "brx", "ret", "exit", "bar", "barrier") and ".red." not in ins.op
        return bool(flow.writes[pc]) and not flow.is_per_thread(ins)

    def kept(self, uniform: bool, fine: bool) -> int:
        """Registers that threads may still read while others of their block, or group, execute something else."""
        key = uniform, fine
        if key not in self._kept:
            places = []
            for ins in self.program.code:
                waits = is_control(ins) or (not uniform and ins.root in SYNCHRONISING)
                if waits or (fine and ins.root in MEMORY):
                    places += [ins.pc, ins.pc + 1]
            self._kept[key] = self.flow.live_anywhere(places)
        return self._kept[key]


class Pool:
    """Frames that are kept for later launches, up to so many bytes of registers: those used last."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.frames: list[Frame] = []

    def take(self, kernel: Kernel, blocks: int, threads: int, shared: int) -> Frame:
        """A frame for so many blocks that run together."""
        for i in range(len(self.frames) - 1, -1, -1):
            f = self.frames[i]
            if f.kernel is kernel and (f.blocks, f.threads, f.shared.size) == (blocks, threads, shared):
                return self.frames.pop(i)
        return Frame(kernel, blocks, threads, shared)

    def give_back(self, frame: Frame) -> None:
        """Keep a frame."""
        self.frames.append(frame)
        excess = sum(f.bytes for f in self.frames) - self.max_bytes
        while excess > 0:
            excess -= self.frames.pop(0).bytes


pool = Pool(256 << 20)

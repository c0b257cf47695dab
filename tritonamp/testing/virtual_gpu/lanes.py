"""The operands of bound code: arrays with one element per thread, or per block where a register is uniform."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import ptx_types
from .memory import Scratch
from .ptx_types import Array

if TYPE_CHECKING:
    from .code import Code
    from .group import Group
    from .kernel import Kernel

Spec = tuple[Any, ...]  # ("reg", name, type), ("imm", text, type), ("param", name, offset, type), ...


class Active:
    """The active lanes, where not all are."""

    __slots__ = ("_index", "mask", "n")

    def __init__(self, mask: Array) -> None:
        self.mask, self.n = mask, int(np.count_nonzero(mask))
        self._index: Array | None = None

    @property
    def index(self) -> Array:
        """The numbers of the active lanes."""
        if self._index is None:
            self._index = self.mask.nonzero()[0]
        return self._index

    def over(self, out: Array) -> Array:
        """The mask in the shape that an operand asks for."""
        return self.mask if out.ndim == 1 else self.mask[:, None]


class Lanes:
    """A register file, and whatever else instructions read. A lane stands for ``span`` threads of one block."""

    def __init__(self, frame: "Frame", n: int, span: int) -> None:
        self.frame, self.n, self.span = frame, n, span
        self.per_block = frame.threads // span
        self.warps_per_lane = max(span // 32, 1)
        self.block = np.arange(n) // self.per_block
        self.rows: dict[str, Array] = {}  # register -> uintN[n]
        self.operands: dict[Spec, Array] = {}
        self.of_launch: dict[Spec, Array] = {}  # operands that change from launch to launch
        # Distinct per warp; the bits below are a sector's number (see traffic.py).
        self.warp_keys = (np.arange(n) * span // 32).astype(np.uint64) << np.uint64(43)
        self.ones, self.zeros = b"\1" * n, b"\0" * n  # bytes of a bool array: all set, none set

    def __getitem__(self, spec: Spec) -> Array:
        """``[n]``, or ``[n, lanes]`` of a packed type. Immediates and parameters are read-only."""
        if spec not in self.operands:
            self.operands[spec] = self.make(spec)
        return self.operands[spec]

    def row(self, name: str) -> Array:
        """A register's storage; what it held in an earlier launch is still there."""
        if name not in self.rows:
            bits = self.frame.kernel.program.registers[name]
            self.rows[name] = np.zeros(self.n, np.bool_ if bits == 1 else f"u{bits // 8}")
            self.frame.bytes += self.rows[name].nbytes
        return self.rows[name]

    def make(self, spec: Spec) -> Array:
        """The array of an operand that was not asked for before."""
        kind, name, t = spec[0], spec[1], spec[-1]
        if kind == "reg":
            return ptx_types.view(self.row(name), t)
        d, per_lane = ptx_types.dtype(t)
        shape = (self.n,) if per_lane == 1 else (self.n, per_lane)
        if kind == "imm":
            return np.broadcast_to(np.array(ptx_types.immediate(name, t), d), shape)
        value = np.asarray(self.frame.value(spec, self))
        cell = np.zeros(value.shape, d)
        cell[...] = value
        self.of_launch[spec] = cell
        return np.broadcast_to(cell, shape)

    def refill(self) -> None:
        """Give the operands that a launch determines their values in this one."""
        for spec, cell in self.of_launch.items():
            cell[...] = self.frame.value(spec, self)


class Frame:
    """The registers and the scratch memory of blocks that run together, with the code bound to them.

    Frames are kept from launch to launch: binding code to arrays takes longer than running it once.
    """

    def __init__(self, kernel: "Kernel", blocks: int, threads: int, shared: int) -> None:
        self.kernel, self.blocks, self.threads = kernel, blocks, threads
        self.bytes = 0  # of registers
        self.wide, self.scalar = Lanes(self, blocks * threads, 1), Lanes(self, blocks, threads)
        self.thread = np.arange(blocks * threads) % threads
        self.lane = self.thread % 32
        self.warp_base = np.arange(blocks * threads) - self.lane
        self.local = Scratch("local", kernel.local, blocks * threads)
        self.shared = Scratch("shared", shared, blocks)
        self.codes: dict[tuple[bool, bool], Code] = {}
        self.group: Group

    def start(self, group: "Group") -> None:
        """Make ready for blocks of a launch."""
        self.group = group
        for space in (self.shared, self.local):
            space.array[:] = 0
        for lanes in (self.wide, self.scalar):
            lanes.refill()
            for name in self.kernel.read_first:
                lanes.row(name).fill(0)

    def expand(self, blocks: Array) -> Array:
        """Per-block values, one per thread."""
        return np.repeat(blocks, self.threads, axis=0)

    def value(self, spec: Spec, lanes: Lanes) -> Any:
        """What an operand that is not a register or an immediate holds: a scalar, or one value per lane."""
        kind, name = spec[:2]
        launch = self.group.launch
        if kind == "param":
            n = ptx_types.size(spec[-1])
            d, per_lane = ptx_types.dtype(spec[-1])
            value = np.frombuffer(launch.params[name][spec[2] : spec[2] + n], d)
            return value if per_lane > 1 else value[0]
        if kind == "sym":
            return launch.address(name)
        base, _, axis = name.partition(".")
        index = "xyz".index(axis) if axis else 0
        if base == "%ctaid":
            return np.array([launch.block_id(b)[index] for b in self.group.block_numbers])[lanes.block]
        if base == "%smid":
            return (np.array(self.group.block_numbers) % launch.machine.sms)[lanes.block]
        return self.constant(base, index)

    def constant(self, base: str, axis: int) -> Any:
        """Special registers that are the same for every block."""
        launch, one, word = self.group.launch, np.uint64(1), np.uint64(0xFFFFFFFF)
        bit = one << self.lane.astype(np.uint64)
        values: dict[str, Callable[[], Any]] = {
            "%tid": lambda: self.thread if axis == 0 else 0,
            "%ntid": lambda: self.threads if axis == 0 else 1,
            "%nctaid": lambda: launch.grid[axis],
            "%laneid": lambda: self.lane,
            "%warpid": lambda: self.thread // 32,
            "%nwarpid": lambda: self.threads // 32,
            "%nsmid": lambda: launch.machine.sms,
            "%gridid": lambda: 0,
            "%dynamic_smem_size": lambda: launch.dynamic_shared,
            "%total_smem_size": lambda: launch.shared,
            "%lanemask_eq": lambda: bit,
            "%lanemask_lt": lambda: bit - one,
            "%lanemask_le": lambda: bit | bit - one,
            "%lanemask_gt": lambda: word & ~(bit | bit - one),
            "%lanemask_ge": lambda: word & ~(bit - one),
        }
        if base not in values:
            raise NotImplementedError(f"special register {base}")
        return values[base]()

"""Memory operands: from a thread's addresses to checked row numbers of the memory behind them."""

from typing import TYPE_CHECKING

import numpy as np

from .decode import source
from .errors import MemoryFault
from .lanes import Active, Lanes, Spec
from .memory import BASE, Memory, Scratch, host_rows
from .parser import Instr, Operand, Program
from .ptx_types import Array, dtype, is_type, size
from .shadow import LARGE, SEVERAL

if TYPE_CHECKING:
    pass

SPACES = ("global", "shared", "local", "param", "const")
ORDERS = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")
# The shared and the local window of generic addresses; all others are global.
WINDOW = {"shared": 1 << 60, "local": 2 << 60}

NOWHERE = np.array(1 << 63, np.uint64)  # no access lies here


class Access:
    """What an instruction says about its memory operand."""

    def __init__(self, program: Program, ins: Instr, words: list[str], address: Operand) -> None:
        self.ins = ins
        self.space = next((s for w in words if (s := w.partition("::")[0]) in SPACES), "generic")
        self.order = next((w for w in words if w in ORDERS), "weak")
        self.scope = next((w for w in words if w in SCOPES), "sys")
        self.type = [w for w in words if is_type(w)][-1]
        self.n = next((int(w[1:]) for w in words if w in ("v2", "v4", "v8")), 1)
        self.dtype, lanes = dtype(self.type)
        self.width, self.columns = size(self.type) * self.n, self.n * lanes
        _, base, offset = address
        bits = program.registers[base[1]] if base[0] == "reg" else 64
        self.base: Spec = source(base, f"u{bits}")
        self.offset = int(offset) % (1 << bits)
        self.shift = np.array(self.width.bit_length() - 1, np.uint64)
        self.low = np.array(self.width - 1, np.uint64)

    def port(self, lanes: Lanes) -> "Port":
        """The operand bound to lanes."""
        if self.space == "global":
            return GlobalPort(self, lanes)
        if self.space in ("shared", "local"):
            return ScratchPort(self, lanes, getattr(lanes.frame, self.space))
        return GenericPort(self, lanes)

    def fault(self, lanes: Lanes, m: Active | None, bad: Array, a: Array, why: str) -> MemoryFault:
        """The error for the first of the bad accesses; ``a`` holds the true addresses."""
        i = int(np.argmax(bad))
        lane, address = (i if m is None else int(m.index[i])), int(a[i])
        group = lanes.frame.group
        block, thread = group.block_id(int(lanes.block[lane])), lane % lanes.per_block * lanes.span
        return MemoryFault(
            f"access of {self.width} bytes at {address:#x} is {why}: block {block}, thread {thread} "
            f"({int(np.count_nonzero(bad)) * lanes.span} threads in all)\n    {self.ins.where()}"
        )


class Port:
    """A memory operand bound to lanes."""

    def __init__(self, access: Access, lanes: Lanes) -> None:
        self.access, self.lanes, self.frame = access, lanes, lanes.frame
        self.base = lanes[access.base]

    def locate(self, kind: str, m: Active | None) -> tuple[Array, Array]:
        """Check and count an access.

        Args:
            kind: "ld", "st" or "atom".
            m: the active lanes.

        Returns:
            Memory as rows as wide as the access, and the row of each active lane.

        Raises:
            MemoryFault: out of bounds, or misaligned.
        """
        raise NotImplementedError

    def touch(self) -> None:
        """Note that the memory located last changes."""


class GlobalPort(Port):
    """Global memory. Remembers the region that each block accessed last, and checks against that first."""

    def __init__(self, access: Access, lanes: Lanes) -> None:
        super().__init__(access, lanes)
        self.rows = host_rows(access.dtype, access.columns)
        self.narrow = self.base.dtype != np.uint64
        self.delta = np.array(access.offset - (0 if self.narrow else BASE) + (1 << 64) & (1 << 64) - 1, np.uint64)
        self.generation = -1
        self.lo: Array = np.zeros((), np.uint64)  # start of the regions
        self.top: Array = np.zeros((), np.uint64)  # last valid offset in them
        self.shadow: Array = np.zeros((), np.int64)  # from addresses to locations of the race detector
        self.has_shadow = False  # that is: none of the regions is large

    def locate(self, kind: str, m: Active | None) -> tuple[Array, Array]:
        """See :meth:`Port.locate`."""
        a = self.base if m is None else self.base[m.index]
        if self.narrow:
            return self.check(kind, (a + self.delta.astype(a.dtype)).astype(np.uint64) - np.uint64(BASE), m)
        return self.check(kind, a + self.delta, m)

    def check(self, kind: str, a: Array, m: Active | None) -> tuple[Array, Array]:
        """As :meth:`locate`, from addresses relative to ``BASE``."""
        group, access = self.frame.group, self.access
        if group.memory.generation != self.generation:
            self.remember(a, m)
        lo, top = self.lo, self.top
        if lo.ndim and m is not None:
            lo, top = lo[m.index], top[m.index]
        located = True
        if b"\0" in (a - lo <= top).tobytes() or (access.width > 1 and np.count_nonzero(a & access.low)):
            located = self.recover(group.memory, a, m)
        if group.traffic:
            lanes = self.lanes
            keys = lanes.warp_keys if m is None else lanes.warp_keys[m.index]
            group.traffic.request(kind, access.width, a, keys, lanes.span)
        if group.race:
            self.check_races(kind, a + np.uint64(BASE), m, located)
        return self.rows, (a >> access.shift).view(np.int64)

    def touch(self) -> None:
        """See :meth:`Port.touch`."""
        self.frame.group.memory.version += 1

    def remember(self, a: Array, m: Active | None) -> None:
        """Look up the region of each block's first access."""
        group, lanes, blocks = self.frame.group, self.lanes, self.frame.blocks
        memory, width = group.memory, np.uint64(self.access.width)
        if m is None:
            present, firsts = np.arange(blocks), a[:: lanes.per_block]
        else:
            block = lanes.block[m.index]
            present = np.unique(block)
            firsts = a[block.searchsorted(present)]
        known = np.zeros(len(firsts), np.bool_)
        if memory.starts:
            starts, sizes = memory.table()
            number = starts.searchsorted(firsts, "right") - 1
            known = firsts - starts[number] + width <= sizes[number]
        if not known.all() and all(memory.find(x + BASE, self.access.width) for x in firsts.tolist()):
            starts, sizes = memory.table()  # they may have been found only now
            number = starts.searchsorted(firsts, "right") - 1
        elif not known.all():
            self.lo, self.top = NOWHERE, np.zeros((), np.uint64)
            return
        self.generation = memory.generation
        self.has_shadow = group.shadow is not None and bool((sizes[number] <= LARGE).all())
        offsets = group.shadow.offsets(number) if group.shadow and self.has_shadow else np.zeros_like(number)
        values = starts[number], np.maximum(sizes[number], width) - width, offsets
        if (number == number[0]).all():
            self.lo, self.top, self.shadow = (np.asarray(v[0]) for v in values)
        else:
            full = np.zeros(blocks, np.int64)
            full[present] = np.arange(len(firsts))
            self.lo, self.top, self.shadow = (v[full].repeat(lanes.per_block) for v in values)

    def recover(self, memory: Memory, a: Array, m: Active | None) -> bool:
        """What to do about a failed check: look for the regions again, or raise MemoryFault.

        Returns:
            Whether what :meth:`remember` noted holds for all lanes.
        """
        access, true = self.access, a + np.uint64(BASE)
        bad = a & access.low != 0
        if bad.any():
            why = f"misaligned for its {access.width} bytes"
            raise access.fault(self.lanes, m, bad, true, why + memory.near(int(true[np.argmax(bad)])))
        self.remember(a, m)
        lo, top = (x if m is None or not x.ndim else x[m.index] for x in (self.lo, self.top))
        if (a - lo <= top).all():
            return True
        bad = np.array([memory.known(x, access.width) is None for x in true.tolist()])
        if bad.any() and memory.find(int(true[np.argmax(bad)]), access.width):
            bad = np.array([memory.known(x, access.width) is None for x in true.tolist()])
        if bad.any():
            raise access.fault(self.lanes, m, bad, true, "out of bounds" + memory.near(int(true[np.argmax(bad)])))
        return False

    def check_races(self, kind: str, a: Array, m: Active | None, remembered: bool) -> None:
        """Have the race detector look at an access; ``remembered``: of regions that :meth:`remember` noted."""
        group, lanes = self.frame.group, self.lanes
        shadow, race = group.shadow, group.race
        assert race
        assert shadow
        whole = slice(None) if m is None else m.index
        blocks = group.numbers[lanes.block[whole]]
        threads = self.frame.thread[whole] if lanes.span == 1 else np.full(len(a), SEVERAL)
        if remembered and self.has_shadow:
            units = (a >> np.uint64(shadow.shift)).view(np.int64) + self.shadow[whole if self.shadow.ndim else ()]
        else:
            units = shadow.locations(a)
        race.access(self.access, units[:, None], blocks[:, None], threads[:, None], kind)


class ScratchPort(Port):
    """Shared memory of the lane's block, or local memory of the thread."""

    def __init__(self, access: Access, lanes: Lanes, memory: Scratch) -> None:
        super().__init__(access, lanes)
        self.memory, self.rows = memory, memory.rows(access.dtype, access.columns)
        owner = lanes.block if memory.kind == "shared" else np.arange(lanes.n)
        self.origin = (owner * memory.stride).astype(np.uint64)
        self.offset = np.array(access.offset, self.base.dtype)

    def locate(self, kind: str, m: Active | None) -> tuple[Array, Array]:
        """See :meth:`Port.locate`."""
        a = self.base if m is None else self.base[m.index]
        return self.check((a + self.offset).astype(np.uint64, copy=False), m)

    def check(self, a: Array, m: Active | None) -> tuple[Array, Array]:
        """As :meth:`locate`, from offsets into the block's or the thread's memory."""
        access, memory = self.access, self.memory
        bad = a > np.uint64(max(memory.size - access.width, 0))
        misaligned = a & access.low
        if memory.size < access.width or b"\1" in bad.tobytes() or np.count_nonzero(misaligned):
            if np.count_nonzero(misaligned):
                bad, why = misaligned != 0, f"misaligned for its {access.width} bytes"
            else:
                bad, why = bad | (memory.size < access.width), f"out of bounds of {memory.size} bytes"
            raise access.fault(self.lanes, m, bad, a, f"{why} of {memory.kind} memory")
        origin = self.origin if m is None else self.origin[m.index]
        return self.rows, (a + origin >> access.shift).view(np.int64)


class GenericPort(Port):
    """An address whose high bits tell the space. All active lanes must address the same one."""

    def __init__(self, access: Access, lanes: Lanes) -> None:
        super().__init__(access, lanes)
        frame = self.frame
        self.host = GlobalPort(access, lanes)
        self.scratch = [ScratchPort(access, lanes, s) for s in (frame.shared, frame.local)]
        self.last: Port = self.host

    def locate(self, kind: str, m: Active | None) -> tuple[Array, Array]:
        """See :meth:`Port.locate`."""
        access = self.access
        a = self.base if m is None else self.base[m.index]
        a = (a + np.array(access.offset, a.dtype)).astype(np.uint64, copy=False)
        windows = np.unique(a >> np.uint64(60)).tolist()
        if len(windows) > 1:
            raise NotImplementedError(f"generic addresses of several spaces\n    {access.ins.where()}")
        window = windows[0] << 60
        for port in self.scratch:
            if window == WINDOW[port.memory.kind]:
                self.last = port
                return port.check(a - np.uint64(window), m)
        self.last = self.host
        return self.host.check(kind, a - np.uint64(BASE), m)

    def touch(self) -> None:
        """See :meth:`Port.touch`."""
        self.last.touch()

"""What launches did: instructions, memory traffic, divergence, resources."""

from collections import Counter
from dataclasses import dataclass, field

SECTOR = 32  # bytes
BARRIERS = ("bar.sync", "barrier.sync", "barrier.cta.sync")


@dataclass
class LaunchStats:
    """One launch. Kinds of access are "ld", "st" and "atom"."""

    name: str = ""
    grid: tuple[int, int, int] = (0, 0, 0)
    cooperative: bool = False
    threads: int = 0  # per block
    registers: int = 0  # per thread
    spills: int = 0  # registers spilled, per thread
    shared: int = 0  # bytes of shared memory per block
    blocks_per_sm: int = 0  # that fit a multiprocessor
    resident: int = 0  # blocks that the machine holds at a time
    bytes: Counter[str] = field(default_factory=Counter)  # requested by threads, by kind
    accesses: Counter[tuple[str, int]] = field(default_factory=Counter)  # (kind, bytes per thread) -> by threads
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # (kind, bytes per thread) -> by warps
    sectors: Counter[str] = field(default_factory=Counter)  # kind -> 32-byte sectors, over all requests of warps
    dram_read: int = 0  # bytes
    dram_written: int = 0
    lanes: int = 0  # active threads, summed over the instructions of warps
    seconds: float = 0.0  # that the simulation took
    executed: list[tuple[Counter[str], int]] = field(default_factory=list, repr=False)  # opcodes of a run, times run

    @property
    def opcodes(self) -> Counter[str]:
        """Instructions executed by warps, by opcode."""
        total: Counter[str] = Counter()
        for opcodes, times in self.executed:
            for name, n in opcodes.items():
                total[name] += n * times
        self.executed = [(total, 1)]
        return total

    @property
    def instructions(self) -> int:
        """Instructions executed by warps."""
        return sum(self.opcodes.values())

    def count(self, *prefixes: str) -> int:
        """Instructions executed by warps whose opcode starts with one of the prefixes."""
        return sum(n for name, n in self.opcodes.items() if name.startswith(prefixes))

    @property
    def atomics(self) -> int:
        """Atomic operations performed by threads."""
        return sum(n for (kind, _), n in self.accesses.items() if kind == "atom")

    @property
    def barriers(self) -> int:
        """Barriers of whole blocks, summed over blocks."""
        return self.count(*BARRIERS) * 32 // self.threads if self.threads else 0

    @property
    def efficiency(self) -> float:
        """Mean share of active threads in the instructions of warps."""
        return self.lanes / (32 * max(self.instructions, 1))

    def coalescing(self, kind: str) -> float:
        """Bytes requested over bytes of the sectors touched, per request; 1 is perfect."""
        return self.bytes[kind] / max(SECTOR * self.sectors[kind], 1)

    def bytes_per_element(self, n: int) -> dict[str, float]:
        """Bytes per element: requested by threads, in sectors of warps' requests, and at DRAM."""
        return {
            "ld": self.bytes["ld"] / n,
            "st": self.bytes["st"] / n,
            "ld sectors": SECTOR * self.sectors["ld"] / n,
            "st sectors": SECTOR * self.sectors["st"] / n,
            "dram read": self.dram_read / n,
            "dram written": self.dram_written / n,
        }

    def report(self, n: int | None = None) -> str:
        """A few lines to read; with a number of elements, also per element."""
        kind_of_launch = "cooperative grid" if self.cooperative else "grid"
        resources = f"{self.registers} registers, {self.spills} spilled, {self.resident} blocks resident"
        out = [
            f"{self.name}: {kind_of_launch} {self.grid} x {self.threads} threads, {resources}",
            f"  {self.instructions} warp instructions in {self.seconds:.2f} s, lanes active {self.efficiency:.1%}",
            f"  barriers {self.barriers}, atomics {self.atomics}",
        ]
        for kind in ("ld", "st", "atom"):
            if self.bytes[kind]:
                widths = ", ".join(f"{w} B x {c}" for (k, w), c in sorted(self.requests.items()) if k == kind)
                out.append(
                    f"  {kind:4} {self.bytes[kind]:>12} bytes, {self.sectors[kind]:>9} sectors "
                    f"(efficiency {self.coalescing(kind):.1%}); warp requests: {widths}"
                )
        out.append(f"  DRAM read {self.dram_read}, written {self.dram_written} bytes")
        if n:
            out.append("  per element: " + ", ".join(f"{k} {v:.2f}" for k, v in self.bytes_per_element(n).items()))
        return "\n".join(out)


class Stats:
    """The launches on a virtual GPU, in order."""

    def __init__(self) -> None:
        self.launches: list[LaunchStats] = []

    @property
    def last(self) -> LaunchStats:
        """The last launch."""
        return self.launches[-1]

    @property
    def total(self) -> LaunchStats:
        """What all launches did together; what describes a single launch is left out, ``barriers`` included."""
        total = LaunchStats(name=f"{len(self.launches)} launches")
        for s in self.launches:
            total.bytes += s.bytes
            total.accesses += s.accesses
            total.requests += s.requests
            total.sectors += s.sectors
            total.executed += [(s.opcodes, 1)]
            total.dram_read += s.dram_read
            total.dram_written += s.dram_written
            total.lanes += s.lanes
            total.seconds += s.seconds
        return total

    def bytes_per_element(self, n: int) -> dict[str, float]:
        """As :meth:`LaunchStats.bytes_per_element`, over all launches."""
        return self.total.bytes_per_element(n)

    def report(self, n: int | None = None) -> str:
        """The launches' reports."""
        return "\n".join(s.report(n) for s in self.launches)

"""The compiled kernels: their time over ways to launch them or, virtually, their memory traffic and resources.

Without ``--virtual``, on a GPU: see ``tuning.py``. With it, all is counted on the virtual GPU.

Every optimizer takes one step in each of these situations: with clipping, where the gradients do not fit the L2 cache,
so that they are read twice, and where they do; with nothing to wait for; and with clipping on many small tensors.

The *streams* are the accesses to gradients, parameters and state: all that grows with the number of parameters. They
are told from the other accesses by their addresses. The others look up where and how in the device table, one word for
a whole program, and are counted apart: no cache is so small that it would not hold what they read.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

import tritonamp
from tritonamp.testing.virtual_gpu import LaunchStats, virtual_gpu
from tritonamp.testing.virtual_gpu.memory import BASE
from tritonamp.testing.virtual_gpu.stats import SECTOR
from tritonamp.testing.virtual_gpu.traffic import Traffic, distinct

from .report import console


class Rule(NamedTuple):
    """An optimizer and its options; how many tensors of state it keeps per parameter."""

    name: str
    make: Any
    options: dict[str, Any]
    states: int


class Situation(NamedTuple):
    """Whether the step clips, the L2 cache (0: none), and the size of the tensors (None: all one)."""

    name: str
    clips: bool
    l2_bytes: int
    numel: int | None = None


RULES = [
    Rule("SGD", tritonamp.SGD, {}, 0),
    Rule("SGD, momentum", tritonamp.SGD, {"momentum": 0.9}, 1),
    Rule("AdamW", tritonamp.AdamW, {}, 2),
    Rule("AdamW, amsgrad", tritonamp.AdamW, {"amsgrad": True}, 3),
]
DTYPES = {  # of gradients and of parameters
    "fp32/fp32": (torch.float32, torch.float32),
    "fp16/fp32": (torch.float16, torch.float32),
    "bf16/bf16": (torch.bfloat16, torch.bfloat16),
    "fp16/fp16": (torch.float16, torch.float16),
}
L2_BYTES = 32 << 20
BEYOND = Situation("clipping, gradients beyond L2", clips=True, l2_bytes=0)
WITHIN = Situation("clipping, gradients within L2", clips=True, l2_bytes=L2_BYTES)
NO_WAIT = Situation("nothing to wait for", clips=False, l2_bytes=0)
SMALL = Situation("clipping, within L2, tensors of 1,000", clips=True, l2_bytes=L2_BYTES, numel=1000)
SITUATIONS = [BEYOND, WITHIN, NO_WAIT, SMALL]
# The columns of the second table.
RESOURCES = ["registers", "blocks per SM", "bytes per load", "bytes per store"]
RESOURCES += ["sector efficiency, loads / stores", "for tensors of 1,000", "barriers per chunk"]


@dataclass
class Streams:
    """What the streams of a launch access, by kind ("ld", "st"): like the counters of ``LaunchStats``."""

    begins: Any
    ends: Any
    accesses: Counter[tuple[str, int]] = field(default_factory=Counter)  # (kind, bytes per thread) -> by threads
    sectors: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Streams:
        """Streams that lie in these tensors."""
        # Traffic is counted at addresses relative to the virtual GPU's base.
        spans = np.array(sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors), np.uint64) - np.uint64(BASE)
        return cls(spans[:, 0], spans[:, 1])

    def note(self, kind: str, width: int, addresses: Any, warps: Any) -> None:
        """Count an access, if it is one of a stream: an instruction accesses streams always or never."""
        i = int(np.searchsorted(self.begins, addresses[0], "right")) - 1
        if i >= 0 and addresses[0] < self.ends[i]:
            self.accesses[kind, width] += len(addresses)
            self.sectors[kind] += len(distinct(addresses >> np.uint64(5) | warps))

    def bytes(self, kind: str) -> int:
        """Bytes that threads ask for."""
        return sum(width * n for (k, width), n in self.accesses.items() if k == kind)

    def efficiency(self, kind: str) -> float:
        """Bytes asked for over bytes of the sectors touched; 1 is perfect."""
        return self.bytes(kind) / (SECTOR * self.sectors[kind])

    def widths(self, kind: str) -> list[int]:
        """Bytes per thread and access that occur, widest first."""
        return sorted({width for k, width in self.accesses if k == kind}, reverse=True)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the launches in this context."""
        original = Traffic.request

        def request(traffic: Traffic, kind: str, width: int, addresses: Any, warps: Any, span: int) -> None:
            if len(addresses):
                self.note(kind, width, addresses, warps)
            original(traffic, kind, width, addresses, warps, span)

        with mock.patch.object(Traffic, "request", request):
            yield


@dataclass(frozen=True)
class Measurement:
    """One step: bytes per parameter at DRAM, the least possible, and what the launch and its streams did."""

    read: float
    written: float
    least_read: int
    least_written: int
    launch: LaunchStats
    streams: Streams

    @property
    def excess(self) -> float:
        """Bytes moved over the least possible, less 1."""
        return (self.read + self.written) / (self.least_read + self.least_written) - 1


def measure(rule: Rule, dtypes: str, situation: Situation, numel: int = 100_000, arch: int = 90) -> Measurement:
    """One step over about ``numel`` elements, the second of its optimizer."""
    grad_dtype, dtype = DTYPES[dtypes]
    size = situation.numel or numel
    params = [make_param(size, grad_dtype, dtype) for _ in range(max(numel // size, 1))]
    options = {"max_norm": 1.0 if situation.clips else None, "skip_nonfinite": situation.clips, **rule.options}
    optimizer = rule.make(params, loss_scale=None, backend="triton", **options)
    with virtual_gpu(arch=arch, auto_register=True, l2_bytes=situation.l2_bytes) as stats:
        optimizer.step()
        grads = [p.grad for p in params if p.grad is not None]
        states = [t for p in params for t in optimizer.state[p].values() if t.shape == p.shape]
        streams = Streams.of([*params, *grads, *states])
        with streams.counting():
            optimizer.step()
    n, launch = size * len(params), stats.last
    # Without a cache every sector asked for moves: those of the streams count, those of the look-ups do not.
    read = launch.dram_read if situation.l2_bytes else SECTOR * streams.sectors["ld"]
    written = launch.dram_written if situation.l2_bytes else SECTOR * streams.sectors["st"]
    times_read = 2 if situation.clips and not situation.l2_bytes else 1
    stored = dtype.itemsize + 4 * rule.states
    return Measurement(read / n, written / n, times_read * grad_dtype.itemsize + stored, stored, launch, streams)


def make_param(numel: int, grad_dtype: torch.dtype, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A random parameter with a random gradient."""
    param = torch.randn(numel, device=device).to(dtype).requires_grad_()
    if grad_dtype != dtype:
        param.grad_dtype = grad_dtype  # type: ignore[attr-defined]
    param.grad = torch.randn(numel, device=device).to(grad_dtype)
    return param


# The report.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``kernel`` takes."""
    parser.add_argument("--virtual", action="store_true", help="count traffic on the virtual GPU")
    parser.add_argument("--arch", type=int, choices=[80, 90, 100], default=90, help="its compute capability")
    parser.add_argument("--markdown", action="store_true", help="print that as Markdown")
    parser.add_argument("--numel", type=int, help="number of elements (default: 100,000 virtual, else 100,000,000)")
    parser.add_argument("--rule", choices=[rule.name for rule in RULES], default="AdamW", help="what is timed")
    parser.add_argument("--dtypes", choices=DTYPES, default="fp32/fp32", help="of gradients and parameters timed")
    parser.add_argument("--out", type=Path, default=Path("build/bench/kernel.json"), help="where times are written")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Count on the virtual GPU, or time on a real one; print."""
    if not args.virtual:
        from . import tuning

        rule = next(rule for rule in RULES if rule.name == args.rule)
        tuning.run(rule, args.dtypes, args.numel or 100_000_000, args.out)
        return
    numel = args.numel or 100_000
    traffic = [["rule", "grads/params", *(s.name for s in SITUATIONS)]]
    resources = [["rule", "grads/params", *RESOURCES]]
    for rule in RULES:
        for dtypes in DTYPES:
            found = {s: measure(rule, dtypes, s, numel, args.arch) for s in SITUATIONS}
            traffic.append([rule.name, dtypes, *map(_bytes, found.values())])
            resources.append([rule.name, dtypes, *_resources(found, numel)])
    where = f"compute capability {args.arch / 10}, {numel:,} parameters"
    title = f"Bytes per parameter at DRAM, read + written, and the least possible ({where})"
    show(title, traffic, args.markdown)
    show(f"The kernel (with clipping; in parentheses with nothing to wait for; {where})", resources, args.markdown)


def _bytes(m: Measurement) -> str:
    return f"{m.read:.2f} + {m.written:.2f} ({m.least_read} + {m.least_written})"


def _resources(found: dict[Situation, Measurement], numel: int) -> list[str]:
    step, apply, small = found[WITHIN], found[NO_WAIT], found[SMALL]
    return [
        f"{step.launch.registers} ({apply.launch.registers})",
        f"{step.launch.blocks_per_sm} ({apply.launch.blocks_per_sm})",
        ", ".join(map(str, step.streams.widths("ld"))),
        ", ".join(map(str, step.streams.widths("st"))),
        _efficiency(step.streams),
        _efficiency(small.streams),
        f"{step.launch.barriers / -(-numel // 2048):.0f} ({apply.launch.barriers / -(-numel // 2048):.0f})",
    ]


def _efficiency(streams: Streams) -> str:
    return " / ".join(f"{streams.efficiency(kind):.1%}" for kind in ("ld", "st"))


def show(title: str, rows: list[list[str]], as_markdown: bool) -> None:
    """Print a table, whose first row is its head."""
    head, *body = rows
    if as_markdown:
        print(f"{title}:\n")
        for row in [head, ["---"] * len(head), *body]:
            print(f"| {' | '.join(row)} |")
        print()
        return
    table = Table(*head, title=title)
    for row in body:
        table.add_row(*row)
    console().print(table)

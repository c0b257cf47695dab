"""The kernel alone over block size, chunk size and programs per multiprocessor: registers, occupancy, time."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from rich.progress import track

from tritonamp.backends import table
from tritonamp.backends import triton as backend

from .kernel import DTYPES, Rule, make_param, show
from .measure import Copy, Samples, timed
from .results import circumstances, replace_file

SPIN = 5_000_000  # cycles that the device is kept busy, for the host to be ahead of it when the kernel starts


class Configuration(NamedTuple):
    """What a launch can be made with.

    Attributes:
        block: elements per program and turn, 4 for each thread.
        chunk: elements per chunk.
        resident: the most programs per multiprocessor.
    """

    block: int
    chunk: int
    resident: int

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Make launches so; of optimizers that have not stepped before."""
        with (
            mock.patch.multiple(backend, BLOCK=self.block, THREADS=self.block // 4, MAX_RESIDENT=self.resident),
            mock.patch.multiple(table, MIN_CHUNK=self.chunk, MAX_CHUNK=self.chunk),
        ):
            yield


CONFIGURATIONS = [
    Configuration(*values) for values in itertools.product((256, 512, 1024), (4096, 16384, 65536), (1, 2, 4, 8))
]


@dataclass(frozen=True)
class Found:
    """A configuration and what came of it. Seconds are medians, without the host's; None on the virtual GPU."""

    block: int
    chunk: int
    resident: int
    warps: int
    registers: int
    spills: int
    programs: int
    seconds: float | None = None
    bandwidth: float | None = None


def measure(
    configuration: Configuration, rule: Rule, dtypes: str, numel: int, device: torch.device, repeat: int = 10
) -> Found:
    """Steps of one tensor, with clipping, on whatever device Triton's driver is of.

    Args:
        configuration: of the launches.
        rule: what is computed.
        dtypes: of gradients and parameters, a key of ``DTYPES``.
        numel: elements of the tensor.
        device: where it is.
        repeat: how many steps are timed, on a GPU.
    """
    params = [make_param(numel, *DTYPES[dtypes], device)]
    backend.step_kernel.device_caches.clear()  # so that the kernel that is compiled now is the only one
    with configuration.applied():
        optimizer = rule.make(params, max_norm=1.0, loss_scale=None, backend="triton", **rule.options)
        for _ in range(2):  # with one program per multiprocessor, then with as many as there is room for
            optimizer.step()
        (compiled,) = (kernel for caches in backend.step_kernel.device_caches.values() for kernel in caches[0].values())
        carrier = optimizer._devices.on(optimizer._device())
        (launch,) = carrier._launches.values()
        programs = min(launch._programs, carrier._workspace.table.n_chunks)
        seconds = _seconds(optimizer, device, repeat) if device.type == "cuda" else None
    grad, param = (dtype.itemsize for dtype in DTYPES[dtypes])
    moved = (2 * grad + 2 * param + 8 * rule.states) * numel
    return Found(
        *configuration,
        warps=compiled.metadata.num_warps,
        registers=compiled.n_regs,
        spills=compiled.n_spills,
        programs=programs,
        seconds=seconds,
        bandwidth=None if seconds is None else moved / seconds,
    )


def _seconds(optimizer: Any, device: torch.device, repeat: int) -> float:
    times = []
    for _ in range(repeat):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN)
        before.record()
        optimizer.step()
        after.record()
        torch.cuda.synchronize(device)
        times.append(before.elapsed_time(after) * 1e-3)
    return statistics.median(times)


def run(rule: Rule, dtypes: str, numel: int, out: Path) -> None:
    """Measure every configuration on the GPU, print them, fastest first, and write them as JSON.

    Raises:
        SystemExit: where there is no GPU.
    """
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: --virtual counts the kernel's traffic without one")
    device, copied = torch.device("cuda"), Samples()
    copy = Copy(device)
    for _ in range(10):
        timed(device, copy, copied)
    ceiling = copy.bytes / statistics.median(copied.total)
    found: list[Found] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for configuration in track(CONFIGURATIONS, "configurations"):
        found.append(measure(configuration, rule, dtypes, numel, device))
        of = {**circumstances(device), "rule": rule.name, "dtypes": dtypes, "numel": numel, "copy_bandwidth": ceiling}
        replace_file(out, json.dumps({"of": of, "rows": [asdict(each) for each in found]}, indent=1))
    show(f"{rule.name}, {dtypes}, {numel:,} parameters, with clipping", _rows(found, ceiling), as_markdown=False)


def _rows(found: Sequence[Found], ceiling: float) -> list[list[str]]:
    rows = [["block", "chunk", "most per SM", "warps", "registers", "spills", "programs", "ms", "GB/s", "of a copy"]]
    for each in sorted(found, key=lambda each: each.seconds or 0.0):
        numbers = [each.block, each.chunk, each.resident, each.warps, each.registers, each.spills, each.programs]
        assert each.seconds is not None
        assert each.bandwidth is not None
        times = [f"{each.seconds * 1e3:.3f}", f"{each.bandwidth / 1e9:.0f}", f"{each.bandwidth / ceiling:.1%}"]
        rows.append([*map(str, numbers), *times])
    return rows

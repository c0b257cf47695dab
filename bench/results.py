"""Results: rows of numbers with where they come from, written as they are found."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One contender on one workload. Times are seconds, sizes bytes; None is what is not known or does not apply.

    Attributes:
        wrong: what was wrong with its steps; there is no number then.
        bytes_per_parameter: what a step moves, read and written, by formula.
        copy_seconds, copy_bytes: median time of a copy in the same rounds, and what it moves, read and written.
        samples, host_samples, copy_samples: all times, in the order in which they were taken.
    """

    workload: str
    tensors: int
    parameters: int
    rule: str
    grads: str
    contender: str
    wrong: str | None = None
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    host_median: float | None = None
    operators: int | None = None
    launches: int | None = None
    copies: int | None = None
    syncs: int | None = None
    peak_bytes: int | None = None
    bytes_per_parameter: int | None = None
    copy_seconds: float | None = None
    copy_bytes: int | None = None
    samples: list[float] = field(default_factory=list)
    host_samples: list[float] = field(default_factory=list)
    copy_samples: list[float] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int, str, str, str]:
        """What it is a measurement of."""
        return self.workload, self.parameters, self.rule, self.grads, self.contender

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second that it moves."""
        if self.bytes_per_parameter is None or self.median is None:
            return None
        return self.bytes_per_parameter * self.parameters / self.median

    @property
    def share(self) -> float | None:
        """Its bandwidth over the copy's: above 1 only where caches help."""
        if self.bandwidth is None or self.copy_seconds is None or self.copy_bytes is None:
            return None
        return self.bandwidth / (self.copy_bytes / self.copy_seconds)


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return statistics.median(samples), fifths[0], fifths[3]


def circumstances(device: torch.device) -> dict[str, Any]:
    """Where results come from: commit, versions, devices."""
    packages = ("torch", "triton", "numpy")
    return {
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv[1:],
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside of a checkout."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Results:
    """Rows and where they come from, kept in a folder as ``results.json`` and ``results.csv``."""

    def __init__(self, folder: Path, of: dict[str, Any], rows: Iterable[Row] = ()) -> None:
        self.folder, self.of, self.rows = folder, of, list(rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, and write all that there are: an interrupted run leaves what it has found."""
        self.rows += rows
        self.folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"of": self.of, "rows": [asdict(row) for row in self.rows]}, indent=1)
        replace_file(self.folder / "results.json", content)
        names = [f.name for f in fields(Row) if not f.name.endswith("samples")]
        with (self.folder / "results.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow([*names, "bandwidth", "share"])
            table.writerows([*(getattr(row, name) for name in names), row.bandwidth, row.share] for row in self.rows)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read ``results.json``, named itself or by its folder.

        Raises:
            ValueError: for a file that is none.
        """
        path = path / "results.json" if path.is_dir() else path
        content = json.loads(path.read_text())
        try:
            return cls(path.parent, content["of"], [Row(**row) for row in content["rows"]])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no results of `python -m bench run`: {error}") from error


def replace_file(path: Path, content: str) -> None:
    """Write a file so that it is never half written."""
    part = path.with_suffix(".part")
    part.write_text(content)
    part.replace(path)

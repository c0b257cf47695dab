"""What is meant for a GPU: the same code, as far as it goes, on the virtual one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_package  # noqa: F401 - makes bench importable
import pytest
import torch

import tritonamp
from bench import gpu_check, tuning
from bench.gpu_check import CHECKS, Setting
from bench.kernel import RULES
from bench.tuning import CONFIGURATIONS, Configuration
from tritonamp import plan
from tritonamp.testing.virtual_gpu import virtual_gpu

pytestmark = pytest.mark.compiled

SETTING = Setting(torch.device("cpu"), large=6000, steps=20)
ROOT = Path(__file__).parents[1]
ADAMW = next(rule for rule in RULES if rule.name == "AdamW")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few shapes and dtypes: each is some time on the virtual GPU."""
    monkeypatch.setattr(gpu_check, "SHAPES", [(7,), (0,), (3, 171), (1030,)])
    monkeypatch.setattr(gpu_check, "DTYPES", gpu_check.DTYPES[:2])


@pytest.mark.parametrize("name", [name for name, (_, needs_cuda) in CHECKS.items() if not needs_cuda])
def test_checks_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.run(SETTING, [name]) == 0
    assert capsys.readouterr().out.startswith(f"ok    {name} (")


def test_checks_that_need_cuda_are_skipped_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.run(SETTING, ["graph", "offsets"]) == 0
    assert capsys.readouterr().out == "skip  graph: needs CUDA\nskip  offsets: needs CUDA\n"


def test_the_check_of_two_devices_passes_on_two_that_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: dict[int, int] = {}

    def device_of(param: torch.Tensor) -> torch.device:
        return torch.device("cpu", numbers.setdefault(id(param), len(numbers)) % 2)

    monkeypatch.setattr(plan, "device_of", device_of)
    gpu_check.steps_on_two_devices_equal_the_oracle(SETTING)


def wrong_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    hyper = tritonamp.AdamW._hyper
    monkeypatch.setattr(tritonamp.AdamW, "_hyper", lambda self, group: hyper(self, {**group, "weight_decay": 0.5}))


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_check.next_scale
    monkeypatch.setattr(gpu_check, "next_scale", lambda state, found_inf: right(right(state, found_inf), False))


def other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)


@pytest.mark.parametrize(
    ("name", "break_it", "message"),
    [
        ("oracle", wrong_decay, "elements are out of bounds"),
        ("large", wrong_decay, "elements are out of bounds"),
        ("scale", wrong_scale, "(found, expected)"),
        ("repeat", other_bits, "second run: tensor 0 differs in"),
    ],
)
def test_checks_stop_at_the_first_wrong_result(
    name: str, break_it: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it(monkeypatch)
    assert gpu_check.run(SETTING, [name, "graph"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"WRONG {name}: AssertionError: ")
    assert message in out
    assert "graph" not in out


def shell(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``bench/gpu.sh`` on the CPU, with a Python that does what the test says."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "PYTHON $*"\n' + variables.pop("does", ""))
    python.chmod(0o755)
    env = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": str(python), "DEVICE": "cpu", **variables}
    return subprocess.run([ROOT / "bench" / "gpu.sh"], env=env, capture_output=True, text=True, check=False)


def test_the_script_checks_then_measures_and_ends_with_a_summary(tmp_path: Path) -> None:
    done = shell(tmp_path, WORKLOADS="resnet50", ROUNDS="3", SWEEP="1e3")
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [line for line in done.stdout.splitlines() if line.startswith("PYTHON")]
    out = tmp_path / "out"
    assert calls == [
        "PYTHON -m bench.gpu_check --device cpu",
        f"PYTHON -m bench run --device cpu --workloads resnet50 --sweep 1e3 --rounds 3 --out {out}",
    ]
    assert done.stdout.rstrip().endswith("benchmark: done")
    assert "checks: ok" in (out / "log.txt").read_text()


@pytest.mark.parametrize(
    ("does", "status", "last"),
    [
        ('case "$*" in *gpu_check*) exit 1;; esac', 1, "checks: WRONG, see above (status 1)"),
        ('case "$*" in *"bench run"*) exit 1;; esac', 1, "benchmark: status 1, see above"),
        ('case "$*" in *"bench run"*) exit 124;; esac', 0, "benchmark: cut short; what it had is in"),
    ],
)
def test_the_script_stops_at_what_is_wrong_and_not_at_what_was_cut_short(
    does: str, status: int, last: str, tmp_path: Path
) -> None:
    done = shell(tmp_path, does=does)
    assert done.returncode == status
    assert last in done.stdout.splitlines()[-1]
    assert ("bench run" in done.stdout) == ("gpu_check" not in does)


def test_the_script_says_what_it_has_when_it_is_interrupted(tmp_path: Path) -> None:
    done = shell(tmp_path, does='case "$*" in *"bench run"*) kill -TERM $(ps -o ppid= -p $PPID); exec sleep 100;; esac')
    assert done.returncode == 130
    assert done.stdout.index("bench run") < done.stdout.index("Summary") < done.stdout.index("checks: ok")


def test_the_script_asks_for_a_folder() -> None:
    env = {key: value for key, value in os.environ.items() if key != "OUT"}
    done = subprocess.run([ROOT / "bench" / "gpu.sh"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "OUT: must name the folder for the results" in done.stderr


def test_the_link_tree_of_the_script_imports_the_kernels(tmp_path: Path) -> None:
    program = f"exec {sys.executable} -c 'import tritonamp.kernels.step as step; print(step.__file__)'"
    done = shell(tmp_path, does=f'case "$*" in *gpu_check*) {program};; esac')
    path = next(Path(line) for line in done.stdout.splitlines() if line.endswith("/tritonamp/kernels/step.py"))
    assert not path.is_relative_to(ROOT)
    assert not path.exists()  # the tree is removed at the end


@pytest.mark.parametrize("configuration", [Configuration(256, 4096, 8), Configuration(1024, 8192, 1)])
def test_a_configuration_is_what_is_launched(configuration: Configuration) -> None:
    with virtual_gpu(sms=2, auto_register=True, traffic=False) as stats:
        found = tuning.measure(configuration, ADAMW, "fp32/fp32", 40_000, torch.device("cpu"))
    assert (found.block, found.chunk, found.resident) == configuration
    last = stats.last
    assert (found.warps, found.programs) == (configuration.block // 128, last.grid[0])
    assert (found.registers, found.spills, last.threads) == (last.registers, last.spills, configuration.block // 4)
    chunks = -(-40_000 // configuration.chunk)
    assert found.programs == min(2 * min(last.blocks_per_sm, configuration.resident), chunks)
    assert found.seconds is None


def test_the_defaults_are_back_after_a_configuration() -> None:
    from tritonamp.backends import table
    from tritonamp.backends import triton as backend

    before = (backend.BLOCK, backend.THREADS, backend.MAX_RESIDENT, table.MIN_CHUNK, table.MAX_CHUNK)
    with Configuration(256, 4096, 1).applied():
        assert (backend.BLOCK, backend.THREADS, backend.MAX_RESIDENT, table.MIN_CHUNK) == (256, 64, 1, 4096)
    assert before == (backend.BLOCK, backend.THREADS, backend.MAX_RESIDENT, table.MIN_CHUNK, table.MAX_CHUNK)
    assert any(c.block == backend.BLOCK and c.resident == backend.MAX_RESIDENT for c in CONFIGURATIONS)


def test_times_are_refused_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--virtual counts the kernel's traffic without one"):
        tuning.run(ADAMW, "fp32/fp32", 1000, tmp_path / "kernel.json")


def test_configurations_are_written_and_printed_fastest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a GPU's part played: its presence, its copy and its clock."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning, "Copy", lambda device: type("Copy", (), {"bytes": 1000})())
    monkeypatch.setattr(tuning, "timed", lambda device, call, samples: samples.total.append(1.0))
    monkeypatch.setattr(tuning, "circumstances", lambda device: {"commit": "abc"})
    monkeypatch.setattr(tuning, "CONFIGURATIONS", [Configuration(512, 4096, n) for n in (1, 2)])

    def measure(configuration: Configuration, *args: Any) -> tuning.Found:
        seconds = 1.0 / configuration.resident
        return tuning.Found(*configuration, 4, 74, 0, 8, seconds, 500.0 / seconds)

    monkeypatch.setattr(tuning, "measure", measure)
    tuning.run(ADAMW, "fp32/fp32", 1000, tmp_path / "kernel.json")
    written = json.loads((tmp_path / "kernel.json").read_text())
    assert [row["resident"] for row in written["rows"]] == [1, 2]
    assert written["of"] == {
        "commit": "abc", "rule": "AdamW", "dtypes": "fp32/fp32", "numel": 1000, "copy_bandwidth": 1000.0,
    }  # fmt: skip
    out = capsys.readouterr().out
    assert out.index("100.0%") < out.index("50.0%")

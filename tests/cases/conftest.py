"""The cases run on every backend, and where there is a GPU also on that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import IS_INTERPRETED, RUNNERS, Runner, choose

HAS_GPU = torch.cuda.is_available() and not IS_INTERPRETED


class GpuRunner(Runner):
    """Steps on a GPU: tensors are made there."""

    @contextlib.contextmanager
    def running(self, **options: Any) -> Iterator[None]:
        with torch.device("cuda"):
            yield None

    def __str__(self) -> str:
        return f"gpu-{self.name}"


ALL_RUNNERS = [*RUNNERS, GpuRunner("triton"), GpuRunner("torch")] if HAS_GPU else RUNNERS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip("needs a CUDA device and compiled kernels"))


@pytest.fixture(params=ALL_RUNNERS, ids=str)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """Every backend that this process can run."""
    runner = choose(request, monkeypatch)
    with runner.running():
        yield runner


@pytest.fixture(params=[runner for runner in ALL_RUNNERS if runner.backend == "triton"], ids=str)
def triton_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """Every way to run the kernels that this process has."""
    runner = choose(request, monkeypatch)
    with runner.running():
        yield runner

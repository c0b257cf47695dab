"""Where the tests run: the kernels interpreted, the kernels compiled, and plain torch.

``TRITON_INTERPRET`` is read when a kernel is decorated, so the suite runs in two processes: with it, the ``runner``
fixture is the concurrent interpreter; without it, the torch backend and the compiled kernels on a virtual GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch

from tritonamp.backends import table
from tritonamp.testing import concurrent_interpreter

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# How many examples a property test draws. An example is steps of an interpreter: no deadline is of use.
hypothesis.settings.register_profile("dev", deadline=None, max_examples=15)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=15, derandomize=True, report_multiple_bugs=False)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=3000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@dataclass(frozen=True)
class Runner:
    """One way to carry out steps.

    Attributes:
        name: ``"torch"``, ``"interpreted"`` or ``"compiled"``.
        programs: how many programs the kernels run on at first.
    """

    name: str
    programs: int = 1

    @property
    def backend(self) -> str:
        """What to pass as ``backend=``."""
        return "torch" if self.name == "torch" else "triton"

    @contextlib.contextmanager
    def running(self, **options: Any) -> Iterator[Any]:
        """Where launches work; yields what counts them (None for torch)."""
        if self.name == "torch":
            yield None
        elif self.name == "interpreted":
            with concurrent_interpreter(self.programs, **options) as launches:
                yield launches
        else:
            from tritonamp.testing.virtual_gpu import virtual_gpu

            # On the virtual GPU a grid starts with one program per multiprocessor.
            options = {"race": True, "auto_register": True, "traffic": False, **options}
            with virtual_gpu(sms=self.programs, **options) as stats:
                yield stats

    def __str__(self) -> str:
        return self.name if self.name == "torch" else f"{self.name}-{self.programs}"


RUNNERS = [Runner("interpreted", 3)] if IS_INTERPRETED else [Runner("torch"), Runner("compiled", 3)]
KERNEL_RUNNERS = [Runner("interpreted" if IS_INTERPRETED else "compiled", programs) for programs in (1, 2, 5)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what the other process runs: ``interpreted`` or ``compiled`` tests, and tests of neither."""
    for item in items:
        if item.get_closest_marker("compiled" if IS_INTERPRETED else "interpreted"):
            item.add_marker(
                pytest.mark.skip("runs with TRITON_INTERPRET unset" if IS_INTERPRETED else "needs TRITON_INTERPRET=1")
            )


@pytest.fixture(params=RUNNERS, ids=str)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """Every backend that this process can run, with chunks so small that small tensors make several."""
    monkeypatch.setattr(table, "MIN_CHUNK", 512)
    with request.param.running():
        yield request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)

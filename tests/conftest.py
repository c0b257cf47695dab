"""Where the tests run: the kernels interpreted, the kernels compiled, and plain torch.

``TRITON_INTERPRET`` is read when a kernel is decorated, so the suite runs in two processes: with it, the ``runner``
fixture is the concurrent interpreter; without it, the torch backend and the compiled kernels on a virtual GPU.
"""

from __future__ import annotations

import contextlib
import os
import zlib
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
PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
hypothesis.settings.load_profile(PROFILE)

ARCHS = (80, 90, 100)  # compute capabilities
SEEDS = (None, 1, 2, 3)  # of the interleaving; None: in turn


@dataclass(frozen=True)
class Runner:
    """One way to carry out steps.

    Attributes:
        name: ``"torch"``, ``"interpreted"`` or ``"compiled"``.
        programs: how many programs the kernels run on at first; None: up to :meth:`chosen`.
        arch: compute capability that they are compiled for; None: up to :meth:`chosen`.
        seed: of the programs' interleaving.
    """

    name: str
    programs: int | None = None
    arch: int | None = None
    seed: int | None = None

    @property
    def backend(self) -> str:
        """What to pass as ``backend=``."""
        return "torch" if self.name == "torch" else "triton"

    def chosen(self, test: str) -> Runner:
        """With what is open chosen by the name of a test: always alike for one test, all there is over many."""
        if self.name not in ("interpreted", "compiled"):
            return self
        number = zlib.crc32(test.encode())
        number, programs = divmod(number, 8)
        number, seed = divmod(number, len(SEEDS))
        arch = self.arch or ARCHS[number % len(ARCHS)] if self.name == "compiled" else None
        return Runner(self.name, self.programs or 1 + programs, arch, SEEDS[seed])

    @contextlib.contextmanager
    def running(self, **options: Any) -> Iterator[Any]:
        """Where launches work; yields what counts them (None for torch)."""
        if self.name == "torch":
            yield None
            return
        assert self.programs is not None
        options = {"seed": self.seed, **options}
        if self.name == "interpreted":
            with concurrent_interpreter(self.programs, **options) as launches:
                yield launches
        else:
            from tritonamp.testing.virtual_gpu import virtual_gpu

            assert self.arch is not None
            # On the virtual GPU a grid starts with one program per multiprocessor.
            options = {"race": True, "auto_register": True, "traffic": False, **options}
            with virtual_gpu(self.arch, self.programs, **options) as stats:
                yield stats

    def __str__(self) -> str:
        return self.name if self.arch is None else f"{self.name}-sm{self.arch}"


# A test takes one architecture; with the nightly profile all of them in turn.
COMPILED = [Runner("compiled", arch=arch) for arch in ARCHS] if PROFILE == "nightly" else [Runner("compiled")]
KERNEL_RUNNERS = [Runner("interpreted")] if IS_INTERPRETED else COMPILED
RUNNERS = KERNEL_RUNNERS if IS_INTERPRETED else [Runner("torch"), *COMPILED]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what the other process runs: ``interpreted`` or ``compiled`` tests, and tests of neither."""
    for item in items:
        if item.get_closest_marker("compiled" if IS_INTERPRETED else "interpreted"):
            item.add_marker(
                pytest.mark.skip("runs with TRITON_INTERPRET unset" if IS_INTERPRETED else "needs TRITON_INTERPRET=1")
            )


def choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """The runner of a fixture's parameter as chosen for the test, which says so if it fails.

    Chunks are so small that small tensors make several.
    """
    monkeypatch.setattr(table, "MIN_CHUNK", 512)
    runner: Runner = request.param.chosen(request.node.nodeid)
    request.node.add_report_section("setup", "runner", repr(runner))
    return runner


@pytest.fixture(params=RUNNERS, ids=str)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """Every backend that this process can run, ready for steps."""
    runner = choose(request, monkeypatch)
    with runner.running():
        yield runner


@pytest.fixture(params=KERNEL_RUNNERS, ids=str)
def kernel_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Every way to run the kernels that this process has."""
    return choose(request, monkeypatch)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)

"""The suite as a whole runs its kernels everywhere: each test has a configuration of its own, and says which."""

from __future__ import annotations

import itertools

import pytest
from conftest import ARCHS, SEEDS, Runner

NAMES = [f"tests/test_step.py::test_{i}" for i in range(1000)]


def test_the_tests_are_spread_over_all_configurations() -> None:
    chosen = [Runner("compiled").chosen(name) for name in NAMES]
    reached = {(runner.programs, runner.arch, runner.seed) for runner in chosen}
    assert reached == set(itertools.product(range(1, 9), ARCHS, SEEDS))
    assert chosen == [Runner("compiled").chosen(name) for name in NAMES]


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_fixed_stays(arch: int) -> None:
    runner = Runner("compiled", programs=3, arch=arch)
    assert {(r.programs, r.arch) for r in map(runner.chosen, NAMES)} == {(3, arch)}
    assert Runner("torch").chosen(NAMES[0]) == Runner("torch")


def test_a_failure_says_where_it_was(kernel_runner: Runner, request: pytest.FixtureRequest) -> None:
    assert ("setup", "runner", repr(kernel_runner)) in request.node._report_sections

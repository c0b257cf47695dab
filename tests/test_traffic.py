"""What a step moves: everything once, gradients twice only where a cache cannot hold them; in whole sectors."""

from __future__ import annotations

import importlib
from typing import Any

import bench_package  # noqa: F401 - makes bench importable
import pytest

pytestmark = pytest.mark.compiled

RULES = ["SGD", "SGD, momentum", "AdamW", "AdamW, amsgrad"]
DTYPES = ["fp32/fp32", "fp16/fp32", "bf16/bf16", "fp16/fp16"]  # of gradients and of parameters
SITUATIONS = ["BEYOND", "WITHIN", "NO_WAIT", "SMALL"]


@pytest.fixture(scope="module")
def bench() -> Any:
    """``bench/kernel.py``, which is not installed."""
    return importlib.import_module("bench.kernel")


@pytest.fixture(scope="module")
def measured(bench: Any) -> Any:
    rules = {rule.name: rule for rule in bench.RULES}
    found: dict[tuple[str, str, str], Any] = {}

    def measure(rule: str, dtypes: str, situation: str) -> Any:
        key = rule, dtypes, situation
        if key not in found:
            found[key] = bench.measure(rules[rule], dtypes, getattr(bench, situation))
        return found[key]

    return measure


@pytest.mark.parametrize("situation", SITUATIONS[:3])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_moves_the_least_possible(measured: Any, rule: str, dtypes: str, situation: str) -> None:
    step = measured(rule, dtypes, situation)
    # No less either: then something would not have been counted.
    assert step.read == pytest.approx(step.least_read, rel=0.02)
    assert step.written == pytest.approx(step.least_written, rel=0.02)


def test_the_least_possible_of_adamw(measured: Any) -> None:
    """In bytes per parameter: gradient, parameter, two moments; all but the gradient are written as well."""
    least = {
        (dtypes, situation): step.least_read + step.least_written
        for dtypes in DTYPES[:2]
        for situation in SITUATIONS[:3]
        for step in [measured("AdamW", dtypes, situation)]
    }
    assert list(least.values()) == [32, 28, 28, 28, 26, 26]


def test_gradients_read_last_are_still_in_the_cache(bench: Any) -> None:
    """SGD updates in the opposite order until what it reads besides (8 bytes in all) has pushed the gradients out.

    In the order of reading it would find none: each would be gone just before its turn.
    """
    l2_bytes, numel = 256 << 10, 100_000  # the gradients take 400,000 bytes
    step = bench.measure(bench.RULES[0], "fp32/fp32", bench.BEYOND._replace(l2_bytes=l2_bytes), numel)
    found = (12 - step.read) * numel
    assert found >= 0.75 * l2_bytes / 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_sectors_are_used_whole(measured: Any, rule: str, dtypes: str) -> None:
    """In one large tensor and in tensors of 1,000 elements, which end within a sector."""
    for situation in SITUATIONS:
        streams = measured(rule, dtypes, situation).streams
        assert streams.efficiency("ld") >= 0.95 and streams.efficiency("st") >= 0.95


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_streams_move_as_wide_as_possible(bench: Any, measured: Any, rule: str, dtypes: str) -> None:
    """16 bytes per thread; 8 where a half-precision stream goes along with float32 state, 4 elements per thread."""
    grad, param = (dtype.itemsize for dtype in bench.DTYPES[dtypes])
    for situation in SITUATIONS:
        step = measured(rule, dtypes, situation)
        states = [4] * next(r.states for r in bench.RULES if r.name == rule)
        loads, stores = {4 * size for size in (grad, param, *states)}, {4 * size for size in (param, *states)}
        if situation != "NO_WAIT":
            loads.add(16)  # phase 1 reads whole vectors, whatever the dtype
        assert set(step.streams.widths("ld")) == loads
        assert set(step.streams.widths("st")) == stores


@pytest.mark.parametrize("rule", RULES)
def test_look_ups_are_few(measured: Any, rule: str) -> None:
    """What is read and written besides the streams, per parameter, where the table is in the cache."""
    step = measured(rule, "fp32/fp32", "SMALL")
    assert step.excess < 0.02


@pytest.mark.parametrize("arch", [80, 100])
def test_other_architectures(bench: Any, arch: int) -> None:
    rule = next(rule for rule in bench.RULES if rule.name == "AdamW")
    for dtypes in ("fp32/fp32", "bf16/bf16"):
        step = bench.measure(rule, dtypes, bench.WITHIN, 20_000, arch)
        assert abs(step.excess) < 0.02
        assert step.streams.efficiency("ld") >= 0.95 and step.streams.efficiency("st") >= 0.95


@pytest.mark.parametrize(
    ("options", "read", "written"),
    [
        ({"master_weights": True}, 2 * 2 + 3 * 4, 2 + 3 * 4),  # the parameter is not read: the copy is the truth
        ({"rounding": "stochastic"}, 2 * 2 + 2 + 2 * 4, 2 + 2 * 4),  # random numbers move nothing
    ],
    ids=["master", "stochastic"],
)
def test_ways_to_keep_a_parameter_move_the_least_possible(
    bench: Any, options: dict[str, Any], read: int, written: int
) -> None:
    """AdamW on bfloat16, gradients read twice."""
    adamw = next(rule for rule in bench.RULES if rule.name == "AdamW")
    step = bench.measure(adamw._replace(options=options), "bf16/bf16", bench.BEYOND)
    assert step.read == pytest.approx(read, rel=0.02)
    assert step.written == pytest.approx(written, rel=0.02)
    assert step.streams.efficiency("ld") >= 0.95 and step.streams.efficiency("st") >= 0.95

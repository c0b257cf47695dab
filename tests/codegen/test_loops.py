"""The loops over elements run without waiting for other threads."""

from __future__ import annotations

import pytest
from codegen.compile import MIXES, compiled, grad_kinds

pytestmark = pytest.mark.compiled

TARGETS = ["sm80", "sm90", "sm100", "gfx942"]


@pytest.mark.parametrize("mix", MIXES)
def test_the_update_exchanges_nothing(mix: str) -> None:
    assert exchanging_loops("apply", mix, "sm90") == 0


@pytest.mark.parametrize("target", TARGETS)
def test_sums_are_exchanged_once_per_chunk(target: str) -> None:
    """In the loop that looks at a chunk, at most twice: one for each dtype of gradients; and while waiting."""
    kinds = len(grad_kinds(MIXES["mixed"][1]))
    assert exchanging_loops("statistics", "mixed", target) == kinds
    assert exchanging_loops("apply", "mixed", target) == 0
    assert exchanging_loops("step", "mixed", target) == kinds + 1


def exchanging_loops(kernel: str, mix: str, target: str) -> int:
    """The number of loops that exchange something themselves, not in a loop inside of them."""
    return sum(any(i.is_exchange for i in loop.own) for loop in compiled(kernel, mix, target).listing.loops)

"""The grid barrier in the compiled kernels: as much ordering as needed, and no work while waiting."""

from __future__ import annotations

import re

import pytest
from codegen.compile import Compiled, Instruction, compiled

pytestmark = pytest.mark.compiled

NVIDIA = ["sm80", "sm90", "sm100"]


def synchronising(kernel: Compiled) -> list[str]:
    """The instructions that order memory or are atomic, in the order of the listing."""
    pattern = r"atom|red\b|fence|membar|.*\b(acquire|release|acq_rel)\b|global_atomic|buffer_(wbl2|inv)"
    return [i.opcode for i in kernel.listing.instructions if re.match(pattern, i.opcode)]


def is_waiting(instruction: Instruction) -> bool:
    return "acquire" in instruction.opcode or instruction.opcode == "buffer_inv"


@pytest.mark.parametrize("target", NVIDIA)
def test_one_release_one_acquire_and_the_exit(target: str) -> None:
    exit_ = ["atom.global.gpu.acq_rel.add.u32"]
    barrier = ["atom.global.gpu.release.add.u32", "ld.global.gpu.acquire.b32"]
    assert synchronising(compiled("step", "adam_f32_f32", target)) == barrier + exit_
    assert synchronising(compiled("apply", "mixed", "sm90")) == exit_
    assert synchronising(compiled("statistics", "mixed", "sm90")) == []


def test_one_release_one_acquire_and_the_exit_on_amd() -> None:
    """Write back before the arrival, invalidate while waiting, both at the exit."""
    once = ["buffer_wbl2", "global_atomic_add", "buffer_inv"]
    assert synchronising(compiled("step", "adam_f32_f32", "gfx942")) == once + once
    assert synchronising(compiled("apply", "mixed", "gfx942")) == once
    assert synchronising(compiled("statistics", "mixed", "gfx942")) == []


@pytest.mark.parametrize("target", [*NVIDIA, "gfx942"])
def test_nothing_but_the_counter_is_read_while_waiting(target: str) -> None:
    loop = compiled("step", "adam_f32_f32", target).listing.loop_with(is_waiting)
    assert loop.accesses == {("load", 4): 1}
    assert len(loop.instructions) <= 24


@pytest.mark.parametrize("target", NVIDIA)
def test_partials_are_read_past_the_first_level_cache(target: str) -> None:
    """Only L2 is sure to hold what other multiprocessors have written."""
    opcodes = [i.opcode for i in compiled("step", "adam_f32_f32", target).listing.instructions]
    assert opcodes.count("ld.global.cg.b64") == 4  # 512 partials at a time

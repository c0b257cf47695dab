"""The compiled arithmetic is the one of the rules: every operation correctly rounded, none merged, subnormals kept."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from codegen.compile import MIXES, compiled
from tritonamp.kernels import rules
from tritonamp.kernels.norm import UNROLL

pytestmark = pytest.mark.compiled

CASES = [*[(mix, "sm90") for mix in MIXES], ("mixed", "sm80"), ("mixed", "sm100")]


def opcodes_of(mix: str, target: str) -> Counter[str]:
    return Counter(instruction.opcode for instruction in compiled("step", mix, target).listing.instructions)


def exponentials(mix: str) -> int:
    """How often a kernel calls ``exp``, on doubles: for each variant and beta."""
    rule, variants = MIXES[mix]
    return 2 * len(variants) if rule is rules.ADAM else 0


@pytest.mark.parametrize(("mix", "target"), CASES)
def test_every_operation_rounds_to_nearest(mix: str, target: str) -> None:
    """And says so: what is spelt ``.rn`` is not contracted by any later stage."""
    operation = r"(add|sub|mul|div|rcp|sqrt|fma|mad)\b.*\.b?f\d\d(x2)?"
    found = {op for op in opcodes_of(mix, target) if re.fullmatch(operation, op)}
    assert "add.rn.f64" in found
    assert {op for op in found if not re.fullmatch(r"\w+\.rn\.(f32|f32x2|f64)", op)} == set()


@pytest.mark.parametrize(("mix", "target"), CASES)
def test_nothing_is_approximate_or_flushed(mix: str, target: str) -> None:
    opcodes = opcodes_of(mix, target)
    assert [op for op in opcodes if re.search(r"approx|full|ex2|lg2|rsqrt|sin|cos|tanh", op)] == []
    # `exp` looks at the upper half of a double as if that were a float, to compare it.
    flushing = {op: n for op, n in opcodes.items() if ".ftz" in op}
    assert flushing in ({}, {"abs.ftz.f32": exponentials(mix)})


@pytest.mark.parametrize(("mix", "target"), CASES)
def test_nothing_is_contracted(mix: str, target: str) -> None:
    """No fused multiply-add, but those that ``exp`` is made of."""
    opcodes = opcodes_of(mix, target)
    fused = {op: n for op, n in opcodes.items() if re.fullmatch(r"(fma|mad)\b.*\.b?f\d\d(x2)?", op)}
    assert fused in ({}, {"fma.rn.f64": 14 * exponentials(mix)})


@pytest.mark.parametrize("mix", ["adam_f32_f32", "amsgrad", "adam_bf16_bf16", "adam_f64", "mixed"])
def test_two_divisions_and_one_root_per_element(mix: str) -> None:
    opcodes = opcodes_of(mix, "sm90")
    in_float32 = sum(variant[2].primitive_bitwidth == 32 for variant in MIXES[mix][1])
    elements = in_float32 * (4 + 1)  # of the wide loop and of the narrow
    assert opcodes["div.rn.f32"] == 2 * elements
    assert opcodes["sqrt.rn.f32"] == elements


def test_amd_keeps_subnormals_and_contracts_nothing() -> None:
    kernel = compiled("step", "adam_f32_f32", "gfx942")
    assert re.search(r"\.amdhsa_float_denorm_mode_32\s+3\b", kernel.text)
    # Divisions and roots are made of fused operations there. The sum of squares has neither.
    sums = [loop for loop in kernel.listing.loops if loop.accesses == {("load", 16): UNROLL.value}]
    opcodes = {instruction.opcode for loop in sums for instruction in loop.instructions}
    assert any(re.match(r"v_(pk_)?mul_f32", op) for op in opcodes)
    assert [op for op in opcodes if re.match(r"v_(pk_)?(fma|fmac|mad|mac)_(mix_)?f", op)] == []

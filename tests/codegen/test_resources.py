"""Registers, spills and shared memory of the compiled kernels: how many programs a multiprocessor holds."""

from __future__ import annotations

import pytest
from codegen.compile import CASES, compiled

pytestmark = pytest.mark.compiled

# Of 65536 that a multiprocessor of NVIDIA's has for programs of 128 threads, of 131072 that one of AMD's has.
MAX_REGISTERS = {True: 96, False: 128}
FOR_RANDOM_NUMBERS = 8
# Combining the numbers of the warps, of one float64 and one int32 each.
MAX_SHARED = 64


@pytest.mark.parametrize(("kernel", "mix", "target"), CASES)
def test_everything_stays_in_registers(kernel: str, mix: str, target: str) -> None:
    is_nvidia, resources = compiled(kernel, mix, target).is_nvidia, compiled(kernel, mix, target).resources
    assert resources.spills == 0
    assert resources.registers <= MAX_REGISTERS[is_nvidia] + FOR_RANDOM_NUMBERS * ("stochastic" in mix)
    assert resources.shared <= MAX_SHARED

"""How the compiled kernels read and write global memory: 16 bytes at once, and nothing twice."""

from __future__ import annotations

from collections import Counter

import pytest
from codegen.compile import CASES, MASTER, MIXES, Accesses, Dtype, Variant, compiled, grad_kinds
from tritonamp.kernels.norm import UNROLL

pytestmark = pytest.mark.compiled


def size(dtype: Dtype) -> int:
    return int(dtype.primitive_bitwidth) // 8


def once(variant: Variant, elements: int) -> Accesses:
    """One load and one store of everything, for that many elements per thread.

    Gradients are only loaded; parameters that have a master copy, which is as wide as state, are only stored.
    """
    grad, param, compute, states, kept = variant
    both = [elements * size(compute)] * (states + (kept == MASTER))
    loads = [elements * size(grad), *both] + [elements * size(param)] * (kept != MASTER)
    return Counter([("load", n) for n in loads] + [("store", n) for n in [elements * size(param), *both]])


def wide_loops(kernel: str, variants: tuple[Variant, ...]) -> list[Accesses]:
    """The least that each loop over whole chunks has to access per turn.

    In phase 1 each dtype of gradients has a loop of its own, in phase 4 each variant.
    """
    statistics = [Counter({("load", 16): UNROLL.value}) for _ in grad_kinds(variants)]
    update = [once(variant, elements=16 // size(variant[2])) for variant in variants]
    return {"step": statistics + update, "statistics": statistics, "apply": update}[kernel]


def frozen(accesses: Accesses) -> frozenset[tuple[tuple[str, int], int]]:
    return frozenset(accesses.items())


@pytest.mark.parametrize(("kernel", "mix", "target"), CASES)
def test_whole_chunks_move_in_the_least_possible_accesses(kernel: str, mix: str, target: str) -> None:
    """One access of 16 bytes, or of as much as goes with 16 bytes of state, to everything there is to access."""
    loops = [loop for loop in compiled(kernel, mix, target).listing.loops if loop.is_innermost]
    found = Counter(frozen(loop.accesses) for loop in loops)
    missing = Counter(frozen(accesses) for accesses in wide_loops(kernel, MIXES[mix][1])) - found
    assert not missing, found


@pytest.mark.parametrize("mix", MIXES)
def test_the_rest_moves_element_by_element(mix: str) -> None:
    """Misaligned, strided, left over: in a loop around the one over dimensions, whose number it reads besides."""
    found = [loop.accesses for loop in compiled("apply", mix, "sm90").listing.loops if not loop.is_innermost]
    for variant in MIXES[mix][1]:
        least = once(variant, elements=1)
        assert any(least <= accesses and set(accesses - least) <= {("load", 8)} for accesses in found), found

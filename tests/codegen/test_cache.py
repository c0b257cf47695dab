"""Triton keeps compiled kernels on disk, longer than one version of this package lives."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from codegen.compile import F32, source_of
from tritonamp.kernels import rules

pytestmark = pytest.mark.compiled


def some_rule(is_mended: bool) -> Any:
    """A rule before or after a change that leaves the names as they were."""
    if is_mended:

        @triton.jit
        def update(p, g, state, scalars, C):
            return p - g, state

    else:

        @triton.jit
        def update(p, g, state, scalars, C):
            return p + g, state

    return (rules.SGD[0], update)


@pytest.mark.parametrize("kernel", ["step", "apply"])
def test_a_changed_rule_is_compiled_anew(kernel: str) -> None:
    """An upgrade that mends a rule must not run the old one from the cache."""
    old, same, new = (
        source_of(kernel, some_rule(is_mended), ((F32, F32, F32, 0),)).hash() for is_mended in (False, False, True)
    )
    assert old == same != new

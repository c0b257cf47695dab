"""What makes a law a test, where a drawn example runs, and what is read off an optimizer."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import problem
import pytest
import torch
from conftest import ARCHS, IS_INTERPRETED, PROFILE, Runner
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from torch import Tensor

from tritonamp.backends import table
from tritonamp.optimizer import FusedOptimizer

KERNELS = ["interpreted" if IS_INTERPRETED else "compiled"]
EVERYWHERE = KERNELS if IS_INTERPRETED else ["torch", *KERNELS]
# An example takes about 0.01 s of processor time on torch, 0.06 s compiled and 0.11 s interpreted.
NIGHTLY = {"torch": 3000, "interpreted": 500, "compiled": 1000}

seeds = st.integers(0, 2**16)


def runners(name: str) -> st.SearchStrategy[Runner]:
    """Runners of that name: kernels for any architecture, on any number of programs, interleaved anyhow."""
    if name == "torch":
        return st.just(Runner(name))
    archs = st.sampled_from(ARCHS) if name == "compiled" else st.none()
    return st.builds(Runner, st.just(name), st.integers(1, 8), archs, st.none() | seeds)


def how(name: str, share: float = 1.0) -> settings:
    """How many examples are drawn on runners of that name: a share of what the profile says."""
    examples = NIGHTLY[name] if PROFILE == "nightly" else settings().max_examples
    # What fails is kept by the law, and would be forgotten as soon as it passes on another runner.
    kept = settings().database and DirectoryBasedExampleDatabase(f".hypothesis/{name}")
    return settings(max_examples=max(int(examples * share), 5), database=kept)


def law(
    names: Sequence[str] = tuple(EVERYWHERE), share: float = 1.0, **drawn: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make tests of a function that checks an example: one for each name of a runner.

    Hypothesis' own decorators fix the number of examples for all parameters of a test.

    Args:
        names: of runners; the function's argument ``runner`` is drawn among them.
        share: of the examples that :func:`how` gives; less for examples of several steps.
        drawn: the other arguments.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(name: str) -> None:
            how(name, share)(given(runner=runners(name), **drawn)(check))()

        parameter = inspect.Parameter("name", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("name", names)(test)

    return decorate


@contextlib.contextmanager
def world(runner: Runner, min_chunk: int = 512, **options: Any) -> Iterator[None]:
    """Where one example runs; entered inside a test's body, once per example: a fixture is there once per test."""
    with mock.patch.object(table, "MIN_CHUNK", min_chunk), runner.running(**options):
        yield


def params_of(optimizer: FusedOptimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def bare(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies whose strides are those of their shapes; ``contiguous()`` leaves others to tensors of one element."""
    return [tensor.detach().clone(memory_format=torch.contiguous_format).view(-1) for tensor in tensors]


def assert_same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    problem.assert_same_bits(bare(a), bare(b))


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all parameters and state tensors, for bitwise comparison."""
    return bare(problem.values(optimizer))


def everything(optimizer: FusedOptimizer) -> list[Tensor]:
    """Copies of parameters, state and outcome, and the loss scale's state, for bitwise comparison."""
    numbers = [] if optimizer.loss_scale is None else [optimizer._scale_state().clone()]
    return [*values(optimizer), optimizer._outcome_state().clone(), *numbers]


def numbers_of(optimizer: FusedOptimizer) -> dict[str, float | int]:
    assert optimizer.loss_scale is not None
    return optimizer.loss_scale.state_dict()


def is_bad(grad: Tensor) -> bool:
    return not bool(grad.isfinite().all())

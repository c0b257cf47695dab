"""Where a drawn example runs, and what is read off an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import problem
import torch
from conftest import Runner
from hypothesis import settings
from torch import Tensor

from tritonamp.backends import table
from tritonamp.optimizer import FusedOptimizer


@contextlib.contextmanager
def world(runner: Runner, min_chunk: int = 512, **options: Any) -> Iterator[None]:
    """Where one example runs; entered inside a test's body, once per example: a fixture is there once per test."""
    with mock.patch.object(table, "MIN_CHUNK", min_chunk), runner.running(**options):
        yield


def fewer(divisor: int) -> settings:
    """For a test whose examples take several steps: so much less of them than the profile says."""
    return settings(max_examples=max(settings().max_examples // divisor, 5))


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

"""The loss scale equals the oracle's rule over any sequence of steps: on the host and in the kernels."""

from __future__ import annotations

import copy
from typing import Any

import torch
from conftest import Runner
from hypothesis import given
from hypothesis import strategies as st
from problem import scaled
from property.tools import law, numbers_of, world

import tritonamp
from tritonamp.loss_scale import advance
from tritonamp.testing import ScaleState, next_scale, strategies

outcomes = st.lists(st.booleans(), min_size=1, max_size=12)


def state_of(loss_scale: tritonamp.LossScale) -> ScaleState:
    return ScaleState.from_state_dict(loss_scale.state_dict())


@given(settings=strategies.loss_scales(), found=outcomes)
def test_the_host_rule_equals_the_oracle(settings: dict[str, Any], found: list[bool]) -> None:
    loss_scale = tritonamp.LossScale(**settings)
    want = state_of(loss_scale)
    for found_inf in found:
        numbers = loss_scale._read()
        advance(numbers, found_inf)
        loss_scale._write(numbers)
        want = next_scale(want, found_inf)
        assert state_of(loss_scale) == want


@law(share=1 / 3, settings=strategies.loss_scales(), found=outcomes)
def test_the_scale_equals_the_oracle_over_steps(runner: Runner, settings: dict[str, Any], found: list[bool]) -> None:
    param = torch.zeros(3, requires_grad=True)
    with world(runner):
        optimizer = tritonamp.SGD([param], lr=0.1, loss_scale=tritonamp.LossScale(**settings), backend=runner.backend)
        want = state_of(optimizer.loss_scale)
        for found_inf in found:
            scaled(optimizer)
            param.grad = torch.tensor([0.0, torch.nan if found_inf else 0.0, 0.0])
            optimizer.step()
            want = next_scale(want, found_inf)
            assert ScaleState.from_state_dict(numbers_of(optimizer)) == want


@law(
    share=1 / 3, settings=strategies.loss_scales(), found=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6)
)
def test_a_shared_scale_moves_once_per_iteration(
    runner: Runner, settings: dict[str, Any], found: list[tuple[bool, bool]]
) -> None:
    loss_scale = tritonamp.LossScale(**settings)
    params = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    with world(runner):
        optimizers = [tritonamp.SGD([p], lr=0.1, loss_scale=loss_scale, backend=runner.backend) for p in params]
        want = state_of(loss_scale)
        for flags in found:
            for param, optimizer, found_inf in zip(params, optimizers, flags, strict=True):
                scaled(optimizer)
                param.grad = torch.full((3,), torch.inf if found_inf else 0.0)
                optimizer.step()
                assert optimizer.step_was_skipped == found_inf and state_of(loss_scale) == want
            loss_scale.update()
            want = next_scale(want, any(flags))
            assert state_of(loss_scale) == want


@given(settings=strategies.loss_scales(), found=outcomes, other=strategies.loss_scales())
def test_a_loaded_scale_is_the_saved_one(settings: dict[str, Any], found: list[bool], other: dict[str, Any]) -> None:
    saved = tritonamp.LossScale(**settings)
    numbers = saved._read()
    for found_inf in found:
        advance(numbers, found_inf)
    saved._write(numbers)
    loaded = tritonamp.LossScale(**other)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.state_dict() == saved.state_dict() == copy.deepcopy(saved).state_dict()

"""What one optimizer does with drawn problems: equals the oracle, skips as a whole, clips, resumes."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from conftest import Runner
from hypothesis import assume
from hypothesis import strategies as st
from problem import scaled
from property.tools import assert_same_bits, everything, law, numbers_of, params_of, values, world

import tritonamp
from tritonamp.testing import expect, strategies
from tritonamp.testing.problems import Overflow, Problem, StepSpec

# Every set of dtypes is a kernel of its own, to be compiled: a few sets, of (parameter, gradient).
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float64),
]
KINDS = ["SGD", "Adam", "AdamW"]


def problems(**options: Any) -> st.SearchStrategy[Problem]:
    """Tensors of one of the sets of dtypes; small, for there are interpreted steps to wait for."""

    def of_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> st.SearchStrategy[Problem]:
        param, grad = dtypes
        return strategies.problems(
            dtypes=[param], grad_dtypes=[grad], max_total=1500, **{"max_tensors": 4, "exponents": (-12, 4), **options}
        )

    return st.sampled_from(DTYPES).flatmap(of_dtypes)


def optimizers(**options: Any) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """Name and options of an optimizer."""
    return st.sampled_from(KINDS).flatmap(
        lambda kind: st.tuples(st.just(kind), strategies.hyperparameters(kind, with_max_norm=True, **options))
    )


def made(runner: Runner, problem: Problem, kind: str, options: dict[str, Any], **more: Any) -> Any:
    return getattr(tritonamp, kind)(problem.params(), backend=runner.backend, **{**options, **more})


def train(optimizer: Any, problem: Problem, step: StepSpec, *, check: bool = False) -> None:
    """One iteration."""
    problem.set_grads(params_of(optimizer), scaled(optimizer), step)
    expectation = expect(optimizer) if check else None
    optimizer.step()
    if expectation is not None:
        expectation.check()


@law(
    problem=problems(),
    optimizer=optimizers(),
    scale=strategies.loss_scales(),
    steps=strategies.sequences(max_steps=4),
)
def test_steps_equal_the_oracle_within_its_bound(
    runner: Runner,
    problem: Problem,
    optimizer: tuple[str, dict[str, Any]],
    scale: dict[str, Any],
    steps: list[StepSpec],
) -> None:
    with world(runner):
        ours = made(runner, problem, *optimizer, loss_scale=tritonamp.LossScale(**scale))
        for step in steps:
            train(ours, problem, step, check=True)


@law(problem=problems(), optimizer=optimizers(), overflow=strategies.overflows(), is_unscaled=st.booleans())
def test_one_nonfinite_element_changes_nothing_but_scale_and_skip_counters(
    runner: Runner, problem: Problem, optimizer: tuple[str, dict[str, Any]], overflow: Overflow, is_unscaled: bool
) -> None:
    bad = StepSpec(seed=1, overflow=overflow)
    assume(problem.has_elements(bad))
    with world(runner):
        ours = made(runner, problem, *optimizer, loss_scale=tritonamp.LossScale(16.0))
        train(ours, problem, StepSpec())
        before = values(ours)
        problem.set_grads(params_of(ours), scaled(ours), bad)
        if is_unscaled:
            ours.unscale_()
        ours.step()
        assert_same_bits(values(ours), before)
        assert ours.step_was_skipped and float(ours.found_inf) == 1.0 and not bool(ours.grad_norm.isfinite())
        assert (int(ours.skipped_steps), int(ours.consecutive_skips)) == (1, 1)
        assert (numbers_of(ours)["scale"], numbers_of(ours)["_growth_tracker"]) == (8.0, 0)


@law(problem=problems(exponents=(-8, 4), grads=["normal"]), max_norm=st.sampled_from([0.0, 1e-3, 1.0, 30.0]))
def test_the_norm_after_clipping_is_at_most_max_norm(runner: Runner, problem: Problem, max_norm: float) -> None:
    """Read off the update of an SGD with lr 1 on parameters that are zero, in dtypes that hold it."""
    assume(all(t.dtype in (torch.float32, torch.float64) for t in problem.tensors))
    assume(all(abs(value) < 2.0**60 for t in problem.tensors for _, value in t.grad_hard))
    with world(runner):
        ours = made(runner, problem, "SGD", {}, lr=1.0, max_norm=max_norm, loss_scale=None)
        for param in params_of(ours):
            param.data.zero_()
        problem.set_grads(params_of(ours))
        ours.step()
        update = torch.cat([p.detach().double().flatten() for p in params_of(ours)])
        assert float(update.norm()) <= max_norm * (1 + 1e-6)


@law(problem=problems(), optimizer=optimizers(), step=strategies.step_specs(overflow=False))
def test_an_infinite_max_norm_is_no_clip(
    runner: Runner, problem: Problem, optimizer: tuple[str, dict[str, Any]], step: StepSpec
) -> None:
    results = []
    with world(runner):
        for max_norm in (None, math.inf):
            ours = made(runner, problem, *optimizer, max_norm=max_norm, loss_scale=4.0)
            train(ours, problem, step)
            results.append(everything(ours))
    assert_same_bits(*results)


@law(
    share=1 / 2,
    problem=problems(max_tensors=3),
    optimizer=optimizers(extreme=False),
    scale=strategies.loss_scales(),
    first=strategies.sequences(max_steps=2),
    then=strategies.sequences(max_steps=2),
)
def test_saving_and_loading_does_not_change_what_follows(
    runner: Runner,
    problem: Problem,
    optimizer: tuple[str, dict[str, Any]],
    scale: dict[str, Any],
    first: list[StepSpec],
    then: list[StepSpec],
) -> None:
    kind, options = optimizer
    with world(runner):
        ours = made(runner, problem, kind, options, loss_scale=tritonamp.LossScale(**scale))
        for step in first:
            train(ours, problem, step)
        checkpoint = copy.deepcopy(ours.state_dict())
        fresh = made(runner, problem, kind, {}, lr=7.0, loss_scale="dynamic")
        for new, old in zip(params_of(fresh), params_of(ours), strict=True):
            new.data.copy_(old.data)
        fresh.load_state_dict(checkpoint)
        for step in then:
            train(ours, problem, step)
            train(fresh, problem, step)
        assert_same_bits([p.detach() for p in params_of(fresh)], [p.detach() for p in params_of(ours)])
        assert numbers_of(fresh) == numbers_of(ours)
        assert_same_states(fresh.state_dict()["state"], ours.state_dict()["state"])


def assert_same_states(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> None:
    assert a.keys() == b.keys()
    for number, state in a.items():
        assert state.keys() == b[number].keys()
        assert_same_bits(list(state.values()), [b[number][key] for key in state])


@law(problem=problems(grads=["none"]), optimizer=optimizers(), is_zero_size=st.booleans())
def test_a_step_without_elements_does_nothing(
    runner: Runner, problem: Problem, optimizer: tuple[str, dict[str, Any]], is_zero_size: bool
) -> None:
    with world(runner):
        ours = made(runner, problem, *optimizer, loss_scale="dynamic")
        if is_zero_size:
            ours.add_param_group({"params": [torch.zeros(0, 3, requires_grad=True)]})
        scaled(ours)
        for param in params_of(ours)[len(problem.tensors) :]:
            param.grad = torch.zeros(0, 3)
        before, numbers = [p.detach().clone() for p in params_of(ours)], numbers_of(ours)
        ours.step()
        assert_same_bits([p.detach() for p in params_of(ours)], before)
        assert numbers_of(ours) == numbers and not ours.step_was_skipped
        assert (float(ours.grad_norm), float(ours.found_inf)) == (0.0, 0.0)


@law(share=1 / 2, problem=problems(max_tensors=3), data=st.data(), kind=st.sampled_from(KINDS))
def test_changed_hyperparameters_take_effect_at_once(
    runner: Runner, problem: Problem, data: st.DataObject, kind: str
) -> None:
    drawn = strategies.hyperparameters(kind, with_max_norm=True)
    with world(runner):
        ours = made(runner, problem, kind, data.draw(drawn), loss_scale=4.0)
        for seed in range(3):
            train(ours, problem, StepSpec(seed=seed), check=True)
            ours.param_groups[0].update(data.draw(drawn))

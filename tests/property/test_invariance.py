"""What must not matter: grid, run, interleaving, order, splitting, grouping, chunks, powers of two."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from conftest import Runner
from hypothesis import assume
from hypothesis import strategies as st
from problem import scaled
from property.tools import KERNELS, assert_same_bits, everything, law, params_of, seeds, values, world

import tritonamp
from tritonamp.testing import expect, strategies
from tritonamp.testing.problems import Problem, StepSpec, TensorSpec

NORM_ERROR = 5e-7
KINDS = ["SGD", "Adam", "AdamW"]


def problems(**options: Any) -> st.SearchStrategy[Problem]:
    """Finite float32 problems: what is invariant does not depend on the dtype."""
    return strategies.problems(
        dtypes=[torch.float32],
        grad_dtypes=None,
        max_total=2500,
        **{"max_tensors": 4, "exponents": (-12, 4), "grads": ["normal", "hard"], **options},
    )


def optimizers() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.sampled_from(KINDS).flatmap(
        lambda kind: st.tuples(st.just(kind), strategies.hyperparameters(kind, with_max_norm=True))
    )


def stepped(kind: str, params: Any, options: dict[str, Any], backend: str, *, check: bool = True) -> Any:
    """An optimizer with the gradients at hand, after one step that is checked against the oracle's bound."""
    optimizer = getattr(tritonamp, kind)(params, **options, loss_scale=None, backend=backend)
    expectation = expect(optimizer) if check else None
    optimizer.step()
    if expectation is not None:
        expectation.check()
    return optimizer


@law(
    KERNELS,
    problem=problems(),
    optimizer=optimizers(),
    others=st.lists(st.tuples(st.integers(1, 8), st.none() | seeds), min_size=1, max_size=2),
    step=strategies.step_specs(),
)
def test_results_are_bitwise_independent_of_grid_and_interleaving(
    runner: Runner,
    problem: Problem,
    optimizer: tuple[str, dict[str, Any]],
    others: list[tuple[int, int | None]],
    step: StepSpec,
) -> None:
    """On the virtual GPU with race detection on. Architectures may add up in orders of their own."""
    kind, options = optimizer
    results = []
    for each in [runner, *(replace(runner, programs=programs, seed=seed) for programs, seed in others)]:
        with world(each):
            ours = getattr(tritonamp, kind)(problem.params(), **options, loss_scale=4.0, backend="triton")
            problem.set_grads(params_of(ours), scaled(ours), step)
            ours.step()
            results.append(everything(ours))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@law(problem=problems(), optimizer=optimizers(), order=st.randoms(use_true_random=False), groups=st.integers(1, 3))
def test_permuting_and_regrouping_tensors_moves_only_the_norms_rounding(
    runner: Runner, problem: Problem, optimizer: tuple[str, dict[str, Any]], order: Any, groups: int
) -> None:
    kind, options = optimizer
    norms = []
    with world(runner):
        for permuted in (False, True):
            params: list[Any] = problem.params()
            problem.set_grads(params)
            if permuted:
                order.shuffle(params)
                params = [{"params": params[i::groups]} for i in range(groups)]
            norms.append(float(stepped(kind, params, options, runner.backend).grad_norm))
    assert_close_norms(norms)


@law(
    size=st.integers(2, 1600),
    exponent=st.integers(-40, 40),
    seed=seeds,
    cuts=st.lists(st.integers(0, 1600), max_size=3),
    optimizer=optimizers(),
)
def test_splitting_a_tensor_moves_only_the_norms_rounding(
    runner: Runner, size: int, exponent: int, seed: int, cuts: list[int], optimizer: tuple[str, dict[str, Any]]
) -> None:
    kind, options = optimizer
    whole = TensorSpec(shape=(size,), exponent=exponent, seed=seed)
    norms = []
    with world(runner):
        for borders in ([0, size], [0, *sorted(cut % size for cut in cuts), size]):
            values, grads = whole.param().detach(), whole.gradient()
            assert grads is not None
            params = []
            for start, stop in itertools.pairwise(borders):
                # Views as well as copies: a part of a tensor begins at any address.
                params.append(values[start:stop].requires_grad_())
                params[-1].grad = grads[start:stop]
            norms.append(float(stepped(kind, params, options, runner.backend).grad_norm))
    assert_close_norms(norms)


@law(share=1 / 2, problem=problems(), optimizer=optimizers(), chunks=st.permutations([8, 128, 512, 2048]))
def test_the_chunk_size_moves_only_the_norms_rounding(
    runner: Runner, problem: Problem, optimizer: tuple[str, dict[str, Any]], chunks: list[int]
) -> None:
    kind, options = optimizer
    norms = []
    for chunk in chunks[:2]:
        params = problem.params()
        problem.set_grads(params)
        with world(runner, min_chunk=chunk):
            norms.append(float(stepped(kind, params, options, runner.backend).grad_norm))
    assert_close_norms(norms)


def assert_close_norms(norms: list[float]) -> None:
    """Each norm is within its bound of the true one, so two are within twice that of each other."""
    a, b = norms
    assert a == b or abs(a - b) <= 2 * NORM_ERROR * max(a, b) + 2.0**-148


@law(problem=problems(exponents=(-20, 20)), optimizer=optimizers(), exponent=st.integers(-60, 60))
def test_scaling_by_a_power_of_two_and_unscaling_is_exact(
    runner: Runner, problem: Problem, optimizer: tuple[str, dict[str, Any]], exponent: int
) -> None:
    """Where neither product is subnormal or overflows. Clipping's own factor is left out: it is rounded with it."""
    kind, options = optimizer
    results = []
    with world(runner):
        for scale in (1.0, 2.0**exponent):
            ours = getattr(tritonamp, kind)(
                problem.params(), **{**options, "max_norm": None}, loss_scale=scale, backend=runner.backend
            )
            problem.set_grads(params_of(ours))
            factor = scaled(ours)
            for param in params_of(ours):
                sizes = [g.abs()[g != 0] for g in (param.grad, param.grad.double() * factor)]
                assume(all(bool(((s >= 2.0**-126) & (s < 2.0**128 - 2.0**104)).all()) for s in sizes))
                param.grad = param.grad * factor
            ours.step()
            assert not ours.step_was_skipped
            results.append((values(ours), float(ours.grad_norm)))
    assert_same_bits(results[0][0], results[1][0])
    assert math.isclose(results[0][1], results[1][1], rel_tol=2 * NORM_ERROR)

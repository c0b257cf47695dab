"""A step computes what the float64 oracle computes, on every backend."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from conftest import Runner
from problem import SHAPES, assert_same_bits, checked_step, make_params, scaled, set_grads, values

import tritonamp
from tritonamp.testing import TorchReference
from tritonamp.testing.scale import ScaleState

SGD, Adam, AdamW = tritonamp.SGD, tritonamp.Adam, tritonamp.AdamW

OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (SGD, {}),
    (SGD, {"weight_decay": 0.1, "maximize": True}),
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    (Adam, {}),
    (Adam, {"weight_decay": 0.1, "maximize": True}),
    (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (Adam, {"betas": (0.0, 0.9999), "eps": 1e-3}),
    (AdamW, {}),
    (AdamW, {"amsgrad": True, "weight_decay": 0.5, "maximize": True}),
]


def option_id(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(map(str, value)) or "plain"


@pytest.mark.parametrize(("make", "options"), OPTIONS, ids=option_id)
@pytest.mark.parametrize("max_norm", [None, 1.0, 1e4])
def test_steps_equal_the_oracle(runner: Runner, make: Any, options: dict[str, Any], max_norm: float | None) -> None:
    """Two good steps, an overflow, and growth: parameters, state, norm, skip and scale."""
    params = make_params()
    loss_scale = tritonamp.LossScale(1024.0, growth_interval=2)
    optimizer = make(params, lr=0.05, max_norm=max_norm, loss_scale=loss_scale, backend=runner.backend, **options)
    for step in range(4):
        set_grads(params, scaled(optimizer))
        if step == 1:
            params[-2].grad[-1] = torch.inf
        checked_step(optimizer)
        assert optimizer.step_was_skipped == (step == 1)
    assert loss_scale.get_scale() == 1024.0


@pytest.mark.parametrize("make", [SGD, AdamW], ids=option_id)
def test_trajectory_equals_torch(runner: Runner, make: Any) -> None:
    """Against GradScaler + clip_grad_norm_ + the non-fused optimizer, over ten steps with two overflows."""
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    if make is SGD:
        options["momentum"] = 0.9
    params = make_params([(40,), (3, 50)])
    scale = ScaleState(scale=256.0, growth_interval=3, min_scale=0.0, max_scale=float("inf"))
    reference = TorchReference(getattr(torch.optim, make.__name__), params, max_norm=2.0, scale=scale, **options)
    loss_scale = tritonamp.LossScale(256.0, growth_interval=3)
    optimizer = make(params, max_norm=2.0, loss_scale=loss_scale, backend=runner.backend, **options)
    for step in range(10):
        set_grads(params, scaled(optimizer))
        if step in (0, 6):
            params[1].grad[0, 0] = torch.nan
        outcome = reference.step([p.grad for p in params])
        optimizer.step()
        assert optimizer.step_was_skipped == outcome.skipped
        assert loss_scale.get_scale() == reference.scale.scale
    for ours, theirs in zip(params, reference.params, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("make", "options"), [OPTIONS[3], OPTIONS[7]], ids=option_id)
def test_all_dtypes_in_one_step(runner: Runner, make: Any, options: dict[str, Any]) -> None:
    """Gradients and parameters of three dtypes each, and float64, in one optimizer."""
    params = []
    for grad_dtype, dtype in [*itertools.product(DTYPES, DTYPES), (torch.float64, torch.float64)]:
        made = make_params([(5,), (523,)], dtype)
        set_grads(made, 4.0, grad_dtype)
        params += made
    optimizer = make(params, lr=0.05, max_norm=1.0, loss_scale=4.0, backend=runner.backend, **options)
    for _ in range(2):
        for param in params:
            set_grads([param], scaled(optimizer), param.grad.dtype)
        checked_step(optimizer)


def test_groups_have_their_own_options(runner: Runner) -> None:
    """One norm over all groups; lr, decay, betas, max_norm, amsgrad, maximize of each group."""
    params = make_params([(60,)] * 7)
    groups = [
        {"params": params[0:1]},
        {"params": params[1:2], "lr": 0.5, "max_norm": None},
        {"params": params[2:3], "max_norm": 0.1, "weight_decay": 0.3},
        {"params": params[3:5], "betas": (0.5, 0.6), "amsgrad": True},
        {"params": []},
        {"params": params[5:7], "maximize": True, "max_norm": float("inf")},
    ]
    optimizer = AdamW(groups, lr=0.1, max_norm=1.0, loss_scale=8.0, backend=runner.backend)
    for _ in range(3):
        set_grads(params, scaled(optimizer))
        checked_step(optimizer)
        optimizer.param_groups[0]["lr"] *= 0.5  # takes effect at once
        optimizer.param_groups[2]["max_norm"] = 5.0


@pytest.mark.parametrize("shape", [(64,), (2, 3, 1030)])
def test_layouts(runner: Runner, shape: tuple[int, ...]) -> None:
    """Misaligned views, slices, transposes and expanded gradients are updated by logical index, and nothing beside."""
    n = int(torch.tensor(shape).prod())
    flat = torch.randn(n + 9)
    bases = [flat, torch.randn(*shape, 3), torch.randn(*shape[::-1])]
    views = [bases[0][3 : n + 3].view(shape), bases[1][..., 1], bases[2].permute(*range(len(shape) - 1, -1, -1))]
    params = [view.detach().requires_grad_() for view in views]
    optimizer = AdamW(params, lr=0.1, max_norm=1.0, loss_scale=2.0, backend=runner.backend)
    before = [base.clone() for base in bases]
    for step in range(3):
        scaled(optimizer)
        params[0].grad = torch.randn(n + 5)[step + 1 : n + step + 1].view(shape)  # moves from step to step
        params[1].grad = torch.randn(*shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
        params[2].grad = torch.randn(shape[-1:]).expand(shape)
        checked_step(optimizer)
    touched = [torch.zeros_like(base, dtype=torch.bool) for base in bases]
    touched[0][3 : n + 3] = True
    touched[1][..., 1] = True
    touched[2][...] = True
    for base, old, mask in zip(bases, before, touched, strict=True):
        assert torch.equal(base[~mask], old[~mask])
        assert not torch.equal(base[mask], old[mask])


def test_complex_parameters_are_pairs_of_reals(runner: Runner) -> None:
    params = [
        torch.randn(30, dtype=torch.complex64).requires_grad_(),
        torch.randn(4, 5, dtype=torch.complex64).t().requires_grad_(),
    ]
    optimizer = Adam(params, lr=0.1, max_norm=1.0, amsgrad=True, loss_scale=None, backend=runner.backend)
    for step in range(2):
        for param in params:
            param.grad = torch.randn(param.shape, dtype=torch.complex64)
            if step:
                param.grad = param.grad.conj()  # carried out when it is read
        checked_step(optimizer)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["first", "last", "tail"])
def test_one_nonfinite_element_changes_nothing(runner: Runner, value: float, where: str) -> None:
    params = make_params()
    optimizer = AdamW(params, max_norm=1.0, loss_scale="dynamic", backend=runner.backend)
    set_grads(params, scaled(optimizer))
    optimizer.step()
    before = values(optimizer)
    set_grads(params, scaled(optimizer))
    grad = {"first": params[0].grad, "last": params[-1].grad, "tail": params[-2].grad}[where]
    grad.view(-1)[0 if where == "first" else -1] = value
    optimizer.step()
    assert_same_bits(values(optimizer), before)
    assert optimizer.loss_scale.get_scale() == 32768.0
    assert (int(optimizer.skipped_steps), int(optimizer.consecutive_skips)) == (1, 1)
    assert optimizer.step_was_skipped and float(optimizer.found_inf) == 1.0
    assert not optimizer.grad_norm.isfinite()


def test_a_finite_gradient_that_unscaling_overflows_is_nonfinite(runner: Runner) -> None:
    params = make_params([(20,), (600,)])
    optimizer = SGD(params, loss_scale=tritonamp.LossScale(2.0**-100), backend=runner.backend)
    scaled(optimizer)
    set_grads(params, 1e-30)
    params[1].grad[-1] = 2.0**28
    before = values(optimizer)
    optimizer.step()
    assert_same_bits(values(optimizer), before)
    assert optimizer.step_was_skipped
    scaled(optimizer)
    set_grads(params, 1e-30)
    params[1].grad[-1] = 2.0**26
    checked_step(optimizer)
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("exponent", [-149, -126, -100, -63, -41, -40, 0, 61, 62, 63, 100, 127])
def test_norm_over_the_whole_range(runner: Runner, exponent: int) -> None:
    """Neither squares that overflow nor squares that vanish: right to 5e-7 for every float32 input."""
    params = make_params([(700,), (3,)])
    grads = [torch.ones(700) * 2.0**exponent, torch.tensor([2.0**exponent, -(2.0 ** max(exponent - 12, -149)), 0.0])]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    norm = float(torch.cat(grads).double().norm())
    optimizer = SGD(params, lr=0.0, loss_scale=None, max_norm=1.0, backend=runner.backend)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert float(optimizer.grad_norm) == pytest.approx(norm if norm < 2.0**128 else torch.inf, rel=5e-7, abs=2.0**-149)


def test_skip_norm_counts_but_does_not_back_off(runner: Runner) -> None:
    params = make_params([(50,)])
    optimizer = AdamW(params, loss_scale=tritonamp.LossScale(64.0), skip_norm=10.0, backend=runner.backend)
    for step, size in enumerate([0.1, 100.0, 100.0, 0.1]):
        set_grads(params, scaled(optimizer) * size)
        checked_step(optimizer)
        assert optimizer.step_was_skipped == (size > 10)
        assert int(optimizer.consecutive_skips) == (step if step < 3 else 0)
    assert int(optimizer.skipped_steps) == 2
    assert optimizer.loss_scale.state_dict()["_growth_tracker"] == 4


def test_without_anything_to_wait_for(runner: Runner) -> None:
    """No clipping, no scale, no skipping: a non-finite gradient goes through, as in torch."""
    params = make_params([(300,), (5,)])
    optimizer = SGD(params, lr=0.1, loss_scale=None, skip_nonfinite=False, backend=runner.backend)
    set_grads(params)
    params[1].grad[0] = torch.inf
    expected = [p.detach() - 0.1 * p.grad for p in params]
    optimizer.step()
    for param, want in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), want)
    assert optimizer.grad_norm.isnan() and not optimizer.step_was_skipped


def test_parameters_without_gradient_are_left_alone(runner: Runner) -> None:
    params = make_params([(40,), (600,), (3,)])
    optimizer = AdamW(params, lr=0.1, weight_decay=0.5, max_norm=1.0, loss_scale=None, backend=runner.backend)
    for step in range(4):
        set_grads(params)
        idle = params[step % 3]
        idle.grad = None
        before = idle.detach().clone()
        checked_step(optimizer)
        assert torch.equal(idle, before)
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 3, 3]


def test_nothing_to_do(runner: Runner) -> None:
    params = make_params([(4,), (0,)])
    optimizer = AdamW(params, loss_scale="dynamic", backend=runner.backend)
    set_grads(params, scaled(optimizer))
    optimizer.step()
    before = values(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    params[1].grad = torch.zeros(0)
    optimizer.step()
    assert_same_bits(values(optimizer), before)
    assert float(optimizer.grad_norm) == 0.0 and float(optimizer.found_inf) == 0.0 and not optimizer.step_was_skipped
    assert optimizer.loss_scale.state_dict()["_growth_tracker"] == 1


def test_lr_may_be_a_tensor(runner: Runner) -> None:
    params = make_params([(10,)])
    for dtype in (torch.float32, torch.float64):
        lr = torch.tensor(0.1, dtype=dtype)
        optimizer = SGD(params, lr=lr, loss_scale=None, backend=runner.backend)
        for value in (0.1, 0.01):
            lr.fill_(value)
            set_grads(params)
            checked_step(optimizer)


def test_autograd_sees_the_update(runner: Runner) -> None:
    """A tensor saved for backward that a step has changed since is refused, as after an in-place operation."""
    param = torch.ones(3, requires_grad=True)
    optimizer = SGD([param], loss_scale=None, backend=runner.backend)
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("shapes", [SHAPES, [(2000,)]], ids=["many", "one"])
def test_bits_do_not_depend_on_the_number_of_programs(kernel_runner: Runner, shapes: list[tuple[int, ...]]) -> None:
    results = []
    for programs in (1, 2, 5):
        for seed in (None, 1):
            torch.manual_seed(0)
            params = make_params(shapes)
            with dataclasses.replace(kernel_runner, programs=programs, seed=seed).running():
                optimizer = AdamW(params, max_norm=1.0, loss_scale=16.0, backend="triton")
                for _ in range(2):
                    set_grads(params, scaled(optimizer))
                    optimizer.step()
                results.append([*values(optimizer), optimizer._outcome.clone()])
    for result in results[1:]:
        assert_same_bits(result, results[0])

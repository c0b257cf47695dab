"""The loss scale: growth, backoff, skipped steps, unscaling. Cases from public bug reports."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.tools import leaf, params_of, scale_and_tracker, set_true_grads, steps_of, train
from conftest import Runner
from problem import assert_same_bits, values

from tritonamp import SGD, Adam, AdamW, LossScale

INF, NAN = float("inf"), float("nan")


# Growth and backoff.


@pytest.mark.parametrize(("scale", "growth"), [(2.0**127, 2.0), (2.0**127, 1e30), (2.0**-100, 1e300)])
def test_growth_beyond_float32_leaves_the_scale(runner: Runner, scale: float, growth: float) -> None:
    # SM-01, pytorch/pytorch#98828
    p = leaf(1.0)
    optimizer = SGD([p], lr=0.1, loss_scale=LossScale(scale, growth, growth_interval=1), backend=runner.backend)
    train(optimizer, 1e-3)
    assert p.item() == pytest.approx(0.9999)
    assert scale_and_tracker(optimizer) == (scale, 0)


@pytest.mark.parametrize("make", [LossScale, lambda scale: SGD([leaf(1.0)], loss_scale=scale)], ids=["own", "static"])
def test_a_subnormal_scale_is_refused(make: Callable[[float], Any]) -> None:
    # SM-03, NVIDIA/apex#715
    with pytest.raises(ValueError, match="scale"):
        make(2.0**-130)


@pytest.mark.parametrize("is_loaded", [False, True], ids=["made", "loaded"])
@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale"])
def test_the_smallest_scale_has_a_finite_reciprocal(runner: Runner, is_loaded: bool, unscale_first: bool) -> None:
    # SM-03, pytorch/pytorch#125557
    p = leaf(1.0)
    loss_scale = LossScale() if is_loaded else LossScale(2.0**-126)
    if is_loaded:
        loss_scale.load_state_dict({"scale": 2.0**-130})  # below the bound: clamped
    optimizer = SGD([p], lr=1.0, loss_scale=loss_scale, backend=runner.backend)
    set_true_grads(optimizer, 0.5)
    if unscale_first:
        optimizer.unscale_()
    optimizer.step()
    assert p.item() == 0.5
    assert scale_and_tracker(optimizer) == (2.0**-126, 1)


def test_the_scale_may_fall_below_1(runner: Runner) -> None:
    # SM-04, tensorflow/tensorflow#38357
    optimizer = SGD([leaf(1.0)], loss_scale=LossScale(1.0), backend=runner.backend)
    train(optimizer, INF)
    assert scale_and_tracker(optimizer) == (0.5, 0)
    assert LossScale().state_dict()["min_scale"] == 2.0**-126


def test_the_tracker_counts_every_step_once(runner: Runner) -> None:
    # SM-15, neosr-project/neosr#9
    optimizer = SGD([leaf(1.0)], loss_scale=LossScale(8.0, growth_interval=3), backend=runner.backend)
    seen = []
    for grad in [1, 1, INF, 1, 1, 1, 1, 1, 1, INF, 1]:
        train(optimizer, grad)
        seen.append(scale_and_tracker(optimizer))
    assert seen == [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1), (8, 2), (16, 0), (8, 0), (8, 1)]


def test_every_overflow_backs_off(runner: Runner) -> None:
    # SM-21, deepspeedai/DeepSpeed#3008
    optimizer = SGD([leaf(1.0)], loss_scale=LossScale(100.0, 1.5, 0.75, 1), backend=runner.backend)
    seen = []
    for grad in [1.0, INF, INF]:
        train(optimizer, grad)
        seen.append(scale_and_tracker(optimizer))
    assert seen == [(150.0, 0), (112.5, 0), (84.375, 0)]


REFUSED = [
    *({"init_scale": value} for value in (0.0, -1.0, NAN, INF, -INF, 1e39)),
    *({"growth_factor": value} for value in (1.0, 0.5, 0.0, -2.0, NAN, INF)),
    *({"backoff_factor": value} for value in (1.0, 2.0, 0.0, -0.5, NAN)),
    *({"growth_interval": value} for value in (0, -1, 1.5, NAN)),
]


@pytest.mark.parametrize("setting", REFUSED, ids=str)
def test_a_setting_out_of_range_is_refused(setting: dict[str, float]) -> None:
    # SM-19, ooples/AiDotNet.Tensors#277
    (name,) = setting
    with pytest.raises(ValueError, match=name.removeprefix("init_")):
        LossScale(**setting)  # type: ignore[arg-type]
    if name == "init_scale":
        with pytest.raises(ValueError, match="scale"):
            SGD([leaf(1.0)], loss_scale=setting[name])


# What is an overflow, and what a skipped step leaves alone.


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_an_overflow_in_one_parameter_skips_all(runner: Runner, value: float) -> None:
    # SM-23, pytorch/pytorch#26512
    optimizer = AdamW(
        [leaf([1.0, 2.0]), leaf(3.0)], weight_decay=0.1, loss_scale=LossScale(8.0), backend=runner.backend
    )
    train(optimizer, 1.0, 1.0)
    before = values(optimizer)
    train(optimizer, [1.0, value], 1.0)
    assert_same_bits(values(optimizer), before)
    assert scale_and_tracker(optimizer) == (4.0, 0)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_nonfinite_parameter_is_no_overflow(runner: Runner, value: float) -> None:
    # SM-23, pytorch/pytorch#26512
    p = leaf([value, 1.0])
    optimizer = SGD([p], lr=0.1, loss_scale=LossScale(8.0), backend=runner.backend)
    train(optimizer, 1.0)
    assert p.tolist() == pytest.approx([value, 0.9], nan_ok=True)
    assert scale_and_tracker(optimizer) == (8.0, 1)


@pytest.mark.parametrize(("max_norm", "lr", "expected"), [(None, 1e-38, -3.0), (1.0, 1.0, -(0.5**0.5))])
def test_a_norm_beyond_float32_is_no_overflow(
    runner: Runner, max_norm: float | None, lr: float, expected: float
) -> None:
    # SM-20, NVIDIA/apex#352
    p = leaf([0.0, 0.0])
    optimizer = SGD([p], lr=lr, max_norm=max_norm, loss_scale=LossScale(1.0), backend=runner.backend)
    train(optimizer, 3e38)
    assert p.tolist() == pytest.approx([expected, expected])
    assert float(optimizer.grad_norm) == INF and float(optimizer.found_inf) == 0.0
    assert scale_and_tracker(optimizer) == (1.0, 1)


def test_overflows_in_two_dtypes_back_off_once(runner: Runner) -> None:
    # SM-06, flagos-ai/FlagGems#5878
    optimizer = Adam([leaf(1.0), leaf(1.0, dtype=torch.float16)], loss_scale=LossScale(8.0), backend=runner.backend)
    train(optimizer, 1.0, 1.0)
    train(optimizer, INF, INF)
    assert scale_and_tracker(optimizer) == (4.0, 0)
    assert steps_of(optimizer) == [1, 1]


@pytest.mark.parametrize("flag", [1.0, 2.0, 3.0, NAN])
def test_any_outer_flag_but_0_skips(runner: Runner, flag: float) -> None:
    # SM-06, flagos-ai/FlagGems#5917: the flag is a sum over devices
    optimizer = Adam([leaf(1.0, grad=8.0)], backend=runner.backend)
    optimizer.grad_scale = torch.tensor(8.0)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    before = values(optimizer)
    optimizer.found_inf = torch.tensor(flag)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_same_bits(values(optimizer), before)


def test_skipped_steps_do_not_count(runner: Runner) -> None:
    # SM-14, allenai/OLMo-core#309
    p = leaf(1.0)
    optimizer = Adam([p], lr=0.1, loss_scale="dynamic", backend=runner.backend)
    for grad in (1.0, INF, 1.0):
        train(optimizer, grad)
    assert steps_of(optimizer) == [2]
    assert p.item() == pytest.approx(0.8)


def test_an_overflow_left_in_the_gradients_skips_until_they_are_zeroed(runner: Runner) -> None:
    # SM-18, PaddlePaddle/Paddle#67895
    p = leaf(1.0)
    optimizer = SGD([p], lr=0.1, loss_scale=LossScale(16.0), backend=runner.backend)
    seen = []
    for slope in (INF, 1.0, 1.0):
        optimizer.backward(p * slope)
        optimizer.step()
        seen.append((scale_and_tracker(optimizer)[0], p.item()))
    assert seen == [(8.0, 1.0), (4.0, 1.0), (2.0, 1.0)]
    optimizer.zero_grad()
    optimizer.backward(p * 1.0)
    optimizer.step()
    assert p.item() == pytest.approx(0.9)


# What a user sees of a skipped step.


def test_the_skip_flag_is_of_the_last_step(runner: Runner) -> None:
    # SM-11, huggingface/accelerate#4242
    optimizer = SGD([leaf(1.0)], loss_scale="dynamic", backend=runner.backend)
    seen = []
    for grad in (1.0, INF, INF, 1.0):
        train(optimizer, grad)
        seen.append(optimizer.step_was_skipped)
    assert seen == [False, True, True, False]


def test_a_scheduler_does_not_mind_a_skipped_first_step(runner: Runner) -> None:
    # SM-12, pytorch/pytorch#44511
    optimizer = SGD([leaf(1.0)], lr=1.0, loss_scale="dynamic", backend=runner.backend)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(optimizer, INF)
    assert optimizer.step_was_skipped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("is_static", [False, True], ids=["floor", "static"])
def test_a_skip_shows_where_the_scale_does_not_move(runner: Runner, is_static: bool) -> None:
    # SM-13, huggingface/accelerate#2828
    loss_scale = 8.0 if is_static else LossScale(1.0, min_scale=1.0)
    optimizer = SGD([leaf(1.0)], loss_scale=loss_scale, backend=runner.backend)
    assert optimizer.loss_scale is not None
    scale = optimizer.loss_scale.get_scale()
    for skipped in (True, False):
        train(optimizer, INF if skipped else 1.0)
        set_true_grads(optimizer, 1.0)  # accumulation, without a step
        assert optimizer.step_was_skipped == skipped
        assert optimizer.loss_scale.get_scale() == scale


# Unscaling ahead of the step.


@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale"])
def test_gradients_are_unscaled_once(runner: Runner, unscale_first: bool) -> None:
    # SM-08, Lightning-AI/pytorch-lightning#15501
    p = leaf(1.0)
    optimizer = SGD([p], lr=1.0, loss_scale=LossScale(65536.0), backend=runner.backend)
    set_true_grads(optimizer, 0.5)
    if unscale_first:
        optimizer.unscale_()
    optimizer.step()
    assert p.item() == 0.5


def test_unscaling_twice_divides_once(runner: Runner) -> None:
    # SM-09, huggingface/transformers#23935
    p = leaf(1.0)
    optimizer = SGD([p], lr=0.1, loss_scale=1024.0, backend=runner.backend)
    set_true_grads(optimizer, 1.0)
    assert p.grad is not None and p.grad.item() == 1024.0
    optimizer.unscale_()
    optimizer.unscale_()
    assert p.grad.item() == 1.0
    optimizer.step()
    assert p.item() == pytest.approx(0.9)


@pytest.mark.parametrize("is_mended", [False, True], ids=["left", "mended"])
def test_an_overflow_seen_by_unscaling_skips_the_step(runner: Runner, is_mended: bool) -> None:
    # SM-05, pytorch/pytorch#95847
    optimizer = AdamW([leaf([1.0, 2.0]), leaf(3.0)], loss_scale=LossScale(8.0), backend=runner.backend)
    train(optimizer, 1.0, 1.0)
    before = values(optimizer)
    set_true_grads(optimizer, [1.0, INF], 1.0)
    optimizer.unscale_()
    if is_mended:
        params_of(optimizer)[0].grad.nan_to_num_(posinf=0.0)  # type: ignore[union-attr]
    optimizer.step()
    assert_same_bits(values(optimizer), before)
    assert scale_and_tracker(optimizer) == (4.0, 0)


@pytest.mark.parametrize("value", [INF, NAN])
def test_an_overflow_made_after_unscaling_skips_the_step(runner: Runner, value: float) -> None:
    # SM-10, pytorch/pytorch#97415
    p = leaf([1.0, 1.0])
    optimizer = SGD([p], lr=0.1, loss_scale=LossScale(8.0), backend=runner.backend)
    set_true_grads(optimizer, 0.5)
    optimizer.unscale_()
    p.grad[1] = value  # type: ignore[index]
    optimizer.step()
    assert optimizer.step_was_skipped and p.tolist() == [1.0, 1.0]
    assert scale_and_tracker(optimizer) == (4.0, 0)


def drop_by_hand(optimizer: torch.optim.Optimizer) -> None:
    for param in params_of(optimizer):
        param.grad = None


CLEARINGS = {
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "zero_grad_in_place": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "grads_are_None": drop_by_hand,
}


@pytest.mark.parametrize("slope", [1.0, INF])
@pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
def test_an_iteration_given_up_after_unscaling_leaves_no_mark(
    runner: Runner, clear: Callable[[torch.optim.Optimizer], None], slope: float
) -> None:
    # SM-17, Haian-Jin/LVSM#19
    p = leaf(1.0)
    optimizer = SGD([p], lr=0.1, loss_scale=LossScale(8.0), backend=runner.backend)
    optimizer.backward(p * slope)
    optimizer.unscale_()
    clear(optimizer)
    optimizer.backward(p * 1.0)
    optimizer.unscale_()
    assert p.grad is not None and p.grad.item() == 1.0
    optimizer.step()
    assert p.item() == pytest.approx(0.9)
    assert scale_and_tracker(optimizer) == (8.0, 1)


# Two scales, or two optimizers.


def test_a_shared_scale_backs_off_once_per_iteration(runner: Runner) -> None:
    # SM-16, ShiqiYu/OpenGait#147
    loss_scale = LossScale(4.0)
    optimizers = [SGD([leaf(1.0)], lr=0.1, loss_scale=loss_scale, backend=runner.backend) for _ in range(2)]
    for optimizer, grad in zip(optimizers, (INF, 1.0), strict=True):
        train(optimizer, grad)
    loss_scale.update()
    assert loss_scale.get_scale() == 2.0
    a, b = (params_of(optimizer)[0].item() for optimizer in optimizers)
    assert a == 1.0 and b == pytest.approx(0.9)


def test_scales_of_their_own_are_independent(runner: Runner) -> None:
    # SM-16, ShiqiYu/OpenGait#147
    optimizers = [SGD([leaf(1.0)], loss_scale=LossScale(4.0), backend=runner.backend) for _ in range(2)]
    for optimizer, grad in zip(optimizers, (INF, 1.0), strict=True):
        train(optimizer, grad)
    assert [scale_and_tracker(optimizer) for optimizer in optimizers] == [(2.0, 0), (4.0, 1)]


@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale"])
def test_an_own_divisor_multiplies_with_the_loss_scale(runner: Runner, unscale_first: bool) -> None:
    # SM-24, pytorch/pytorch#123428
    p = leaf(1.0)
    optimizer = SGD([p], lr=1.0, loss_scale=LossScale(8.0), backend=runner.backend)
    set_true_grads(optimizer, 4 * 0.5)
    optimizer.grad_scale = torch.tensor(4.0)
    if unscale_first:
        optimizer.unscale_()
    optimizer.step()
    assert p.item() == 0.5


def test_two_scalers_for_one_loss_are_refused(runner: Runner) -> None:
    # SM-24, pytorch/pytorch#123428
    p = leaf(1.0)
    optimizer = SGD([p], lr=1.0, loss_scale=LossScale(8.0), backend=runner.backend)
    set_true_grads(optimizer, 0.5)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="GradScaler"):
        optimizer.step()
    assert p.item() == 1.0

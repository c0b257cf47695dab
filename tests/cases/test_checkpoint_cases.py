"""Checkpoints, copies and resumed runs. Cases from public bug reports."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.tools import leaf, params_of, scale_and_tracker, steps_of, train
from conftest import Runner
from problem import assert_same_bits, values

from tritonamp import SGD, Adam, AdamW, LossScale

INF = float("inf")


def through_a_file(state: Any, map_location: Any = None) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location=map_location)


# State.


@pytest.mark.parametrize("map_location", [None, "cpu"])
def test_a_resumed_run_equals_an_unbroken_one(runner: Runner, map_location: str | None) -> None:
    # CK-03, pytorch/pytorch#103256, pytorch/pytorch#75224
    unbroken, resumed = leaf([1.0, 2.0]), leaf([1.0, 2.0])
    optimizers = [Adam([p], lr=0.1, loss_scale=None, backend=runner.backend) for p in (unbroken, resumed)]
    grads = [[1.0, -0.3], [0.7, 0.1], [-0.2, 0.9], [0.4, 0.4]]
    for step, grad in enumerate(grads):
        if step == 2:
            saved = through_a_file(optimizers[1].state_dict(), map_location)
            optimizers[1] = Adam([resumed], lr=0.1, loss_scale=None, backend=runner.backend)
            optimizers[1].load_state_dict(saved)
        for optimizer in optimizers:
            train(optimizer, grad)
    assert_same_bits(values(optimizers[1]), values(optimizers[0]))


@pytest.mark.parametrize("saved_as", [float, int, torch.tensor, lambda step: torch.tensor(step, dtype=torch.int64)])
def test_a_loaded_step_counter_is_exact_and_on_the_device(runner: Runner, saved_as: Callable[[float], Any]) -> None:
    # CK-03, pytorch/pytorch#173901
    p = leaf(1.0, grad=1.0)
    optimizer = Adam([p], loss_scale=None, backend=runner.backend)
    optimizer.step()
    state_dict = optimizer.state_dict()
    state_dict["state"][0]["step"] = saved_as(2.0**24 - 2)
    optimizer.load_state_dict(state_dict)
    optimizer.step()
    step = optimizer.state[p]["step"]
    assert (step.item(), step.dtype, step.device) == (2.0**24 - 1, torch.float32, p.device)


def test_optimizers_that_share_a_state_dict_share_no_state(runner: Runner) -> None:
    # CK-04, pytorch/pytorch#196083, pytorch/pytorch#147288
    first, second = (Adam([leaf(1.0)], loss_scale=LossScale(8.0), backend=runner.backend) for _ in range(2))
    train(first, 1.0)
    before = values(first)
    second.load_state_dict(first.state_dict())
    train(second, INF)
    train(second, 1.0)
    assert steps_of(first) == [1] and steps_of(second) == [2]
    assert scale_and_tracker(first) == (8.0, 1) and scale_and_tracker(second) == (4.0, 1)
    assert_same_bits(values(first), before)


def test_a_state_dict_keeps_the_scale_it_was_taken_with(runner: Runner) -> None:
    # CK-04, mlverse/torch#1041
    optimizer = Adam([leaf(1.0)], loss_scale=LossScale(8.0), backend=runner.backend)
    train(optimizer, 1.0)
    of_optimizer = optimizer.state_dict()["param_groups"][0]["loss_scale"]
    assert optimizer.loss_scale is not None
    of_scale = optimizer.loss_scale.state_dict()
    train(optimizer, INF)
    for taken in (of_optimizer, of_scale):
        assert (taken["scale"], taken["_growth_tracker"]) == (8.0, 1)
    assert scale_and_tracker(optimizer) == (4.0, 0)


# Copies.

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair))}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_goes_on_by_itself(runner: Runner, duplicate: Callable[[Any], Any]) -> None:
    # CK-05, pytorch/pytorch#81700, huggingface/accelerate#1720
    p = torch.nn.Parameter(leaf(1.0))
    options: dict[str, Any] = {"lr": 0.1, "max_norm": 100.0, "skip_norm": 50.0, "backend": runner.backend}
    optimizer = Adam([p], loss_scale=LossScale(8.0, growth_interval=5), **options)
    train(optimizer, 1.0)
    q, other = duplicate((p, optimizer))
    train(other, 1.0)
    assert p.item() == pytest.approx(0.9) and q.item() == pytest.approx(0.8)
    assert steps_of(optimizer) == [1] and steps_of(other) == [2]
    assert scale_and_tracker(optimizer) == (8.0, 1) and scale_and_tracker(other) == (8.0, 2)
    assert other.param_groups[0]["max_norm"] == 100.0
    train(other, 60.0)
    assert other.step_was_skipped and int(other.skipped_steps) == 1 and int(optimizer.skipped_steps) == 0
    assert params_of(other) == [q]


# Checkpoints of torch, and of older versions.

PAIRS = [
    (torch.optim.SGD, SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (torch.optim.SGD, SGD, {"lr": 0.1}),
    (torch.optim.Adam, Adam, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.AdamW, AdamW, {"lr": 0.1, "amsgrad": True}),
]


@pytest.mark.parametrize("is_old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize(("theirs", "ours", "options"), PAIRS)
def test_a_torch_checkpoint_is_continued(
    runner: Runner, theirs: Any, ours: Any, options: dict[str, Any], is_old: bool
) -> None:
    # CK-06, NVIDIA/apex#577, pytorch/pytorch#88015
    p, q = leaf([1.0, 2.0]), leaf([1.0, 2.0])
    reference = theirs([p], foreach=False, **options)
    grads = torch.tensor([[1.0, -0.3], [0.7, 0.1], [-0.2, 0.9], [0.4, 0.4]])
    for step, grad in enumerate(grads):
        p.grad = grad.clone()
        if step == 2:
            saved = through_a_file(reference.state_dict())
            if is_old:  # options that came later, and a counter that was a number
                for name in ("maximize", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"):
                    saved["param_groups"][0].pop(name, None)
                for state in saved["state"].values():
                    if "step" in state:
                        state["step"] = int(state["step"])
            q.data.copy_(p.data)
            optimizer = ours([q], max_norm=100.0, backend=runner.backend)
            optimizer.load_state_dict(saved)
            assert optimizer.param_groups[0]["max_norm"] == 100.0
        reference.step()
        if step >= 2:
            q.grad = grad.clone()
            optimizer.step()
    assert q.tolist() == pytest.approx(p.tolist())


def test_options_missing_in_a_checkpoint_take_those_of_the_constructor(runner: Runner) -> None:
    # CK-06, NVIDIA/apex#1615
    p = leaf(1.0, grad=1.0)
    optimizer = AdamW([p], lr=0.1, loss_scale=None, backend=runner.backend)
    optimizer.step()
    state_dict = optimizer.state_dict()
    for name in ("max_norm", "loss_scale", "eps", "maximize"):
        del state_dict["param_groups"][0][name]
    optimizer = AdamW([p], eps=1e-3, max_norm=0.5, maximize=True, loss_scale=8.0, backend=runner.backend)
    optimizer.load_state_dict(state_dict)
    group = optimizer.param_groups[0]
    assert (group["eps"], group["max_norm"], group["maximize"], group["lr"]) == (1e-3, 0.5, True, 0.1)
    train(optimizer, 1.0)
    assert steps_of(optimizer) == [2]


# The loss scale.


def test_the_loss_scale_travels_with_the_optimizer(runner: Runner) -> None:
    # CK-08, mosaicml/composer#1376, pytorch/torchtitan#146
    p = leaf(1.0)
    optimizer = SGD([p], loss_scale=LossScale(8.0, growth_interval=3), backend=runner.backend)
    train(optimizer, 1.0)
    train(optimizer, 1.0)
    fresh = SGD([p], loss_scale=LossScale(1024.0, growth_interval=100), backend=runner.backend)
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    assert scale_and_tracker(fresh) == (8.0, 2)
    assert fresh.loss_scale is not None and fresh.loss_scale.state_dict()["growth_interval"] == 3
    train(fresh, 1.0)
    assert scale_and_tracker(fresh) == (16.0, 0)


@pytest.mark.parametrize("loss_scale", ["auto", "dynamic"])
def test_the_loaded_scale_is_used_at_once(runner: Runner, loss_scale: str) -> None:
    # CK-09, facebookresearch/fairseq2#1346
    p = leaf(1.0)
    state_dict = SGD([p], lr=1.0, loss_scale=LossScale(1024.0)).state_dict()
    optimizer = SGD([p], loss_scale=loss_scale, backend=runner.backend)
    optimizer.load_state_dict(state_dict)
    p.grad = torch.tensor(512.0)
    optimizer.unscale_()  # ahead of any scale()
    assert p.grad.item() == 0.5
    optimizer.zero_grad()
    optimizer.backward(p * 0.5)
    assert p.grad is not None and p.grad.item() == 512.0
    optimizer.step()
    assert p.item() == 0.5
    assert scale_and_tracker(optimizer) == (1024.0, 1)


# All of it.


def test_a_whole_run_goes_on_from_a_checkpoint(runner: Runner) -> None:
    # CK-10
    grads = [torch.randn(20) for _ in range(10)]
    grads[4][3] = INF

    def make(p: torch.Tensor) -> AdamW:
        loss_scale = LossScale(64.0, growth_interval=2)
        return AdamW([p], lr=0.1, amsgrad=True, max_norm=0.5, loss_scale=loss_scale, backend=runner.backend)

    unbroken, resumed = torch.ones(20).requires_grad_(), torch.ones(20).requires_grad_()
    optimizers = [make(unbroken), make(resumed)]
    for step, grad in enumerate(grads):
        if step == 5:
            saved = through_a_file({"p": resumed.detach(), "optimizer": optimizers[1].state_dict()})
            resumed = saved["p"].requires_grad_()
            optimizers[1] = make(resumed)
            optimizers[1].load_state_dict(saved["optimizer"])
        for optimizer in optimizers:
            train(optimizer, grad)
    assert_same_bits(values(optimizers[1]), values(optimizers[0]))
    assert [scale_and_tracker(optimizer) for optimizer in optimizers] == [(512.0, 1)] * 2

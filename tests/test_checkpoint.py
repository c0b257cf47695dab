"""Loading: hooks, refusals, and the layouts that kernels and host share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import Runner
from problem import assert_same_bits, checked_step, make_params, scaled, set_grads, values
from tritonamp.kernels import scale, step

import tritonamp
from tritonamp import SGD, AdamW, backends, loss_scale


def test_load_hooks_have_the_last_word(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = AdamW(params, loss_scale=None, backend=runner.backend)
    set_grads(params)
    optimizer.step()
    checkpoint = optimizer.state_dict()

    def adapt(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {0: {**state_dict["state"][0], "exp_avg": torch.full((3,), 7.0)}}
        return {**state_dict, "state": state}

    def amend(loaded: Any) -> None:
        loaded.state[params[0]]["exp_avg_sq"] = torch.full((3,), 5.0)

    optimizer.register_load_state_dict_pre_hook(adapt)
    optimizer.register_load_state_dict_post_hook(amend)
    optimizer.load_state_dict(checkpoint)
    state = optimizer.state[params[0]]
    assert state["exp_avg"].tolist() == [7.0] * 3 and state["exp_avg_sq"].tolist() == [5.0] * 3
    set_grads(params)
    checked_step(optimizer)


@pytest.mark.parametrize("damage", ["state of another shape", "scale", "groups"])
def test_a_damaged_checkpoint_changes_nothing(runner: Runner, damage: str) -> None:
    params = make_params([(3,), (2, 2)])
    optimizer = AdamW(params, lr=0.1, loss_scale=tritonamp.LossScale(8.0), backend=runner.backend)
    set_grads(params, scaled(optimizer))
    optimizer.step()
    checkpoint = copy.deepcopy(optimizer.state_dict())
    checkpoint["param_groups"][0]["lr"] = 0.5
    if damage == "state of another shape":
        checkpoint["state"][1]["exp_avg"] = torch.ones(4)
    elif damage == "scale":
        checkpoint["param_groups"][0]["loss_scale"]["scale"] = -1.0
    else:
        checkpoint["param_groups"][0]["params"] = [0]
    before, numbers = values(optimizer), optimizer.loss_scale.state_dict()
    with pytest.raises(ValueError, match=r"exp_avg|scale must be|param"):
        optimizer.load_state_dict(checkpoint)
    assert_same_bits(values(optimizer), before)
    assert optimizer.loss_scale.state_dict() == numbers and optimizer.param_groups[0]["lr"] == 0.1
    set_grads(params, scaled(optimizer))
    checked_step(optimizer)


def test_state_of_halves_stays_float32(runner: Runner) -> None:
    params = make_params([(300,)], torch.bfloat16)
    optimizer = AdamW(params, loss_scale=None, backend=runner.backend)
    set_grads(params)
    optimizer.step()
    before = values(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_bits(values(optimizer), before)


def test_a_buffer_may_outlive_its_momentum(runner: Runner) -> None:
    """It is kept, saved again, and used once there is a momentum again, as in torch."""
    params = make_params([(3,)])
    old = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    set_grads(params)
    old.step()
    old.param_groups[0]["momentum"] = 0.0
    optimizer = SGD(params, lr=0.1, loss_scale=None, backend=runner.backend)
    optimizer.load_state_dict(old.state_dict())
    saved = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert_same_bits([saved], [old.state[params[0]]["momentum_buffer"]])
    set_grads(params)
    checked_step(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    set_grads(params)
    checked_step(optimizer)


def test_plain_loops_stay_plain(runner: Runner) -> None:
    """A checkpoint of a loop that scales nothing does not arm the scale."""
    params = make_params([(3,)])
    for _ in range(2):
        optimizer = AdamW(params, backend=runner.backend)
        set_grads(params)
        checked_step(optimizer, scale=None)
        checkpoint = optimizer.state_dict()
        optimizer = AdamW(params, backend=runner.backend)
        optimizer.load_state_dict(checkpoint)
        set_grads(params)
        checked_step(optimizer, scale=None)


@pytest.mark.parametrize(("host", "device"), [(backends, step), (loss_scale, scale)], ids=["outcome", "scale"])
def test_host_and_kernels_share_a_layout(host: Any, device: Any) -> None:
    names = [name for name in vars(host) if name.isupper() and type(getattr(host, name)) is int]
    assert len(names) >= 7
    assert {name: getattr(device, name).value for name in names} == {name: getattr(host, name) for name in names}

"""One optimizer whose parameters lie on several devices: one launch for each, one decision.

There is one device here. So parameters are said to lie on others: what each device computes, gives to the first and
takes from there can be tested so; that it arrives, between real devices, cannot. Unscaling in place goes by where the
gradients really lie: here all on one.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import Runner
from hypothesis import given
from hypothesis import strategies as st
from problem import (
    assert_same_bits,
    checked_step,
    make_params,
    scaled,
    set_grads,
    values,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import tritonamp
from tritonamp import plan
from tritonamp.backends import moved

SHAPES = [(7,), (600,), (0,), (), (3, 171), (1030,)]


class Places:
    """Says where parameters lie: each on the device of its number; the first device by default."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}

    def spread(self, params: list[Tensor], n_devices: int) -> list[Tensor]:
        """Say that the parameters lie on so many devices, in turn."""
        self.numbers.update({id(param): i % n_devices for i, param in enumerate(params)})
        return params

    def __call__(self, param: Tensor) -> torch.device:
        number = self.numbers.get(id(param), 0)
        return torch.device("cpu", number) if number else torch.device("cpu")


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    places = Places()
    monkeypatch.setattr(plan, "device_of", places)
    return places


@pytest.mark.parametrize("make", [tritonamp.SGD, tritonamp.AdamW])
@pytest.mark.parametrize("n_devices", [2, 3])
def test_steps_are_those_of_one_device(make: type, n_devices: int, places: Places, runner: Runner) -> None:
    params = places.spread(make_params(SHAPES), n_devices)
    options = {"momentum": 0.9} if make is tritonamp.SGD else {}
    opt = make(params, lr=0.1, max_norm=0.5, loss_scale="dynamic", backend=runner.backend, **options)
    for _ in range(3):
        set_grads(params, scaled(opt))
        checked_step(opt)
    assert len(opt._devices._backends) == n_devices


@pytest.mark.parametrize("at", range(6))
def test_an_overflow_on_one_device_skips_on_all(at: int, places: Places, runner: Runner) -> None:
    params = places.spread(make_params(SHAPES), 3)
    opt = tritonamp.AdamW(params, loss_scale=tritonamp.LossScale(64.0), backend=runner.backend)
    for step in range(4):
        set_grads(params, scaled(opt))
        if step in (1, 2) and params[at].numel():
            assert params[at].grad is not None
            params[at].grad.view(-1)[-1] = torch.inf
        checked_step(opt)
    skips = 2 if params[at].numel() else 0
    assert int(opt.skipped_steps) == skips
    assert float(opt.loss_scale.value) == 64.0 / 2**skips


def test_without_clipping_nothing_differs_in_a_bit(places: Places, runner: Runner) -> None:
    """The norm decides here, and its last bits do not matter."""
    params = make_params(SHAPES)
    twins = places.spread([param.detach().clone().requires_grad_() for param in params], 2)
    one, many = (tritonamp.AdamW(each, loss_scale=2.0**10, backend=runner.backend) for each in (params, twins))
    for step in range(3):
        scaled(one), scaled(many)
        set_grads(params, 2.0**10)
        for param, twin in zip(params, twins, strict=True):
            twin.grad = None if param.grad is None else param.grad.clone()
        if step == 1:
            params[1].grad = twins[1].grad = None  # all that the second device has, but for one
        one.step()
        many.step()
    assert_same_bits(values(many), values(one))


def test_each_device_is_launched_on_once_in_each_half(places: Places, kernel_runner: Runner) -> None:
    params = places.spread(make_params(SHAPES), 2)
    with kernel_runner.running() as launches:
        opt = tritonamp.AdamW(params, max_norm=1.0, loss_scale=None, backend="triton")
        for _ in range(2):
            set_grads(params)
            checked_step(opt)
    if kernel_runner.name == "compiled":
        names = [launch.name for launch in launches.launches]
        assert names == 2 * [*2 * ["statistics_kernel", "sums_kernel"], *2 * ["apply_kernel"]]


def test_without_a_norm_nothing_is_sent(places: Places, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params(SHAPES)
    twins = places.spread([param.detach().clone().requires_grad_() for param in params], 2)
    options = {"loss_scale": None, "skip_nonfinite": False, "backend": runner.backend}
    one, many = (tritonamp.AdamW(each, **options) for each in (params, twins))  # type: ignore[arg-type]
    monkeypatch.delattr(plan.Agreement, "reduce")
    for _ in range(2):
        set_grads(params)
        for param, twin in zip(params, twins, strict=True):
            twin.grad = param.grad
        one.step()
        many.step()
        assert bool(many.grad_norm.isnan())
    assert_same_bits(values(many), values(one))


def test_unscaling_in_place_sees_all_devices(places: Places, runner: Runner) -> None:
    params = places.spread(make_params(SHAPES), 2)
    opt = tritonamp.SGD(params, lr=0.1, max_norm=1.0, loss_scale="dynamic", backend=runner.backend)
    for bad in (None, 0, 1):
        set_grads(params, scaled(opt))
        if bad is not None:
            params[bad].grad.view(-1)[0] = torch.nan  # type: ignore[union-attr]
        opt.unscale_()
        checked_step(opt)
    assert int(opt.skipped_steps) == 2


def test_an_outer_scaler_is_heard_on_all_devices(places: Places, runner: Runner) -> None:
    params = places.spread(make_params(SHAPES), 2)
    opt = tritonamp.AdamW(params, loss_scale=None, backend=runner.backend)
    scaler = tritonamp.GradScaler("cpu", init_scale=8.0)
    for bad in (None, 0, 1):
        scaler.scale(torch.ones(()))
        set_grads(params, 8.0)
        if bad is not None:
            params[bad].grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        before = values(opt)
        scaler.step(opt)
        scaler.update(8.0)
        assert opt.step_was_skipped == (bad is not None)
        if bad is not None:
            assert_same_bits(values(opt), before)


def test_a_tensor_lr_counts_on_all_devices(places: Places, runner: Runner) -> None:
    params = places.spread(make_params(SHAPES), 2)
    lr = torch.tensor(0.5)
    opt = tritonamp.SGD(params, lr=lr, loss_scale=None, backend=runner.backend)
    for _ in range(2):
        set_grads(params)
        checked_step(opt)
        lr.mul_(0.5)


def test_copies_and_checkpoints_go_on_alike(places: Places, runner: Runner) -> None:
    params = places.spread(make_params(SHAPES), 2)
    opt = tritonamp.AdamW(params, loss_scale="dynamic", backend=runner.backend)
    set_grads(params, scaled(opt))
    checked_step(opt)
    twin = copy.deepcopy(opt)
    theirs = places.spread(list(twin.param_groups[0]["params"]), 2)
    fresh = tritonamp.AdamW(
        places.spread([param.detach().clone().requires_grad_() for param in params], 2), backend=runner.backend
    )
    fresh.load_state_dict(opt.state_dict())
    set_grads(params, scaled(opt))
    for other in (theirs, fresh.param_groups[0]["params"]):
        for param, same in zip(params, other, strict=True):
            same.grad = None if param.grad is None else param.grad.clone()
    checked_step(opt)
    for each in (twin, fresh):
        scaled(each)
        checked_step(each)
        assert_same_bits(values(each), values(opt))


def test_parameters_move_to_other_devices_and_groups_are_added(places: Places, runner: Runner) -> None:
    params = places.spread(make_params(SHAPES), 2)
    opt = tritonamp.AdamW(params[:4], max_norm=1.0, loss_scale=None, backend=runner.backend)
    for n_devices in (2, 3, 1, 2):
        places.spread(params, n_devices)
        for param in params:
            param.data = param.data.clone()  # elsewhere
        if n_devices == 1:
            opt.add_param_group({"params": params[4:], "lr": 0.5})
        set_grads(params)
        checked_step(opt)


def test_a_first_device_without_gradients(places: Places, runner: Runner) -> None:
    params = places.spread(make_params(SHAPES), 2)
    opt = tritonamp.AdamW(params, max_norm=1.0, loss_scale="dynamic", backend=runner.backend)
    for _ in range(2):
        set_grads(params, scaled(opt))
        for param in params[::2]:
            param.grad = None
        checked_step(opt)


def test_a_step_on_several_devices_is_not_captured(
    places: Places, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = places.spread(make_params(SHAPES), 2)
    opt = tritonamp.AdamW(params, loss_scale=None, backend=runner.backend)
    set_grads(params)
    checked_step(opt)
    before = values(opt)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="on several devices cannot be captured"):
            opt.step()
    assert_same_bits(values(opt), before)
    checked_step(opt)


def test_the_first_step_on_a_gpu_behind_a_cpu_is_not_captured(
    places: Places, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make state."""
    params = make_params(SHAPES)
    opt = tritonamp.AdamW(params, loss_scale=None, backend=runner.backend)
    set_grads(params)
    with monkeypatch.context() as patch:
        patch.setattr(plan, "device_of", lambda p: torch.device("cpu" if p is params[0] else "cuda"))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="makes state or tables cannot be captured"):
            opt.step()
    assert not opt.state
    checked_step(opt)


class Moves(TorchFunctionMode):
    """Notes which tensors are moved, and where to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, torch.device]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and isinstance(args[1], torch.device):
            self.seen.append((id(args[0]), args[1]))
        return func(*args, **(kwargs or {}))


def test_what_another_device_needs_is_moved_there(places: Places, runner: Runner) -> None:
    """Which does not show in the results, where both are the same device."""
    first, second = torch.device("cpu"), torch.device("cpu", 1)
    params = places.spread(make_params(SHAPES), 2)
    lr = torch.tensor(0.5)
    opt = tritonamp.SGD(params, lr=lr, max_norm=1.0, loss_scale=64.0, backend=runner.backend)
    set_grads(params, scaled(opt))
    checked_step(opt)
    set_grads(params, scaled(opt))
    with Moves() as moves:
        opt.step()
    there = [tensor for tensor, device in moves.seen if device == second]
    assert {id(lr), id(opt._outcome_state()), id(opt._scale_state())} < set(there)
    assert len(there) == 4  # and what was agreed on
    here = [tensor for tensor, device in moves.seen if device == first]
    assert len(here) >= 3  # each device's sums, and what was agreed on
    assert there[-1] in here


@pytest.mark.parametrize(("device", "waits"), [(torch.device("cpu", 1), False), (torch.device("meta"), True)], ids=str)
def test_the_host_waits_for_a_copy_to_another_kind_of_device(device: torch.device, waits: bool) -> None:
    """It might read or overwrite its own memory too early."""
    tensor = mock.Mock(device=torch.device("cpu"))
    moved(tensor, device)
    tensor.to.assert_called_once_with(device, non_blocking=not waits, copy=False)


def test_a_checkpoint_takes_step_counters_from_every_device() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = make_params([(3,), (3,)])
        opt = tritonamp.SGD(params, momentum=0.9, loss_scale=None)
        for i, param in enumerate(params):
            opt.state[param] = {"step": torch.ones((), device=f"cuda:{i}"), "momentum_buffer": torch.ones(3)}
        assert [list(state) for state in opt.state_dict()["state"].values()] == [["momentum_buffer"]] * 2


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_norm_whose_square_has_no_sum_is_an_overflow(max_norm: float | None, places: Places, runner: Runner) -> None:
    params = places.spread(make_params([(2,), (2,)], torch.float64), 2)
    opt = tritonamp.SGD(params, max_norm=max_norm, loss_scale=None, backend=runner.backend)
    before = values(opt)
    for param in params:
        param.grad = torch.full((2,), 1e200, dtype=torch.float64)
    opt.step()
    assert opt.step_was_skipped
    assert_same_bits(values(opt), before)


def test_the_norm_does_not_depend_on_where_tensors_lie(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places()
    monkeypatch.setattr(plan, "device_of", places)

    @given(st.lists(st.integers(0, 3), min_size=len(SHAPES), max_size=len(SHAPES)), st.floats(1e-3, 1e3))
    def law(numbers: list[int], max_norm: float) -> None:
        params = make_params(SHAPES)
        places.numbers = {id(param): number for param, number in zip(params, numbers, strict=True)}
        opt = tritonamp.AdamW(params, max_norm=max_norm, loss_scale="dynamic", backend=runner.backend)
        for _ in range(2):
            set_grads(params, scaled(opt))
            checked_step(opt)

    law()

"""Loops by somebody who has not read the docs: nothing trains wrongly in silence, and nothing is half done."""

from __future__ import annotations

import copy
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import Runner
from problem import assert_same_bits, checked_step, make_params, scaled, set_grads, values
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import tritonamp
from tritonamp.checks import _check_apart

SGD, AdamW = tritonamp.SGD, tritonamp.AdamW


@pytest.mark.parametrize("make", [SGD, AdamW])
def test_a_default_device_does_not_matter(runner: Runner, make: Any) -> None:
    """Not even for what is made once and for all at the first step."""
    params = make_params([(5,)])
    optimizer = make(params, lr=0.1, max_norm=0.1, backend=runner.backend)
    for _ in range(2):
        set_grads(params, scaled(optimizer))
        with torch.device("meta"):
            optimizer.step()
    set_grads(params, scaled(optimizer))
    checked_step(optimizer)


def test_inference_mode_around_a_report_or_a_step_does_not_matter(runner: Runner) -> None:
    params = make_params([(5,)])
    optimizer = AdamW(params, backend=runner.backend)
    with torch.inference_mode():
        assert optimizer.grad_norm.isnan()
        optimizer.scale(torch.ones(()))
    for _ in range(2):
        set_grads(params, scaled(optimizer))
        with torch.inference_mode():
            optimizer.step()
    set_grads(params, scaled(optimizer))
    checked_step(optimizer)


def test_unscaling_ahead_of_the_gradients_unscales_nothing(runner: Runner) -> None:
    p = torch.ones((), requires_grad=True)
    optimizer = SGD([p], lr=0.1, backend=runner.backend)
    loss = optimizer.scale(p * 1)
    optimizer.unscale_()
    loss.backward()
    optimizer.step()
    assert p.item() == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_decay", None),
        ("lr", "0.1"),
        ("lr", torch.ones(2)),
        ("max_norm", "1"),
        ("eps", None),
        ("weight_decay", torch.ones(1)),
    ],
)
def test_an_option_that_is_no_number_changes_nothing(runner: Runner, name: str, value: Any) -> None:
    """In the second group, after the first might have been updated."""
    params = make_params([(5,), (3,)])
    optimizer = AdamW([{"params": [p]} for p in params], loss_scale=None, backend=runner.backend)
    set_grads(params)
    optimizer.step()
    before, good = values(optimizer), optimizer.param_groups[1][name]
    optimizer.param_groups[1][name] = value
    set_grads(params)
    with pytest.raises((TypeError, ValueError), match=name):
        optimizer.step()
    assert_same_bits(values(optimizer), before)
    optimizer.param_groups[1][name] = good
    checked_step(optimizer)


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.99, 0.999), 0.9, (0.9, "0.99")])
def test_betas_are_two_numbers(betas: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="beta"):
        AdamW(make_params([(3,)]), betas=betas)


def test_parameters_that_share_memory_are_refused(runner: Runner) -> None:
    """Tied through .data, or overlapping; tied as one Parameter, or side by side, they are fine."""
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight.data = embedding.weight.data
    encoder, decoder = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)
    decoder.weight.data = encoder.weight.data.t()
    base = torch.randn(64)
    overlapping = [base[:40].requires_grad_(), base[30:].requires_grad_()]
    square = base.view(8, 8)
    crossing = [square[:, :5].requires_grad_(), square[:, 4:].requires_grad_()]
    far_apart = [base[::3].requires_grad_(), base[1:2].requires_grad_(), base[60:61].requires_grad_()]
    tied = [embedding.weight, head.weight], [encoder.weight, decoder.weight]
    for params in (*tied, overlapping, crossing, far_apart):
        optimizer = SGD(params, loss_scale=None, backend=runner.backend)
        set_grads(params)
        with pytest.raises(RuntimeError, match="share memory"):
            optimizer.step()
    windows = [base.unfold(0, 4, 2).requires_grad_()]
    optimizer = SGD(windows, loss_scale=None, backend=runner.backend)
    windows[0].grad = torch.ones(windows[0].shape)
    with pytest.raises(RuntimeError, match=r"share memory \(strides \(2, 1\)\)"):
        optimizer.step()
    head.weight = embedding.weight
    columns = [square[:, ::2].requires_grad_(), square[:, 1::2].requires_grad_()]
    for params in ([embedding.weight], columns, [encoder.weight]):
        optimizer = SGD(params, loss_scale=None, backend=runner.backend)
        set_grads(params)
        checked_step(optimizer)


def test_parameters_without_data_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    with pytest.raises(RuntimeError, match="after the model has got its memory"):
        optimizer.scale(torch.ones(()))
    model.weight.grad = torch.zeros_like(model.weight)
    with pytest.raises(RuntimeError, match=r"parameter 0 .* has no data"):
        optimizer.step()


def test_state_of_the_users_own_travels_along(runner: Runner) -> None:
    params = make_params([(5,)])
    optimizer = AdamW(params, loss_scale=None, backend=runner.backend)
    set_grads(params)
    optimizer.step()
    optimizer.state[params[0]]["my_norm"] = torch.tensor(2.0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert float(optimizer.state[params[0]]["my_norm"]) == 2
    set_grads(params)
    optimizer.step()


@pytest.mark.parametrize(
    ("key", "value"), [("step", "1"), ("step", torch.ones(3)), ("exp_avg", torch.ones(5).to_sparse())]
)
def test_a_checkpoint_with_state_of_another_kind_changes_nothing(key: str, value: Any) -> None:
    params = make_params([(5,)])
    optimizer = AdamW(params, lr=0.5, loss_scale=None)
    set_grads(params)
    optimizer.step()
    checkpoint = AdamW(params, lr=0.1, loss_scale=None).state_dict()
    checkpoint["state"] = {0: {**optimizer.state_dict()["state"][0], key: value}}
    before = values(optimizer)
    with pytest.raises(ValueError, match=key):
        optimizer.load_state_dict(checkpoint)
    assert_same_bits(values(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_master_copy_is_saved_ahead_of_its_momentum(runner: Runner) -> None:
    """Momentum turned on in mid-run, and its first step skipped: the buffer is not seeded, the copy is the truth."""
    p = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = SGD([p], lr=1e-3, dampening=0.5, master_weights=True, loss_scale=None, backend=runner.backend)
    p.grad = torch.ones(4, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    p.grad = torch.full((4,), torch.inf, dtype=torch.bfloat16)
    optimizer.step()
    (state,) = optimizer.state_dict()["state"].values()
    assert set(state) == {"master_param"} and bool((state["master_param"] == 1 - torch.tensor(1e-3)).all())


def test_a_float64_norm_beyond_the_kernels_range_is_an_overflow(runner: Runner) -> None:
    """Or right, on the torch backend; never a wrong one."""
    p = torch.ones(4, dtype=torch.float64, requires_grad=True)
    optimizer = SGD([p], lr=1.0, max_norm=1.0, loss_scale=None, backend=runner.backend)
    p.grad = torch.full((4,), 1e200, dtype=torch.float64)
    optimizer.step()
    assert optimizer.step_was_skipped == (runner.backend == "triton")
    assert p.tolist() == pytest.approx([1.0 if optimizer.step_was_skipped else 0.5] * 4)


@pytest.mark.parametrize("seed", [0.5, -1, True, None])
def test_a_seed_that_is_none_changes_nothing(runner: Runner, seed: Any) -> None:
    params = make_params([(5,)], torch.bfloat16)
    optimizer = SGD(params, momentum=0.9, rounding="stochastic", loss_scale=None, backend=runner.backend)
    set_grads(params)
    optimizer.step()
    before = values(optimizer)
    optimizer.param_groups[0]["rounding_seed"] = seed
    with pytest.raises(ValueError, match="rounding_seed"):
        optimizer.step()
    assert_same_bits(values(optimizer), before)


def test_a_shared_scale_is_agreed_on_by_all_or_none() -> None:
    scale = tritonamp.LossScale()
    alone = SGD(make_params([(3,)]), loss_scale=scale)
    group: Any = SimpleNamespace(rank=lambda: 0)
    with pytest.raises(ValueError, match="same process_group"):
        SGD(make_params([(3,)]), loss_scale=scale, process_group=group)
    assert list(scale._optimizers) == [alone]


def test_a_fuse_that_fails_leaves_the_scale_alone() -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3).to_sparse()
    scale = tritonamp.LossScale(8.0)
    with pytest.raises(RuntimeError, match="sparse") as held:
        tritonamp.fuse(torch.optim.SGD([param], lr=0.1), scale)
    param.grad = None
    optimizer = tritonamp.fuse(torch.optim.SGD([param], lr=0.1), scale)
    assert not scale._is_shared and held is not None
    optimizer.backward(param.sum())
    checked_step(optimizer)


def _abandon_an_iteration(optimizer: Any, params: list[torch.Tensor]) -> None:
    set_grads(params, scaled(optimizer))
    optimizer.unscale_()
    optimizer.zero_grad()


def _go_back_to_a_checkpoint_without_it(optimizer: Any, params: list[torch.Tensor]) -> None:
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        set_grads(params, scaled(optimizer))
        optimizer.step()
    optimizer.load_state_dict(checkpoint)


def _clear_the_state(optimizer: Any, params: list[torch.Tensor]) -> None:
    set_grads(params, scaled(optimizer))
    optimizer.step()
    optimizer.state.clear()


@pytest.mark.parametrize("lose", [_abandon_an_iteration, _go_back_to_a_checkpoint_without_it, _clear_the_state])
@pytest.mark.parametrize(("make", "options"), [(SGD, {"momentum": 0.9}), (AdamW, {})])
def test_a_gradient_like_an_earlier_one_of_a_parameter_without_state(
    runner: Runner, make: Any, options: dict[str, Any], lose: Any
) -> None:
    """Seen before, it is nothing new; its parameter's state is."""
    params = make_params([(5,), (3, 4)])
    optimizer = make(params, loss_scale=4.0, backend=runner.backend, **options)
    set_grads(params[:1], scaled(optimizer))
    optimizer.step()
    lose(optimizer, params)
    optimizer.zero_grad()
    set_grads(params[:1], scaled(optimizer))
    checked_step(optimizer)
    for _ in range(2):
        set_grads(params, scaled(optimizer))
        checked_step(optimizer)
    assert set(optimizer.state) == set(params)


def test_a_parameter_takes_another_shape_while_it_has_no_gradient(runner: Runner) -> None:
    params = make_params([(4,), (6,)])
    optimizer = SGD(params, lr=0.1, loss_scale=None, backend=runner.backend)
    set_grads(params)
    optimizer.step()
    params[1].grad = None
    params[1].data = torch.randn(2, 3)
    for chosen in (params[:1], params):
        set_grads(chosen)
        checked_step(optimizer)


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_one_gradient_of_two_parameters_is_unscaled_and_clipped_once(runner: Runner, kind: str) -> None:
    """``torch.autograd.grad`` returns one tensor for both terms of a sum."""
    options: dict[str, Any] = {"amsgrad": True} if kind == "plain" else {}
    params = make_params([(4,), (4,)])
    optimizer = AdamW(params, max_norm=1.0, loss_scale=1024.0, backend=runner.backend, **options)
    loss = optimizer.scale(((params[0] + params[1]) ** 2).sum())
    params[0].grad, params[1].grad = torch.autograd.grad(loss, params)
    assert params[0].grad is params[1].grad
    checked_step(optimizer)


def test_one_gradient_of_two_parameters_is_unscaled_in_place_once(runner: Runner) -> None:
    params = make_params([(4,), (4,)])
    optimizer = SGD(params, loss_scale=4.0, backend=runner.backend)
    scaled(optimizer)
    params[0].grad = params[1].grad = torch.full((4,), 8.0)
    optimizer.unscale_()
    assert all(bool((param.grad == 2.0).all()) for param in params)


def test_autograd_notices_that_a_gradient_was_unscaled() -> None:
    """As after ``clip_grad_norm_``; torch's fused kernels do not count it."""
    (param,) = make_params([(4,)])
    optimizer = AdamW([param], max_norm=1e-3, loss_scale=None, backend="torch")
    set_grads([param])
    weight = torch.ones(4, requires_grad=True)
    assert param.grad is not None
    product = (weight * param.grad).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_parameters_at_one_address_of_two_devices_are_apart() -> None:
    params = [torch.ones(4), mock.Mock(device=torch.device("cuda"), shape=(4,), nbytes=16)]
    params[1].data_ptr.return_value = params[0].data_ptr()
    _check_apart(params)
    params[1].device = torch.device("cpu")
    params[1].stride.return_value, params[1].element_size.return_value = (1,), 4
    with pytest.raises(RuntimeError, match="share memory"):
        _check_apart(params)


def test_a_gradient_like_an_earlier_one_does_not_fit_what_the_parameter_is_by_now(runner: Runner) -> None:
    """A sharding scheme that swaps ``.data`` at the wrong moment."""
    params = make_params([(3,), (3,)])
    optimizer = SGD(params, loss_scale=None, backend=runner.backend)
    set_grads(params)
    optimizer.step()
    small, large = params[0].data, torch.zeros(8)
    params[0].grad = None
    params[0].data = large
    optimizer.step()
    params[0].data = small
    params[0].grad = torch.ones(3)
    params[0].data = large
    with pytest.raises(RuntimeError, match=r"parameter 0 \(shape \(8,\).* has a gradient of shape \(3,\)"):
        optimizer.step()


def test_a_gradient_of_another_class_than_the_last_is_refused(runner: Runner) -> None:
    (param,) = make_params([(3,)])
    optimizer = SGD([param], loss_scale=None, backend=runner.backend)
    set_grads([param])
    optimizer.step()
    param.grad = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(TypeError, match="has a gradient that is a TwoTensor"):
        optimizer.step()


def test_rounding_switched_to_stochastic_in_mid_run(runner: Runner) -> None:
    params = [*make_params([(3,)]), *make_params([(600,)], torch.bfloat16)]
    optimizer = AdamW(params, loss_scale=None, backend=runner.backend)
    for rounding in ("nearest", "stochastic"):
        optimizer.rounding = rounding
        set_grads(params)
        checked_step(optimizer)


def test_state_that_is_lazily_conjugated_is_resolved(runner: Runner) -> None:
    (param,) = make_params([(3,)], torch.complex64)
    optimizer = SGD([param], momentum=0.9, loss_scale=None, backend=runner.backend)
    for _ in range(2):
        set_grads([param])
        checked_step(optimizer)
        optimizer.state[param]["momentum_buffer"] = optimizer.state[param]["momentum_buffer"].conj()


def test_unscaling_that_is_refused_keeps_nothing() -> None:
    (param,) = make_params([(3,)])
    optimizer = SGD([param], loss_scale=2.0)
    scaled(optimizer)
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.unscale_()
    here = weakref.ref(param)
    del param, optimizer.param_groups[:]
    assert here() is None


@pytest.mark.parametrize("value", [1.0, torch.inf])
def test_nobody_looks_for_a_norm_that_nothing_asks_for(runner: Runner, value: float) -> None:
    (param,) = make_params([(3,)])
    optimizer = SGD([param], loss_scale=None, skip_nonfinite=False, backend=runner.backend)
    param.grad = torch.full((3,), value)
    checked_step(optimizer)
    assert optimizer.grad_norm.isnan() and not optimizer.found_inf

"""What is rare but has to be right: odd arguments, hand-edited groups and state, devices that change."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from conftest import Runner
from problem import checked_step, make_params, scaled, set_grads

from tritonamp import SGD, Adam, AdamW, LossScale

META = torch.device("meta")


class Losses(NamedTuple):
    main: torch.Tensor
    other: torch.Tensor


def test_a_named_tuple_of_losses_stays_one() -> None:
    optimizer = SGD(make_params([(2,)]), loss_scale=4.0)
    losses = optimizer.scale(Losses(torch.ones(()), torch.ones(())))
    assert isinstance(losses, Losses) and losses == (4.0, 4.0)


def test_a_loss_scale_tells_what_it_is() -> None:
    assert "LossScale(scale=8.0" in repr(LossScale(8.0)) and "LossScale.static(scale=8.0" in repr(LossScale.static(8.0))
    assert float(LossScale(8.0).value) == 8.0


@pytest.mark.parametrize(
    ("state_dict", "error", "message"),
    [
        (3, TypeError, "state_dict must be a mapping, got int"),
        ({"scale": "high"}, TypeError, "scale must be a number, got 'high'"),
        ({"scale": 1e39}, ValueError, "scale must be finite"),
        ({"_growth_tracker": -1}, ValueError, "_growth_tracker must be an integer of at least 0"),
    ],
    ids=str,
)
def test_a_damaged_scale_is_refused(state_dict: Any, error: type[Exception], message: str) -> None:
    loss_scale = LossScale(8.0)
    with pytest.raises(error, match=message):
        loss_scale.load_state_dict(state_dict)
    assert loss_scale.state_dict() == LossScale(8.0).state_dict()


def test_a_static_scale_stays_when_another_is_loaded() -> None:
    loss_scale = LossScale.static(8.0)
    loss_scale.load_state_dict(LossScale(64.0).state_dict())
    assert loss_scale.get_scale() == 8.0


def test_a_loaded_scale_is_clamped() -> None:
    loss_scale = LossScale(8.0, max_scale=16.0)
    loss_scale.load_state_dict({"scale": 64.0})
    assert loss_scale.get_scale() == 16.0


def test_a_scale_follows_its_optimizer_to_another_device() -> None:
    loss_scale = LossScale(8.0)
    params = make_params([(2,)])
    optimizer = SGD(params, loss_scale=loss_scale)
    scaled(optimizer)
    assert loss_scale._on(META).device == META


def test_a_shared_scale_stays_where_it_is() -> None:
    loss_scale = LossScale(8.0)
    optimizers = [SGD(make_params([(2,)]), loss_scale=loss_scale) for _ in range(2)]
    scaled(optimizers[0])
    with pytest.raises(RuntimeError, match="the shared loss scale lies on cpu, an optimizer of it on meta"):
        loss_scale._on(META)


def test_a_tensor_max_norm_is_refused() -> None:
    with pytest.raises(TypeError, match="max_norm must be a number or None, got a tensor"):
        SGD(make_params([(2,)]), max_norm=torch.ones(()))  # type: ignore[arg-type]


def test_a_group_must_be_a_dict() -> None:
    with pytest.raises(TypeError, match="param_group must be a dict"):
        SGD(make_params([(2,)])).add_param_group(make_params([(2,)]))  # type: ignore[arg-type]


def test_unscaling_where_nothing_is_scaled(runner: Runner) -> None:
    params = make_params([(2,), (3,)])
    optimizer = SGD(params, loss_scale=None, backend=runner.backend)
    optimizer.unscale_()
    optimizer = SGD(params, loss_scale=4.0, backend=runner.backend)
    scaled(optimizer)
    optimizer.unscale_()  # no gradients yet
    optimizer.zero_grad()
    set_grads(params[1:], scaled(optimizer))
    want = params[1].grad / 4
    optimizer.unscale_()
    assert torch.equal(params[1].grad, want)
    checked_step(optimizer)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_torch_sgd_without_buffers_is_taken_over(runner: Runner, momentum: float) -> None:
    params = make_params([(3,)])
    theirs = torch.optim.SGD(params, momentum=momentum)
    set_grads(params)
    theirs.step()
    state_dict = theirs.state_dict()
    for state in state_dict["state"].values():
        state["momentum_buffer"] = None  # as older versions of torch save it
    optimizer = SGD(params, momentum=momentum, loss_scale=None, backend=runner.backend)
    optimizer.load_state_dict(state_dict)
    set_grads(params)
    checked_step(optimizer)


def test_hand_edited_groups_and_state(runner: Runner) -> None:
    params = make_params([(3,), (4,)])
    optimizer = Adam(params[:1], loss_scale=None, backend=runner.backend)
    set_grads(params)
    checked_step(optimizer)
    optimizer.param_groups[0]["params"].append(params[1])
    checked_step(optimizer)
    optimizer.state[params[0]]["exp_avg"] = torch.zeros(5)
    with pytest.raises(RuntimeError, match=r"state 'exp_avg' has shape \(5,\), its parameter \(3,\)"):
        optimizer.step()


def test_float64_gradients_with_squares_beyond_its_range() -> None:
    """On the torch backend; the kernels' norm of float64 gradients is right up to 2**450."""
    param = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = SGD([param], lr=1.0, max_norm=1.0, loss_scale=None, backend="torch")
    param.grad = torch.tensor([3e200, -4e200], dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor([-0.6, 0.8], dtype=torch.float64))
    assert not optimizer.step_was_skipped
    param.grad = torch.full((2,), 1.7e308, dtype=torch.float64)
    optimizer.step()  # the norm itself is beyond float64
    assert not optimizer.step_was_skipped and param.isfinite().all()


def test_an_outer_scaler_without_own_scaling(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = AdamW(params, loss_scale="dynamic", backend=runner.backend)
    set_grads(params)
    optimizer.found_inf = torch.tensor(0.0)
    checked_step(optimizer, scale=None)
    del optimizer.found_inf


def test_kernels_refuse_tensors_that_are_elsewhere(runner: Runner) -> None:
    from tritonamp.backends import choose_backend

    if runner.backend == "triton":
        with pytest.raises(RuntimeError, match=r"runs (on|kernels on) .*, got meta"):
            choose_backend("triton", META)


def test_an_empty_parameter_has_no_state(runner: Runner) -> None:
    params = make_params([(3,), (0, 2)])
    optimizer = AdamW(params, loss_scale=None, backend=runner.backend)
    set_grads(params)
    optimizer.step()
    assert optimizer.state[params[0]] and not optimizer.state.get(params[1])


@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_a_lazy_gradient_that_is_not_dense(bit: str, runner: Runner) -> None:
    """Carried out, it lies elsewhere, and densely."""
    lazy = torch.randn(30, 40, dtype=torch.complex64)[:, ::2].conj()
    grad = lazy if bit == "conj" else lazy.imag
    assert grad.is_conj() or grad.is_neg()
    param = torch.randn(30, 20, dtype=grad.dtype, requires_grad=True)
    opt = SGD([param], lr=0.5, momentum=0.9, max_norm=1.0, loss_scale=None, backend=runner.backend)
    for _ in range(2):
        param.grad = grad
        checked_step(opt)
    param.grad = torch.randn_like(param)
    checked_step(opt)


def test_a_parameter_of_another_shape_with_the_same_strides(runner: Runner) -> None:
    """In the same memory, with as many elements."""
    param = torch.nn.Parameter(torch.zeros(32).as_strided((6, 2), (1, 6)))
    opt = SGD([param], lr=1.0, loss_scale=None, backend=runner.backend)
    for shape in ((6, 2), (4, 3), (6, 2)):
        param.data = param.data.as_strided(shape, (1, 6))
        param.grad = torch.randn(32).as_strided(shape, (1, 6))
        checked_step(opt)


def test_a_sparse_gradient_after_an_expanded_one(runner: Runner) -> None:
    param = torch.zeros(3, requires_grad=True)
    opt = SGD([param], lr=1.0, loss_scale=None, backend=runner.backend)
    param.grad = torch.ones(1).expand(3)
    checked_step(opt)
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"parameter 0 .* has a sparse gradient"):
        opt.step()


def test_groups_that_swap_their_parameters_while_one_is_frozen(runner: Runner) -> None:
    """As many parameters as before in each, and the same ones to be updated, in the same order."""
    params = make_params([(3,), (5,)])
    params[1].requires_grad_(False)
    opt = SGD(
        [{"params": [params[0]], "lr": 10.0}, {"params": [params[1]], "lr": 1.0}],
        loss_scale=None,
        backend=runner.backend,
    )
    for _ in range(2):
        params[0].grad = torch.ones(3)
        checked_step(opt)
    one, other = opt.param_groups
    one["params"], other["params"] = other["params"], one["params"]
    checked_step(opt)


@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_a_lazy_parameter_is_refused(bit: str, runner: Runner) -> None:
    """Its memory does not hold its values; nor does it once a good parameter's data is swapped for such."""
    plain = torch.zeros(4, dtype=torch.complex64)
    lazy = plain.conj() if bit == "conj" else plain.conj().imag
    param = torch.nn.Parameter(lazy.resolve_conj().resolve_neg().clone())
    opt = SGD([param], loss_scale=None, backend=runner.backend)
    param.grad = torch.ones_like(param)
    checked_step(opt)
    param.data = lazy
    with pytest.raises(RuntimeError, match=r"parameter 0 .* is lazily conjugated or negated"):
        opt.step()

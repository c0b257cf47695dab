"""The loss scale's contract: armed, shared, set by hand; under a stock scaler; unscaling in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import Runner
from problem import assert_refused, assert_same_bits, checked_step, make_params, scaled, set_grads, values

from tritonamp import SGD, AdamW, LossScale


def test_an_armed_step_needs_a_scaled_loss(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = AdamW(params, loss_scale="dynamic", backend=runner.backend)
    set_grads(params)
    assert_refused(optimizer, RuntimeError, "nothing was scaled since the last step: call opt.backward")
    scaled(optimizer)
    optimizer.step()
    set_grads(params)
    assert_refused(optimizer, RuntimeError, "nothing was scaled since the last step")


def test_scaling_inside_the_closure_counts(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = AdamW(params, loss_scale="dynamic", backend=runner.backend)

    def closure() -> float:
        set_grads(params, scaled(optimizer))
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert optimizer.step(closure=closure) == 3.0


def test_auto_is_armed_by_the_first_scaling(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = SGD(params, lr=0.1, backend=runner.backend)
    set_grads(params)
    checked_step(optimizer, scale=None)  # a plain loop: nothing is unscaled, the scale does not move
    assert optimizer.loss_scale.state_dict()["_growth_tracker"] == 0
    set_grads(params, scaled(optimizer))
    checked_step(optimizer)
    assert optimizer.loss_scale.state_dict()["_growth_tracker"] == 1
    with pytest.raises(RuntimeError, match="nothing was scaled"):
        optimizer.step()


def test_state_may_be_made_by_a_step_with_lr_0(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = AdamW(params, lr=0.0, loss_scale="dynamic", backend=runner.backend)
    params[0].grad = torch.zeros(3)
    optimizer.step()
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.loss_scale.state_dict() == LossScale().state_dict()


def test_scale_is_a_snapshot(runner: Runner) -> None:
    """A step between the scaling of a loss and its backward pass does not change that loss."""
    params = make_params([(3,)])
    optimizer = SGD(params, lr=0.0, loss_scale=LossScale(8.0, growth_interval=1), backend=runner.backend)
    held = optimizer.scale(params[0].sum())
    set_grads(params, 8.0)
    optimizer.step()
    optimizer.zero_grad()
    held.backward()
    assert params[0].grad.tolist() == [8.0] * 3 and optimizer.loss_scale.get_scale() == 16.0


def test_scale_takes_what_gradscaler_takes() -> None:
    optimizer = SGD(make_params([(3,)]), loss_scale=4.0, backend="torch")
    one = torch.ones(())
    assert optimizer.scale([one, (one, one)]) == [4.0, (4.0, 4.0)]
    assert list(optimizer.scale(x for x in (one, one))) == [4.0, 4.0]
    with pytest.raises(ValueError, match="must be a tensor or an iterable of tensors, got int"):
        optimizer.scale(3)
    assert SGD(make_params([(3,)]), loss_scale=None).scale(3) == 3


def test_a_shared_scale_moves_once_per_iteration(runner: Runner) -> None:
    loss_scale = LossScale(8.0, growth_interval=2)
    params = make_params([(3,), (700,)])
    a = SGD(params[:1], loss_scale=loss_scale, backend=runner.backend)
    b = AdamW(params[1:], loss_scale=loss_scale, backend=runner.backend)
    expected = [(4.0, 0), (4.0, 1), (8.0, 0), (8.0, 1)]
    for step, (scale, tracker) in enumerate(expected):
        set_grads(params, scaled(a))
        if step == 0:
            params[0].grad[0] = params[1].grad[-1] = torch.inf
        a.step()
        b.step()
        assert a.step_was_skipped == b.step_was_skipped == (step == 0)
        with pytest.raises(RuntimeError, match=r"call loss_scale.update\(\) first"):
            b.step()
        loss_scale.update()
        assert (loss_scale.get_scale(), loss_scale.state_dict()["_growth_tracker"]) == (scale, tracker)
        set_grads(params)
        with pytest.raises(RuntimeError, match="nothing was scaled"):
            a.step()


def test_an_inf_of_one_optimizer_backs_off_the_shared_scale(runner: Runner) -> None:
    loss_scale = LossScale(8.0)
    params = make_params([(3,), (700,)])
    a, b = (SGD([p], loss_scale=loss_scale, backend=runner.backend) for p in params)
    set_grads(params, scaled(a))
    params[0].grad[0] = torch.nan
    a.step()
    checked_step(b)
    loss_scale.update()
    assert a.step_was_skipped and not b.step_was_skipped and loss_scale.get_scale() == 4.0


def test_update_by_hand(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = SGD(params, loss_scale=LossScale(8.0, growth_interval=3, max_scale=64.0), backend=runner.backend)
    with pytest.raises(RuntimeError, match="it advances in that optimizer's step"):
        optimizer.loss_scale.update()
    for new in (16, 32.0, torch.tensor(64.0)):
        set_grads(params, scaled(optimizer))
        checked_step(optimizer)
        tracker = optimizer.loss_scale.state_dict()["_growth_tracker"]
        optimizer.loss_scale.update(new)
        assert optimizer.loss_scale.state_dict()["_growth_tracker"] == tracker
        assert float(optimizer.loss_scale.value) == float(new)
    for bad in (0.0, -1.0, 128.0, float("nan")):
        with pytest.raises(ValueError, match="new_scale must be within"):
            optimizer.loss_scale.update(bad)


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_, clip, step"])
def test_under_a_stock_scaler(runner: Runner, explicit: bool) -> None:
    """As a fused optimizer under an unmodified GradScaler; our own scale stays inert."""
    ours = make_params([(40,), (600,)])
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    optimizers = [AdamW(ours, lr=0.1, backend=runner.backend), torch.optim.AdamW(theirs, lr=0.1, foreach=False)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    for step in range(4):
        set_grads(ours, scalers[0].get_scale())
        if step == 1:
            ours[1].grad[5] = torch.inf
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = mine.grad.clone()
        for params, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            scaler.scale(torch.ones(()))
            if explicit:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
        assert optimizers[0].step_was_skipped == (step == 1)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert not hasattr(optimizers[0], "grad_scale")
    with pytest.raises(RuntimeError, match=r"scale\(\) under a GradScaler"):
        optimizers[0].scale(torch.ones(()))


def test_found_inf_of_an_outer_scaler_may_be_a_sum(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = AdamW(params, backend=runner.backend)
    for flag, skips in (
        (torch.tensor(2.0), True),
        (torch.tensor(float("nan")), True),
        (torch.tensor(0.0), False),
        (0, False),
    ):
        set_grads(params)
        before = values(optimizer)
        optimizer.found_inf = flag
        optimizer.step()
        del optimizer.found_inf
        assert optimizer.step_was_skipped == skips
        if skips:
            assert_same_bits(values(optimizer)[:1], before[:1])


def test_an_outer_divisor_multiplies_with_the_loss_scale(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = SGD(params, lr=1.0, loss_scale=LossScale(4.0), backend=runner.backend)
    before = params[0].detach().clone()
    scaled(optimizer)
    params[0].grad = torch.full((3,), 24.0)
    optimizer.grad_scale = torch.tensor(3.0)
    optimizer.step()
    del optimizer.grad_scale
    torch.testing.assert_close(params[0].detach(), before - 2.0)


def test_unscaling_in_place_is_known_to_the_step(runner: Runner) -> None:
    params = make_params([(3,), (600,)])
    optimizer = AdamW(params, lr=0.1, max_norm=1.0, loss_scale=LossScale(16.0), backend=runner.backend)
    for step in range(3):
        set_grads(params, scaled(optimizer))
        want = [p.grad / 16 for p in params]
        if step == 1:
            params[1].grad[7] = torch.inf
        optimizer.unscale_()
        optimizer.unscale_()  # does nothing more
        if step == 1:
            params[1].grad[7] = 0.0  # seen all the same
            before = values(optimizer)
            optimizer.step()
            assert optimizer.step_was_skipped and optimizer.loss_scale.get_scale() == 8.0
            assert_same_bits(values(optimizer), before)
            optimizer.loss_scale.update(16.0)
            continue
        assert all(map(torch.equal, want, [p.grad for p in params]))
        checked_step(optimizer)


@pytest.mark.parametrize("forget", ["zero_grad", "zero_grad in place", "scale"])
def test_the_unscaled_mark_is_cleared(runner: Runner, forget: str) -> None:
    params = make_params([(3,)])
    optimizer = SGD(params, lr=0.1, loss_scale=16.0, backend=runner.backend)
    set_grads(params, scaled(optimizer))
    params[0].grad[0] = torch.inf
    optimizer.unscale_()
    if forget == "scale":
        params[0].grad = None
    else:
        optimizer.zero_grad(set_to_none=forget == "zero_grad")
    set_grads(params, scaled(optimizer))
    checked_step(optimizer)
    assert not optimizer.step_was_skipped


def test_hysteresis_backs_off_on_the_nth_overflow(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = SGD(params, loss_scale=LossScale(64.0, hysteresis=2, min_scale=16.0), backend=runner.backend)
    scales = []
    for overflow in (True, False, True, True, True, False, True, True, True):
        set_grads(params, scaled(optimizer))
        if overflow:
            params[0].grad[0] = torch.inf
        checked_step(optimizer)
        scales.append(optimizer.loss_scale.get_scale())
    assert scales == [64.0, 64.0, 64.0, 32.0, 16.0, 16.0, 16.0, 16.0, 16.0]


def test_a_static_scale_may_be_shared(runner: Runner) -> None:
    loss_scale = LossScale.static(4.0)
    params = make_params([(3,), (5,)])
    optimizers = [SGD([p], loss_scale=loss_scale, backend=runner.backend) for p in params]
    for _ in range(2):
        set_grads(params, scaled(optimizers[0]))
        for optimizer in optimizers:
            checked_step(optimizer)
        loss_scale.update()
    assert loss_scale.get_scale() == 4.0


def test_a_float64_gradient_of_a_float32_parameter_may_overflow(runner: Runner) -> None:
    """It is computed in float32: what is beyond that is non-finite."""
    params = make_params([(5,)])
    params[0].grad_dtype = torch.float64
    optimizer = SGD(params, loss_scale=None, backend=runner.backend)
    before = values(optimizer)
    params[0].grad = torch.tensor([1.0, 1e300, 0.0, 0.0, 0.0], dtype=torch.float64)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_same_bits(values(optimizer), before)


def test_scaling_between_unscaling_and_step_is_refused(runner: Runner) -> None:
    """A scaled loss's gradients would be added to unscaled ones."""
    params = make_params([(3,)])
    optimizer = SGD(params, loss_scale=16.0, backend=runner.backend)
    set_grads(params, scaled(optimizer))
    optimizer.unscale_()
    with pytest.raises(RuntimeError, match=r"after unscale_\(\): call step\(\) or zero_grad\(\)"):
        optimizer.scale(torch.ones(()))
    optimizer.step()
    scaled(optimizer)


def test_scaling_without_skipping_is_refused() -> None:
    optimizer = SGD(make_params([(3,)]), skip_nonfinite=False)
    with pytest.raises(RuntimeError, match="backs off by skipping"):
        optimizer.scale(torch.ones(()))


@pytest.mark.parametrize("outputs", [{"loss": torch.ones(())}, "loss", [torch.ones(()), "loss"]], ids=str)
def test_a_refused_scaling_arms_nothing(outputs: Any) -> None:
    params = make_params([(3,)])
    optimizer = SGD(params, backend="torch")
    with pytest.raises(ValueError, match="must be a tensor or an iterable of tensors"):
        optimizer.scale(outputs)
    set_grads(params)
    optimizer.step()


def test_a_constructor_that_raises_attaches_nothing(runner: Runner) -> None:
    loss_scale = LossScale(8.0)
    params = make_params([(3,)])
    with pytest.raises(ValueError, match="lr") as kept:
        SGD(params, lr=-1.0, loss_scale=loss_scale)
    optimizer = SGD(params, loss_scale=loss_scale, backend=runner.backend)
    set_grads(params, scaled(optimizer))
    params[0].grad[0] = torch.inf
    checked_step(optimizer)
    assert loss_scale.get_scale() == 4.0 and kept is not None


def test_an_optimizer_may_leave_a_shared_scale_in_mid_iteration(runner: Runner) -> None:
    loss_scale = LossScale(8.0)
    params = make_params([(3,), (4,)])
    a, b = (SGD([p], loss_scale=loss_scale, backend=runner.backend) for p in params)
    set_grads(params, scaled(a))
    params[0].grad[0] = torch.inf
    a.step()
    del b
    loss_scale.update()  # the iteration that was shared
    assert loss_scale.get_scale() == 4.0
    set_grads(params[:1], scaled(a))
    checked_step(a)
    assert loss_scale.state_dict()["_growth_tracker"] == 1


def test_unscaling_conjugated_gradients(runner: Runner) -> None:
    param = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    optimizer = SGD([param], lr=1.0, loss_scale=2.0, backend=runner.backend)
    scaled(optimizer)
    param.grad = torch.full((3,), 2 + 4j).conj()
    optimizer.unscale_()
    optimizer.step()
    assert param.tolist() == [2j] * 3


def test_a_copy_knows_that_its_gradients_are_unscaled(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = SGD(params, loss_scale=16.0, backend=runner.backend)
    set_grads(params, scaled(optimizer))
    optimizer.unscale_()
    copied = copy.deepcopy(optimizer)
    checked_step(copied, unscaled=True)

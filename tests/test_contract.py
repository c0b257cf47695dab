"""Bad input is refused early, by name, and leaves everything as it was."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from conftest import IS_INTERPRETED, Runner
from problem import assert_same_bits, checked_step, make_params, scaled, set_grads, values

import tritonamp
from tritonamp import SGD, Adam, AdamW, LossScale

ALL = [SGD, Adam, AdamW]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be at least 0, got -0.1"),
        ({"lr": float("nan")}, "lr must be at least 0, got nan"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
        ({"max_norm": -1.0}, "max_norm must be at least 0, got -1.0"),
        ({"max_norm": float("nan")}, "max_norm must be at least 0, got nan"),
        ({"skip_norm": -1.0}, "skip_norm must be at least 0, got -1.0"),
        ({"skip_norm": float("nan")}, "skip_norm must be at least 0, got nan"),
        ({"loss_scale": "static"}, "'auto', 'dynamic', a number, a LossScale or None, got 'static'"),
        ({"loss_scale": 0.0}, "scale must be finite and positive, got 0.0"),
        ({"loss_scale": True}, "loss_scale must be"),
        ({"loss_scale": [1.0]}, "loss_scale must be"),
        ({"loss_scale": 2.0, "skip_nonfinite": False}, "skip_nonfinite=False needs loss_scale=None, got 2.0"),
        ({"loss_scale": "dynamic", "skip_nonfinite": False}, "skip_nonfinite=False needs loss_scale=None"),
        ({"backend": "cuda"}, "'auto', 'triton' or 'torch', got 'cuda'"),
    ],
    ids=str,
)
def test_options_out_of_range(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        make(make_params([(2,)]), **options)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (SGD, {"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
        (SGD, {"nesterov": True}, "nesterov needs a momentum and no dampening, got momentum=0.0"),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening=0.1"),
        (Adam, {"betas": (1.0, 0.9)}, r"beta1 must be in \[0, 1\), got 1.0"),
        (AdamW, {"betas": (0.9, float("nan"))}, r"beta2 must be in \[0, 1\), got nan"),
        (Adam, {"eps": -1e-8}, "eps must be at least 0, got -1e-08"),
    ],
    ids=str,
)
def test_options_of_a_rule_out_of_range(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_params([(2,)]), **options)
    optimizer = make(make_params([(2,)]))
    with pytest.raises(ValueError, match=message):  # a group's own options too
        optimizer.add_param_group({"params": make_params([(2,)]), **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": 0.0}, "scale must be finite and positive, got 0.0"),
        ({"init_scale": -1.0}, "scale must be finite and positive"),
        ({"init_scale": float("inf")}, "scale must be finite and positive"),
        ({"init_scale": float("nan")}, "scale must be finite and positive"),
        ({"init_scale": 2.0**-130}, "init_scale must be within"),
        ({"init_scale": 4.0, "max_scale": 2.0}, "init_scale must be within"),
        ({"growth_factor": 1.0}, "growth_factor must be finite and above 1, got 1.0"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\), got 1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval must be an integer of at least 1, got 0"),
        ({"growth_interval": 1.5}, "growth_interval must be an integer"),
        ({"hysteresis": 0}, "hysteresis must be an integer of at least 1, got 0"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale must be at least"),
        ({"min_scale": 0.0}, "min_scale must be at least"),
        ({"max_scale": float("inf")}, "max_scale must be a finite float32"),
    ],
    ids=str,
)
def test_loss_scale_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScale(**settings)


def refused(optimizer: Any, error: type[Exception], message: str) -> None:
    """The step raises; parameters, state, scale, counters are as before, and the next good step works."""
    before, scale = values(optimizer), optimizer.loss_scale.state_dict()
    counts = optimizer._outcome_state().clone()
    with pytest.raises(error, match=message):
        optimizer.step()
    assert_same_bits([*values(optimizer), optimizer._outcome_state()], [*before, counts])
    assert optimizer.loss_scale.state_dict() == scale


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("case", ["sparse", "device", "shape", "integer", "complex"])
def test_gradients_that_cannot_be_used(runner: Runner, case: str, first: bool) -> None:
    params = make_params([(3,), (4, 2)])
    optimizer = AdamW(params, loss_scale="dynamic", backend=runner.backend)
    if not first:
        set_grads(params, scaled(optimizer))
        checked_step(optimizer)
    set_grads(params, scaled(optimizer))
    messages = {
        "sparse": r"parameter 1 \(shape \(4, 2\).*sparse gradient",
        "device": "parameter 1 .* has a gradient on meta",
        "shape": r"parameter 1 .* gradient of shape \(2, 4\)",
        "integer": "parameter 1 .* gradient of torch.int64",
        "complex": "parameter 1 .* gradient of torch.complex64",
    }
    bad = {
        "sparse": torch.ones(4, 2).to_sparse(),
        "device": torch.ones(4, 2, device="meta"),
        "shape": torch.ones(2, 4),
        "integer": torch.ones(4, 2, dtype=torch.int64),
        "complex": torch.ones(4, 2, dtype=torch.complex64),
    }[case]

    class Param(torch.nn.Parameter):  # autograd itself refuses such gradients; a subclass may hand out any
        grad = bad  # type: ignore[assignment]

    state = optimizer.state.pop(params[1], {})
    optimizer.param_groups[0]["params"][1] = Param(params[1].detach())
    if state:
        optimizer.state[optimizer.param_groups[0]["params"][1]] = state
    refused(optimizer, RuntimeError, messages[case])
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop(), None)
    checked_step(optimizer)


def test_parameters_that_cannot_be_optimized(runner: Runner) -> None:
    expanded = torch.ones(1).expand(3).detach()
    expanded.grad = torch.ones(3)
    optimizer = SGD([expanded], loss_scale="dynamic", backend=runner.backend)
    scaled(optimizer)
    refused(optimizer, RuntimeError, "parameter 0 .* is an expanded tensor")
    eighth = torch.ones(3).to(torch.float8_e5m2)
    optimizer = SGD([eighth], loss_scale="dynamic", backend=runner.backend)
    scaled(optimizer)
    with pytest.raises(TypeError, match=r"parameter 0 .*float8_e5m2.* cannot be optimized"):
        optimizer.step()


def test_two_devices_in_one_optimizer(runner: Runner) -> None:
    params = [*make_params([(3,)]), torch.ones(3, device="meta", requires_grad=True)]
    params[0].grad = torch.ones(3)
    optimizer = SGD(params, loss_scale="dynamic", backend=runner.backend)
    scaled(optimizer)
    with pytest.raises(RuntimeError, match=r"parameter 1 .* another device than parameter 0"):
        optimizer.step()


@pytest.mark.compiled
def test_triton_where_it_cannot_run() -> None:
    params = make_params([(2,)])
    set_grads(params)
    optimizer = SGD(params, loss_scale=None, backend="triton")
    with pytest.raises(RuntimeError, match=r"backend='triton' .*use backend='auto'"):
        optimizer.step()


def test_triton_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="needs the package triton: install it"):
        SGD(make_params([(2,)]), backend="triton")
    SGD(make_params([(2,)]), backend="auto")


# The loss scale's contract.


def test_an_armed_step_needs_a_scaled_loss(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = AdamW(params, loss_scale="dynamic", backend=runner.backend)
    set_grads(params)
    refused(optimizer, RuntimeError, "nothing was scaled since the last step: call opt.backward")
    scaled(optimizer)
    optimizer.step()
    set_grads(params)
    refused(optimizer, RuntimeError, "nothing was scaled since the last step")


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
    with pytest.raises(RuntimeError, match="would scale twice"):
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


def test_import_needs_no_gpu_and_names_are_public() -> None:
    assert set(tritonamp.__all__) == {"SGD", "Adam", "AdamW", "LossScale"}
    assert IS_INTERPRETED or SGD(make_params([(1,)]))._backend is None


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

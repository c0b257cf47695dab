"""Our optimizers under ``torch.amp.GradScaler``, the stock one and ours: every order of a loop's calls."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from conftest import KERNEL_RUNNERS, Runner
from problem import assert_same_bits, make_params, set_grads, values
from torch import Tensor

import tritonamp
from tritonamp import SGD, AdamW
from tritonamp.testing import expect

RUNNER = KERNEL_RUNNERS[0].chosen(__name__)
SCALERS = [torch.amp.GradScaler, tritonamp.GradScaler]
SHAPES = {"a": [(40,), (600,)], "b": [(3, 5)]}

# What one iteration calls; "a" and "b" are optimizers.
ORDERS = [
    "scale, step a, step b, update",
    "scale, unscale a, step a, unscale b, step b, update",
    "scale, unscale a, clip a, step a, step b, update",
    "scale, unscale a, unscale b, clip b, clip a, step b, step a, update",
    "scale, scale, unscale b, step b, step a, update",
    "scale, step a, update",
    "scale, unscale b, clip b, step b, update",
    "scale, step a, update, zero b, scale b, step b, update",
]


class Twins:
    """Optimizers of ours under one scaler, torch's under a stock one; before every step, the same bits in both."""

    def __init__(self, scaler: Any, backend: str) -> None:
        ours = {name: make_params(shapes) for name, shapes in SHAPES.items()}
        theirs = copy.deepcopy(ours)
        self.params = [ours, theirs]
        self.optimizers: list[dict[str, Any]] = [
            {
                "a": AdamW(ours["a"], lr=0.1, backend=backend),
                "b": SGD(ours["b"], lr=0.1, momentum=0.9, dampening=0.5, backend=backend),
            },
            {
                "a": torch.optim.AdamW(theirs["a"], lr=0.1, foreach=False),
                "b": torch.optim.SGD(theirs["b"], lr=0.1, momentum=0.9, dampening=0.5, foreach=False),
            },
        ]
        options = {"init_scale": 64.0, "growth_interval": 2}
        self.scalers = [scaler("cpu", **options), torch.amp.GradScaler("cpu", **options)]
        self.unscaled: set[str] = set()

    def call(self, verb: str, overflows: str) -> None:
        """Carry out one of ``ORDERS``' calls on both sides; gradients of ``overflows`` become inf."""
        verb, _, name = verb.partition(" ")
        if verb == "step":
            self.step(name)
            return
        slopes = {n: [torch.randn(shape) for shape in shapes] for n, shapes in SHAPES.items() if name in ("", n)}
        for n in slopes:
            if n in overflows:
                slopes[n][-1].view(-1)[7] = torch.inf
        for params, optimizers, scaler in zip(self.params, self.optimizers, self.scalers, strict=True):
            if verb == "scale":
                loss = sum((p * slope).sum() for n in slopes for p, slope in zip(params[n], slopes[n], strict=True))
                scaler.scale(loss).backward()
            elif verb == "unscale":
                scaler.unscale_(optimizers[name])
                self.unscaled.add(name)
            elif verb == "clip":
                torch.nn.utils.clip_grad_norm_(params[name], 1.0, foreach=False)
            elif verb == "zero":
                optimizers[name].zero_grad()
            else:
                scaler.update()
        if verb == "update":
            self.unscaled.clear()
            assert self.scalers[0].state_dict() == self.scalers[1].state_dict()

    def step(self, name: str) -> None:
        ours, theirs = (optimizers[name] for optimizers in self.optimizers)
        flags = self.scalers[0]._found_inf_per_device(ours).values()
        expectation = expect(
            ours,
            scale=None if name in self.unscaled else self.scalers[0].get_scale(),
            found_inf=any(flag.item() for flag in flags),
        )
        for optimizer, scaler in zip((ours, theirs), self.scalers, strict=True):
            scaler.step(optimizer)
            dataclasses.replace(expectation, optimizer=optimizer).check()
        for mine, other in zip(self.params[0][name], self.params[1][name], strict=True):
            other.data.copy_(mine.data)
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch's loading copies nothing


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scaler", SCALERS, ids=["stock", "ours"])
def test_every_order_of_calls_equals_torch(runner: Runner, scaler: Any, order: str) -> None:
    twins = Twins(scaler, runner.backend)
    scales = [64.0]
    for overflows in ("", "a", "b", "", "", "ab"):
        for optimizers in twins.optimizers:
            for optimizer in optimizers.values():
                optimizer.zero_grad()
        for verb in order.split(", "):
            twins.call(verb, overflows)
        scales.append(twins.scalers[0].get_scale())
    assert {new / old for old, new in itertools.pairwise(scales)} >= {0.5, 2.0}
    for optimizer in twins.optimizers[0].values():
        assert optimizer.loss_scale.state_dict() == tritonamp.LossScale().state_dict()  # its own rests


def scaled_grads(scaler: Any, params: list[Tensor]) -> None:
    """Random gradients that carry the scaler's scale."""
    scaler.scale(torch.ones(()))
    set_grads(params, scaler.get_scale())


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_, step"])
def test_one_launch_per_optimizer_and_no_wait(explicit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [make_params([(70,)]), make_params([(600,), (3,)])]
    passes = []
    look = torch._amp_foreach_non_finite_check_and_unscale_
    with RUNNER.running() as launches:
        optimizers = [AdamW(params, max_norm=1.0, backend="triton") for params in groups]
        scaler = tritonamp.GradScaler("cpu", init_scale=8.0)

        def iterate() -> None:
            for optimizer in optimizers:
                if explicit:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()

        for step in range(3):
            for params in groups:
                scaled_grads(scaler, params)
            with monkeypatch.context() as patch:
                if step:
                    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
                        patch.setattr(Tensor, name, refuse_to_wait)
                patch.setattr(
                    torch, "_amp_foreach_non_finite_check_and_unscale_", lambda *args: passes.append(look(*args))
                )
                iterate()
        assert len(launches.launches) == 6
    assert len(passes) == (6 if explicit else 0)  # none but those asked for


def refuse_to_wait(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("nothing may wait for the device")


def test_an_overflow_after_unscaling_moves_the_scale(runner: Runner) -> None:
    params = make_params([(3,), (600,)])
    optimizer = AdamW(params, backend=runner.backend)
    for scaler, scale in ((torch.amp.GradScaler("cpu", 8.0), 8.0), (tritonamp.GradScaler("cpu", 8.0), 4.0)):
        before = values(optimizer)
        scaled_grads(scaler, params)
        scaler.unscale_(optimizer)
        params[1].grad[-1] = torch.nan
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.step_was_skipped and scaler.get_scale() == scale
        assert_same_bits(values(optimizer)[:2], before[:2])


def test_what_unscaling_found_counts(runner: Runner) -> None:
    """Even if the gradient is mended or dropped before the step."""
    params = make_params([(3,)])
    optimizer, scaler = SGD(params, backend=runner.backend), tritonamp.GradScaler("cpu", 8.0)
    before = values(optimizer)
    for mend in (lambda: params[0].grad.nan_to_num_(0, 0, 0), optimizer.zero_grad):
        scaled_grads(scaler, params)
        params[0].grad[0] = torch.inf
        scaler.unscale_(optimizer)
        mend()
        scaler.step(optimizer)
        scaler.update()
        assert_same_bits(values(optimizer), before)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("overflow", ["ours", "theirs", "both", "neither"])
def test_ours_and_others_under_one_scaler(runner: Runner, overflow: str) -> None:
    mine, other = make_params([(600,)]), make_params([(5,)])
    ours, theirs = AdamW(mine, backend=runner.backend), torch.optim.SGD(other, lr=0.1)
    scaler = tritonamp.GradScaler("cpu", 8.0, growth_interval=1)
    scaled_grads(scaler, [*mine, *other])
    for params, side in ((mine, "ours"), (other, "theirs")):
        if overflow in (side, "both"):
            params[0].grad[2] = torch.inf
    before = [p.detach().clone() for p in (*mine, *other)]
    for optimizer in (theirs, ours):
        scaler.step(optimizer)
    scaler.update()
    moved = [not torch.equal(p, old) for p, old in zip((*mine, *other), before, strict=True)]
    assert moved == [overflow not in ("ours", "both"), overflow not in ("theirs", "both")]
    assert scaler.get_scale() == (16.0 if overflow == "neither" else 4.0)


def test_with_other_optimizers_it_is_the_stock_scaler() -> None:
    ends = []
    for kind in SCALERS:
        torch.manual_seed(0)
        params = make_params([(5,), (3,)])
        optimizers = [torch.optim.Adam(params[:1], fused=True), torch.optim.SGD(params[1:], momentum=0.9)]
        scaler = kind("cpu", 8.0, growth_interval=2)
        for step in range(4):
            scaled_grads(scaler, params)
            if step == 1:
                params[0].grad[0] = torch.inf
            scaler.unscale_(optimizers[step % 2])
            for optimizer in optimizers:
                scaler.step(optimizer)
            with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
                scaler.step(optimizers[1])
            scaler.update()
        ends.append((values(optimizers[0]) + values(optimizers[1]), scaler.state_dict()))
        optimizers[1].zero_grad()
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            scaler.step(optimizers[1])
        scaler = kind("cpu", 8.0)
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            scaler.update()
    assert_same_bits(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_nothing_to_do_is_no_error_and_no_progress(runner: Runner) -> None:
    params = make_params([(3,), (0,)])
    busy, idle = (SGD([p], backend=runner.backend) for p in params)
    params[1].grad = torch.zeros(0)
    scaler = tritonamp.GradScaler("cpu", 8.0, growth_interval=2)
    scaler.scale(torch.ones(()))
    for unscale in (False, True):
        if unscale:
            scaler.unscale_(busy)
        scaler.step(busy)
        scaler.step(idle)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(busy)
        scaler.update()
        assert scaler.state_dict()["_growth_tracker"] == 0 and scaler.get_scale() == 8.0
    set_grads(params, 8.0)
    params[0].grad[0] = torch.inf
    scaler.step(busy)
    scaler.update()
    busy.zero_grad()
    scaler.step(busy)  # the last overflow is not counted again
    scaler.update()
    assert scaler.get_scale() == 4.0
    set_grads(params, 4.0)
    scaler.step(busy)
    scaler.step(idle)
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_disabled_it_only_steps(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = SGD(params, lr=1.0, backend=runner.backend)
    scaler = tritonamp.GradScaler("cpu", enabled=False)
    loss = params[0].sum()
    assert scaler.scale(loss) is loss
    params[0].grad = torch.ones(3)
    before = params[0].detach().clone()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, closure=lambda: 5.0) == 5.0
    scaler.update()
    torch.testing.assert_close(params[0].detach(), before - 1, rtol=0, atol=2.0**-22)
    assert scaler.state_dict() == {} and scaler.get_scale() == 1.0


def test_errors_are_those_of_the_stock_scaler(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer, scaler = SGD(params, backend=runner.backend), tritonamp.GradScaler("cpu", 8.0)
    set_grads(params)
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="Attempted update but _scale is None"):
        scaler.update()
    scaled_grads(scaler, params)
    for args, kwargs in (((), {"closure": None}), ((lambda: 1.0,), {})):
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(optimizer, *args, **kwargs)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer, None)  # as accelerate calls it
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step"):
        scaler.unscale_(optimizer)
    scaler.update()


def test_a_refused_step_may_be_repeated(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer, scaler = SGD(params, backend=runner.backend), tritonamp.GradScaler("cpu", 8.0)
    scaled_grads(scaler, params)
    grad, params[0].grad = params[0].grad, torch.ones(3).to_sparse()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match="sparse gradient"):
            call(optimizer)
    with pytest.raises(TypeError, match="unexpected keyword"):
        scaler.step(optimizer, nonsense=1)
    assert not hasattr(optimizer, "grad_scale") and optimizer._outer_found_inf is None
    params[0].grad = grad
    expectation = expect(optimizer, scale=8.0)
    scaler.step(optimizer)
    expectation.check()


def test_an_outer_divisor_multiplies_with_the_scale(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer, scaler = SGD(params, lr=1.0, backend=runner.backend), tritonamp.GradScaler("cpu", 4.0)
    for unscale, factor in ((False, 12.0), (True, 3.0)):
        scaled_grads(scaler, params)
        optimizer.grad_scale = torch.tensor(3.0)
        if unscale:
            scaler.unscale_(optimizer)
        expectation = expect(optimizer, scale=factor)
        scaler.step(optimizer)
        scaler.update()
        expectation.check()
        assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_every_gradient_can_be_unscaled(runner: Runner, dtype: torch.dtype) -> None:
    params = [torch.ones(5, dtype=dtype, requires_grad=True)]
    optimizer, scaler = SGD(params, lr=1.0, backend=runner.backend), tritonamp.GradScaler("cpu", 8.0)
    for overflow in (False, True):
        scaler.scale(torch.ones(()))
        params[0].grad = torch.full((5,), 4.0, dtype=dtype)
        if overflow:
            params[0].grad[4] = torch.inf
        scaler.unscale_(optimizer)
        assert params[0].grad[0].item() == 0.5
        scaler.step(optimizer)
        scaler.update()
        assert params[0].tolist() == [0.5] * 5
    assert scaler.get_scale() == 4.0


def test_it_is_a_torch_gradscaler() -> None:
    """Its state goes both ways, and it is pickled and copied as torch's."""
    params = make_params([(3,)])
    optimizer = SGD(params, backend="torch")
    scaler = tritonamp.GradScaler("cpu", 8.0, 3.0, 0.25, 5)
    assert isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
    scaled_grads(scaler, params)
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled"):
        pickle.dumps(scaler)
    scaler.update()
    stock = torch.amp.GradScaler("cpu")
    stock.load_state_dict(scaler.state_dict())
    assert stock.state_dict() == scaler.state_dict() and scaler.state_dict()["_growth_tracker"] == 1
    again = tritonamp.GradScaler("cpu")
    again.load_state_dict(stock.state_dict())
    file = io.BytesIO()
    torch.save(scaler, file)
    file.seek(0)
    copies = [again, pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler), torch.load(file, weights_only=False)]
    for other in copies:
        assert type(other) is tritonamp.GradScaler and other.state_dict() == scaler.state_dict()
        scaled_grads(other, params)
        other.step(optimizer)
        other.update()
        assert other.state_dict()["_growth_tracker"] == 2
    scaler.update(16.0)
    scaler.update(torch.tensor(32.0))
    assert scaler.get_scale() == 32.0

"""``fuse``: training goes on as if nothing had happened, and what holds the old optimizer acts on ours."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Runner
from problem import assert_same_bits, checked_step, make_params, scaled, set_grads, values
from torch import Tensor
from torch.optim import lr_scheduler

import tritonamp
from tritonamp import LossScale, fuse

SHAPES = [(40,), (600,), (3, 5)]
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    "Adam decoupled": (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "maximize": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
}


def make(name: str, params: Any, **options: Any) -> Any:
    """An optimizer of torch's."""
    kind, known = OPTIMIZERS[name]
    return kind(params, **{**known, **options})


def stepped(name: str = "AdamW", steps: int = 2, **options: Any) -> tuple[list[Tensor], Any]:
    """Parameters and an optimizer of torch's that has made steps."""
    params = make_params(SHAPES)
    optimizer = make(name, params, **options)
    for _ in range(steps):
        set_grads(params)
        optimizer.step()
    return params, optimizer


def stepped_under(scaler: Any) -> tuple[list[Tensor], Any]:
    """The same under a scaler; the first step overflows."""
    params, optimizer = stepped(steps=0)
    for step in range(3):
        scaler.scale(torch.ones(()))
        set_grads(params, scaler.get_scale())
        if step == 0:
            params[0].grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    return params, optimizer


# The state that is taken over.


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_training_goes_on(runner: Runner, name: str, way: dict[str, bool]) -> None:
    """Every further step is the oracle's, and bitwise that of an optimizer which has loaded the checkpoint."""
    params, old = stepped(name, **way)
    twins = copy.deepcopy(params)
    loaded = getattr(tritonamp, type(old).__name__)(twins, loss_scale=None, max_norm=1.0, backend=runner.backend)
    loaded.load_state_dict(copy.deepcopy(old.state_dict()))
    loaded.param_groups[0]["max_norm"] = 1.0
    before = copy.deepcopy(old.state_dict())
    optimizer = fuse(old, max_norm=1.0, backend=runner.backend)
    assert type(optimizer) is type(loaded) and optimizer.loss_scale is None
    after = optimizer.state_dict()
    for option, value in before["param_groups"][0].items():
        assert after["param_groups"][0][option] == value
    assert before["state"].keys() == after["state"].keys()
    for number, state in before["state"].items():
        kept = {key: value for key, value in state.items() if value is not None}
        assert kept.keys() == after["state"].get(number, {}).keys()
        assert_same_bits(list(kept.values()), [after["state"][number][key] for key in kept])
    for _ in range(3):
        set_grads(params)
        for param, twin in zip(params, twins, strict=True):
            twin.grad = param.grad.clone()
        checked_step(optimizer)
        loaded.step()
        assert_same_bits(values(optimizer), values(loaded))


@pytest.mark.parametrize("name", [name for name, (_, options) in OPTIMIZERS.items() if not options.get("amsgrad")])
def test_the_torch_backend_goes_on_bitwise(name: str) -> None:
    """Where both run torch's fused kernels, even the roundings are those of a run that was never fused."""
    ends = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        params, optimizer = stepped(name, fused=True)
        if is_fused:
            optimizer = fuse(optimizer, backend="torch")
        for _ in range(3):
            set_grads(params)
            optimizer.step()
        ends.append(params + [t for state in optimizer.state_dict()["state"].values() for t in state.values()])
    assert_same_bits(*ends)


def test_a_parameter_without_a_step_is_fresh(runner: Runner) -> None:
    """Its momentum buffer is not seeded, and is not dampened; the others' are."""
    params = make_params(SHAPES)
    old = make("SGD momentum", params)
    set_grads(params[:2])
    old.step()
    optimizer = fuse(old, backend=runner.backend)
    assert optimizer.state_dict()["state"].keys() == {0, 1}
    set_grads(params)
    checked_step(optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str)
def test_state_is_shared_where_its_form_fits(runner: Runner, dtype: torch.dtype) -> None:
    params = make_params([(300,)], dtype)
    old = make("Adam amsgrad", params, foreach=False)
    set_grads(params)
    old.step()
    before = {key: value.clone() for key, value in old.state[params[0]].items()}
    addresses = {key: value.data_ptr() for key, value in old.state[params[0]].items()}
    refs = [weakref.ref(value) for value in old.state[params[0]].values() if value.dim()]
    optimizer = fuse(old, backend=runner.backend)
    state = optimizer.state[params[0]]
    for key, value in state.items():
        assert torch.equal(value, before[key].to(value.dtype))
        assert (value.data_ptr() == addresses[key]) == (dtype != torch.bfloat16 or key == "step")
    assert old.state is optimizer.state
    assert sum(ref() is not None for ref in refs) == (0 if dtype == torch.bfloat16 else 3)  # none is held twice
    set_grads(params)
    checked_step(optimizer)


def test_groups_are_shared(runner: Runner) -> None:
    """Options of their own and unknown ones stay; a group's ``max_norm`` is its own."""
    a, b, c = make_params(SHAPES)
    groups = [
        {"params": [("a", a)], "lr": torch.tensor(0.05), "note": "mine"},
        {"params": [("b", b)], "betas": (0.5, 0.6), "max_norm": 0.25},
        {"params": [("c", c)], "max_norm": None},
    ]
    old = make("AdamW", groups, capturable=False)
    dicts = list(old.param_groups)
    optimizer = fuse(old, max_norm=2.0, skip_norm=100.0, skip_nonfinite=False, backend=runner.backend)
    assert optimizer.param_groups is old.param_groups
    assert all(mine is group for mine, group in zip(optimizer.param_groups, dicts, strict=True))
    assert [group["max_norm"] for group in dicts] == [2.0, 0.25, 2.0]
    assert dicts[0]["lr"] is groups[0]["lr"] and dicts[0]["note"] == "mine" and dicts[0]["param_names"] == ["a"]
    assert optimizer._skip_norm == 100.0 and not optimizer._skip_nonfinite
    set_grads([a, b, c])
    checked_step(optimizer)
    optimizer.add_param_group({"params": [("d", torch.ones(3, requires_grad=True))]})
    added = old.param_groups[3]
    assert added["max_norm"] == 2.0 and added["lr"] == 0.1 and added["amsgrad"] and added["params"][0].sum() == 3


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, tritonamp.GradScaler], ids=["stock", "ours"])
def test_the_scale_is_taken_over(runner: Runner, kind: Any) -> None:
    scaler = kind("cpu", 64.0, 4.0, 0.25, 3)
    params, old = stepped_under(scaler)
    optimizer = fuse(old, scaler, backend=runner.backend)
    numbers = optimizer.loss_scale.state_dict()
    assert {key: numbers[key] for key in scaler.state_dict()} == scaler.state_dict()
    assert numbers["scale"] == 16.0 and numbers["_growth_tracker"] == 2
    set_grads(params)
    with pytest.raises(RuntimeError, match="nothing was scaled"):
        optimizer.step()
    for scale in (64.0, 64.0):
        set_grads(params, scaled(optimizer))
        checked_step(optimizer)
        assert optimizer.loss_scale.get_scale() == scale
    assert float(optimizer.state[params[0]]["step"]) == 4.0


def test_a_checkpoint_of_ours_may_be_fused_again(runner: Runner) -> None:
    """Torch's optimizers keep the options of ours that they do not know; the scale comes from the scaler."""
    params, old = stepped()
    optimizer = fuse(old, LossScale(8.0), max_norm=0.5, backend=runner.backend)
    again = torch.optim.AdamW(params)
    again.load_state_dict(optimizer.state_dict())
    optimizer = fuse(again, LossScale(32.0), max_norm=2.0, backend=runner.backend)
    (group,) = optimizer.param_groups
    assert group["max_norm"] == 0.5 and group["loss_scale"]["scale"] == 32.0 and group["amsgrad"]
    set_grads(params, scaled(optimizer))
    checked_step(optimizer)


def test_a_disabled_scaler_is_none(runner: Runner) -> None:
    params, old = stepped()
    optimizer = fuse(old, torch.amp.GradScaler("cpu", enabled=False), backend=runner.backend)
    assert optimizer.loss_scale is None
    set_grads(params)
    checked_step(optimizer)


def test_a_loss_scale_may_be_shared(runner: Runner) -> None:
    loss_scale = LossScale(8.0, hysteresis=2)
    pairs = [stepped(), stepped("SGD momentum")]
    optimizers = [fuse(old, loss_scale, backend=runner.backend) for _, old in pairs]
    assert all(optimizer.loss_scale is loss_scale for optimizer in optimizers)
    for _ in range(2):
        scaled(optimizers[0])
        for (params, _), optimizer in zip(pairs, optimizers, strict=True):
            set_grads(params, 8.0)
            params[0].grad[0] = torch.inf
            checked_step(optimizer)
        loss_scale.update()
    assert loss_scale.get_scale() == 4.0


def test_gradients_that_are_there_are_accumulated_on(runner: Runner) -> None:
    scaler = torch.amp.GradScaler("cpu", 64.0)
    params, old = stepped_under(scaler)
    old.zero_grad()
    scaler.scale(sum(p.sum() for p in params)).backward()
    optimizer = fuse(old, scaler, backend=runner.backend)
    optimizer.backward(sum(p.sum() for p in params))
    assert params[0].grad.tolist() == [2 * 32.0] * 40
    checked_step(optimizer)


def test_the_scaler_may_stay(runner: Runner) -> None:
    """Under it, the optimizer is a fused one as any other."""
    for kind in (torch.amp.GradScaler, tritonamp.GradScaler):
        scaler = kind("cpu", 64.0, growth_interval=1)
        params, old = stepped_under(scaler)
        optimizer = fuse(old, max_norm=1.0, backend=runner.backend)
        scale = scaler.get_scale()
        scaler.scale(torch.ones(()))
        set_grads(params, scale)
        expectation = tritonamp.testing.expect(optimizer, scale=scale)
        scaler.step(optimizer)
        scaler.update()
        expectation.check()
        assert scaler.get_scale() == 2 * scale


# The old optimizer.


def sequential(optimizer: Any) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        lr_scheduler.CosineAnnealingLR(optimizer, 4),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "SequentialLR": sequential,
}


@pytest.mark.parametrize("when", ["before", "on the old one", "on ours"])
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW"])
def test_schedulers_act_on_ours(kind: str, name: str, when: str) -> None:
    """In every respect as on an optimizer that was never fused, after loading a checkpoint too; no warning."""
    histories = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        params, optimizer = make_params([(3,)]), None
        old = make(name, [{"params": params}])
        if when == "before":
            scheduler = SCHEDULERS[kind](old)
        if is_fused:
            optimizer = fuse(old, backend="torch")
        optimizer = optimizer or old
        if when != "before":
            scheduler = SCHEDULERS[kind](old if when == "on the old one" else optimizer)
        history = []
        for step in range(6):
            set_grads(params)
            optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            group = optimizer.param_groups[0]
            history.append([group["lr"], group.get("momentum"), group.get("betas")])
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        histories.append(history)
        assert len({row[0] for row in history}) > 2
    assert histories[0] == histories[1]


def test_a_scheduler_that_steps_first_still_warns() -> None:
    _, old = stepped(steps=0)
    scheduler = SCHEDULERS["LambdaLR"](old)
    fuse(old, backend="torch")
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


def test_schedulers_see_steps_of_compiled_loops() -> None:
    params, old = stepped(steps=0)
    scheduler = SCHEDULERS["LambdaLR"](old)
    optimizer = fuse(old, backend="torch")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        torch.compile(optimizer.step, backend="eager")()
    scheduler.step()
    assert not any(param.grad is not None for param in params) and old._opt_called


def test_the_old_optimizer_does_not_step() -> None:
    params, old = stepped()
    before = values(old)
    fuse(old, backend="torch")
    for scheduled in (False, True):
        if scheduled:
            SCHEDULERS["LambdaLR"](old)
        set_grads(params)
        with pytest.raises(RuntimeError, match=r"call step\(\) of what tritonamp.fuse\(\) returned"):
            old.step()
    with pytest.raises(RuntimeError, match=r"call step\(\) of what"):
        old.step(lambda: 1.0)
    assert_same_bits(values(old), before)


def test_the_old_optimizers_other_calls_act_on_ours(runner: Runner) -> None:
    params, old = stepped()
    optimizer = fuse(old, LossScale(8.0), backend=runner.backend)
    set_grads(params, scaled(optimizer))
    optimizer.unscale_()
    old.zero_grad()
    assert params[0].grad is None and not optimizer._is_unscaled
    optimizer.loss_scale.update(16.0)
    checkpoint = copy.deepcopy(old.state_dict())
    assert checkpoint["param_groups"][0]["loss_scale"]["scale"] == 16.0
    optimizer.loss_scale.update(8.0)
    set_grads(params, scaled(optimizer))
    checked_step(optimizer)
    old.load_state_dict(checkpoint)
    assert optimizer.loss_scale.get_scale() == 16.0 and float(optimizer.state[params[0]]["step"]) == 2.0
    assert old.param_groups is optimizer.param_groups and old.state is optimizer.state
    new = make_params([(4,)])
    old.add_param_group({"params": new})
    set_grads(params + new, scaled(optimizer))
    checked_step(optimizer)


def test_the_old_optimizer_may_go() -> None:
    params, old = stepped()
    optimizer = fuse(old, backend="torch")
    gone = weakref.ref(old)
    del old
    gc.collect()
    assert gone() is None
    set_grads(params)
    checked_step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())


def test_copies_stand_alone() -> None:
    params, old = stepped()
    scheduler = SCHEDULERS["LambdaLR"](old)
    optimizer = fuse(old, backend="torch")
    copied, plain = copy.deepcopy(optimizer), copy.deepcopy(old)
    scheduler.optimizer.param_groups[0]["lr"] = 0.5
    assert copied.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.1
    for other in (copied, plain):
        set_grads(other.param_groups[0]["params"])
        checked_step(other)  # the copy of the old one is torch's again
    assert_same_bits(values(optimizer), values(old))
    assert type(plain) is torch.optim.AdamW and float(optimizer.state[params[0]]["step"]) == 2.0


def test_hooks_come_along(runner: Runner) -> None:
    params, old = stepped()
    calls: list[str] = []

    def note(what: str) -> Callable[..., None]:
        return lambda optimizer, *_: calls.append(f"{what} {type(optimizer).__module__}")

    order = [f"{call}_{when}" for call in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")]
    handles = [getattr(old, f"register_{what}_hook")(note(what)) for what in order]
    optimizer = fuse(old, backend=runner.backend)
    for is_removed in (False, True):
        set_grads(params)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert calls == ([] if is_removed else [f"{what} tritonamp.adam" for what in order])
        calls.clear()
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("kept", [{"master_weights": True}, {"rounding": "stochastic"}], ids=str)
def test_low_precision_parameters_can_be_kept_otherwise_from_then_on(runner: Runner, kept: dict[str, Any]) -> None:
    params = make_params([(300,), (7,)], torch.bfloat16)
    old = torch.optim.AdamW(params, lr=0.05, foreach=False)
    set_grads(params)
    old.step()
    fused = tritonamp.fuse(old, backend=runner.backend, **kept)
    assert all(("master_param" in fused.state[p]) == ("master_weights" in kept) for p in params)
    for _ in range(2):
        set_grads(params)
        checked_step(fused)

"""``fuse``: what has no equivalent is refused by name, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problem import make_params, set_grads
from torch import Tensor

import tritonamp
from tritonamp import LossScale, fuse


class Scheduled(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


class Stepping(Scheduled):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Grouping(torch.optim.SGD):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({**param_group, "lr": 1.0})


class Backing(torch.amp.GradScaler):
    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)


def test_another_constructor_is_no_obstacle() -> None:
    for _ in range(2):
        optimizer = fuse(Scheduled(make_params([(3,)])), backend="torch")
        assert type(optimizer) is tritonamp.AdamW and optimizer.param_groups[0]["lr"] == 0.5


def pending(step: bool) -> Any:
    scaler = torch.amp.GradScaler("cpu")
    params = make_params([(3,)])
    other = torch.optim.SGD(params)
    scaler.scale(torch.ones(()))
    set_grads(params)
    if step:
        scaler.step(other)
    else:
        scaler.unscale_(other)
    return scaler


def with_step_replaced(params: list[Tensor]) -> Any:
    optimizer = torch.optim.SGD(params)
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)
    return optimizer


def with_sparse_grad(params: list[Tensor]) -> Any:
    params[0].grad = torch.ones(3).to_sparse()
    return torch.optim.SGD(params)


def with_damaged_state(params: list[Tensor]) -> Any:
    params.append(torch.ones(2, dtype=torch.bfloat16, requires_grad=True))
    optimizer = torch.optim.SGD(params[::-1], momentum=0.9)
    set_grads(params)
    optimizer.step()
    optimizer.state[params[0]]["momentum_buffer"] = torch.ones(4)
    return optimizer


@pytest.mark.parametrize(
    ("make_old", "arguments", "error", "message"),
    [
        (torch.optim.RMSprop, {}, TypeError, r"takes a torch.optim.SGD, Adam or AdamW, got torch.optim.*RMSprop"),
        (tritonamp.AdamW, {}, TypeError, "got AdamW of tritonamp, which is fused"),
        (Stepping, {}, TypeError, "Stepping is no plain AdamW: it has a step of its own"),
        (Grouping, {}, TypeError, "Grouping is no plain SGD: it has a add_param_group of its own"),
        (with_step_replaced, {}, RuntimeError, "step.. was replaced by"),
        (with_sparse_grad, {}, RuntimeError, "sparse gradient"),
        (with_damaged_state, {}, RuntimeError, r"'momentum_buffer' has shape \(4,\), its parameter \(3,\)"),
        (lambda p: torch.optim.SGD(p, differentiable=True), {}, ValueError, "group 0 has differentiable=True"),
        (lambda p: torch.optim.SGD(p, weight_decay=torch.tensor(0.1)), {}, TypeError, "tensor in weight_decay: set"),
        (lambda p: torch.optim.Adam(p, betas=(torch.tensor(0.1),) * 2), {}, TypeError, "tensor in betas: set"),
        (lambda p: torch.optim.SGD(p, lr=torch.tensor(1)), {}, ValueError, "lr must have one element, float32 or"),
        (torch.optim.SGD, {"max_norm": -1.0}, ValueError, "max_norm must be at least 0, got -1.0"),
        (torch.optim.SGD, {"backend": "cuda"}, ValueError, "backend must be"),
        (torch.optim.SGD, {"lr": 0.1}, TypeError, "lr"),
        (torch.optim.SGD, {"loss_scale": 8.0}, TypeError, "pass a LossScale as scaler"),
        (torch.optim.SGD, {"scaler": 8.0}, TypeError, "scaler must be a .* or None, got float"),
        (torch.optim.SGD, {"scaler": Backing("cpu")}, TypeError, "Backing is no plain GradScaler: it has a update of"),
        (torch.optim.SGD, {"scaler": pending(step=True)}, RuntimeError, r"between unscale_\(\) or step\(\) and update"),
        (torch.optim.SGD, {"scaler": pending(step=False)}, RuntimeError, "between unscale_"),
        (torch.optim.SGD, {"scaler": LossScale(), "skip_nonfinite": False}, ValueError, "skip_nonfinite=False"),
    ],
)  # fmt: skip
def test_what_cannot_be_fused_is_refused(make_old: Any, arguments: Any, error: Any, message: str) -> None:
    """By name, and nothing has changed then."""
    params = make_params([(3,)])
    old = make_old(params)
    attributes, group = dict(vars(old)), dict(old.param_groups[0])
    state = [list(of_param.items()) for of_param in old.state.values()]
    hooks = [dict(value) for name, value in vars(old).items() if name.endswith("_hooks")]
    with pytest.raises(error, match=message) as kept:
        fuse(old, **arguments)
    assert vars(old) == attributes and old.param_groups[0] == group and kept is not None
    assert [list(of_param.items()) for of_param in old.state.values()] == state
    assert [dict(value) for name, value in vars(old).items() if name.endswith("_hooks")] == hooks
    if isinstance(arguments.get("scaler"), LossScale):
        assert not arguments["scaler"]._optimizers


def test_a_parameter_named_twice_is_refused() -> None:
    """Torch updates it twice in a step."""
    params = make_params([(3,)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        old = torch.optim.SGD(params * 2)
    with pytest.raises(ValueError, match="group 0 names a parameter twice"):
        fuse(old)


def test_parameters_without_data_are_refused() -> None:
    params = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True, device="meta")]
    with pytest.raises(RuntimeError, match="has no data"):
        fuse(torch.optim.SGD(params))


def test_fusing_twice_is_refused() -> None:
    old = torch.optim.AdamW(make_params([(3,)]))
    optimizer = fuse(old, backend="torch")
    with pytest.raises(RuntimeError, match="was fused before"):
        fuse(old, backend="torch")
    with pytest.raises(TypeError, match="AdamW of tritonamp, which is fused"):
        fuse(optimizer)

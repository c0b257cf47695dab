"""Parameters and gradients made by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonamp.optimizer import FusedOptimizer


def leaf(value: Any, grad: Any = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """A parameter of the given value, and its gradient, taken as it is."""
    param = torch.tensor(value, dtype=dtype).requires_grad_()
    if grad is not None:
        param.grad = torch.tensor(grad, dtype=dtype)
    return param


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_true_grads(optimizer: FusedOptimizer, *grads: Any) -> None:
    """Leave gradients as ``backward()`` of a scaled loss does; given are the unscaled ones, one for each parameter."""
    scale = float(optimizer.scale(torch.ones(())))
    for param, grad in zip(params_of(optimizer), grads, strict=True):
        if grad is None:
            param.grad = None
        else:
            scaled = torch.as_tensor(grad, dtype=torch.float64, device=param.device) * scale
            param.grad = scaled.to(getattr(param, "grad_dtype", None) or param.dtype).expand(param.shape).clone()


def train(optimizer: FusedOptimizer, *grads: Any) -> None:
    """One iteration with the given true gradients."""
    set_true_grads(optimizer, *grads)
    optimizer.step()


def scale_and_tracker(optimizer: FusedOptimizer) -> tuple[float, int]:
    assert optimizer.loss_scale is not None
    state = optimizer.loss_scale.state_dict()
    return float(state["scale"]), int(state["_growth_tracker"])


def steps_of(optimizer: FusedOptimizer) -> list[int]:
    """The parameters' counts of applied steps."""
    return [int(optimizer.state[param]["step"]) for param in params_of(optimizer)]

"""What scaling and unscaling do to tensors, and which loss scale an argument means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .distributed import like, local_of
from .loss_scale import LossScale


def make_loss_scale(loss_scale: Any) -> tuple[LossScale | None, bool]:
    """The scale that the argument of that name means, and whether it is armed from the start.

    Raises:
        ValueError: for what means none.
    """
    if loss_scale is None:
        return None, False
    if isinstance(loss_scale, LossScale):
        return loss_scale, True
    if isinstance(loss_scale, str) and loss_scale in ("auto", "dynamic"):
        return LossScale(), loss_scale == "dynamic"
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return LossScale.static(loss_scale), True
    raise ValueError(f"loss_scale must be 'auto', 'dynamic', a number, a LossScale or None, got {loss_scale!r}")


def scale_outputs(outputs: Any, scale: Tensor) -> Any:
    """Multiply a tensor, or an iterable of them (nested too), as ``torch.amp.GradScaler.scale`` does.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(outputs, Tensor):
        return outputs * scale.to(outputs.device, non_blocking=True)
    if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes, Mapping)):
        scaled = [scale_outputs(output, scale) for output in outputs]
        if hasattr(outputs, "_fields"):
            return type(outputs)(*scaled)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
    raise ValueError(f"outputs must be a tensor or an iterable of tensors, got {type(outputs).__name__}")


def unscale_grads(params: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply the gradients by ``inv_scale`` in place, and set ``found_inf`` to 1 if one is inf or NaN.

    Args:
        params: tensors whose ``grad`` is meant, where there is one; on whichever devices.
        inv_scale: 0-dim float32.
        found_inf: ``[1]`` float32.
    """
    grads_like: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    seen = set()
    for param in params:
        grad = local_of(param.grad)
        if grad is None:
            continue
        own = grad.clone() if id(param.grad) in seen else grad  # not the gradient of another parameter, too
        if own.is_conj() or own.is_neg():
            own = own.resolve_conj().resolve_neg()
        if 0 in own.stride():  # an expanded gradient: its elements share memory
            own = own.clone(memory_format=torch.contiguous_format)
        if own is not grad:
            param.grad, grad = like(param, own), own
        seen.add(id(param.grad))
        reals = torch.view_as_real(grad) if grad.is_complex() else grad
        grads_like.setdefault((reals.device, reals.dtype), []).append(reals.detach())
    for (device, _), grads in grads_like.items():
        found = torch.zeros(1, dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale.to(device))
        found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))


def as_scalar(value: Any, device: torch.device) -> Tensor | None:
    """A scaler's number as 0-dim float32 on the device; None for None and for the int 0 that stands for no flag."""
    if isinstance(value, Tensor):
        return value.detach().to(device=device, dtype=torch.float32).reshape(())
    return torch.full((), float(value), dtype=torch.float32, device=device) if value else None

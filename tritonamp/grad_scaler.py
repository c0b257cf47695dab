"""A ``torch.amp.GradScaler`` for training loops that insist on its own verbs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from .optimizer import FusedOptimizer
from .scaling import unscale_grads


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, which leaves looking at the gradients to tritonamp's optimizers.

    With the stock scaler, ``step()`` reads all gradients to look for inf and NaN before an optimizer of ours reads
    them again. This one hands over its scale, and takes the flag that the optimizer's own check leaves on the
    device: one launch per optimizer, no pass besides it, no wait. :meth:`update` moves the scale, once for all
    optimizers. Theirs, the ``loss_scale=`` of the constructor, rests meanwhile.

    What differs from the stock scaler, with optimizers of ours only:

    - A gradient that has become inf or NaN after :meth:`unscale_` backs the scale off too.
    - :meth:`step` and :meth:`update` without any gradient do nothing; the scale does not advance.
    - :meth:`unscale_` takes every gradient that the optimizer takes, float16 and complex ones too.

    With any other optimizer it is ``torch.amp.GradScaler``, and so are its arguments, errors and ``state_dict``.
    """

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, check and update, in the optimizer's ``step()``; as ``torch.amp.GradScaler.step``.

        Raises:
            RuntimeError: for a second call before :meth:`update`; for a closure, whose gradients would be new.
            AssertionError: if nothing was scaled yet.
        """
        if not self._enabled or not isinstance(optimizer, FusedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs or any(arg is not None for arg in args):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        is_scaled = state["stage"] is OptState.READY
        found: dict[torch.device, Tensor] = state["found_inf_per_device"]
        fused: Any = optimizer  # to which both are lent for the step
        divisor = getattr(fused, "grad_scale", None)
        if is_scaled:
            divisor = scale if divisor is None else scale * divisor
        fused.grad_scale, fused.found_inf = divisor, next(iter(found.values()), 0)
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del fused.grad_scale, fused.found_inf
        state["stage"] = OptState.STEPPED
        if optimizer._had_gradients:
            flag = optimizer.found_inf  # with what `unscale_` had found
            state["found_inf_per_device"] = {flag.device: flag}
        return result  # type: ignore[no-any-return]

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what the steps have found, or set it; as ``torch.amp.GradScaler.update``."""
        states = self._per_optimizer_states.values() if self._enabled else ()
        has_stepped = any(state["stage"] is OptState.STEPPED for state in states)
        if new_scale is None and has_stepped and not any(state["found_inf_per_device"] for state in states):
            # Steps of ours, none of which had a gradient.
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
            return
        super().update(new_scale)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, FusedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        has_gradients, device = optimizer._plan.look(optimizer), optimizer._plan.device
        optimizer._plan.release()
        if not has_gradients or device is None:
            return {}
        flag = found_inf.to(device, copy=True).reshape(1)
        unscale_grads(optimizer._params(), inv_scale.to(device), flag)
        return {device: flag[0]}

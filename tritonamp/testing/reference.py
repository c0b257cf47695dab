"""torch's own three calls on CPU: ``GradScaler``, ``clip_grad_norm_`` and a non-fused optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.testing.scale import ScaleState

__all__ = ["Outcome", "TorchReference"]


@dataclass(frozen=True)
class Outcome:
    """What a reference step reports: norm before clipping, whether it was skipped, the scale after it."""

    norm: float
    skipped: bool
    scale: ScaleState | None


class TorchReference:
    """A torch optimizer on copies of the parameters, driven with scaled gradients.

    Low-precision parameters are computed in float32 and rounded to their dtype after each step.

    Args:
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW``.
        params: parameters, or param groups; a group may have a ``max_norm``.
        max_norm: of groups that have none of their own.
        scale: the loss scale to start with; None: no scaling, and no look at the gradients.
        dtype: compute everything in this dtype instead, say in float64.
        hyperparameters: passed to ``optimizer``.

    Raises:
        ValueError: if ``scale`` asks for bounds or a hysteresis: torch has neither.
    """

    def __init__(
        self,
        optimizer: Callable[..., Optimizer],
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        *,
        max_norm: float | None = None,
        scale: ScaleState | None = None,
        dtype: torch.dtype | None = None,
        **hyperparameters: Any,
    ) -> None:
        entries = list(params)
        groups = [dict(e) for e in entries if isinstance(e, Mapping)] or [{"params": entries}]
        self.params: list[Tensor] = []
        self._dtypes: list[torch.dtype] = []
        for group in groups:
            group["params"] = [self._copy(p, dtype) for p in group["params"]]
            group.setdefault("max_norm", max_norm)
        self.optimizer = optimizer(groups, foreach=False, fused=False, **hyperparameters)
        self._scaler = None if scale is None else _scaler(scale)
        self._overflows = 0 if scale is None else scale.hysteresis_tracker

    def _copy(self, param: Tensor, dtype: torch.dtype | None) -> Tensor:
        exact = param.dtype.itemsize >= 4
        wide = dtype or (param.dtype if exact else torch.float32)
        copy = param.detach().cpu().to(wide, copy=True).requires_grad_()
        self.params.append(copy)
        self._dtypes.append(wide if dtype or exact else param.dtype)
        return copy

    def step(self, grads: Sequence[Tensor | None]) -> Outcome:
        """Do one step.

        Args:
            grads: for each parameter its gradient, scaled; or None.
        """
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else grad.detach().cpu().to(param.dtype, copy=True)
        used = [p.grad for p in self.params if p.grad is not None]
        skipped = self._scaler is not None and not all(bool(g.isfinite().all()) for g in used)
        if self._scaler is not None and used:
            self._scaler.unscale_(self.optimizer)
        total = torch.nn.utils.get_total_norm(used, foreach=False)
        for group in self.optimizer.param_groups:
            if group["max_norm"] is not None and group["max_norm"] != math.inf:
                torch.nn.utils.clip_grads_with_norm_(group["params"], group["max_norm"], total, foreach=False)
        if self._scaler is None:
            self.optimizer.step()
        elif used:
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self._overflows = self._overflows + 1 if skipped else 0
        with torch.no_grad():
            for param, dtype in zip(self.params, self._dtypes, strict=True):
                param.copy_(param.to(dtype))
        return Outcome(float(total), skipped, self.scale)

    @property
    def scale(self) -> ScaleState | None:
        """The loss scale, None where there is none."""
        if self._scaler is None:
            return None
        return ScaleState.from_state_dict({**self._scaler.state_dict(), "_hysteresis_tracker": self._overflows})

    def state(self, i: int) -> dict[str, Tensor]:
        """Return the state tensors of the ``i``-th parameter."""
        state = self.optimizer.state.get(self.params[i], {})
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _scaler(scale: ScaleState) -> torch.amp.GradScaler:
    if (scale.min_scale, scale.max_scale, scale.hysteresis) != (0.0, math.inf, 1):
        raise ValueError(f"torch.amp.GradScaler has no bounds and no hysteresis, got {scale!r}")
    scaler = torch.amp.GradScaler("cpu", scale.scale, scale.growth_factor, scale.backoff_factor, scale.growth_interval)
    # It makes its tensors at the first use only.
    scaler.scale(torch.ones(()))
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": scale.growth_tracker})
    return scaler

"""How an optimizer is driven: without a loss scale, with torch's ``GradScaler``, or with its own loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import tritonamp
from tritonamp.testing.scale import ScaleState

__all__ = ["Adapter", "GradScalerAdapter", "Make", "OwnScaleAdapter"]

Make = Callable[..., Optimizer]


class Adapter:
    """Drives an optimizer that has no loss scale; base of the adapters for those that have.

    Attributes:
        scales: whether there is a loss scale.
        takes_nothing: whether a step may be made when there is no gradient at all.
        optimizer: what is driven.
    """

    scales = False
    takes_nothing = True

    def __init__(self, make: Make, params: list[Tensor], options: Mapping[str, Any], scale: Mapping[str, Any]) -> None:
        """Make the optimizer.

        Args:
            make: the optimizer's class, or a function that is called as one.
            params: parameters.
            options: hyperparameters, keyword arguments of ``make``.
            scale: settings of a dynamic loss scale, keyword arguments of ``torch.amp.GradScaler``.
        """
        del scale  # there is none
        self.optimizer = make(params, **options)

    def scale(self) -> float:
        """Scale a loss; returns what it is multiplied by."""
        return 1.0

    def step(self) -> None:
        """Make the step that follows the backward pass, and whatever ends the iteration."""
        self.optimizer.step()

    def scale_state(self) -> ScaleState | None:
        """Return the loss scale as it is now."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return all that is saved."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned."""
        self.optimizer.load_state_dict(state_dict["optimizer"])


class GradScalerAdapter(Adapter):
    """Drives an optimizer with ``torch.amp.GradScaler``, which refuses a step without any gradient."""

    scales = True
    takes_nothing = False

    def __init__(self, make: Make, params: list[Tensor], options: Mapping[str, Any], scale: Mapping[str, Any]) -> None:
        super().__init__(make, params, options, scale)
        device = next((param.device.type for param in params), "cpu")
        self.scaler = torch.amp.GradScaler(device, **scale)

    def scale(self) -> float:
        """As ``GradScaler.scale``."""
        device = self.optimizer.param_groups[0]["params"][0].device
        return float(self.scaler.scale(torch.ones((), device=device)))

    def step(self) -> None:
        """``GradScaler.step`` and ``update``."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def scale_state(self) -> ScaleState:
        """The scaler's state."""
        return ScaleState.from_state_dict(self.scaler.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Both state dicts."""
        return {"scaler": self.scaler.state_dict(), **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both."""
        super().load_state_dict(state_dict)
        self.scaler.load_state_dict(state_dict["scaler"])


class OwnScaleAdapter(Adapter):
    """Drives an optimizer of tritonamp with its own loss scale."""

    scales = True

    def __init__(self, make: Make, params: list[Tensor], options: Mapping[str, Any], scale: Mapping[str, Any]) -> None:
        super().__init__(make, params, {**options, "loss_scale": tritonamp.LossScale(**scale)}, scale)
        self._own: Any = self.optimizer

    def scale(self) -> float:
        """As the optimizer's ``scale``."""
        return float(self._own.scale(torch.ones(())))

    def scale_state(self) -> ScaleState:
        """The state of the optimizer's loss scale."""
        return ScaleState.from_state_dict(self._own.loss_scale.state_dict())

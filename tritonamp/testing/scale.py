"""The loss scale's rule, on Python numbers: ``torch.amp.GradScaler``'s, with bounds and hysteresis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["ScaleState", "next_scale", "round_to_float32"]


def round_to_float32(x: float) -> float:
    """Return the nearest float32; infinite beyond its range."""
    return torch.tensor(x, dtype=torch.float64).to(torch.float32).item()


@dataclass(frozen=True)
class ScaleState:
    """A dynamic loss scale: settings and state.

    Attributes:
        scale: what losses are multiplied by; a float32 value.
        growth_tracker: good steps since the scale last changed or an overflow.
        hysteresis: the scale backs off on the ``hysteresis``-th overflow since the last good step, and on each
            further one until there is a good step again. 1 is torch's rule.
        hysteresis_tracker: overflows since the last good step.
    """

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 0.0
    max_scale: float = math.inf
    hysteresis: int = 1
    growth_tracker: int = 0
    hysteresis_tracker: int = 0

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> ScaleState:
        """Read the ``state_dict()`` of a ``tritonamp.LossScale`` or a ``torch.amp.GradScaler``."""
        return cls(**{name.removeprefix("_"): value for name, value in state.items()})


def next_scale(state: ScaleState, found_inf: bool | float | Tensor) -> ScaleState:
    """Return the loss scale after a step.

    A growth that would not be finite in float32 is not taken. The product is formed in float64 and rounded once.

    Args:
        state: the loss scale of the step.
        found_inf: anything but zero, NaN included, is an overflow.
    """
    if bool(found_inf):
        overflows = state.hysteresis_tracker + 1
        state = replace(state, growth_tracker=0, hysteresis_tracker=overflows)
        if overflows < state.hysteresis:
            return state
        return replace(state, scale=max(round_to_float32(state.scale * state.backoff_factor), state.min_scale))
    tracker = state.growth_tracker + 1
    if tracker < state.growth_interval:
        return replace(state, growth_tracker=tracker, hysteresis_tracker=0)
    grown = round_to_float32(state.scale * state.growth_factor)
    scale = min(grown, state.max_scale) if math.isfinite(grown) else state.scale
    return replace(state, scale=scale, growth_tracker=0, hysteresis_tracker=0)

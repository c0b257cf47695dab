"""What a step leaves to read."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from .backends import CONSECUTIVE_SKIPS, FOUND_INF, GRAD_NORM, OUTCOME, SKIPPED, SKIPPED_STEPS
from .wrapping import of_itself


class StepReport(torch.optim.Optimizer):
    """An optimizer whose steps report on themselves, in a vector on the device: reading it costs no sync."""

    _itself: weakref.ref[Any]
    _outcome: Tensor | None  # made when first asked for
    _outer_found_inf: Any

    def _device(self) -> torch.device:
        """Where the outcome lies."""
        raise NotImplementedError

    @property
    def grad_norm(self) -> Tensor:
        """L2 norm of the last step's gradients, unscaled, before clipping: 0-dim float32 on the device.

        inf or NaN on an overflow; NaN before the first step, and where nothing needed the norm.
        """
        return self._read(GRAD_NORM, torch.float32)

    @property
    def found_inf(self) -> Tensor:
        """1.0 if the last step saw an inf or NaN gradient, else 0.0: 0-dim float32 on the device."""
        return self._read(FOUND_INF, torch.float32)

    @found_inf.setter
    def found_inf(self, value: Any) -> None:  # torch.amp.GradScaler sets it before step() ...
        self._outer_found_inf = value

    @found_inf.deleter
    def found_inf(self) -> None:  # ... and deletes it afterwards
        self._outer_found_inf = None

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps were skipped so far: 0-dim int64 on the device."""
        return self._read(SKIPPED_STEPS, torch.int64)

    @property
    def consecutive_skips(self) -> Tensor:
        """How many steps were skipped since the last applied one: 0-dim int64 on the device."""
        return self._read(CONSECUTIVE_SKIPS, torch.int64)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. Waits for the device."""
        return bool(self._read(SKIPPED, torch.bool))

    @of_itself
    def _read(self, at: int, dtype: torch.dtype) -> Tensor:
        return self._outcome_state()[at].to(dtype)

    def _outcome_state(self) -> Tensor:
        device = self._device()
        if self._outcome is None:
            with torch.inference_mode(False):  # steps write to it outside of that
                self._outcome = torch.zeros(OUTCOME, dtype=torch.float64, device=device)
                self._outcome[GRAD_NORM] = math.nan
        elif self._outcome.device != device:
            self._outcome = self._outcome.to(device)
        return self._outcome

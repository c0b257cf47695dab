"""The loss scale: its settings, its state on the device, and its interchange with ``torch.amp.GradScaler``."""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .optimizer import FusedOptimizer

# The state, a vector of float64. `kernels/scale.py` reads and writes the same layout.
SCALE, GROWTH_TRACKER, HYSTERESIS_TRACKER, FOUND_INF = 0, 1, 2, 3
GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL, MIN_SCALE, MAX_SCALE, HYSTERESIS = 4, 5, 6, 7, 8, 9

# Keys of `state_dict()`: torch's own, then ours.
_KEYS = {
    "scale": SCALE,
    "growth_factor": GROWTH_FACTOR,
    "backoff_factor": BACKOFF_FACTOR,
    "growth_interval": GROWTH_INTERVAL,
    "_growth_tracker": GROWTH_TRACKER,
    "min_scale": MIN_SCALE,
    "max_scale": MAX_SCALE,
    "hysteresis": HYSTERESIS,
    "_hysteresis_tracker": HYSTERESIS_TRACKER,
}
_INTEGERS = ("growth_interval", "_growth_tracker", "hysteresis", "_hysteresis_tracker")


def round_to_float32(value: float) -> float:
    """The nearest float32, as a Python float; inf beyond its range."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def advance(state: list[float], found_inf: bool) -> None:
    """Grow or back off, in place: the rule of ``kernels/scale.py``, on the host.

    Good steps are counted; the ``growth_interval``-th grows the scale, unless that is not finite, and starts the
    count anew, as an overflow does. The scale backs off on the ``hysteresis``-th overflow since the last good
    step, and on every further one until the next good step. Both round once to float32 and respect the bounds.
    """
    if found_inf:
        state[HYSTERESIS_TRACKER] += 1
        state[GROWTH_TRACKER] = 0.0
        if state[HYSTERESIS_TRACKER] >= state[HYSTERESIS]:
            state[SCALE] = max(round_to_float32(state[SCALE] * state[BACKOFF_FACTOR]), state[MIN_SCALE])
        return
    state[HYSTERESIS_TRACKER] = 0.0
    state[GROWTH_TRACKER] += 1
    if state[GROWTH_TRACKER] >= state[GROWTH_INTERVAL]:
        state[GROWTH_TRACKER] = 0.0
        grown = round_to_float32(state[SCALE] * state[GROWTH_FACTOR])
        if math.isfinite(grown):
            state[SCALE] = min(grown, state[MAX_SCALE])


class LossScale:
    """A dynamic loss scale, kept on the device and advanced there.

    Attached to one optimizer, it advances in that optimizer's ``step()``. Attached to several, it is shared: their
    steps only record whether a gradient was inf or NaN, and :meth:`update` ends the iteration, once.

    Args:
        init_scale: the first scale; rounded to float32.
        growth_factor: what the scale is multiplied by after ``growth_interval`` good steps in a row; > 1.
        backoff_factor: what it is multiplied by after an overflow; in (0, 1).
        growth_interval: good steps before the scale grows; >= 1.
        min_scale, max_scale: bounds of the scale. By default the smallest normal float32, whose reciprocal is
            finite, and the largest power of two.
        hysteresis: the scale backs off on this many overflows since the last good step; 1 is torch's behaviour.

    Raises:
        ValueError: for a setting out of its range, naming it.

    Defaults and update rule are those of ``torch.amp.GradScaler``; the bounds and the hysteresis are additions.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        min_scale: float = 2.0**-126,
        max_scale: float = 2.0**127,
        hysteresis: int = 1,
    ) -> None:
        settings = {
            "scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "_growth_tracker": 0,
            "min_scale": min_scale,
            "max_scale": max_scale,
            "hysteresis": hysteresis,
            "_hysteresis_tracker": 0,
        }
        self._numbers = _validated(settings)  # the state until a device is known
        scale = self._numbers[SCALE]
        if not self._numbers[MIN_SCALE] <= scale <= self._numbers[MAX_SCALE]:
            raise ValueError(f"init_scale must be within [min_scale, max_scale], got {init_scale!r}")
        self._state: Tensor | None = None
        self._is_dynamic = True
        self._is_scaled = False  # something was scaled since the last iteration ended
        self._optimizers: weakref.WeakSet[FusedOptimizer] = weakref.WeakSet()
        self._recorded: set[FusedOptimizer] = set()  # that have stepped in this iteration

    @classmethod
    def static(cls, scale: float) -> LossScale:
        """A scale that never moves; steps with a non-finite gradient are skipped all the same."""
        loss_scale = cls(scale)
        loss_scale._is_dynamic = False
        return loss_scale

    def __repr__(self) -> str:
        kind = "LossScale" if self._is_dynamic else "LossScale.static"
        return f"{kind}({', '.join(f'{key}={value!r}' for key, value in self.state_dict().items())})"

    @property
    def value(self) -> Tensor:
        """The scale, 0-dim float32: a copy, without a sync. On the device, from the first use there on."""
        if self._state is None:
            return torch.tensor(self._numbers[SCALE], dtype=torch.float32, device="cpu")
        return self._state[SCALE].to(torch.float32)

    def get_scale(self) -> float:
        """The scale as a Python float. Waits for the device."""
        return self._read()[SCALE]

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration of a shared loss scale, or set the scale by hand.

        Args:
            new_scale: taken as the scale from now on; the growth tracker stays. A tensor is read on the host.

        Raises:
            RuntimeError: without ``new_scale``, for a scale that is not shared: it advances in ``step()``.
            ValueError: for a ``new_scale`` outside of the bounds.
        """
        if new_scale is not None:
            numbers = self._read()
            value = round_to_float32(float(new_scale))
            if not numbers[MIN_SCALE] <= value <= numbers[MAX_SCALE]:
                raise ValueError(f"new_scale must be within [min_scale, max_scale], got {new_scale!r}")
            numbers[SCALE], numbers[FOUND_INF] = value, 0.0
            self._write(numbers)
        elif not self._is_shared and not self._recorded:
            raise RuntimeError(
                "LossScale.update() ends an iteration of a scale shared by several optimizers; "
                "attached to one, it advances in that optimizer's step()"
            )
        elif self._is_dynamic and self._recorded and self._state is not None:
            next(iter(self._recorded))._advance_shared(self._state)
        if new_scale is None or self._recorded:
            self._is_scaled = False
            self._recorded.clear()

    def state_dict(self) -> dict[str, float | int]:
        """Settings and state as Python numbers. Waits for the device.

        It loads into ``torch.amp.GradScaler`` too, which passes over the keys that it does not know.
        """
        numbers = self._read()
        return {key: int(numbers[at]) if key in _INTEGERS else numbers[at] for key, at in _KEYS.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over settings and state, ours or a ``torch.amp.GradScaler``'s.

        What is missing keeps its value; a scale outside of the bounds is clamped. A static scale stays as it is.

        Raises:
            TypeError, ValueError: for what is no such dict, before anything is changed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a mapping, got {type(state_dict).__name__}")
        if not self._is_dynamic:
            return
        live = self._read()
        numbers = _validated({key: state_dict.get(key, live[at]) for key, at in _KEYS.items()})
        numbers[SCALE] = min(max(numbers[SCALE], numbers[MIN_SCALE]), numbers[MAX_SCALE])
        self._write(numbers)

    # What the optimizers use.

    @property
    def _is_shared(self) -> bool:
        return len(self._optimizers) > 1

    def _attach(self, optimizer: FusedOptimizer) -> None:
        """Note that the optimizer uses this scale.

        Raises:
            ValueError: if another that does agrees with other ranks: they would move the scale apart.
        """
        if any(other.process_group is not optimizer.process_group for other in self._optimizers):
            raise ValueError("optimizers that share a loss scale must have the same process_group")
        self._optimizers.add(optimizer)

    def _end_step(self, optimizer: FusedOptimizer) -> None:
        """The optimizer has used up what was scaled; where the scale is shared, :meth:`update` ends the iteration."""
        if self._is_shared:
            self._recorded.add(optimizer)
        else:
            self._is_scaled = False

    def _on(self, device: torch.device) -> Tensor:
        """The state as a ``[10]`` float64 tensor on the device."""
        if self._state is None:
            with torch.inference_mode(False):  # steps write to it outside of that
                self._state = torch.tensor(self._numbers, dtype=torch.float64, device=device)
        elif self._state.device != device:
            if self._is_shared:
                raise RuntimeError(
                    f"the shared loss scale lies on {self._state.device}, an optimizer of it on {device}"
                )
            self._state = self._state.to(device)
        return self._state

    def _read(self) -> list[float]:
        return list(self._numbers) if self._state is None else self._state.tolist()

    def _write(self, numbers: list[float]) -> None:
        self._numbers = numbers
        if self._state is not None:
            self._state.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))

    def __getstate__(self) -> dict[str, Any]:
        # Which optimizers are attached is for them to say again; the state travels as numbers.
        return {"numbers": self._read(), "is_dynamic": self._is_dynamic, "is_scaled": self._is_scaled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._numbers, self._is_dynamic, self._is_scaled = state["numbers"], state["is_dynamic"], state["is_scaled"]


def _validated(settings: Mapping[str, Any]) -> list[float]:
    """The state vector of the given settings, keys as in ``state_dict``."""
    numbers = [0.0] * 10
    for key, at in _KEYS.items():
        value = settings[key]
        try:
            numbers[at] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"{key.strip('_')} must be a number, got {value!r}") from None
    numbers[SCALE] = round_to_float32(numbers[SCALE])
    checks = {
        "scale": math.isfinite(numbers[SCALE]) and numbers[SCALE] > 0,
        "growth_factor": 1 < numbers[GROWTH_FACTOR] < math.inf,
        "backoff_factor": 0 < numbers[BACKOFF_FACTOR] < 1,
        "growth_interval": numbers[GROWTH_INTERVAL] >= 1 and numbers[GROWTH_INTERVAL].is_integer(),
        "_growth_tracker": numbers[GROWTH_TRACKER] >= 0 and numbers[GROWTH_TRACKER].is_integer(),
        "min_scale": 2.0**-126 <= numbers[MIN_SCALE] <= numbers[MAX_SCALE],
        "max_scale": math.isfinite(round_to_float32(numbers[MAX_SCALE])),
        "hysteresis": numbers[HYSTERESIS] >= 1 and numbers[HYSTERESIS].is_integer(),
        "_hysteresis_tracker": numbers[HYSTERESIS_TRACKER] >= 0 and numbers[HYSTERESIS_TRACKER].is_integer(),
    }
    expected = {
        "scale": "finite and positive",
        "growth_factor": "finite and above 1",
        "backoff_factor": "in (0, 1)",
        "growth_interval": "an integer of at least 1",
        "min_scale": "at least 2**-126 and at most max_scale",
        "max_scale": "a finite float32",
        "hysteresis": "an integer of at least 1",
    }
    for key, holds in checks.items():
        if not holds:
            raise ValueError(f"{key} must be {expected.get(key, 'an integer of at least 0')}, got {settings[key]!r}")
    return numbers

"""Who competes: everything that carries out what follows ``backward()``.

Every contender unscales, looks for inf and NaN, clips to ``MAX_NORM``, updates, and adapts the loss scale. What it
moves per parameter, where that is known, counts each tensor once for every pass that reads or writes it, as if nothing
were found in a cache.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tritonamp

MAX_NORM = 1.0
LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class Rule:
    """An optimizer and its options.

    Attributes:
        update: bytes per parameter that its update reads and writes where it is one pass over gradient, parameter and
            state, all float32.
        passes: the same where every operation is a pass of its own.
    """

    name: str
    options: dict[str, Any]
    update: int
    passes: int


RULES = {
    # Decay (8), m = lerp(m, g) (12), v *= beta2 (8), v += g * g (12), its root (8), divided (8), eps added (8), and the
    # update from param, m and that (16).
    "adamw": Rule("AdamW", {"lr": 1e-3}, 28, 80),
    "adam": Rule("Adam", {"lr": 1e-3}, 28, 72),
    # The buffer is decayed (8) and added to (12), and the parameter updated from it (12).
    "sgd": Rule("SGD", {"lr": 1e-3, "momentum": 0.9}, 20, 32),
}
# unscale_ reads and writes the gradients (8), clip_grad_norm_ reads them (4), and reads and writes them (8)
_TORCH_CALLS = 20
_NORM = 4  # a pass over the gradients alone
_GRAD_WRITTEN = 4  # by torch's fused kernels, where they divide the gradient


class Step:
    """One contender's optimizer, its loss scale, and its step."""

    optimizer: Any

    def scale_loss(self) -> None:
        """What comes before the backward pass; not timed."""
        raise NotImplementedError

    def __call__(self) -> None:
        """All that comes after the backward pass."""
        raise NotImplementedError

    def norm(self) -> float:
        """The global norm that the last step found."""
        raise NotImplementedError

    def scale(self) -> float:
        """The loss scale now."""
        raise NotImplementedError


class ScalerStep(Step):
    """``torch.amp.GradScaler``, ``clip_grad_norm_`` and any optimizer."""

    def __init__(self, optimizer: Any, params: Sequence[Tensor]) -> None:
        self.optimizer, self._params = optimizer, params
        self._device = params[0].device
        self._scaler = torch.amp.GradScaler(self._device.type, init_scale=LOSS_SCALE)
        self._norm = torch.tensor(math.nan)

    def scale_loss(self) -> None:
        """See :class:`Step`."""
        self._scaler.scale(torch.ones((), device=self._device))

    def __call__(self) -> None:
        """See :class:`Step`."""
        self._scaler.unscale_(self.optimizer)
        self._norm = torch.nn.utils.clip_grad_norm_(self._params, MAX_NORM)
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def norm(self) -> float:
        """See :class:`Step`."""
        return float(self._norm)

    def scale(self) -> float:
        """See :class:`Step`."""
        return self._scaler.get_scale()


class FoldedStep(Step):
    """torch's fused optimizer with unscaling and clipping in its ``grad_scale``, and nothing that waits.

    The best that its parts allow: one pass for the norm, whose inf or NaN tells of an overflow, and one for the update.
    """

    def __init__(self, optimizer: Any, params: Sequence[Tensor]) -> None:
        self.optimizer, self._params = optimizer, params
        device = params[0].device
        self._scale = torch.full((), LOSS_SCALE, device=device)
        self._tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._norm = torch.tensor(math.nan)

    def scale_loss(self) -> None:
        """See :class:`Step`."""

    def __call__(self) -> None:
        """See :class:`Step`."""
        grads = [param.grad for param in self._params if param.grad is not None]
        self._norm = torch.nn.utils.get_total_norm(grads, foreach=True) / self._scale
        found_inf = (~self._norm.isfinite()).to(torch.float32)
        self.optimizer.grad_scale = self._scale * ((self._norm + 1e-6) / MAX_NORM).clamp(min=1.0)
        self.optimizer.found_inf = found_inf
        self.optimizer.step()
        torch._amp_update_scale_(self._scale, self._tracker, found_inf, 2.0, 0.5, 2000)

    def norm(self) -> float:
        """See :class:`Step`."""
        return float(self._norm)

    def scale(self) -> float:
        """See :class:`Step`."""
        return float(self._scale)


class OurStep(Step):
    """tritonamp."""

    def __init__(self, optimizer: Any, params: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        self._loss = torch.ones((), device=params[0].device)

    def scale_loss(self) -> None:
        """See :class:`Step`."""
        self.optimizer.scale(self._loss)

    def __call__(self) -> None:
        """See :class:`Step`."""
        self.optimizer.step()

    def norm(self) -> float:
        """See :class:`Step`."""
        return float(self.optimizer.grad_norm)

    def scale(self) -> float:
        """See :class:`Step`."""
        return float(self.optimizer.loss_scale.get_scale())


@dataclass(frozen=True)
class Contender:
    """Who competes.

    Attributes:
        name: as reported.
        make: makes its :class:`Step` from a rule and parameters.
        bytes: what it moves per parameter with float32 gradients, or None where that is not known.
        devices: where it runs.
        module: what has to be installed.
        takes_fp16: whether float32 parameters may have float16 gradients.
        is_optional: only on request.
        is_double: whether it forms ``1 - beta ** step`` in double precision; float32 is off by thousandfold more.
    """

    name: str
    make: Callable[[Rule, Sequence[Tensor]], Step]
    bytes: Callable[[Rule], int] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    module: str = "torch"
    takes_fp16: bool = False
    is_optional: bool = False
    is_double: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def is_ours(self) -> bool:
        """Whether it is tritonamp."""
        return self.name.startswith("tritonamp")

    def why_not(self, device: str, rule: Rule, is_fp16: bool) -> str | None:
        """Why it cannot compete; None if it can."""
        if device not in self.devices:
            return f"not on {device}"
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        if is_fp16 and not self.takes_fp16:
            return "does not take float16 gradients of float32 parameters"
        if self.module not in ("torch", "triton") and _FOREIGN[self.module].get(rule.name) is None:
            return f"has no {rule.name}"
        return None

    def bytes_per_parameter(self, rule: Rule, is_fp16: bool) -> int | None:
        """What a step moves, read and written; None where that is not known."""
        if self.bytes is None:
            return None
        if not is_fp16:
            return self.bytes(rule)
        return self.bytes(rule) - 4 if self.name == "tritonamp triton" else None  # 2 less in each of two passes


def _torch(fused: bool, foreach: bool, step: Callable[[Any, Sequence[Tensor]], Step] = ScalerStep) -> Any:
    def make(rule: Rule, params: Sequence[Tensor]) -> Step:
        return step(getattr(torch.optim, rule.name)(params, fused=fused, foreach=foreach, **rule.options), params)

    return make


def _compiled(rule: Rule, params: Sequence[Tensor]) -> Step:
    # The learning rate stays as it is, so that it may be compiled in.
    optimizer = getattr(torch.optim, rule.name)(params, foreach=True, **rule.options)
    optimizer.step = torch.compile(optimizer.step)
    return ScalerStep(optimizer, params)


def _ours(backend: str) -> Any:
    def make(rule: Rule, params: Sequence[Tensor]) -> Step:
        # As GradScaler: torch has no bounds.
        scale = tritonamp.LossScale(LOSS_SCALE)
        options: dict[str, Any] = {"max_norm": MAX_NORM, "loss_scale": scale, "backend": backend, **rule.options}
        return OurStep(getattr(tritonamp, rule.name)(params, **options), params)

    return make


# The optimizers of other libraries: where they are, and options that make them the same rule.
_FOREIGN: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "apex": {
        "AdamW": ("apex.optimizers.FusedAdam", {"adam_w_mode": True, "weight_decay": 1e-2}),
        "Adam": ("apex.optimizers.FusedAdam", {"adam_w_mode": False}),
        "SGD": ("apex.optimizers.FusedSGD", {}),
    },
    "transformer_engine": {
        "AdamW": ("transformer_engine.pytorch.optimizers.FusedAdam", {"adam_w_mode": True, "weight_decay": 1e-2}),
        "Adam": ("transformer_engine.pytorch.optimizers.FusedAdam", {"adam_w_mode": False}),
        "SGD": ("transformer_engine.pytorch.optimizers.FusedSGD", {}),
    },
    "optimi": {
        "AdamW": ("optimi.AdamW", {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}),
        "Adam": ("optimi.Adam", {"betas": (0.9, 0.999), "eps": 1e-8}),
        "SGD": ("optimi.SGD", {}),
    },
    "bitsandbytes": {
        "AdamW": ("bitsandbytes.optim.AdamW32bit", {"weight_decay": 1e-2}),
        "Adam": ("bitsandbytes.optim.Adam32bit", {}),
        "SGD": ("bitsandbytes.optim.SGD32bit", {}),
    },
}


def _foreign(module: str) -> Any:
    def make(rule: Rule, params: Sequence[Tensor]) -> Step:
        path, options = _FOREIGN[module][rule.name]
        where, _, name = path.rpartition(".")
        return ScalerStep(getattr(importlib.import_module(where), name)(params, **rule.options, **options), params)

    return make


def _three_calls(rule: Rule) -> int:
    return _TORCH_CALLS + rule.passes


CONTENDERS = [
    Contender("torch loop", _torch(False, False), _three_calls),
    Contender("torch foreach", _torch(False, True), _three_calls),
    Contender("torch fused", _torch(True, False), lambda rule: _TORCH_CALLS + rule.update),
    Contender(
        "torch fused, clip folded in",
        _torch(True, False, FoldedStep),
        lambda rule: _NORM + rule.update + _GRAD_WRITTEN,
    ),
    Contender("torch compiled", _compiled, is_optional=True, is_double=False),
    *(
        Contender(f"{module} fused", _foreign(module), devices=("cuda",), module=module, is_double=False)
        for module in _FOREIGN
    ),
    Contender("tritonamp torch", _ours("torch"), lambda rule: _NORM + rule.update + _GRAD_WRITTEN, takes_fp16=True),
    Contender(
        "tritonamp triton",
        _ours("triton"),
        lambda rule: _NORM + rule.update,
        devices=("cuda",),
        module="triton",
        takes_fp16=True,
    ),
]


def choose(names: Sequence[str] | None, device: str, rule: Rule, is_fp16: bool) -> tuple[list[Contender], list[str]]:
    """Who competes, and of each other one why it does not.

    Args:
        names: of the contenders that are asked for; None: all that are not optional.
        device: ``"cpu"`` or ``"cuda"``.
        rule: what they are to do.
        is_fp16: whether the gradients are float16.

    Raises:
        ValueError: for an unknown name.
    """
    known = [contender.name for contender in CONTENDERS]
    for name in names or ():
        if name not in known:
            raise ValueError(f"unknown contender {name!r}: must be one of {', '.join(known)}")
    asked = [c for c in CONTENDERS if (c.name in names if names is not None else not c.is_optional)]
    reasons = [(c, c.why_not(device, rule, is_fp16)) for c in asked]
    return [c for c, why in reasons if why is None], [f"{c.name}: {why}" for c, why in reasons if why is not None]

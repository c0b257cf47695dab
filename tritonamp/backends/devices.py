"""The step on all devices of one optimizer: where it takes others to decide, in two halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import Backend, Request, choose_backend, moved

if TYPE_CHECKING:
    from ..optimizer import FusedOptimizer
    from ..plan import Plan


class Devices:
    """A backend for each device, made when first needed.

    Args:
        name: of the backends: ``"auto"``, ``"triton"`` or ``"torch"``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._backends: dict[torch.device, Backend] = {}

    def step(self, optimizer: FusedOptimizer, plan: Plan, request: Request) -> None:
        """Update parameters, state, loss scale and outcome from the plan's gradients.

        With several devices, or ranks: every device gives its sums; the first adds them up, ranks agree on them, and
        each device decides by the same numbers. Loss scale and outcome are the first device's; others get a copy.
        """
        device = request.outcome.device
        first, *others = plan.parts()
        if not plan.agreement.is_needed:
            self.on(device).step(optimizer, first, request)
            return
        if others and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a step() on several devices cannot be captured in a CUDA graph")
        work = [(self.on(first.device or device), first, request)]
        work += [(self.on(part.device), part, request.on(part.device)) for part in others if part.device is not None]
        sums = [backend.local_sums(optimizer, part, asked) for backend, part, asked in work]
        agreed: list[Tensor | None] = [None] * len(work)
        if request.needs_norm:
            total, *more = [moved(of_one, device) for of_one in sums if of_one is not None]
            for of_one in more:
                total += of_one
            reduced = plan.agreement.reduce(total)
            agreed = [moved(reduced, backend.device) for backend, _, _ in work]
        for (backend, part, asked), by in zip(work, agreed, strict=True):
            backend.apply(optimizer, part, asked, by)

    def advance(self, loss_scale: Tensor) -> None:
        """End the iteration of a shared loss scale: advance it by the recorded flag, and clear that."""
        self.on(loss_scale.device).advance(loss_scale)

    def on(self, device: torch.device) -> Backend:
        """The backend for tensors on that device.

        Raises:
            RuntimeError: where it cannot run on such tensors.
        """
        if device not in self._backends:
            self._backends[device] = choose_backend(self._name, device)
        return self._backends[device]

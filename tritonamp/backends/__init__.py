"""What carries a step out: the Triton kernel on a GPU, plain torch elsewhere. One interface for both."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    import torch  # at run time, `torch` here is the module beside this file, once it is imported

    from ..optimizer import FusedOptimizer
    from ..plan import Part

# The outcome of a step, a vector of float64. `kernels/step.py` writes the same layout.
GRAD_NORM, FOUND_INF, SKIPPED, SKIPPED_STEPS, CONSECUTIVE_SKIPS, PENDING_INF = 0, 1, 2, 3, 4, 5
OUTCOME = 8


@dataclass(frozen=True)
class Request:
    """What one step asks of a backend, besides the plan.

    Attributes:
        outcome: ``[OUTCOME]`` float64 on the device, to be written.
        loss_scale: the state of the scale in force, ``[10]`` float64 on the device, or None.
        unscale: whether the gradients carry that scale.
        advance: 0: the scale stays, 1: it advances with this step, 2: the step's flag is recorded in it.
        skip_nonfinite: whether an inf or NaN gradient skips the step.
        skip_norm: the norm above which a step is skipped; inf for none.
        grad_scale, found_inf: an outer scaler's, 0-dim float32 on the device, or None.
        needs_norm: whether the step waits for the norm at all.
        lrs: the groups' learning rates: numbers, or tensors of one element on the device, float32 or float64.
    """

    outcome: Tensor
    loss_scale: Tensor | None
    unscale: bool
    advance: int
    skip_nonfinite: bool
    skip_norm: float
    grad_scale: Tensor | None
    found_inf: Tensor | None
    needs_norm: bool
    lrs: Sequence[float | Tensor]

    def on(self, device: torch.device) -> Request:
        """The same on another device, from where nothing comes back: what is written there are copies."""
        return replace(
            self,
            outcome=moved(self.outcome, device, copy=True),
            loss_scale=None if self.loss_scale is None else moved(self.loss_scale, device, copy=True),
            grad_scale=None if self.grad_scale is None else moved(self.grad_scale, device),
            found_inf=None if self.found_inf is None else moved(self.found_inf, device),
            lrs=[moved(lr, device) if isinstance(lr, Tensor) else lr for lr in self.lrs],
        )


def moved(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """On a device; the host waits for the copy only to or from a CPU, whose memory is read or changed at once."""
    return tensor.to(device, non_blocking=device.type == tensor.device.type, copy=copy)


class Backend(Protocol):
    """Carries out the steps of one optimizer on one device."""

    device: torch.device

    def step(self, optimizer: FusedOptimizer, part: Part, request: Request) -> None:
        """Update parameters, state, loss scale and outcome from the gradients, which are all there are."""

    def local_sums(self, optimizer: FusedOptimizer, part: Part, request: Request) -> Tensor | None:
        """The first half, where there are others to agree with: what ``Agreement.reduce`` takes, if that is needed."""

    def apply(self, optimizer: FusedOptimizer, part: Part, request: Request, agreed: Tensor | None) -> None:
        """The second half: as :meth:`step`, from what was agreed on; None where the norm is not needed."""

    def advance(self, loss_scale: Tensor) -> None:
        """End the iteration of a shared loss scale: advance it by the recorded flag, and clear that."""


def check_backend(name: str) -> None:
    """Raise unless such a backend exists, and can exist here.

    Raises:
        ValueError: for an unknown name.
        RuntimeError: for ``"triton"`` where it is not installed.
    """
    if name not in ("auto", "triton", "torch"):
        raise ValueError(f"backend must be 'auto', 'triton' or 'torch', got {name!r}")
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise RuntimeError("backend='triton' needs the package triton: install it, or use backend='auto'")


def choose_backend(name: str, device: torch.device) -> Backend:
    """The backend of that name for tensors on ``device``; ``"auto"`` is Triton on a GPU, where it is installed.

    Raises:
        RuntimeError: for ``"triton"`` where it cannot run, saying why.
    """
    if name == "triton" or (name == "auto" and device.type == "cuda" and importlib.util.find_spec("triton")):
        from .triton import TritonBackend

        return TritonBackend(device)
    from .torch import TorchBackend

    return TorchBackend(device)

"""Adam and AdamW, fused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from .loss_scale import LossScale
from .optimizer import FusedOptimizer, check_at_least_0, check_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Adam(FusedOptimizer):
    """Adam, as ``torch.optim.Adam``, with everything after ``backward()`` in its ``step()``.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a tensor of one element; >= 0.
        betas: decay rates of the first and second moment; each in [0, 1). Numbers, or tensors of one element on
            the CPU, which are read at every step.
        eps: added to the denominator; >= 0.
        weight_decay: L2 penalty, or decay of the weights if decoupled; >= 0.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend instead.
        decoupled_weight_decay: decay the weights instead of the gradients (AdamW).
        max_norm, loss_scale, skip_nonfinite, skip_norm, master_weights, rounding, process_group, backend: see
            :class:`~tritonamp.optimizer.FusedOptimizer`.

    Raises:
        ValueError: for an option out of its range, naming it.
    """

    _rule: ClassVar[str] = "ADAM"
    _numbers: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "eps")
    _inseparable: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] | tuple[Tensor, Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        max_norm: float | None = None,
        loss_scale: str | float | LossScale | None = "auto",
        skip_nonfinite: bool = True,
        skip_norm: float | None = None,
        master_weights: bool = False,
        rounding: str = "nearest",
        process_group: ProcessGroup | None = None,
        backend: str = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(
            params,
            defaults,
            max_norm=max_norm,
            loss_scale=loss_scale,
            skip_nonfinite=skip_nonfinite,
            skip_norm=skip_norm,
            master_weights=master_weights,
            rounding=rounding,
            process_group=process_group,
            backend=backend,
        )

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        super()._check_numbers(group)
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas!r}")
        for i, beta in enumerate(betas, 1):
            check_number(f"beta{i}", beta)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_at_least_0("eps", group["eps"])
        check_at_least_0("weight_decay", group["weight_decay"])
        if len({isinstance(beta, Tensor) for beta in group["betas"]}) > 1:
            raise ValueError(f"betas must be both numbers or both tensors, got {group['betas']!r}")
        for i, beta in enumerate(group["betas"], 1):
            if isinstance(beta, Tensor):
                _check_tensor_beta(f"beta{i}", beta)
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"beta{i} must be in [0, 1), got {beta!r}")

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        beta1, beta2 = map(float, group["betas"])
        log_betas = (math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2))
        return (group["weight_decay"], group["decoupled_weight_decay"], beta1, beta2, *log_betas, group["eps"])


def _check_tensor_beta(name: str, beta: Tensor) -> None:
    if beta.numel() != 1:
        raise ValueError(f"{name} must have one element, got shape {tuple(beta.shape)}")
    if beta.device.type != "cpu":
        raise ValueError(f"{name} must lie on the CPU, where it is read, got {beta.device}")


class AdamW(Adam):
    """AdamW, as ``torch.optim.AdamW``: :class:`Adam` with decoupled weight decay, 0.01 by default."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] | tuple[Tensor, Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        loss_scale: str | float | LossScale | None = "auto",
        skip_nonfinite: bool = True,
        skip_norm: float | None = None,
        master_weights: bool = False,
        rounding: str = "nearest",
        process_group: ProcessGroup | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            max_norm=max_norm,
            loss_scale=loss_scale,
            skip_nonfinite=skip_nonfinite,
            skip_norm=skip_norm,
            master_weights=master_weights,
            rounding=rounding,
            process_group=process_group,
            backend=backend,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's: whatever is loaded, an Adam's checkpoint too, its weight decay is decoupled."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True

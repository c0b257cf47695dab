"""SGD, fused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from .loss_scale import LossScale
from .optimizer import FusedOptimizer, check_at_least_0

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SGD(FusedOptimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD``, with everything after ``backward()`` in its ``step()``.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a tensor of one element; >= 0.
        momentum: momentum factor; >= 0.
        dampening: of the momentum; not on a parameter's first step.
        weight_decay: L2 penalty; >= 0.
        nesterov: Nesterov momentum; needs a momentum and no dampening.
        maximize: ascend instead.
        max_norm, loss_scale, skip_nonfinite, skip_norm, master_weights, rounding, process_group, backend: see
            :class:`~tritonamp.optimizer.FusedOptimizer`.

    Raises:
        ValueError: for an option out of its range, naming it.
    """

    _rule: ClassVar[str] = "SGD"
    _numbers: ClassVar[tuple[str, ...]] = ("lr", "momentum", "dampening", "weight_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
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

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_at_least_0("momentum", group["momentum"])
        check_at_least_0("weight_decay", group["weight_decay"])
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                "nesterov needs a momentum and no dampening, got "
                f"momentum={group['momentum']!r}, dampening={group['dampening']!r}"
            )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (group["weight_decay"], group["momentum"], group["dampening"], group["nesterov"])

    def _import_state(self, state: dict[str, Any]) -> None:
        if state.get("momentum_buffer") is None:
            state.pop("momentum_buffer", None)
        else:
            state.setdefault("step", 1.0)  # a loaded buffer counts as seeded

    def state_dict(self) -> dict[str, Any]:
        """As torch's: a momentum buffer per parameter, once an applied step has seeded it. With dampening it waits.

        Without dampening a buffer of zeros does as well, and what is there does not depend on skipped steps.
        """
        state_dict = super().state_dict()
        # The count of steps is ours alone: which buffers are seeded is known on the device only. Stochastic rounding
        # takes its random numbers by it.
        dampened = {n for group in state_dict["param_groups"] if group["dampening"] != 0 for n in group["params"]}
        states = state_dict["state"].items()
        unseeded = {n for n, state in states if n in dampened and "step" in state and float(state["step"]) == 0}
        dropped = set() if self.rounding == "stochastic" else {"step"}
        state = {
            number: {
                key: value
                for key, value in of_param.items()
                if key not in dropped and not (key == "momentum_buffer" and number in unseeded)
            }
            for number, of_param in states
        }
        return {**state_dict, "state": {number: of_param for number, of_param in state.items() if of_param}}

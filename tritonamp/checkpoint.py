"""Reading a checkpoint: an optimizer's ``state_dict``, ours or torch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .loss_scale import LossScale

Group = dict[str, Any]
_STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")


def states_of(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Iterator[tuple[Tensor, Group, dict[str, Any]]]:
    """Parameters of the live groups, with their group and the state that the checkpoint has for them.

    torch's flattened checkpoints have ``{}`` for what is missing: that is left out.
    """
    for group, saved in zip(groups, state_dict["param_groups"], strict=False):
        for param, number in zip(group["params"], saved["params"], strict=False):
            if number in state_dict["state"]:
                state = state_dict["state"][number].items()
                yield param, group, {key: value for key, value in state if not (isinstance(value, dict) and not value)}


def loss_scale_of(state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """The loss scale in the checkpoint: that of the first group that has one."""
    scales = (group.get("loss_scale") for group in state_dict["param_groups"])
    return next((numbers for numbers in scales if numbers is not None), None)


def check(groups: Sequence[Group], state_dict: Mapping[str, Any], inseparable: Sequence[str]) -> None:
    """Raise for state or a loss scale that does not fit; torch checks the groups.

    Args:
        groups: the live ones.
        state_dict: the checkpoint.
        inseparable: keys of state that has to be there once steps have been counted.

    Raises:
        ValueError, TypeError: naming what is wrong.
    """
    numbers = loss_scale_of(state_dict)
    if numbers is not None:
        LossScale().load_state_dict(numbers)
    for param, _, state in states_of(groups, state_dict):
        step = state.get("step", 0)
        if not (step.numel() == 1 if isinstance(step, Tensor) else isinstance(step, (int, float))):
            raise ValueError(f"the checkpoint's state 'step' must be a number, got {step!r}")
        missing = [key for key in inseparable if state.get(key) is None]
        if missing and float(step) > 0:  # in this order: nothing is missing as a rule, and the device not waited for
            raise ValueError(f"the checkpoint counts {float(step):g} steps, but has no state {missing[0]!r}")
        for key in _STATE:
            value = state.get(key)
            if value is not None and (not isinstance(value, Tensor) or value.layout != torch.strided):
                raise ValueError(f"the checkpoint's state {key!r} must be a dense tensor, got {value!r}")
            if value is not None and value.shape != param.shape:
                shapes = f"{tuple(value.shape)}, its parameter {tuple(param.shape)}"
                raise ValueError(f"the checkpoint's state {key!r} has shape {shapes}")

"""The state of a parameter: which tensors it has, and the form that the kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .distributed import like, local_of, part_of
from .layout import compute_dtype, dense_strides, real_dtype, state_dtype

if TYPE_CHECKING:
    from .optimizer import FusedOptimizer

# How a parameter is kept: rounded to nearest, or stochastically, when it is stored; or as the rounding of a master
# copy in the compute dtype. `kernels/table.py` has the same numbers.
ROUNDED, STOCHASTIC, MASTER = 0, 1, 2


def how_kept(optimizer: FusedOptimizer, param: Tensor) -> int:
    """``ROUNDED``, ``STOCHASTIC`` or ``MASTER``: how the optimizer keeps a parameter."""
    if real_dtype(param.dtype) == compute_dtype(param):
        return ROUNDED  # as it is computed
    return MASTER if optimizer.master_weights else STOCHASTIC if optimizer.rounding == "stochastic" else ROUNDED


def state_keys(optimizer: FusedOptimizer, group: dict[str, Any], param: Tensor) -> tuple[str, ...]:
    """Keys of a parameter's state tensors, ``"step"`` apart."""
    names = optimizer._state_names(group)
    return (*names, "master_param") if how_kept(optimizer, param) == MASTER else names


def prepare_state(state: dict[str, Any], owner: Tensor, names: Sequence[str]) -> None:
    """Bring step counter and state tensors into the form the kernels take: made if missing, converted if need be.

    Those of a DTensor are distributed as it is.
    """
    param = local_of(owner)
    step = state.get("step")
    if not isinstance(step, Tensor):
        step = torch.full((), float(step or 0), dtype=torch.float32, device=param.device)
    state["step"] = step.detach().to(device=param.device, dtype=torch.float32).reshape(())
    dtype, strides = state_dtype(param), dense_strides(param)
    for name in names:
        tensor = state.get(name, owner.detach() if name == "master_param" else None)
        if tensor is None:
            if name == "momentum_buffer":  # its first step is not dampened
                state["step"] = torch.zeros_like(state["step"])
            state[name] = like(owner, torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format))
            continue
        if tensor.shape != owner.shape:
            raise RuntimeError(f"state {name!r} has shape {tuple(tensor.shape)}, its parameter {tuple(owner.shape)}")
        part = part_of(tensor, owner).resolve_conj().resolve_neg()
        if part.dtype != dtype or part.device != param.device or part.stride() != strides:
            part = torch.empty_strided(param.shape, strides, dtype=dtype, device=param.device).copy_(part)
        if part is not local_of(tensor):
            state[name] = like(owner, part)

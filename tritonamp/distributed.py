"""What ranks, and the devices of one, have to agree on: norm, inf and NaN, loss scale; and which of them.

Parameters that are DTensors say by their mesh and placements over which ranks they are sharded; plain tensors say
nothing, and are taken for this rank's own, or for replicas. Every mesh is one collective: each rank gives the sum of
squares of what it holds, a replica of what others hold counting on the first of its ranks only, and NaN where a
replica that does not count is not finite. Meshes follow each other from the smallest to the largest, each handing on
whether something was not finite. Where the last has all ranks of the others in it, what these have found (the same on
all its ranks but for rounding) enters it as its mean, so that all decide by the same bits. A process group of the
user's comes last: its ranks hold different parameters, and add up what they have found so far.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Of meshes of several dimensions: by the group of the first dimension, with which they end, and by their ranks.
_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # where nobody has imported it, there is none
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is a DTensor, found without a look at every single one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, tensors)))


def local_of(tensor: Any) -> Any:
    """The part of a DTensor that this rank holds, sharing its memory; a plain tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    local = tensor._local_tensor
    return local.wait() if hasattr(local, "wait") else local  # a collective may still be under way


def local_grad(param: Any) -> Any:
    """The gradient of what this rank holds of a DTensor parameter; brought to its placements first, if need be."""
    grad = param.grad
    if not is_sharded(grad):
        return grad
    if grad.device_mesh != param.device_mesh or grad.placements != param.placements:
        param.grad = grad = grad.redistribute(param.device_mesh, param.placements)
    return local_of(grad)


def like(param: Any, local: Tensor) -> Any:
    """The whole of which ``local`` is this rank's part: distributed as ``param`` is."""
    if not is_sharded(param):
        return local
    return type(param).from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def part_of(tensor: Any, param: Any) -> Any:
    """This rank's part of a tensor that is to be distributed as ``param`` is, and may not be yet.

    No rank sends anything: a plain tensor is taken for the whole, present on every rank.
    """
    if not is_sharded(param):
        return local_of(tensor)
    if not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(tensor.to(param.device), param.device_mesh, param.placements, src_data_rank=None)
    elif tensor.placements != param.placements or tensor.device_mesh != param.device_mesh:
        tensor = tensor.redistribute(param.device_mesh, param.placements)
    return local_of(tensor)


class Share(NamedTuple):
    """This rank's share of one parameter.

    Attributes:
        slot: the number of the mesh over which it is reduced; 0 for none.
        counts: whether this rank's part enters the sum; a replica's does not.
        shard: which part it is.
    """

    slot: int
    counts: bool
    shard: int


WHOLE = Share(0, True, 0)


class Agreement:
    """Among which ranks, and whether among several devices, one optimizer's steps are agreed.

    Args:
        params: its parameters.
        process_group: over which, besides, sums are added up; or None.
        n_devices: on how many devices they lie in this process.
    """

    def __init__(self, params: Iterable[Any], process_group: Any, n_devices: int = 1) -> None:
        # A rank outside of a parameter's mesh has nothing to do with it.
        params = [p for p in params if is_sharded(p) and p.device_mesh.get_coordinate() is not None]
        if any(placement.is_partial() for param in params for placement in param.placements):
            raise RuntimeError("a parameter with a partial placement cannot be optimized: redistribute it first")
        meshes = {_ranks(param.device_mesh): param.device_mesh for param in params}
        order = sorted(meshes, key=lambda ranks: (len(ranks), ranks))
        self._groups = [_group_of(meshes[ranks]) for ranks in order]
        self._is_nested = bool(order) and all(set(ranks) <= set(order[-1]) for ranks in order)
        self._process_group = process_group
        self._has_devices = n_devices > 1
        self._shares = {id(p): _share(p, 1 + order.index(_ranks(p.device_mesh))) for p in params}

    @property
    def is_needed(self) -> bool:
        """Whether there are others to agree with, ranks or devices."""
        return bool(self._groups) or self._process_group is not None or self._has_devices

    @property
    def slots(self) -> int:
        """How many pairs of numbers :meth:`reduce` takes."""
        return 1 + len(self._groups)

    @property
    def n_sums(self) -> int:
        """How many numbers it returns."""
        return 1 if self._process_group is not None else 2 if self._is_nested else 2 * self.slots

    def share(self, param: Tensor) -> Share:
        """This rank's share of a parameter."""
        return self._shares.get(id(param), WHOLE)

    def reduce(self, sums: Tensor) -> Tensor:
        """Add up over the ranks.

        Args:
            sums: ``[slots, 2]`` float64, of all devices of this process: for each slot the sum of squares of the
                tensors that count, and 0, or NaN where another is not finite; overwritten.

        Returns:
            ``[n_sums]`` float64 whose sum is the square of the global norm; not finite if any rank's part is not.
        """
        for slot, group in enumerate(self._groups, 1):
            before = sums[:slot].sum()
            is_last = slot == len(self._groups)
            # Their mean comes back; or 0, or NaN.
            sums[slot, 1] += before / group.size() if is_last and self._is_nested else before - before
            torch.distributed.all_reduce(sums[slot], group=group)
        agreed = sums[-1] if self._is_nested else sums.view(-1)
        if self._process_group is None:
            return agreed
        total = agreed.sum().reshape(1)
        torch.distributed.all_reduce(total, group=self._process_group)
        return total

    def broadcast(self, state: Tensor) -> None:
        """Take over the first rank's numbers."""
        for group in (*self._groups, self._process_group):
            if group is not None:
                torch.distributed.broadcast(state, group=group, group_src=0)


def _ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _group_of(mesh: Any) -> Any:
    """The process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    groups, ranks = _groups.setdefault(mesh.get_group(0), {}), _ranks(mesh)
    if ranks not in groups:
        groups[ranks] = torch.distributed.new_group(list(ranks), use_local_synchronization=True)
    return groups[ranks]


def _share(param: Any, slot: int) -> Share:
    """By the rank's coordinate in each dimension of the mesh: a shard's number, or a replica's."""
    counts, shard = True, 0
    for at, size, placement in zip(
        param.device_mesh.get_coordinate(), param.device_mesh.shape, param.placements, strict=True
    ):
        if placement.is_replicate():
            counts = counts and at == 0
        else:
            shard = shard * size + at
    return Share(slot, counts, shard)

"""Which part of a parameter a rank holds, and among whom it is reduced: of eight ranks that exist on paper only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tritonamp.distributed import WHOLE, Agreement, Share


@pytest.fixture(params=[0, 5])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=request.param, world_size=8, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def param(mesh: Any, *placements: Any) -> Any:
    return DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False)


def test_every_element_counts_once(rank: int) -> None:
    """Rank 5 is at (1, 0, 1)."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    cases = {
        (Shard(0), Shard(0), Shard(1)): Share(1, True, 5),
        (Replicate(), Shard(0), Shard(1)): Share(1, False, 1),
        (Shard(0), Replicate(), Shard(1)): Share(1, True, 3),
        (Shard(0), Shard(1), Replicate()): Share(1, False, 2),
        (Replicate(), Replicate(), Replicate()): Share(1, False, 0),
    }
    params = [param(mesh, *placements) for placements in cases]
    agreement = Agreement(params, None)
    found = [agreement.share(p) for p in params]
    assert found == (list(cases.values()) if rank == 5 else [Share(1, True, 0)] * len(cases))
    assert (agreement.slots, agreement.n_sums, agreement.is_needed) == (2, 2, True)


def test_meshes_follow_from_small_to_large_and_once_each(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    other = DeviceMesh("cpu", [7, 6, 5, 4, 3, 2, 1, 0])  # the same ranks
    params = [param(mesh, Shard(0), Shard(1)), param(mesh["b"], Shard(0)), param(mesh["a"], Shard(0))]
    params += [param(other, Shard(0)), torch.ones(2)]
    agreement = Agreement(params, None)
    assert [agreement.share(p).slot for p in params] == [3, 2, 1, 3, 0]
    assert [group.size() for group in agreement._groups] == [2, 4, 8]


def test_plain_tensors_are_whole(rank: int) -> None:
    params = [torch.ones(2)]
    alone, grouped = Agreement(params, None), Agreement(params, dist.group.WORLD)
    assert alone.share(params[0]) == grouped.share(params[0]) == WHOLE
    assert not alone.is_needed
    assert grouped.is_needed and (grouped.slots, grouped.n_sums) == (1, 1)

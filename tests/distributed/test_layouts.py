"""In every layout a step is what it would be in one process on the same global batch, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, Runs, agreed, assert_agreed, backend, checked_step, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tritonamp

pytestmark = pytest.mark.xdist_group("ranks")

BATCH = 4  # rows of each rank that has its own


class Network(nn.Module):
    """Sizes that do not divide by the ranks, but for the hidden one; ``head.bias`` leaves ranks with nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 7, bias=False)
        self.head = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.norm(torch.tanh(self.first(x)))))


# Each returns the model laid out, how many ranks see rows of their own, and this one's number among them.

Laid = tuple[nn.Module, int, int]


def ddp(model: nn.Module) -> Laid:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, dist.get_world_size(), dist.get_rank()


def fsdp2(model: nn.Module) -> Laid:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.second, mesh=mesh)
    return fully_shard(model, mesh=mesh), dist.get_world_size(), dist.get_rank()


def hsdp(model: nn.Module) -> Laid:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh), dist.get_world_size(), dist.get_rank()


def tensor_parallel(model: nn.Module) -> Laid:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return _tensor_parallel(model, mesh), 1, 0


def _tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    # The norm sees shards of the hidden dimension only if it is whole: gather before it, and shard after.
    plan["first"] = ColwiseParallel(output_layouts=_replicate())
    plan["second"] = RowwiseParallel(input_layouts=_replicate())
    return parallelize_module(model, mesh, plan)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def sequence_parallel(model: nn.Module) -> Laid:
    """Rows are sharded through the norm, whose replicated parameters get gradients of partial sums."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {
        "first": ColwiseParallel(output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "second": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    del plan["head"]
    return parallelize_module(model, mesh, plan), 1, 0


def fsdp2_tensor_parallel(model: nn.Module) -> Laid:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(model, mesh["tp"])
    return fully_shard(model, mesh=mesh["dp"]), 2, mesh.get_local_rank("dp")


def train(layout: Callable[[nn.Module], Laid], runner: Runs, optimizer: Any, options: dict[str, Any]) -> list[Any]:
    """Six steps, each compared with the oracle's; inf on one rank only at the third."""
    laid, parts, number = layout(Network())
    with backend(runner) as name:
        scale = tritonamp.LossScale(2.0**10, growth_interval=2)
        opt = optimizer(laid.parameters(), loss_scale=scale, backend=name, max_norm=0.1, **options)
        skipped = []
        for i in range(6):
            generator = torch.Generator().manual_seed(i)
            x, y = (
                torch.randn(BATCH * parts, 5, generator=generator),
                torch.randn(BATCH * parts, 1, generator=generator),
            )
            rows = slice(BATCH * number, BATCH * (number + 1))
            x, y = x[rows], y[rows]
            if i == 2 and dist.get_rank() == 0:
                x[0, 0] = torch.inf
            opt.backward((laid(x) - y).square().mean())
            checked_step(opt)
            opt.zero_grad()
            skipped.append(opt.step_was_skipped)
            assert_agreed(agreed(opt))
        assert skipped == [False, False, True, False, False, False]
    return [[whole(p) for p in laid.parameters()], agreed(opt)]


LAYOUTS = [
    (ddp, 2),
    (fsdp2, 2),
    (fsdp2, 4),
    (hsdp, 4),
    (tensor_parallel, 2),
    (sequence_parallel, 2),
    (fsdp2_tensor_parallel, 4),
]


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS, ids=lambda value: getattr(value, "__name__", value))
def test_steps_equal_those_of_one_process(layout: Any, ranks: int, runner: Runs, pool: Pool) -> None:
    pool.run(train_named, layout.__name__, runner, ranks=ranks)


def train_named(layout: str, runner: Runs) -> list[Any]:
    return train(globals()[layout], runner, tritonamp.AdamW, {"lr": 0.01})

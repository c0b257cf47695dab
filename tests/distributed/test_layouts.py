"""In every layout a step is what it would be in one process on the same global batch, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, Runs, agreed, assert_agreed, backend, checked_step, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tritonamp

pytestmark = pytest.mark.xdist_group("ranks")

STEPS = 6
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
    """The norm between the layers needs all of the hidden dimension."""
    plan = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "second": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def sequence_parallel(model: nn.Module) -> Laid:
    """Rows are sharded through the norm, whose replicated parameters get gradients of partial sums."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {
        "first": ColwiseParallel(output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "second": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan), 1, 0


def fsdp2_tensor_parallel(model: nn.Module) -> Laid:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(model, mesh["tp"])
    return fully_shard(model, mesh=mesh["dp"]), 2, mesh.get_local_rank("dp")


LAYOUTS = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tensor-parallel": tensor_parallel,
    "sequence-parallel": sequence_parallel,
    "fsdp2-tensor-parallel": fsdp2_tensor_parallel,
}
CASES = [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4), ("tensor-parallel", 2), ("sequence-parallel", 2)]
CASES += [("fsdp2-tensor-parallel", 4)]


def rows_of(step: int, parts: int, number: int) -> tuple[Tensor, Tensor, slice]:
    """The global batch of a step, and which rows of it are this rank's."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH * parts, width, generator=generator) for width in (5, 1))
    return x, y, slice(BATCH * number, BATCH * (number + 1))


def checked(layout: str, runner: Runs) -> None:
    """Six steps, each compared with the oracle's; an overflow on one rank only at the third."""
    laid, parts, number = LAYOUTS[layout](Network())
    with backend(runner) as name:
        scale = tritonamp.LossScale(2.0**10, growth_interval=2)
        opt = tritonamp.AdamW(laid.parameters(), lr=0.01, max_norm=0.1, loss_scale=scale, backend=name)
        for step in range(6):
            x, y, rows = rows_of(step, parts, number)
            if step == 2 and dist.get_rank() == 0:
                x[rows][0, 0] = torch.inf
            opt.backward((laid(x[rows]) - y[rows]).square().mean())
            checked_step(opt)
            opt.zero_grad()
            assert opt.step_was_skipped == (step == 2)
            assert_agreed(agreed(opt))


@pytest.mark.parametrize(("layout", "ranks"), CASES)
def test_steps_equal_those_of_one_process(layout: str, ranks: int, runner: Runs, pool: Pool) -> None:
    pool.run(checked, layout, runner, ranks=ranks)


def compared(layout: str) -> None:
    """In float64; every rank trains the whole model on the whole batch besides."""
    laid, parts, number = LAYOUTS[layout](Network().double())
    reference = Network().double()
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "max_norm": 0.5}
    opt = tritonamp.SGD(laid.parameters(), loss_scale=tritonamp.LossScale(256.0), backend="torch", **options)
    one = tritonamp.SGD(reference.parameters(), loss_scale=tritonamp.LossScale(256.0), **options)
    for step in range(STEPS):
        x, y, rows = (part.double() if isinstance(part, Tensor) else part for part in rows_of(step, parts, number))
        opt.backward((laid(x[rows]) - y[rows]).square().mean())
        one.backward((reference(x) - y).square().mean())
        for optimizer in (opt, one):
            optimizer.step()
            optimizer.zero_grad()
    for ours, want in zip(laid.parameters(), reference.parameters(), strict=True):
        # Values about 1; in each step no more than 1000 roundings of 2**-53, momentum adds up ten steps' at most.
        torch.testing.assert_close(whole(ours), want.detach(), rtol=0, atol=STEPS * 10 * 1000 * 2.0**-53)


@pytest.mark.parametrize(("layout", "ranks"), CASES)
def test_trajectories_equal_that_of_one_process_on_the_global_batch(layout: str, ranks: int, pool: Pool) -> None:
    pool.run(compared, layout, ranks=ranks)

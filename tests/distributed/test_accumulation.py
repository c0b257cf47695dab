"""Training in float64 follows one process on the same global batch; so it does where gradients are accumulated."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, Runs, agreed, assert_agreed, backend, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import tritonamp

pytestmark = pytest.mark.xdist_group("ranks")

STEPS, PARTS, ROWS = 4, 3, 4


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int) -> Tensor:
    """``[parts, ranks, rows, 5]``."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(PARTS, dist.get_world_size(), ROWS, 5, dtype=torch.float64, generator=generator)


def accumulate(layout: str, runner: Runs) -> None:
    reference, model = network(), network()
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if layout == "offload" else {}
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **policy)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "max_norm": 0.3}
    with backend(runner) as name:
        one = tritonamp.SGD(reference.parameters(), loss_scale=tritonamp.LossScale(8.0), **options)
        opt = tritonamp.SGD(model.parameters(), loss_scale=tritonamp.LossScale(8.0), backend=name, **options)
        for step in range(STEPS):
            rows = batch(step)
            for part in range(PARTS):
                is_last = part == PARTS - 1
                waiting: Any = contextlib.nullcontext()
                if layout == "ddp" and not is_last:
                    waiting = model.no_sync()  # type: ignore[operator]
                elif layout != "ddp":
                    model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                with waiting:
                    opt.backward(model(rows[part, dist.get_rank()]).square().mean() / PARTS)
            one.backward(reference(rows).square().mean())
            for optimizer in (opt, one):
                optimizer.step()
                optimizer.zero_grad()
            assert_agreed(agreed(opt))
        assert float(opt.grad_norm) == pytest.approx(float(one.grad_norm), rel=1e-6)  # float32
    for ours, want in zip(model.parameters(), reference.parameters(), strict=True):
        # Values about 1; in each step no more than 1000 roundings of 2**-53, momentum adds up ten steps' at most.
        torch.testing.assert_close(whole(ours), want.detach(), rtol=0, atol=STEPS * 10 * 1000 * 2.0**-53)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "offload"])
def test_accumulated_gradients_train_as_one_batch(layout: str, runner: Runs, pool: Pool) -> None:
    pool.run(accumulate, layout, runner, ranks=2)

"""A rank that fails takes no other's training astray: they end with an error, and have changed nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Failure, Pool, Runs, agreed, backend, bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tritonamp

pytestmark = pytest.mark.xdist_group("ranks")


def fail(how: str, kind: str, runner: Runs) -> str:
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (2,))
        param: Any = nn.Parameter(distribute_tensor(torch.ones(5), mesh, [Shard(0)], src_data_rank=None))
        group = None
    else:
        param, group = nn.Parameter(torch.ones(3)), dist.group.WORLD
    with backend(runner) as name:
        scale = tritonamp.LossScale(4.0)
        opt = tritonamp.AdamW([param], lr=0.1, loss_scale=scale, backend=name, process_group=group)
        opt.scale(torch.ones(()))
        param.grad = torch.ones_like(param)
        opt.step()
        opt.scale(torch.ones(()))

        def before() -> list[Any]:
            held = [param, *opt.state[param].values()]
            return [bits([t.to_local() if hasattr(t, "to_local") else t for t in held]), agreed(opt)]

        old = before()
        if dist.get_rank() == 1 and how == "dies":
            opt.register_step_pre_hook(lambda *_: os._exit(1))
        elif dist.get_rank() == 1:
            opt.param_groups[0]["max_norm"] = -1.0  # refused by the step
        try:
            opt.step()
        finally:
            assert before() == old
    return "applied"


@pytest.mark.parametrize("kind", ["mesh", "group"])
@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_rank_that_fails_ends_the_others_unchanged(how: str, kind: str, runner: Runs, pool: Pool) -> None:
    first, second = pool.outcomes(fail, how, kind, runner, ranks=2, timeout=3.0)
    assert isinstance(first, Failure) and isinstance(second, Failure)
    # Of torch.distributed, by its timeout or at once; not the comparison's.
    assert first.kind in ("RuntimeError", "DistBackendError"), first.report
    assert second.kind == {"dies": "died", "raises": "ValueError"}[how], second.report

"""``process_group=``: ranks that hold other parameters decide as one optimizer would that held them all."""

from __future__ import annotations

import copy
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, Runs, agreed, assert_agreed, backend, checked_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tritonamp
from tritonamp import plan

pytestmark = pytest.mark.xdist_group("ranks")


def other_parameters(kind: str, runner: Runs) -> None:
    rank = dist.get_rank()
    params = [nn.Parameter(torch.randn(3 + rank)) for _ in range(1 + rank)]
    if kind == "frozen" and rank == 1:
        for param in params:
            param.requires_grad_(False)
    with backend(runner) as name:
        opt = tritonamp.AdamW(
            params,
            lr=0.1,
            max_norm=0.5,
            loss_scale=tritonamp.LossScale(16.0),
            backend=name,
            process_group=dist.group.WORLD,
        )
        for step in range(4):
            scale = float(opt.scale(torch.ones(())))
            for param in params:
                idle = kind != "all" and rank == 1 and (kind == "frozen" or step % 2 == 0)
                param.grad = None if idle else torch.randn_like(param) * scale
            if step == 2 and rank == 0:
                params[0].grad[0] = torch.nan
            want = checked_step(opt)
            assert opt.step_was_skipped == want.skipped == (step == 2)
            assert_agreed(agreed(opt))


@pytest.mark.parametrize("kind", ["all", "without-gradients", "frozen"])
def test_steps_equal_those_of_one_optimizer(kind: str, runner: Runs, pool: Pool) -> None:
    """Also where the second rank has no gradients, at times or ever."""
    pool.run(other_parameters, kind, runner, ranks=2)


def three_and_four(runner: Runs, dtype: torch.dtype) -> None:
    values = [3.0, 4.0]
    param = nn.Parameter(torch.zeros(1, dtype=dtype))
    param.grad = torch.full((1,), values[dist.get_rank()], dtype=dtype)
    with backend(runner) as name:
        opt = tritonamp.SGD(
            [param], lr=1.0, max_norm=1.0, loss_scale=None, backend=name, process_group=dist.group.WORLD
        )
        opt.step()
    assert float(opt.grad_norm) == 5.0
    # 1e-6 once. The product is rounded to float32, then to the parameter's dtype.
    want = torch.tensor(-values[dist.get_rank()] / (5 + 1e-6)).to(dtype)
    assert torch.equal(param.detach()[0], want) or abs(float(param) / float(want) - 1) <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_shards_of_norm_3_and_4_have_norm_5(runner: Runs, dtype: torch.dtype, pool: Pool) -> None:
    pool.run(three_and_four, runner, dtype, ranks=2)


def many_small(runner: Runs) -> float:
    """bfloat16 gradients: rank 0 holds 256, the others 1 each, which bfloat16 and even float32 would not add."""
    value = 2.0**13 if dist.get_rank() == 0 else 1.0
    param = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    param.grad = torch.full((1,), value, dtype=torch.bfloat16)
    with backend(runner) as name:
        opt = tritonamp.SGD([param], lr=1.0, loss_scale=None, backend=name, process_group=dist.group.WORLD)
        opt.step()
    return float(opt._outcome_state()[0])


def test_squares_are_added_in_float64(runner: Runs, pool: Pool) -> None:
    exact = (2.0**26 + 3) ** 0.5  # 2**26 + 3 needs 27 bits
    assert pool.run(many_small, runner, ranks=4) == [pytest.approx(exact, rel=2.0**-51)] * 4


def pipeline(runner: Runs) -> None:
    """Two stages of two ranks each; every stage is sharded over its own mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    start = torch.arange(5.0) + 10 * stage
    param: Any = nn.Parameter(distribute_tensor(start, mesh["dp"], [Shard(0)], src_data_rank=None))
    group = mesh["pp"].get_group()
    scale = tritonamp.LossScale(2.0 ** (4 + dist.get_rank()))
    with backend(runner) as name:
        opt = tritonamp.AdamW([param], lr=0.1, max_norm=1.0, loss_scale=scale, backend=name, process_group=group)
        for step in range(3):
            factor = float(opt.scale(torch.ones(())))  # of a loss, which the first stage has not: to take notice
            grad = torch.randn(5, generator=torch.Generator().manual_seed(stage)) * factor
            if step == 1 and stage == 1:
                grad[-1] = torch.inf  # held by the last rank alone
            param.grad = distribute_tensor(grad, mesh["dp"], [Shard(0)], src_data_rank=None)
            checked_step(opt)
            assert opt.step_was_skipped == (step == 1)
            assert_agreed(agreed(opt))
    assert scale.get_scale() == 8.0


def stages_on_two_devices(runner: Runs) -> None:
    """Every rank holds parameters on two devices; one of them is said to be another than it is."""
    rank = dist.get_rank()
    params = [nn.Parameter(torch.randn(shape)) for shape in ((5 + rank,), (600,), (3, 3))]
    places = {id(params[1]): torch.device("cpu", 1)}
    with backend(runner) as name, mock.patch.object(plan, "device_of", lambda p: places.get(id(p), p.device)):
        opt = tritonamp.AdamW(params, max_norm=1.0, loss_scale="dynamic", backend=name, process_group=dist.group.WORLD)
        for step in range(4):
            scale = float(opt.scale(torch.ones(())))
            for param in params:
                param.grad = torch.randn_like(param) * scale
            if step in (1, 2) and rank == 1:
                params[step - 1].grad[-1] = torch.inf  # type: ignore[index]
            checked_step(opt)
            assert opt.step_was_skipped == (step in (1, 2))
            assert_agreed(agreed(opt))
        assert len(opt._devices._backends) == 2


def test_ranks_of_several_devices_agree(runner: Runs, pool: Pool) -> None:
    pool.run(stages_on_two_devices, runner, ranks=2)


def test_pipeline_stages_of_shards_agree(runner: Runs, pool: Pool) -> None:
    pool.run(pipeline, runner, ranks=4)


# torch's ZeRO.


def make_zero(model: nn.Module, name: str) -> Any:
    """Every rank's optimizer has its own parameters: that is whom the loss scale belongs to."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns, of torch's own doing

    adamw = functools.partial(
        tritonamp.AdamW, process_group=dist.group.WORLD, loss_scale=tritonamp.LossScale(2.0**10), backend=name
    )
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=adamw, lr=0.05, max_norm=0.1)


def zero(runner: Runs) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    reference, model = make(), nn.parallel.DistributedDataParallel(make())
    with backend(runner) as name:
        one = tritonamp.AdamW(reference.parameters(), lr=0.05, max_norm=0.1, loss_scale=tritonamp.LossScale(2.0**10))
        opt = make_zero(model, name)
        for step in range(5):
            x = torch.randn(4 * ranks, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            opt.optim.backward(model(x[4 * rank : 4 * rank + 4]).square().mean())
            one.backward(reference(x).square().mean())
            if step == 2:
                next(model.parameters()).grad.view(-1)[0] = torch.inf  # on every rank, in one rank's share
                next(reference.parameters()).grad.view(-1)[0] = torch.inf
            for optimizer in (opt, one):
                optimizer.step()
                optimizer.zero_grad()
            assert opt.optim.step_was_skipped == one.step_was_skipped == (step == 2)
            assert opt.optim.loss_scale.get_scale() == one.loss_scale.get_scale()
            if step == 3:  # continue from a checkpoint
                opt.consolidate_state_dict(to=0)
                saved: list[Any] = [(opt.state_dict(), opt.optim.loss_scale.state_dict()) if rank == 0 else None]
                dist.broadcast_object_list(saved)
                opt = make_zero(model, name)
                opt.load_state_dict(saved[0][0])
                opt.optim.loss_scale.load_state_dict(saved[0][1])
                assert opt.optim.loss_scale.get_scale() == 2.0**9
        for ours, want in zip(model.parameters(), reference.parameters(), strict=True):
            # AdamW's updates are at most 0.05 each, of gradients off by some hundred roundings.
            torch.testing.assert_close(ours, want, rtol=0, atol=1e-10)


def test_torchs_zero_redundancy_optimizer_trains_as_one(runner: Runs, pool: Pool) -> None:
    pool.run(zero, runner, ranks=2)


def refusals() -> None:
    param = nn.Parameter(torch.zeros(1))
    with pytest.raises(TypeError, match=r"process_group must be a torch.distributed.ProcessGroup or None"):
        tritonamp.SGD([param], process_group=init_device_mesh("cpu", (2,)))
    group = dist.new_group([0])
    if dist.get_rank() == 1:  # not a member
        with pytest.raises(TypeError, match="process_group must be"):
            tritonamp.SGD([param], process_group=group)
    with pytest.raises(TypeError, match="cannot be copied or pickled: use its state_dict"):
        copy.deepcopy(tritonamp.SGD([param], process_group=dist.group.WORLD))


def test_what_is_no_process_group_is_refused(pool: Pool) -> None:
    pool.run(refusals, ranks=2)


def one_rank_has_nothing_to_do(runner: Runs) -> tuple[list[float], float, tuple[float, int]]:
    """A rank without gradients, which has scaled nothing, goes along: with an overflow of the other, and without."""
    param = nn.Parameter(torch.ones(3))
    with backend(runner) as name:
        opt = tritonamp.SGD([param], lr=0.5, loss_scale="dynamic", backend=name, process_group=dist.group.WORLD)
        for bad in (True, False):
            if dist.get_rank() == 0:
                opt.zero_grad()
                opt.backward((param * (torch.inf if bad else 1.0)).sum())
            opt.step()
    state = opt.loss_scale.state_dict()
    return param.tolist(), float(opt.grad_norm), (state["scale"], state["_growth_tracker"])


def test_a_rank_without_gradients_goes_along(runner: Runs, pool: Pool) -> None:
    rest = (pytest.approx(3**0.5), (32768.0, 1))
    assert pool.run(one_rank_has_nothing_to_do, runner, ranks=2) == [([0.5] * 3, *rest), ([1.0] * 3, *rest)]

"""All ranks find the same norm, skip the same steps and move their loss scales alike; by how many messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, Runs, agreed, assert_agreed, backend, bits, checked_step, local, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tritonamp
from tritonamp.testing.oracle import NORM_ERROR

pytestmark = pytest.mark.xdist_group("ranks")


def sharded(tensor: Tensor, mesh: Any, *placements: Any) -> Any:
    """The same on all ranks, as a parameter that is distributed."""
    return torch.nn.Parameter(distribute_tensor(tensor, mesh, placements, src_data_rank=None))


def set_grads(params: list[Any], scale: float = 1.0, seed: int = 0) -> None:
    """Whole gradients that are the same on all ranks, cut as the parameters are."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).mul(scale).to(param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def mixed() -> list[Any]:
    """Parameters on a mesh, on both kinds of its rows, and of no mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(1)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [
        sharded(make(5, 3), mesh, Shard(0), Shard(1)),
        sharded(make(7), mesh, Replicate(), Shard(0)),
        sharded(make(4, 4), mesh["dp"], Shard(0)),
        sharded(make(1, 3), mesh["tp"], Shard(0)),
        sharded(make(3), mesh, Replicate(), Replicate()),
        torch.nn.Parameter(make(9)),
    ]


# Overflows.


def overflow(at: int, rank: int, runner: Runs, is_unscaled: bool) -> None:
    params = mixed()
    with backend(runner) as name:
        opt = tritonamp.AdamW(params, lr=0.1, loss_scale=tritonamp.LossScale(1024.0), max_norm=1.0, backend=name)
        for step in range(3):
            set_grads(params, float(opt.scale(torch.ones(()))), step)
            if step == 1 and dist.get_rank() == rank and local(params[at].grad).numel():
                local(params[at].grad).view(-1)[-1] = (torch.inf, torch.nan)[rank % 2]
            before = bits([local(p) for p in params])
            if is_unscaled:
                opt.unscale_()
                if step == 1:  # what unscale_() has seen counts, whatever becomes of the gradients
                    set_grads(params)
            opt.step()
            assert_agreed(agreed(opt))
            assert opt.step_was_skipped == (step == 1) == (before == bits([local(p) for p in params]))
        assert opt.loss_scale.get_scale() == 512.0


@pytest.mark.parametrize("is_unscaled", [False, True], ids=["step", "unscale"])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "at", [0, 1, 2, 4, 5], ids=["sharded", "replicated-in-part", "in-a-row", "replicated", "plain"]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    at: int, rank: int, is_unscaled: bool, runner: Runs, pool: Pool
) -> None:
    """Rank 3's replicas do not count in the norm, and its plain tensor is one of four."""
    pool.run(overflow, at, rank, runner, is_unscaled, ranks=4)


def random_overflows(steps: int) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    params = [sharded(torch.ones(5), mesh, Replicate(), Shard(0)), torch.nn.Parameter(torch.ones(2))]
    scale = tritonamp.LossScale(2.0**8, growth_interval=3, hysteresis=2)
    opt = tritonamp.SGD(params, lr=0.01, momentum=0.9, max_norm=1.0, loss_scale=scale, backend="torch")
    chance = torch.Generator().manual_seed(dist.get_rank())
    numbers = []
    for step in range(steps):
        set_grads(params, float(opt.scale(torch.ones(()))), step)
        if torch.rand((), generator=chance) < 0.1:
            grads = [local(p.grad) for p in params]
            grads[step % 2].view(-1)[0] = torch.inf
        opt.step()
        numbers += agreed(opt)
    assert_agreed(numbers)
    assert_agreed([float(x) for p in params for x in whole(p)])
    return int(opt.skipped_steps)


def test_scales_and_counters_never_differ(pool: Pool) -> None:
    skipped = pool.run(random_overflows, 1000, ranks=4)
    assert 250 < skipped[0] < 450  # 1 - 0.9**4 of the steps


def skip_norm() -> None:
    params = mixed()
    opt = tritonamp.SGD(params, lr=0.1, loss_scale=None, backend="torch")
    set_grads(params)
    with mock.patch.object(opt, "_skip_norm", 0.0):
        opt.step()
    assert opt.step_was_skipped
    opt._skip_norm = float(opt._outcome_state()[0])  # of which no rank's sum may be an ulp larger
    # Replicas that no mesh tells of, and that have drifted apart by roundings.
    with torch.no_grad():
        for param in params[2:4]:
            local(param.grad).mul_(1 + dist.get_rank() * 2.0**-23)
    opt.step()
    assert_agreed(agreed(opt))


def test_ranks_decide_by_the_same_bits(pool: Pool) -> None:
    pool.run(skip_norm, ranks=4)


# The norm, and what it costs.


def norms(runner: Runs, dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (4,))
    params = [sharded(torch.ones(shape, dtype=dtype), mesh, Shard(0)) for shape in ((1000,), (3, 7), (2,))]
    with backend(runner) as name:
        opt = tritonamp.SGD(params, lr=0.1, max_norm=0.5, loss_scale=None, backend=name)
        for exponent in (-30, 0, 12):
            set_grads(params, 10.0**exponent)
            grads = [p.grad.detach().clone() for p in params]
            exact = torch.cat([whole(g).double().view(-1) for g in grads]).norm()
            checked_step(opt)
            assert abs(float(opt.grad_norm) / float(exact) - 1) <= NORM_ERROR
            if dtype == torch.float32 and exponent == 0:
                # torch adds squares in float32: no more than n/2 roundings of 2**-24, and its own per rank.
                theirs = torch.nn.utils.get_total_norm(grads).full_tensor()
                assert abs(float(theirs) / float(exact) - 1) <= 1024 * 2.0**-24 + NORM_ERROR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_is_that_of_the_whole(dtype: torch.dtype, runner: Runs, pool: Pool) -> None:
    pool.run(norms, runner, dtype, ranks=4)


def messages(make: str, runner: Runs) -> list[tuple[int, torch.dtype, int]]:
    """Numbers, dtype and ranks of each all-reduce of a step; no other collective is called."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params = {
        "plain": lambda: [torch.nn.Parameter(torch.ones(5))],
        "group": lambda: [torch.nn.Parameter(torch.ones(5))],
        "mesh": lambda: [sharded(torch.ones(5), mesh, Shard(0), Replicate()) for _ in range(3)],
        "meshes": mixed,
        "unused": lambda: [sharded(torch.ones(5), mesh, Shard(0), Replicate())],
    }[make]()
    options = {"skip_nonfinite": False} if make == "unused" else {}
    group = dist.group.WORLD if make == "group" else None
    with backend(runner) as name:
        opt = tritonamp.SGD(params, lr=0.1, loss_scale=None, backend=name, process_group=group, **options)
        set_grads(params)
        opt.step()
        sent: list[tuple[int, torch.dtype, int]] = []
        all_reduce: Callable[..., Any] = dist.all_reduce

        def noted(tensor: Tensor, group: Any) -> Any:
            sent.append((tensor.numel(), tensor.dtype, group.size()))
            return all_reduce(tensor, group=group)

        from torch.distributed.tensor.debug import CommDebugMode

        with mock.patch.object(dist, "all_reduce", noted), CommDebugMode() as seen:
            opt.step()
        assert seen.get_total_counts() == len(sent)
    return sent


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        ("plain", []),
        ("unused", []),
        ("mesh", [(2, 4)]),
        ("meshes", [(2, 2), (2, 2), (2, 4)]),
        ("group", [(1, 4)]),
    ],
)
def test_a_step_sends_one_message_per_mesh(
    make: str, expected: list[tuple[int, int]], runner: Runs, pool: Pool
) -> None:
    """Plain tensors and steps that need no norm send none."""
    for sent in pool.run(messages, make, runner, ranks=4):
        assert sent == [(numel, torch.float64, ranks) for numel, ranks in expected]


def on_crossing_meshes(runner: Runs) -> tuple[float, ...]:
    """One parameter sharded over the rows of a mesh, one over its columns: no mesh has all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params = [torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh[name], [Shard(0)])) for name in ("dp", "tp")]
    for param in params:
        param.grad = torch.ones_like(param)
    with backend(runner) as name:
        opt = tritonamp.SGD(params, lr=0.1, max_norm=1.0, loss_scale=None, backend=name)
        opt.step()
    return float(opt.grad_norm), *(float(local(param)[0]) for param in params)


def test_meshes_that_cross_give_one_norm(runner: Runs, pool: Pool) -> None:
    assert (
        pool.run(on_crossing_meshes, runner, ranks=4)
        == [(pytest.approx(8**0.5), *[pytest.approx(1 - 0.1 / 8**0.5)] * 2)] * 4
    )


# The loss scale at the start.


def different_scales(make: str) -> list[float]:
    rank = dist.get_rank()
    params = mixed() if make == "mixed" else [torch.nn.Parameter(torch.ones(2))]
    group = None if make == "mixed" else dist.group.WORLD
    scale = tritonamp.LossScale(2.0 ** (8 + rank), growth_interval=1 + rank)
    opt = tritonamp.SGD(params, lr=0.1, loss_scale=scale, process_group=group, backend="torch")
    found = [float(opt.scale(torch.ones(())))]
    assert_agreed(agreed(opt))
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        group["loss_scale"]["scale"] = 2.0 ** (12 + rank)
    opt.load_state_dict(saved)
    found.append(float(opt.scale(torch.ones(()))))
    assert_agreed(agreed(opt))
    return found


@pytest.mark.parametrize("make", ["mixed", "group"])
def test_the_first_ranks_scale_is_taken_over(make: str, pool: Pool) -> None:
    assert pool.run(different_scales, make, ranks=4) == [[2.0**8, 2.0**12]] * 4


# Under a scaler from outside.


def outer_scaler(runner: Runs, is_unscaled: bool) -> None:
    params = mixed()
    with backend(runner) as name:
        opt = tritonamp.AdamW(params, lr=0.1, max_norm=1.0, backend=name)
        scaler = tritonamp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            set_grads(params, float(scaler.scale(torch.ones(()))), step)
            if step == 1 and dist.get_rank() == 3:
                local(params[4].grad)[0] = torch.inf  # a replica that does not count
            if is_unscaled:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            assert opt.step_was_skipped == (step == 1)
            assert_agreed([*agreed(opt), *scaler.state_dict().values()])
        assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("is_unscaled", [False, True], ids=["step", "unscale"])
def test_our_grad_scaler_hears_of_other_ranks(runner: Runs, is_unscaled: bool, pool: Pool) -> None:
    pool.run(outer_scaler, runner, is_unscaled, ranks=4)

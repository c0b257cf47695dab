"""Gradients sharded over ranks: one norm, one decision, one loss scale for all of them. Cases from public bug reports.

``process_group=`` takes the group over which plain tensors are sharded; of DTensors it is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.tools import leaf, scale_and_tracker, set_true_grads, train
from ranks import Pool, Runs, backend
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tritonamp import SGD, AdamW, LossScale
from tritonamp.testing import ScaleState, next_scale

pytestmark = pytest.mark.xdist_group("ranks")

INF, NAN = float("inf"), float("nan")


RANKS = 2
Run = Callable[..., list[Any]]


@pytest.fixture
def run(pool: Pool, runner: Runs) -> Run:
    """Calls a function of this module on all ranks, with the rank, the backend and the arguments."""

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(on_rank, function.__name__, runner, *args, ranks=RANKS)

    return run


def on_rank(name: str, runner: Runs, *args: Any) -> Any:
    with backend(runner) as chosen:
        return globals()[name](distributed.get_rank(), chosen, *args)


def scales_over_steps(rank: int, backend: str, bad: list[int | None]) -> list[tuple[float, int]]:
    optimizer = AdamW(
        [leaf([1.0, 2.0])],
        loss_scale=LossScale(1024.0, growth_interval=2),
        backend=backend,
        process_group=distributed.group.WORLD,
    )
    found = []
    for who in bad:
        train(optimizer, torch.tensor([1.0, NAN if who == rank else 1.0]))
        found.append(scale_and_tracker(optimizer))
    return found


def test_all_ranks_have_the_same_scale_after_every_step(run: Run) -> None:
    # DI-01, pytorch/pytorch#136009
    bad = [None, 0, None, 1, None, None]  # the rank that overflows
    want, state = [], ScaleState(1024.0, growth_interval=2)
    for who in bad:
        state = next_scale(state, who is not None)
        want.append((state.scale, state.growth_tracker))
    assert run(scales_over_steps, bad) == [want] * RANKS


def with_scales_that_differ(rank: int, backend: str) -> float:
    group = distributed.group.WORLD
    optimizer = SGD([leaf(1.0)], loss_scale=LossScale(256.0 * 2**rank), backend=backend, process_group=group)
    train(optimizer, 1.0)
    return optimizer.loss_scale.get_scale()


def test_ranks_that_begin_with_different_scales_take_the_first_ones(run: Run) -> None:
    # DI-01, pytorch/pytorch#136009
    assert run(with_scales_that_differ) == [256.0] * RANKS


def with_an_overflow(rank: int, backend: str, where: int, value: float) -> dict[str, Any]:
    param = leaf([1.0, 2.0])
    optimizer = AdamW(
        [param], max_norm=1.0, loss_scale=LossScale(64.0), backend=backend, process_group=distributed.group.WORLD
    )
    train(optimizer, torch.tensor([value if rank == where else 1.0, 1.0]))
    return {
        "param": param.tolist(),
        "step": float(optimizer.state[param].get("step", 0)),
        "scale": scale_and_tracker(optimizer),
        "skipped": (optimizer.step_was_skipped, float(optimizer.found_inf), int(optimizer.skipped_steps)),
    }


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("where", range(RANKS))
def test_an_overflow_on_one_rank_skips_the_step_on_all(run: Run, where: int, value: float) -> None:
    # DI-02, pytorch/pytorch#115710
    want = {"param": [1.0, 2.0], "step": 0.0, "scale": (32.0, 0), "skipped": (True, 1.0, 1)}
    assert run(with_an_overflow, where, value) == [want] * RANKS


def clipped(rank: int, backend: str, size: float, kind: str) -> tuple[float, float]:
    """Norm and update where the two ranks' shards are 3 and 4 times a size, clipped to a norm of that size."""
    local = torch.zeros(1)
    param: Any = local
    options = {"max_norm": size, "loss_scale": 8.0, "backend": backend}
    if kind == "DTensor":
        mesh = init_device_mesh("cpu", (RANKS,))
        param = DTensor.from_local(local, mesh, [Shard(0)])
        optimizer = SGD([param.requires_grad_()], lr=1.0, **options)
        grad = torch.full((1,), (3.0 + rank) * size * float(optimizer.scale(torch.ones(()))))
        param.grad = DTensor.from_local(grad, mesh, [Shard(0)])
    else:
        optimizer = SGD([param.requires_grad_()], lr=1.0, process_group=distributed.group.WORLD, **options)
        set_true_grads(optimizer, torch.full((1,), (3.0 + rank) * size))
    optimizer.step()
    return float(optimizer.grad_norm), float(local)


@pytest.mark.parametrize("kind", ["plain", "DTensor"])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_shards_are_clipped_by_the_norm_of_all(run: Run, size: float, kind: str) -> None:
    """The 1e-6 of the clip coefficient is added once, whatever the number of ranks."""
    # DI-04, pytorch/pytorch#149768, #170862, #126457, pytorch/torchtitan#766
    coefficient = size / (5 * size + 1e-6)
    for rank, (norm, param) in enumerate(run(clipped, size, kind)):
        assert math.isclose(norm, 5 * size, rel_tol=5e-7)
        assert math.isclose(param, -(3 + rank) * size * coefficient, rel_tol=1e-6)


def norm_of(rank: int, backend: str, grads: list[list[float]], dtype: torch.dtype) -> float:
    param = torch.zeros(len(grads[rank]), dtype=dtype, requires_grad=True)
    param.grad = torch.tensor(grads[rank], dtype=dtype)
    optimizer = SGD([param], max_norm=1.0, loss_scale=None, backend=backend, process_group=distributed.group.WORLD)
    optimizer.step()
    return float(optimizer.grad_norm)


@pytest.mark.parametrize(
    ("dtype", "grads"),
    [
        (torch.float16, [[6e4, 6e4], [6e4, 6e4]]),  # beyond float16, as are their squares
        (torch.float16, [[2.0**-20], [2.0**-20]]),  # whose squares vanish
        (torch.bfloat16, [[256.0], [16.0]]),  # 256.5, which bfloat16 rounds to 256
    ],
)
def test_norms_are_reduced_in_float32_at_least(run: Run, dtype: torch.dtype, grads: list[list[float]]) -> None:
    # DI-05, NVIDIA-NeMo/Automodel#825, facebookresearch/fairscale#1092
    exact = torch.cat([torch.tensor(each, dtype=dtype).double() for each in grads]).norm()
    for norm in run(norm_of, grads, dtype):
        assert math.isclose(norm, float(exact), rel_tol=5e-7)

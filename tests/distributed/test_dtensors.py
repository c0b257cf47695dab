"""DTensor parameters: any placements, dtypes and gradients in one optimizer, and what else holds for them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from ranks import Pool, Runs, agreed, assert_agreed, backend, bits, checked_step, local, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritonamp

pytestmark = pytest.mark.xdist_group("ranks")


class Param(NamedTuple):
    """A parameter as drawn.

    Attributes:
        shape, dtype: of the whole.
        rows: the mesh: ``"dp"`` or ``"tp"`` of the two by two, ``"both"``; None for a plain tensor.
        dims: for each dimension of the mesh, the dimension sharded over it, or None.
        grad: ``"same"``: distributed as the parameter; ``"partial"``: sums over the whole mesh; None.
        is_frozen: whether it asks for no gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: str | None
    dims: tuple[int | None, ...]
    grad: str | None
    is_frozen: bool


class Drawn(NamedTuple):
    """A problem: parameters, options, and where a step overflows: ``(step, parameter, rank)``."""

    params: list[Param]
    optimizer: str
    options: dict[str, Any]
    overflow: tuple[int, int, int]


@st.composite
def params(draw: st.DrawFn) -> Param:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 7, 30]), min_size=0, max_size=2)))
    rows = draw(st.sampled_from(["both", "both", "dp", "tp", None]))
    dim = st.sampled_from([None, *range(len(shape))])
    dims = tuple(draw(dim) for _ in range({"both": 2, None: 0}.get(rows, 1)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    grad = draw(st.sampled_from(["same", "same", "partial", None] if rows else ["same", None]))
    return Param(shape, dtype, rows, dims, grad, draw(st.booleans()) and grad is None)


@st.composite
def problems(draw: st.DrawFn) -> Drawn:
    drawn = draw(st.lists(params(), max_size=4))
    # One lies on all ranks: without it, the rows have no way to agree, and need none while they are replicas.
    drawn.insert(draw(st.integers(0, len(drawn))), draw(params().filter(lambda p: p.rows == "both" and p.grad)))
    optimizer = draw(st.sampled_from(["SGD", "Adam", "AdamW"]))
    options: dict[str, Any] = {"lr": 0.01, "max_norm": draw(st.sampled_from([None, 0.5, 1e6]))}
    options["master_weights"] = draw(st.booleans())
    if optimizer == "SGD":
        options["momentum"] = draw(st.sampled_from([0.0, 0.9]))
        options["dampening"] = draw(st.sampled_from([0.0, 0.5]))
    else:
        options["amsgrad"] = draw(st.booleans())
    at = draw(st.sampled_from([i for i, param in enumerate(drawn) if param.grad]))
    return Drawn(drawn, optimizer, options, (draw(st.integers(0, 2)), at, draw(st.integers(0, 3))))


def distributed(tensor: Tensor, param: Param, mesh: DeviceMesh) -> Any:
    if param.rows is None:
        return tensor
    mesh = mesh if param.rows == "both" else mesh[param.rows]
    placements = [Replicate() if dim is None else Shard(dim) for dim in param.dims]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def gradient(tensor: Any, param: Param, scale: float, seed: int) -> Any:
    """One that does not depend on how the parameter is distributed; partial ones are small integers, sums exact."""
    if param.grad is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    if param.grad == "partial":
        mesh = tensor.device_mesh
        generator.manual_seed(seed + 100 * mesh.get_local_rank("dp" if param.rows == "both" else None))
        part = torch.randint(-4, 5, param.shape, generator=generator).to(param.dtype) * scale
        return DTensor.from_local(part, mesh, [Partial()] * mesh.ndim, run_check=False)
    grad = torch.randn(param.shape, generator=generator, dtype=torch.float64) * scale
    grad = grad.to(param.dtype)
    if param.rows is None:
        return grad
    return distribute_tensor(grad, tensor.device_mesh, tensor.placements, src_data_rank=None)


@functools.cache
def mesh_of_four() -> DeviceMesh:
    """Made once in a process: every group of ranks has threads of its own, which stay."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def steps(drawn: Drawn, runner: Runs) -> None:
    mesh = mesh_of_four()
    generator = torch.Generator().manual_seed(1)
    tensors: list[Any] = []
    for param in drawn.params:
        value = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        tensors.append(nn.Parameter(distributed(value, param, mesh), requires_grad=not param.is_frozen))
    with backend(runner) as name:
        opt = getattr(tritonamp, drawn.optimizer)(
            tensors, loss_scale=tritonamp.LossScale(64.0), backend=name, **drawn.options
        )
        for step in range(3):
            scale = float(opt.scale(torch.ones(())))
            for i, (tensor, param) in enumerate(zip(tensors, drawn.params, strict=True)):
                tensor.grad = gradient(tensor, param, scale, 10 * step + i)
            at, which, rank = drawn.overflow
            if at == step and dist.get_rank() == rank:
                local(tensors[which].grad).view(-1)[:1] = torch.inf
            checked_step(opt)
            assert_agreed(agreed(opt))


def test_steps_equal_those_on_whole_tensors(runner: Runs, pool: Pool) -> None:
    replicated = Param((7,), torch.float32, "both", (None, 0), "partial", False)
    row = Param((3, 3), torch.float64, "tp", (1,), "same", False)
    empty = Param((1, 3), torch.bfloat16, "both", (0, 0), "same", False)

    # Not shrunk: a failure costs new processes. No more than can be waited for: an example takes 0.1 s on all cores.
    @settings(phases=[Phase.explicit, Phase.reuse, Phase.generate], max_examples=min(settings().max_examples, 300))
    @given(problems())
    @example(Drawn([replicated, empty, row], "AdamW", {"lr": 0.1, "master_weights": True}, (1, 2, 1)))
    @example(Drawn([empty, empty._replace(rows=None, dims=())], "SGD", {"lr": 0.1, "momentum": 0.9}, (1, 1, 2)))
    def law(drawn: Drawn) -> None:
        pool.run(steps, drawn, runner, ranks=4)

    law()


# Rounding.


def stochastic(runner: Runs, seed: int) -> list[bytes]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    start = torch.linspace(1, 2, 600).to(torch.bfloat16).repeat(2)  # both shards alike
    param = nn.Parameter(distribute_tensor(start, mesh, [Replicate(), Shard(0)], src_data_rank=None))
    with backend(runner) as name:
        opt = tritonamp.SGD([param], lr=2.0**-9, rounding="stochastic", loss_scale=None, backend=name)
        opt.param_groups[0]["rounding_seed"] = seed
        exact = start.float() - 2.0**-9 * 0.75
        param.grad = distribute_tensor(torch.full((1200,), 0.75).bfloat16(), mesh, param.placements, src_data_rank=None)
        opt.step()
    found = whole(param).float()
    down = (exact.view(torch.int32) & -65536).view(torch.float32)
    up = ((exact.view(torch.int32) + 65535) & -65536).view(torch.float32)
    assert bool(((found == down) | (found == up)).all())
    shares = ((exact - down) / (up - down).clamp(min=2.0**-30)).mean()
    went_up = (found == up)[up != down].float().mean()
    assert abs(float(went_up - shares)) < 6 * 0.5 / 1200**0.5  # six deviations of 1200 tosses at most
    return bits([local(param)])


def test_stochastic_rounding_differs_between_shards_and_not_between_replicas(runner: Runs, pool: Pool) -> None:
    first = pool.run(stochastic, runner, 0, ranks=4)
    assert first[0] == first[2] != first[1] == first[3]
    assert pool.run(stochastic, runner, 0, ranks=4) == first != pool.run(stochastic, runner, 1, ranks=4)


def written_to(runner: Runs) -> None:
    mesh = init_device_mesh("cpu", (2,))
    param: Any = nn.Parameter(distribute_tensor(torch.ones(6).bfloat16(), mesh, [Shard(0)], src_data_rank=None))
    with backend(runner) as name:
        opt = tritonamp.SGD([param], lr=2.0**-12, master_weights=True, loss_scale=None, backend=name)
        for value in (1.0, 3.0, 5.0):
            with torch.no_grad():
                if value == 3.0:
                    param.fill_(value)
                elif value == 5.0:
                    param.to_local().fill_(value)
            param.grad = torch.ones_like(param)
            opt.step()
            assert torch.equal(whole(opt.state[param]["master_param"]), torch.full((6,), value - 2.0**-12))


def test_what_others_write_reaches_the_master_copy(runner: Runs, pool: Pool) -> None:
    pool.run(written_to, runner, ranks=2)


# What torch's optimizers do as well.


def update_between(runner: Runs) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with backend(runner) as name:
        opt = tritonamp.SGD(model.parameters(), lr=0.1, loss_scale=None, backend=name)
        loss = model(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_autograd_sees_the_update(runner: Runs, pool: Pool) -> None:
    pool.run(update_between, runner, ranks=2)


def expanded(runner: Runs, is_unscaled: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    param: Any = nn.Parameter(distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)], src_data_rank=None))
    with backend(runner) as name:
        opt = tritonamp.AdamW([param], lr=0.1, max_norm=1.0, loss_scale=8.0, backend=name)
        for value in (1.0, 2.0):
            grad = torch.full((1, 1), value * float(opt.scale(torch.ones(())))).expand(3, 2)
            param.grad = DTensor.from_local(grad, mesh, [Shard(0)], run_check=False)
            if is_unscaled:
                opt.unscale_()
                assert torch.equal(whole(param.grad), torch.full((6, 2), value))
            checked_step(opt)


@pytest.mark.parametrize("is_unscaled", [False, True], ids=["step", "unscale"])
def test_expanded_gradients_are_taken(runner: Runs, is_unscaled: bool, pool: Pool) -> None:
    pool.run(expanded, runner, is_unscaled, ranks=2)


def complex_ones(runner: Runs) -> None:
    mesh = init_device_mesh("cpu", (2,))
    start = torch.complex(torch.arange(5.0), torch.ones(5))
    param: Any = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)], src_data_rank=None))
    with backend(runner) as name:
        opt = tritonamp.Adam([param], lr=0.1, loss_scale=4.0, backend=name)
        for _ in range(2):
            opt.scale(torch.ones(()))
            grad = distribute_tensor(4 * start, mesh, [Shard(0)], src_data_rank=None)
            param.grad = DTensor.from_local(grad.to_local().conj(), mesh, [Shard(0)], shape=grad.shape, stride=(1,))
            opt.unscale_()
            checked_step(opt)


def test_complex_parameters_are_pairs_of_reals(runner: Runs, pool: Pool) -> None:
    pool.run(complex_ones, runner, ranks=2)


def come_and_go() -> None:
    mesh = init_device_mesh("cpu", (2,))
    params: list[Any] = [
        nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Shard(0)], src_data_rank=None)) for _ in range(2)
    ]
    opt = tritonamp.AdamW(params, lr=0.1, loss_scale=None, backend="torch")
    generations = []
    for step in range(6):
        params[0].grad = torch.ones_like(params[0])
        params[1].grad = None if step % 2 else torch.ones_like(params[1])
        opt.step()
        generations.append(opt._plan.generation)
    assert generations[1:] == generations[:1] * 5


def test_gradients_that_come_and_go_make_no_new_tables(pool: Pool) -> None:
    pool.run(come_and_go, ranks=2)


# Meshes.


def outside() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    params: list[Any] = [
        nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Shard(0)], src_data_rank=None)),
        nn.Parameter(torch.ones(2)),
    ]
    opt = tritonamp.SGD(params, lr=0.5, loss_scale=None, backend="torch")
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    assert torch.equal(params[1].detach(), torch.full((2,), 0.5))
    assert float(opt.grad_norm) == pytest.approx((8 if dist.get_rank() < 2 else 2) ** 0.5)


def test_ranks_outside_of_a_mesh_go_on_alone(pool: Pool) -> None:
    pool.run(outside, ranks=3)


def partial_param() -> None:
    mesh = init_device_mesh("cpu", (2,))
    param: Any = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))
    param.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(RuntimeError, match="partial placement cannot be optimized: redistribute it"):
        tritonamp.SGD([param], lr=0.5, loss_scale=None, backend="torch")


def test_partial_parameters_are_refused(pool: Pool) -> None:
    pool.run(partial_param, ranks=2)

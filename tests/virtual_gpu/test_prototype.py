"""An optimizer step in one cooperative launch, against torch."""

import numpy as np
import pytest
import torch
from virtual_gpu.prototype import Problem

from tritonamp.testing.virtual_gpu import RaceError, register, virtual_gpu

pytestmark = pytest.mark.compiled

SHAPES = [(1000,), (37, 5), (1,), (4096,), (333, 7)]


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_step(arch: int, warps: int, fusion: bool) -> None:
    p = Problem(SHAPES)
    options = {"num_warps": warps, "enable_fp_fusion": fusion}
    with virtual_gpu(arch, race=True) as stats:
        register(*p.tensors)
        norm = p.torch_step()
        p.launch(4, **options)
        assert p.state[3].item() == pytest.approx(norm, rel=1e-6)
        good, before = p.G[1].clone(), [t.clone() for t in p.P + p.M + p.V]
        p.G[1].view(-1)[3] = float("inf")  # the step is skipped, the scale is halved
        p.launch(4, **options)
        assert p.state[:3].tolist() == [64, 0, 1] and all(map(torch.equal, before, p.P + p.M + p.V))
        p.G[1].copy_(good)
        p.torch_step()
        p.launch(4, **options)
    assert p.state[:3].tolist() == [64, 1, 2] and not p.counter.any()
    assert p.error() < 2e-6
    s = stats.last
    assert s.opcodes["atom.global.gpu.acq_rel.add.u32"] == 8 * warps and s.accesses["atom", 4] == 8
    per = s.bytes_per_element(p.n)
    assert per["st"] == pytest.approx(12, rel=0.01) and per["dram read"] == pytest.approx(14, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grad_dtypes(dtype: torch.dtype) -> None:
    p = Problem(SHAPES, dtype)
    with virtual_gpu(90) as stats:
        register(*p.tensors)
        for _ in range(2):
            p.torch_step()
            p.launch(3)
    assert p.error() < 2e-6 and len(stats.launches) == 2


def test_independent_of_schedule_and_grid() -> None:
    results = []
    for grid, seed, race in ((1, None, False), (4, None, False), (4, None, True), (7, 1, True), (8, 2, False)):
        p = Problem(SHAPES)
        with virtual_gpu(90, seed=seed, race=race):
            register(*p.tensors)
            p.launch(grid)
        results.append(p.P)
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True))


def test_what_is_counted_does_not_depend_on_the_grouping() -> None:
    """But for the spins in the barrier."""
    counts = []
    for seed in (None, 1):
        p = Problem([(1024,), (3072,), (500,)])
        with virtual_gpu(90, seed=seed) as stats:
            register(*p.tensors)
            p.launch(1)
            p.launch(3)
        s = stats.total
        loads = {w: n for (kind, w), n in s.requests.items() if kind == "ld" and w != 4}
        counts.append((loads, s.sectors["st"], s.dram_read, s.dram_written, s.count("st.global", "mul", "fma", "shfl")))
    assert counts[0] == counts[1]


def test_an_unordered_reset_is_a_race_between_threads() -> None:
    """A benign one: thread 0 stores the step count while other threads of the block may still read it."""
    p = Problem([(100,)])
    with virtual_gpu(90, race="threads"):
        register(*p.tensors)
        with pytest.raises(RaceError, match=r"prototype\.py"):
            p.launch(1)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_bit_exact_without_fusion(arch: int) -> None:
    """Given the norm, every operation of the update is a correctly rounded float32 one."""
    p = Problem(SHAPES)
    params, means, squares = ([t.clone() for t in ts] for ts in (p.P, p.M, p.V))
    with virtual_gpu(arch):
        register(*p.tensors)
        for step in (1, 2):
            p.launch(4, enable_fp_fusion=False)
            inv, norm = 1 / p.state[0], p.state[3]
            coef = torch.minimum(p.max_norm / (norm + 1e-6), torch.ones(())) * inv
            lr, b1, b2, eps, wd = p.hyper
            step_size = (lr.double() / (1 - b1.double() ** step)).float()
            correction = (1 - b2.double() ** step).sqrt().float()
            for w, g, m, v in zip(params, p.G, means, squares, strict=True):
                x = g.float() * coef
                w.copy_(w - lr * wd * w)
                m.copy_(m + (1 - b1) * (x - m))
                v.copy_(b2 * v + (1 - b2) * x * x)
                root = torch.from_numpy(np.sqrt(v.numpy()))  # torch.sqrt is not correctly rounded on CPUs
                w.copy_(w - step_size * m / (root / correction + eps))
            assert all(map(torch.equal, params + means + squares, p.P + p.M + p.V))

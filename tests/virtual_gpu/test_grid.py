"""Several blocks: grid barriers, residency, deadlocks, atomics, locks."""

import pytest
import torch
from torch import Tensor
from virtual_gpu import kernels

from tritonamp.testing.virtual_gpu import DeadlockError, LaunchError, RaceError, virtual_gpu

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize("blocks", range(1, 9))
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_grid_barrier(blocks: int, arch: int) -> None:
    x, partial, out = torch.randint(-9, 9, (5000,)).float(), torch.zeros(blocks), torch.zeros(blocks)
    counter = torch.zeros(1, dtype=torch.int32)
    for seed in (None, 0, 1):
        for race in (True, False):
            with virtual_gpu(arch, sms=2, seed=seed, race=race):
                kernels.two_phase[(blocks,)](
                    x, partial, out, counter, 5000, SYNC="acq_rel", B=256, launch_cooperative_grid=True
                )
            assert out.tolist() == [x.sum().item()] * blocks
            assert counter.item() % blocks == 0
            out.zero_()


def barrier_args(blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    return torch.ones(5000), torch.zeros(blocks), torch.zeros(blocks), torch.zeros(1, dtype=torch.int32), 5000


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("sync", ["", "relaxed", "release"])  # "release": the last to arrive acquires nothing
def test_a_missing_order_is_a_race(sync: str, seed: int | None) -> None:
    with virtual_gpu(race=True, seed=seed), pytest.raises(RaceError, match=r"data race at(.|\n)*kernels\.py"):
        kernels.two_phase[(4,)](*barrier_args(4), SYNC=sync, B=256, launch_cooperative_grid=True)


def test_a_cooperative_launch_must_fit() -> None:
    with virtual_gpu(sms=1) as stats:
        with pytest.raises(LaunchError, match="too many blocks in cooperative launch"):
            kernels.two_phase[(64,)](*barrier_args(64), SYNC="acq_rel", B=256, launch_cooperative_grid=True)
        kernels.two_phase[(2,)](*barrier_args(2), SYNC="acq_rel", B=256, launch_cooperative_grid=True)
        resident = stats.last.resident
        kernels.two_phase[(resident,)](*barrier_args(resident), SYNC="acq_rel", B=256, launch_cooperative_grid=True)


@pytest.mark.parametrize("seed", [None, 0])
def test_a_barrier_without_residency_is_a_deadlock(seed: int | None) -> None:
    with virtual_gpu(sms=1, seed=seed) as stats:
        kernels.two_phase[(1,)](*barrier_args(1), SYNC="acq_rel", B=256)
        n = stats.last.resident + 1
        where = r"1 blocks never started(.|\n)*blocks .*: 128 threads(.|\n)*kernels\.py"
        with pytest.raises(DeadlockError, match=where):
            kernels.two_phase[(n,)](*barrier_args(n), SYNC="acq_rel", B=256)
        kernels.two_phase[(n,)](*barrier_args(n), SYNC="", B=256)  # without a barrier: in waves


def test_blocks_beyond_residency_run_in_waves() -> None:
    n = 100
    x, out = torch.randint(-9, 9, (n, 300)), torch.zeros(n, dtype=torch.int64)
    with virtual_gpu(sms=1) as stats:
        kernels.reduce[(n,)](x, out, 300, OP="sum", B=512, num_warps=8)
    assert stats.last.resident < n and torch.equal(out, x.sum(1))


def test_a_stale_counter_is_a_deadlock() -> None:
    x, p, o, c, n = barrier_args(4)
    c.fill_(1)  # left over from an aborted launch: one block waits for a ticket that never comes
    with virtual_gpu(), pytest.raises(DeadlockError, match=r"kernels\.py"):
        kernels.two_phase[(4,)](x, p, o, c, n, SYNC="acq_rel", B=256, launch_cooperative_grid=True)


def test_histogram() -> None:
    x, h = torch.randint(0, 16, (3000,), dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    with virtual_gpu(race=True) as stats:
        kernels.histogram[(12,)](x, h, 3000, B=256)
    assert torch.equal(h, torch.bincount(x, minlength=16).int()) and stats.last.atomics == 3000


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("add", torch.float32),
        ("add", torch.float16),
        ("add", torch.bfloat16),
        ("add", torch.int64),
        ("add", torch.float64),
        ("max", torch.float32),
        ("min", torch.int32),
        ("max", torch.int64),
        ("xor", torch.int32),
    ],
    ids=str,
)
def test_atomics(op: str, dtype: torch.dtype, arch: int) -> None:
    x, y = torch.randint(-20, 20, (40,)).to(dtype), torch.zeros(4, dtype=dtype)
    # Some versions of Triton emulate half precision with a loop that starts with a plain load, before 9.0.
    with virtual_gpu(arch, race=arch >= 90):
        kernels.atomics[(40,)](x, y, 40, OP=op)
    columns = torch.cat([x.reshape(-1, 4), torch.zeros(1, 4, dtype=dtype)])
    want = {"add": columns.sum(0), "max": columns.amax(0), "min": columns.amin(0)}
    if op == "xor":
        for row in columns[1:]:
            columns[0] ^= row
        want["xor"] = columns[0]
    assert torch.equal(y, want[op].to(dtype))


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_spin_lock(seed: int | None) -> None:
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with virtual_gpu(90, seed=seed, quantum=7, race=True):
        kernels.locked[(5,)](lock, total, 1)
        assert lock.item() == 0 and total.item() == 31
        lock.fill_(1)
        with pytest.raises(DeadlockError):
            kernels.locked[(5,)](lock, total, 1)

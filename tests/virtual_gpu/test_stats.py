"""Reading launches, resources and occupancy."""

import pytest
import torch
from virtual_gpu import kernels
from virtual_gpu.prototype import Problem

from tritonamp.testing.virtual_gpu import occupancy, register, virtual_gpu

pytestmark = pytest.mark.compiled


def test_launches_can_be_read() -> None:
    p, x = Problem([(1000,)]), torch.zeros(256)
    with virtual_gpu(90, sms=3) as stats:
        register(*p.tensors)
        p.launch(4, num_warps=8)
        k = kernels.copy_unmasked[(2, 1, 1)](x, torch.zeros(256), B=128, num_warps=2)
    first, second = stats.launches
    assert stats.last is second
    assert (first.name, first.grid, first.cooperative, first.threads) == ("fused_adamw", (4, 1, 1), True, 256)
    assert (second.name, second.grid, second.cooperative, second.threads) == ("copy_unmasked", (2, 1, 1), False, 64)
    assert (second.registers, second.spills) == (k.n_regs, k.n_spills)
    assert first.shared > 0 and second.shared == 0
    assert first.blocks_per_sm == occupancy(90, 256, first.registers, first.shared) > 0
    assert first.resident == 3 * first.blocks_per_sm
    assert first.barriers >= 4 * 4 and first.atomics >= 8 and second.barriers == second.atomics == 0
    assert 0 < first.efficiency <= 1 and first.instructions == sum(first.opcodes.values())


def test_reports() -> None:
    x, z = torch.randn(1024), torch.zeros(1024)
    with virtual_gpu(90) as stats:
        for _ in range(2):
            kernels.copy_unmasked[(2,)](x, z, B=512)
    kinds = ("ld", "st", "ld sectors", "st sectors", "dram read", "dram written")
    assert stats.bytes_per_element(1024) == dict.fromkeys(kinds, 8)
    assert stats.total.instructions == 2 * stats.last.instructions
    report = stats.report(1024)
    assert report.count("copy_unmasked: grid (2, 1, 1) x 128 threads") == 2 and "per element: ld 4.00" in report


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks"),
    [
        (90, 128, 32, 0, 16),
        (90, 128, 64, 0, 8),
        (90, 128, 65, 0, 7),
        (90, 128, 255, 0, 2),
        (90, 1024, 32, 0, 2),
        (90, 32, 16, 0, 32),  # blocks
        (90, 32, 80, 0, 24),  # six warps in each quarter of the registers: not 25
        (90, 64, 168, 0, 6),
        (90, 1024, 65, 0, 0),
        (90, 128, 32, 48 << 10, 4),
        (90, 128, 32, 232448, 1),
        (90, 128, 32, 232449, 0),
        (80, 128, 32, 1, 16),
        (86, 128, 32, 0, 12),
        (89, 64, 32, 0, 24),
        (75, 128, 32, 0, 8),
        (75, 256, 32, 17000, 3),
        (75, 32, 256, 0, 0),  # more registers than a thread can have
    ],
)
def test_occupancy(arch: int, threads: int, registers: int, shared: int, blocks: int) -> None:
    assert occupancy(arch, threads, registers, shared) == blocks


def test_arguments_are_checked() -> None:
    for wrong in ({"arch": 70}, {"sms": 0}, {"quantum": 0}, {"l2_bytes": -1}, {"race": "blocks"}):
        (name,) = wrong
        with pytest.raises(ValueError, match=name), virtual_gpu(**wrong):
            pass

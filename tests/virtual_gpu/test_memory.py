"""Which memory a kernel may touch, and what is counted of it."""

import gc

import pytest
import torch
from virtual_gpu import kernels

from tritonamp.testing.virtual_gpu import MemoryFault, register, virtual_gpu

pytestmark = pytest.mark.compiled


def pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors])


def test_vector_accesses() -> None:
    x, y = torch.randn(4096), torch.zeros(4096)
    with virtual_gpu(90) as stats:
        kernels.copy_unmasked[(4,)](x, y, B=1024)
    s = stats.last
    assert torch.equal(x, y)
    assert set(s.requests) == {("ld", 16), ("st", 16)} and s.coalescing("ld") == s.coalescing("st") == 1.0


def test_unaligned_slices() -> None:
    x, y = torch.randn(1025), torch.zeros(1025)
    with virtual_gpu(90) as stats:
        kernels.copy_unmasked[(1,)](x[1:], y[1:], B=1024)
    assert torch.equal(x[1:], y[1:]) and y[0] == 0 and {w for _, w in stats.last.requests} == {4}


@pytest.mark.parametrize("seed", [None, 0])
def test_out_of_bounds(seed: int | None) -> None:
    x, y = torch.randn(1000), torch.zeros(1024)
    with virtual_gpu(seed=seed), pytest.raises(MemoryFault, match=r"thread \d+(.|\n)*ld\.global(.|\n)*kernels\.py"):
        kernels.copy_unmasked[(2,)](x, y, B=512)


def test_misaligned_vector() -> None:
    """A kernel specialised for 16-byte alignment, called directly with a pointer that is not."""
    x, y = torch.randn(2048), torch.zeros(2048)
    with virtual_gpu():
        k = kernels.copy_unmasked[(1,)](x, y, B=1024)
        with pytest.raises(MemoryFault, match="misaligned for its 16 bytes"):
            k[(1, 1, 1)](x[1:], y, 1024)


@pytest.mark.parametrize("race", [False, True])
def test_pointer_table(race: bool) -> None:
    """The blocks of a group access a region each."""
    ts = [torch.randn(n) for n in (1000, 3, 257)]
    want = [t * 3 for t in ts]
    table, sizes = pointers(ts), torch.tensor([t.numel() for t in ts])
    with virtual_gpu(race=race):
        with pytest.raises(MemoryFault, match="out of bounds"):
            kernels.scale_table[(3,)](table, sizes, 3.0, B=128)
        register(*ts)
        kernels.scale_table[(3,)](table, sizes, 3.0, B=128)
    assert all(map(torch.equal, ts, want))
    with virtual_gpu(race=race), pytest.raises(MemoryFault):  # nothing stays registered
        kernels.scale_table[(3,)](table, sizes, 3.0, B=128)


@pytest.mark.parametrize("race", [False, True])
def test_threads_that_access_a_region_each(race: bool) -> None:
    ts = [torch.zeros(5) for _ in range(32)]
    with virtual_gpu(race=race):
        register(*ts)
        kernels.scatter_table[(1,)](pointers(ts), B=32)
    assert all(t.tolist() == [1, 0, 0, 0, 0] for t in ts)


def test_auto_register_finds_live_tensors() -> None:
    ts = [torch.ones(300) for _ in range(3)]
    gc.collect()  # they are no longer the youngest objects
    ts.append(torch.ones(7))
    leaf = torch.ones(9, requires_grad=True)
    leaf.sum().backward()
    assert leaf.grad is not None
    addresses, sizes = pointers([*ts, leaf.grad]), torch.tensor([300, 300, 300, 7, 9])
    with virtual_gpu(auto_register=True):
        kernels.scale_table[(5,)](addresses, sizes, 2.0, B=128)
        assert all((t == 2).all() for t in (*ts, leaf.grad))
        gone = addresses[3:4].clone()
        del ts[3:]
        with pytest.raises(MemoryFault):
            kernels.scale_table[(1,)](gone, torch.tensor([1]), 2.0, B=128)


def test_auto_register_does_not_trust_a_tensor_whose_storage_has_changed() -> None:
    t = torch.ones(300)
    table, sizes = pointers([t]), torch.tensor([300])
    with virtual_gpu(auto_register=True):
        kernels.scale_table[(1,)](table, sizes, 2.0, B=128)
        t.data = torch.ones(5)
        with pytest.raises(MemoryFault):
            kernels.scale_table[(1,)](table, sizes, 2.0, B=128)


def test_arguments_are_accessible_in_their_launch_only() -> None:
    t, sizes = torch.ones(64), torch.tensor([64])
    with virtual_gpu():
        kernels.copy_unmasked[(1,)](t, torch.zeros(64), B=64)
        with pytest.raises(MemoryFault):
            kernels.scale_table[(1,)](pointers([t]), sizes, 2.0, B=64)
        register(t)
        kernels.copy_unmasked[(1,)](t, torch.zeros(64), B=64)
        kernels.scale_table[(1,)](pointers([t]), sizes, 2.0, B=64)
    assert (t == 2).all()


def test_an_empty_tensor_has_nothing_to_access() -> None:
    with virtual_gpu():
        register(torch.zeros(0), torch.zeros(3, 0))
        kernels.add[(1,)](torch.zeros(0), torch.zeros(0), torch.zeros(0), 0, B=64)
        with pytest.raises(MemoryFault):
            kernels.add[(1,)](torch.zeros(0), torch.zeros(0), torch.zeros(0), 1, B=64)


def test_register_rejects_what_it_cannot_use() -> None:
    with pytest.raises(RuntimeError, match="virtual_gpu"):
        register(torch.zeros(3))
    with virtual_gpu(), pytest.raises(ValueError, match="meta"):
        register(torch.zeros(3, device="meta"))


def test_l2_model() -> None:
    n = 1 << 14
    x, y, z = (torch.randn(n) for _ in range(3))
    reads = []
    for l2 in (0, 1 << 10, 1 << 20):
        with virtual_gpu(l2_bytes=l2) as stats:
            kernels.add[(n // 1024,)](x, x, z, n, B=1024)
        reads.append(stats.last.dram_read)
    assert reads == [8 * n, 8 * n, 4 * n]
    with virtual_gpu() as stats:
        kernels.add[(n // 1024,)](x, y, z, n, B=1024)
        kernels.add[(n // 1024,)](x, y, y, n, B=1024)
    assert [s.dram_read for s in stats.launches] == [8 * n, 8 * n]  # cold in every launch
    assert [s.dram_written for s in stats.launches] == [4 * n, 4 * n]


def test_a_request_is_per_warp() -> None:
    """All threads load the same word: a request and a sector for each warp."""
    x, y = torch.zeros(4), torch.zeros(4)
    with virtual_gpu() as stats:
        kernels.scale_table[(3,)](pointers([x, y, x]), torch.tensor([0, 0, 0]), 1.0, B=128, num_warps=4)
    s = stats.last
    assert s.accesses["ld", 8] == 3 * 2 * 128 and s.requests["ld", 8] == s.sectors["ld"] == 3 * 2 * 4
    assert s.dram_read == 2 * 32

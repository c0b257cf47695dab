"""Kernels through Triton's real compilation, against torch."""

import numpy as np
import pytest
import torch
import triton
from virtual_gpu import kernels

from tritonamp.testing.virtual_gpu import DeviceTrap, virtual_gpu

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("n", [1, 31, 1000, 4096])
def test_vector_add(arch: int, n: int) -> None:
    x, y, z = torch.randn(n), torch.randn(n), torch.full((n,), 7.0)
    with virtual_gpu(arch) as stats:
        k = kernels.add[(triton.cdiv(n, 256),)](x, y, z, n, B=256)
    assert torch.equal(z, x + y)
    s = stats.last
    assert (s.bytes["ld"], s.bytes["st"]) == (8 * n, 4 * n)
    assert s.dram_read == 8 * n + -8 * n % 64 and s.dram_written == 4 * n + -4 * n % 32
    assert k.n_regs == s.registers > 0 and k.n_spills == s.spills == 0


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64]


@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(dtype: torch.dtype, warps: int) -> None:
    top = 2 if dtype == torch.bfloat16 else 50  # sums that are exact
    x = torch.randint(-top, top + 1, (7, 300)).to(dtype)
    wanted = {"sum": x.sum(1), "max": x.amax(1), "argmin": x.argmin(1)}
    if not dtype.is_floating_point:
        wanted["xor"] = torch.tensor([np.bitwise_xor.reduce(r) for r in x.numpy()])
    with virtual_gpu():
        for op, want in wanted.items():
            out = torch.zeros(7, dtype=torch.int64 if op == "argmin" else dtype)
            kernels.reduce[(7,)](x, out, 300, OP=op, B=512, num_warps=warps)
            assert torch.equal(out, want.to(out.dtype)), op


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_halves_both_ways(dtype: torch.dtype, arch: int) -> None:
    half = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    wide, back = torch.zeros(65536), torch.zeros(65536, dtype=dtype)

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())

    with virtual_gpu(arch, traffic=False):
        kernels.convert[(32,)](half, wide, 65536, B=2048)
        assert same(wide, half.float())
        for delta in (0, 1, -1):  # the values, and their neighbours
            x = (half.float().view(torch.int32) + delta).view(torch.float32)
            kernels.convert[(32,)](x, back, 65536, B=2048)
            assert same(back, x.to(dtype)), delta
        finite = half.float()[half.isfinite()].sort()[0].double()
        ties = ((finite[1:] + finite[:-1]) / 2).float()
        for x in (ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)):
            out = torch.zeros(len(x), dtype=dtype)
            kernels.convert[(32,)](x, out, len(x), B=2048)
            assert torch.equal(out.view(torch.int16), x.to(dtype).view(torch.int16))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.int32),
        (torch.int64, torch.float32),
        (torch.int32, torch.float16),
        (torch.float64, torch.float16),
        (torch.int8, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.uint8, torch.float64),
        (torch.int64, torch.int16),
    ],
    ids=str,
)
def test_conversions(a: torch.dtype, b: torch.dtype) -> None:
    x = torch.randn(2000) * 100
    x = x.abs() % 256 if a == torch.uint8 else x.clamp(-100, 100) if a == torch.int8 else x
    x, y = x.to(a), torch.zeros(2000, dtype=b)
    if a == torch.int64:
        x = torch.randint(-(2**62), 2**62, (2000,)) >> torch.randint(0, 62, (2000,))
    with virtual_gpu(90):
        kernels.convert[(2,)](x, y, 2000, B=1024)
    # torch rounds from float64 to float16 twice.
    want = torch.from_numpy(x.numpy().astype(np.float16)) if (a, b) == (torch.float64, torch.float16) else x.to(b)
    assert torch.equal(y.float(), want.float())


FUNCTIONS = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "sqrt_rn": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "recip": lambda x: 1 / x,
    "div_rn": lambda x: 1 / x,
    "floor": np.floor,
    "abs": np.abs,
}
EXACT = ("sqrt_rn", "div_rn", "floor", "abs")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions(name: str, dtype: torch.dtype) -> None:
    if name in ("div_rn", "sqrt_rn") and dtype == torch.float64:
        pytest.skip("Triton has it for float32 only")
    x = torch.cat([torch.randn(900), torch.logspace(-30, 30, 90), torch.tensor([0.0, np.inf, np.nan, -1.0])]).to(dtype)
    x = x.abs() if "sqrt" in name or "log" in name else x.clamp(-60, 60) if "exp" in name else x
    y = torch.zeros_like(x)
    with virtual_gpu(90):
        kernels.elementwise[(4,)](x, y, len(x), F=name, B=256)
    with np.errstate(all="ignore"):
        want = FUNCTIONS[name](x.double().numpy())
    eps = torch.finfo(dtype).eps
    if name in EXACT:
        np.testing.assert_array_equal(y.numpy(), want.astype(y.numpy().dtype))
    else:
        rtol, atol = 90 * eps if name == "exp" else 4 * eps, 4 * eps if "log" in name else 1e-45
        np.testing.assert_allclose(y.double().numpy(), want, rtol=rtol, atol=atol)


def test_float64_functions_of_single_values() -> None:
    """Evaluated once per block, as all that is the same for its threads."""
    x, y = torch.tensor([0.1, -3.0, 700.0, -800.0]).double(), torch.zeros(4).double()
    with virtual_gpu(90):
        kernels.elementwise[(4,)](x, y, 4, F="exp", B=1)
    np.testing.assert_allclose(y.numpy(), np.exp(x.numpy()), rtol=1e-15)


def test_scalar_and_tuple_arguments() -> None:
    out, f = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    with virtual_gpu(90):
        kernels.scalars[(1,)](out, (f, 7), -5, 1 << 40, True, 0.75, 1, None, B=16)
        assert out.item() == -5 + (1 << 40) + 7 + 1 + 1000 + 10000 and f.item() == 1.5
        kernels.scalars[(1, 1, 1)](out, (f, -(1 << 35)), 16, 3, False, -1e-40, 1, None, B=16)
        assert out.item() == 16 + 3 - (1 << 35) + 1 + 10000 and f.item() == 2 * torch.tensor(-1e-40).item()


def test_device_assert() -> None:
    x, y = torch.ones(128), torch.zeros(128)
    with virtual_gpu(90):
        kernels.asserts[(1,)](x, y, B=128, debug=True)
        x[77] = -1
        with pytest.raises(DeviceTrap, match=r"kernels\.py"):
            kernels.asserts[(1,)](x, y, B=128, debug=True)


def test_what_is_not_supported_is_named() -> None:
    a, b, c = torch.zeros(64, 64).half(), torch.zeros(64, 64).half(), torch.zeros(64, 64)
    with virtual_gpu(90), pytest.raises(NotImplementedError, match="PTX line"):
        kernels.matmul[(1,)](a, b, c, 64, N=64, B=64)


def test_contexts_may_be_nested() -> None:
    x, z = torch.randn(96), torch.zeros(96)
    with virtual_gpu(80) as outer:
        with virtual_gpu(90) as inner:
            assert kernels.add[(1,)](x, x, z, 96, B=32).metadata.target.arch == 90
        # One that has to be loaded anew.
        assert kernels.add[(3,)](x, x, z, 96, B=32, num_warps=1).metadata.target.arch == 80
    assert torch.equal(z, x + x)
    assert len(outer.launches) == len(inner.launches) == 1


def test_an_empty_grid_launches_nothing() -> None:
    x, z = torch.randn(64), torch.zeros(64)
    with virtual_gpu() as stats:
        kernels.add[(0,)](x, x, z, 64, B=64)
    assert not z.any() and not stats.launches


def test_torch_is_told_what_the_device_is() -> None:
    with virtual_gpu(86):
        driver = triton.runtime.driver.active
        assert driver.get_device_capability() == (8, 6)
        assert driver.get_device_interface() is torch.cpu


def test_compiled_kernels_follow_the_context() -> None:
    x, z = torch.randn(64), torch.zeros(64)
    for arch in (80, 90, 80, 100):
        with virtual_gpu(arch):
            k = kernels.add[(1,)](x, x, z, 64, B=64)
            assert k.metadata.target.arch == arch
            assert triton.runtime.driver.active.get_current_device() == 0
    assert torch.equal(z, x + x)

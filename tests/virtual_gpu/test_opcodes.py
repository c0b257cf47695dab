"""What single instructions compute, on hand-written PTX."""

import inspect
import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch
from virtual_gpu.ptx import random_ints, run, signed, unsigned

pytestmark = pytest.mark.compiled

I32, I64 = torch.int32, torch.int64


def bfe(a: int, pos: int, n: int, is_signed: bool) -> int:
    pos, n, a = pos & 255, n & 255, signed(a) if is_signed else a
    if not n:
        return 0
    r = a >> min(pos, 31 if is_signed else 32)
    if n < 32:
        r &= (1 << n) - 1
        if is_signed and a >> min(pos + n - 1, 31) & 1:
            r |= -1 << n
    return r


def prmt(a: int, b: int, selector: int) -> int:
    both, r = a | b << 32, 0
    for i in range(4):
        n = selector >> 4 * i & 15
        v = both >> 8 * (n & 7) & 255
        r |= ((255 if v & 128 else 0) if n & 8 else v) << 8 * i
    return r


INTEGER: dict[str, Callable[..., int]] = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "mad.hi.u32": lambda a, b, c: (a * b >> 32) + c,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "not.b32": operator.invert,
    "neg.s32": lambda a: -a,
    "abs.s32": lambda a: abs(signed(a)),
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.u32": lambda a, b: sorted((a, b))[1],
    "shl.b32": lambda a, b: a << min(b, 32),
    "shr.u32": lambda a, b: a >> min(b, 32),
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
    "popc.b32": int.bit_count,
    "clz.b32": lambda a: 32 - a.bit_length(),
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "bfe.u32": lambda a, b, c: bfe(a, b, c, False),
    "bfe.s32": lambda a, b, c: bfe(a, b, c, True),
    "prmt.b32": prmt,
    "bfind.u32": lambda a: a.bit_length() - 1,
    "bfind.s32": lambda a: (a if signed(a) >= 0 else ~a % (1 << 32)).bit_length() - 1,
    "shf.l.wrap.b32": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "shf.r.wrap.b32": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "shf.r.clamp.b32": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "cnot.b32": lambda a: not a,
}


@pytest.mark.parametrize("name", INTEGER)
def test_integer_arithmetic(name: str) -> None:
    f = INTEGER[name]
    n = len(inspect.signature(f).parameters)
    a, b, c = random_ints(64), random_ints(64).flip(0), random_ints(64).roll(11)
    if name[:3] in ("shl", "shr", "bfe"):
        b, c = torch.randint(0, 40, (64,), dtype=I32), torch.randint(0, 40, (64,), dtype=I32)
    out = torch.zeros(64, dtype=I32)
    run(f"{name} %o0, {', '.join(f'%a{j}' for j in range(n))};", [a, b, c], [out])
    operands = [unsigned(t) for t in (a, b, c)[:n]]
    assert unsigned(out) == [int(f(*x)) % (1 << 32) for x in zip(*operands, strict=True)]


@pytest.mark.parametrize("amount", [0, 7, 31, 32, 40])
def test_shifts_by_immediates(amount: int) -> None:
    a, outs = random_ints(), [torch.zeros(64, dtype=I32) for _ in range(3)]
    run(f"shl.b32 %o0, %a0, {amount}; shr.u32 %o1, %a0, {amount}; shr.s32 %o2, %a0, {amount};", [a], outs)
    for out, name in zip(outs, ("shl.b32", "shr.u32", "shr.s32"), strict=True):
        assert unsigned(out) == [INTEGER[name](x, amount) % (1 << 32) for x in unsigned(a)]


def test_lop3_and_bfi() -> None:
    a, b, c, out = random_ints(), random_ints().flip(0), random_ints().roll(5), torch.zeros(64, dtype=I32)
    run("lop3.b32 %o0, %a0, %a1, %a2, 0xE2;", [a, b, c], [out])
    for x, y, z, got in zip(*map(unsigned, (a, b, c, out)), strict=True):
        index = [(x >> i & 1) * 4 + (y >> i & 1) * 2 + (z >> i & 1) for i in range(32)]
        assert got == sum((0xE2 >> n & 1) << i for i, n in enumerate(index))
    run("bfi.b32 %o0, %a0, %a1, 5, 9;", [a, b], [out])
    mask = (1 << 9) - 1 << 5
    assert unsigned(out) == [(x << 5 & mask) | (y & ~mask) for x, y in zip(unsigned(a), unsigned(b), strict=True)]


def test_wide_products() -> None:
    a, b, wide = random_ints(), random_ints().flip(0), torch.zeros(64, dtype=I64)
    run("mul.wide.s32 %o0, %a0, %a1;", [a, b], [wide])
    assert torch.equal(wide, a.long() * b.long())
    run("mul.wide.u32 %o0, %a0, %a1;", [a, b], [wide])
    assert unsigned(wide) == [x * y for x, y in zip(unsigned(a), unsigned(b), strict=True)]
    x, y = random_ints(dtype=I64), random_ints(dtype=I64).flip(0)
    run("mul.hi.s64 %o0, %a0, %a1;", [x, y], [wide])
    assert wide.tolist() == [int(p) * int(q) >> 64 for p, q in zip(x.tolist(), y.tolist(), strict=True)]


FLOATS = torch.tensor([0.0, -0.0, 1.5, -2.25, float("inf"), -float("inf"), float("nan"), 1e-40] * 4)
OTHER = torch.cat([FLOATS.roll(k * 5)[:8] for k in range(4)])
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


@pytest.mark.parametrize("compare", COMPARISONS)
def test_setp(compare: str) -> None:
    a, b = FLOATS, OTHER
    nan = a.isnan() | b.isnan()
    ordered = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    if compare in ("num", "nan"):
        want = ~nan if compare == "num" else nan
    else:
        want = ordered[compare[:2]] | nan if len(compare) == 3 else ordered[compare] & ~nan
    out, both = torch.zeros(32, dtype=I32), torch.zeros(32, dtype=I32)
    run(
        f"""setp.{compare}.f32 %p1, %a0, %a1; selp.b32 %o0, 1, 0, %p1;
            setp.lt.s32 %p3, %tid, 20; setp.{compare}.and.f32 %p4|%p5, %a0, %a1, !%p3;
            selp.b32 %r1, 1, 0, %p4; selp.b32 %o1, 2, %r1, %p5;""",
        [a, b],
        [out, both],
    )
    high = torch.arange(32) >= 20
    assert out.bool().tolist() == want.tolist()
    assert both.tolist() == torch.where(want & high, 1, torch.where(~want & high, 2, 0)).tolist()


def test_selp_into_one_of_its_operands() -> None:
    a, b = torch.arange(32, dtype=I32), torch.arange(100, 132, dtype=I32)
    outs = [torch.zeros(32, dtype=I32) for _ in range(2)]
    run(
        """setp.lt.s32 %p1, %tid, 7; mov.b32 %r1, %a0; mov.b32 %r2, %a1;
           selp.b32 %r1, %r1, %a1, %p1; selp.b32 %r2, %a0, %r2, %p1; mov.b32 %o0, %r1; mov.b32 %o1, %r2;""",
        [a, b],
        outs,
    )
    want = torch.where(torch.arange(32) < 7, a, b)
    assert torch.equal(outs[0], want) and torch.equal(outs[1], want)


@pytest.mark.parametrize("to", ["s32", "u32", "s64", "u64", "s16", "u8"])
@pytest.mark.parametrize("mode", ["rzi", "rni", "rmi", "rpi"])
def test_float_to_int_saturates(to: str, mode: str) -> None:
    values = [0.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.7, 3e9, -3e9, 1e19, -1e19, np.inf, -np.inf, np.nan, 255.0, 300.0]
    x, out = torch.tensor(values * 2), torch.zeros(32, dtype=I64)
    w = int(to[1:])
    register = "%h1" if w < 32 else "%r1" if w == 32 else "%o0"
    widen = f"cvt.{to[0]}64.{to} %o0, {register};" if w < 64 else ""
    run(f"cvt.{mode}.{to}.f32 {register}, %a0;" + widen, [x], [out])
    lo, hi = (-(1 << w - 1), (1 << w - 1) - 1) if to[0] == "s" else (0, (1 << w) - 1)
    f = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[mode]
    for v, got in zip(x.tolist(), out.tolist(), strict=True):
        if np.isfinite(v):
            want = min(max(int(f(v)), lo), hi)
        else:
            want = (1 << 63 if w == 64 else 0) if np.isnan(v) else lo if v < 0 else hi
        assert signed(got, 64) == signed(want, 64), v


@pytest.mark.parametrize(("name", "t"), [("f16x2", torch.float16), ("bf16x2", torch.bfloat16)])
def test_packed_halves(name: str, t: torch.dtype) -> None:
    a, b, out = torch.randn(32) * 100, torch.randn(32), torch.zeros(32, dtype=I32)
    run(f"cvt.rn.{name}.f32 %o0, %a0, %a1;", [a, b], [out])
    halves = out.view(t).reshape(-1, 2)
    assert torch.equal(halves[:, 0], b.to(t)) and torch.equal(halves[:, 1], a.to(t))
    x, y = torch.randn(64).to(t), torch.randn(64).to(t)
    functions = {"add": torch.add, "mul": torch.mul, "sub": torch.sub, "min": torch.minimum, "max": torch.maximum}
    for op, f in functions.items():
        run(f"{op}.{name} %o0, %a0, %a1;", [x.view(I32), y.view(I32)], [out])
        assert torch.equal(out.view(t), f(x, y)), op
    run(f"fma.rn.{name} %o0, %a0, %a1, %a0;", [x.view(I32), y.view(I32)], [out])
    assert torch.equal(out.view(t), (x.double() * y.double() + x.double()).to(t))


def test_packed_floats() -> None:
    """As compute capability 10.0 has them."""
    x, y, out = torch.randn(64), torch.randn(64), torch.zeros(32, dtype=I64)
    for op, want in {
        "add.rn.f32x2 %o0, %a0, %a1": x + y,
        "mul.rn.f32x2 %o0, %a0, %a1": x * y,
        "fma.rn.f32x2 %o0, %a0, %a1, %a0": (x.double() * y.double() + x.double()).float(),
    }.items():
        run(op + ";", [x.view(I64), y.view(I64)], [out])
        assert torch.equal(out.view(torch.float32), want)


@pytest.mark.parametrize("t", [torch.float16, torch.bfloat16])
def test_mixed_precision(t: torch.dtype) -> None:
    """Of compute capability 100: halves are widened, and the result is rounded once, to float32."""
    name = "f16" if t == torch.float16 else "bf16"
    a, b, c = torch.randn(64).to(t), torch.randn(64).to(t), torch.randn(64)
    a[:3] = torch.tensor([2.0**-24, torch.inf, -0.0])
    out = [torch.zeros(64) for _ in range(4)]
    body = f"add.rn.f32.{name} %o0, %a0, %a2; sub.rn.f32.{name} %o1, %a0, %a2; sub.rz.sat.f32.{name} %o2, %a0, %a2;"
    run(f"{body} fma.rn.f32.{name} %o3, %a0, %a1, %a2;", [a, b, c], out)
    assert torch.equal(out[0], a.float() + c)
    assert torch.equal(out[1], a.float() - c)
    assert ((out[2] >= 0) & (out[2] <= 1)).all() and torch.equal(out[2] > 0, out[1] > 0)
    exact = a.double() * b.double() + c.double()  # of few enough bits
    torch.testing.assert_close(out[3].double(), exact, rtol=2.0**-24, atol=0.0)


def test_saturation_and_flushing() -> None:
    x, i = (
        torch.tensor([-0.5, 0.25, 0.75, 1e-40, np.nan, 3.0, -0.0, np.inf] * 4),
        torch.arange(-500, 524, 32, dtype=I32),
    )
    outs = [torch.zeros(32), torch.zeros(32), torch.zeros(32, dtype=I32), torch.zeros(32, dtype=torch.float16)]
    run(
        """add.sat.f32 %o0, %a0, %a0; mul.ftz.f32 %o1, %a0, 0f3F800000; cvt.sat.u8.s32 %o2, %a1;
           cvt.rn.relu.f16.f32 %o3, %a0;""",
        [x, i],
        outs,
    )
    assert torch.equal(outs[0], (x + x).clamp(0, 1).nan_to_num(0))
    flushed = torch.where(x.abs() < 1e-38, 0, x)
    assert torch.equal(outs[1].nan_to_num(7), flushed.nan_to_num(7)) and outs[1][6].signbit()
    assert torch.equal(outs[2], i.clamp(0, 255))
    assert torch.equal(outs[3].nan_to_num(7), x.clamp(min=0).half().nan_to_num(7))


def test_minima_of_magnitudes() -> None:
    a, b = torch.randn(32), torch.randn(32)
    out = torch.zeros(32)
    run("min.xorsign.abs.f32 %o0, %a0, %a1;", [a, b], [out])
    assert torch.equal(out, torch.minimum(a.abs(), b.abs()) * a.sign() * b.sign())


def test_narrow_registers_and_scopes() -> None:
    a, out = torch.randint(-128, 127, (32,), dtype=torch.int8), torch.zeros(32, dtype=I64)
    run("{ .reg .b32 t; ld.global.s8 t, [%ptr_a0]; { .reg .b32 t; mov.u32 t, 7; } cvt.s64.s32 %o0, t; }", [a], [out])
    assert torch.equal(out, a.long())
    x, out = random_ints(), torch.zeros(64, dtype=I64)
    run(
        """{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %a0; cvt.u32.u16 %r1, hi; cvt.s32.s16 %r2, lo;
             mov.b64 %o0, {%r2, %r1}; }""",
        [x],
        [out],
    )
    assert unsigned(out) == [(signed(v & 0xFFFF, 16) % 2**32) | (v >> 16) << 32 for v in unsigned(x)]


def test_shuffles_votes_and_reductions() -> None:
    a, outs = torch.arange(64, dtype=I32), [torch.zeros(64, dtype=I32) for _ in range(9)]
    run(
        """shfl.sync.bfly.b32 %o0, %a0, 5, 31, -1;
           shfl.sync.up.b32 %o1|%p1, %a0, 3, 0, -1; selp.b32 %o2, 1, 0, %p1;
           shfl.sync.down.b32 %o3, %a0, 4, 31, -1;
           mov.b32 %r2, 9; shfl.sync.idx.b32 %o4, %a0, %r2, 0x181f, 0xffffffff;
           and.b32 %r1, %a0, 1; setp.ne.b32 %p2, %r1, 0;
           vote.sync.ballot.b32 %o5, %p2, -1;
           vote.sync.any.pred %p3, !%p2, -1; selp.b32 %o6, 1, 0, %p3;
           redux.sync.add.s32 %o7, %a0, -1; activemask.b32 %o8;""",
        [a],
        outs,
    )
    t, lane = a.tolist(), [i % 32 for i in range(64)]
    assert outs[0].tolist() == [i ^ 5 for i in t]
    assert outs[1].tolist() == [i - 3 if lane[i] >= 3 else i for i in t]
    assert outs[2].tolist() == [int(i >= 3) for i in lane]
    assert outs[3].tolist() == [i + 4 if lane[i] < 28 else i for i in t]
    assert outs[4].tolist() == [i // 8 * 8 + 1 for i in t]
    assert unsigned(outs[5]) == [0xAAAAAAAA] * 64 and outs[6].tolist() == [1] * 64
    assert outs[7].tolist() == [496] * 32 + [496 + 1024] * 32 and unsigned(outs[8]) == [0xFFFFFFFF] * 64


def test_reductions_of_a_block() -> None:
    a, outs = torch.arange(64, dtype=I32), [torch.zeros(64, dtype=I32) for _ in range(2)]
    run(
        """setp.lt.s32 %p1, %a0, 40; bar.red.popc.u32 %o0, 0, %p1;
           barrier.cta.red.and.pred %p2, 0, %p1; selp.b32 %o1, 1, 0, %p2;""",
        [a],
        outs,
    )
    assert outs[0].tolist() == [40] * 64 and outs[1].tolist() == [0] * 64


def test_special_registers() -> None:
    outs = [torch.zeros(128, dtype=I32) for _ in range(6)]
    run(
        """mov.u32 %o0, %laneid; mov.u32 %o1, %warpid; mov.u32 %o2, %nctaid.x; mov.u32 %o3, %ctaid.x;
           mov.u32 %o4, %lanemask_le; mov.u32 %o5, %tid.y;""",
        [],
        outs,
        grid=2,
    )
    t = torch.arange(128) % 64
    assert torch.equal(outs[0], (t % 32).int()) and torch.equal(outs[1], (t // 32).int())
    assert outs[2].tolist() == [2] * 128 and outs[3].tolist() == [0] * 64 + [1] * 64
    assert unsigned(outs[4]) == [(2 << i % 32) - 1 for i in t.tolist()] and not outs[5].any()


def test_shared_memory_is_the_blocks_own() -> None:
    a, out = torch.arange(128, dtype=I32), torch.zeros(128, dtype=I32)
    run(
        """mov.u32 %r1, smem; shl.b32 %r2, %tid, 2; add.s32 %r3, %r1, %r2; st.shared.b32 [%r3], %a0; bar.sync 0;
           sub.s32 %r4, 63, %tid; shl.b32 %r4, %r4, 2; add.s32 %r4, %r1, %r4; ld.shared.b32 %o0, [%r4];""",
        [a],
        [out],
        shared=256,
        grid=2,
    )
    assert out.tolist() == [*range(63, -1, -1), *range(127, 63, -1)]


def test_atomics_with_conflicts() -> None:
    t, f = torch.zeros(64, dtype=I32), torch.zeros(64)
    run(
        """ld.param.u64 %d1, [p_o0]; atom.global.add.u32 %r1, [%d1], 2; red.global.max.s32 [%d1+4], %tid;
           atom.global.cas.b32 %r2, [%d1+8], 0, %tid; atom.shared.inc.u32 %r3, [smem], 9;
           ld.param.u64 %d2, [p_a0]; atom.global.add.f32 %r4, [%d2], 0f3F800000; bra DONE;""",
        [f],
        [t],
    )
    assert t[:3].tolist() == [128, 63, 1] and f[0] == 64 and not f[1:].any()


def test_local_memory_and_generic_addresses() -> None:
    a, out = torch.arange(32, dtype=I32), torch.zeros(32, dtype=I32)
    run(
        """.local .align 4 .b8 depot[16]; mov.u64 %d1, depot; cvta.local.u64 %d2, %d1; st.b32 [%d2+4], %a0;
           ld.local.b32 %r1, [%d1+4]; mov.u64 %d3, smem; cvta.shared.u64 %d4, %d3; st.b32 [%d4], 5; bar.sync 0;
           ld.shared.b32 %r2, [smem]; ld.b32 %r3, [%ptr_a0]; add.s32 %o0, %r1, %r2; add.s32 %o0, %o0, %r3;""",
        [a],
        [out],
    )
    assert out.tolist() == [2 * i + 5 for i in range(32)]


@pytest.mark.parametrize(
    "instruction",
    [
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1}, %d1, %d2, %p1",
        "cp.async.ca.shared.global [%r3], [%d1], 4",
        "mov.u64 %d1, %clock64",
        "add.cc.u32 %r1, %r1, %r1",
        "call noinline",
        "barrier.cluster.arrive",
    ],
)
def test_an_unknown_instruction_raises_when_it_is_reached(instruction: str) -> None:
    t = torch.zeros(32, dtype=I32)
    with pytest.raises(NotImplementedError, match=rf"{instruction.split(maxsplit=1)[0]}(.|\n)*PTX line \d+"):
        run(instruction + ";", [t])
    run(f"bra OVER; {instruction}; OVER:", [t])
    run(f"setp.lt.s32 %p3, %tid, 0; @%p3 {instruction};", [t])

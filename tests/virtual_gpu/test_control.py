"""Branches, barriers of a block, divergence, spins: on hand-written PTX."""

import pytest
import torch
from virtual_gpu.ptx import run

from tritonamp.testing.virtual_gpu import DeadlockError, DeviceTrap, DivergenceError, MemoryFault

pytestmark = pytest.mark.compiled

I32 = torch.int32


@pytest.mark.parametrize("grid", [1, 3])
def test_divergence_reconverges(grid: int) -> None:
    """Nested branches, and a loop with a different trip count per thread."""
    out, n = torch.zeros(64 * grid, dtype=I32), torch.randint(0, 20, (64 * grid,), dtype=I32)
    stats = run(
        """mov.u32 %o0, 0; mov.u32 %r1, 0;
           LOOP: setp.ge.s32 %p1, %r1, %a0; @%p1 bra END;
           and.b32 %r2, %r1, 1; setp.eq.s32 %p2, %r2, 0; @%p2 bra EVEN;
           add.s32 %o0, %o0, 100; bra.uni NEXT;
           EVEN: add.s32 %o0, %o0, 1;
           NEXT: add.s32 %r1, %r1, 1; bra.uni LOOP;
           END: shfl.sync.bfly.b32 %r3, %o0, 0, 31, -1; mov.u32 %o0, %r3;""",
        [n],
        [out],
        grid=grid,
    )
    assert out.tolist() == [(k + 1) // 2 + k // 2 * 100 for k in n.tolist()]
    assert stats.count("shfl") == 2 * grid and 0.2 < stats.efficiency < 1


def test_temporaries_of_one_path_survive_another() -> None:
    """Registers may be overwritten in threads that do not execute an instruction only if those never read them."""
    a, outs = torch.arange(64, dtype=I32), [torch.zeros(64, dtype=I32) for _ in range(2)]
    run(
        """mov.u32 %r1, 5; mov.u32 %r2, 7; and.b32 %r3, %a0, 1; setp.eq.s32 %p1, %r3, 0; @%p1 bra EVEN;
           add.s32 %r1, %a0, 1000; add.s32 %r4, %r1, %r2; mov.u32 %o0, %r4; bra.uni END;
           EVEN: add.s32 %r2, %a0, 2000; add.s32 %r4, %r1, %r2; mov.u32 %o0, %r4;
           END: add.s32 %o1, %r1, %r2;""",
        [a],
        outs,
    )
    want = [i + 2005 if i % 2 == 0 else i + 1007 for i in range(64)]
    assert outs[0].tolist() == want and outs[1].tolist() == want


def test_values_cross_a_wait_for_the_rest_of_the_warp() -> None:
    """The lanes of one path wait at a shuffle while those of the other use the same registers."""
    a, out = torch.arange(32, dtype=I32), torch.zeros(32, dtype=I32)
    run(
        """and.b32 %r3, %a0, 1; setp.eq.s32 %p1, %r3, 0; @%p1 bra EVEN;
           mul.lo.s32 %r1, %a0, 10; bra.uni JOIN;
           EVEN: mul.lo.s32 %r1, %a0, 100;
           JOIN: add.s32 %r5, %r1, 1; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; add.s32 %o0, %r2, %r5;""",
        [a],
        [out],
    )
    own = [100 * i if i % 2 == 0 else 10 * i for i in range(32)]
    assert out.tolist() == [own[i ^ 1] + own[i] + 1 for i in range(32)]


@pytest.mark.parametrize("last", [2, 40])
def test_brx_idx(last: int) -> None:
    k, out = torch.randint(0, 3, (32,), dtype=I32).clamp(max=last), torch.zeros(32, dtype=I32)
    run(
        """T: .branchtargets A, B, C; brx.idx %a0, T;
           A: mov.u32 %o0, 10; bra E; B: mov.u32 %o0, 20; bra E; C: mov.u32 %o0, 30; E:""",
        [k],
        [out],
    )
    assert out.tolist() == [10 * (v + 1) for v in k.tolist()]


def test_a_guard_selects_who_leaves() -> None:
    """Of the fragment that reaches a guarded exit, only the threads whose guard is true end."""
    out = torch.zeros(64, dtype=I32)
    run("mov.u32 %o0, 1; setp.lt.s32 %p1, %tid, 20; @%p1 exit;", [], [out])
    assert out.tolist() == [0] * 20 + [1] * 44
    out.zero_()
    run("mov.u32 %o0, 1; setp.lt.s32 %p1, %tid, 20; @!%p1 ret;", [], [out])
    assert out.tolist() == [1] * 20 + [0] * 44


def test_a_guard_selects_who_branches_by_index() -> None:
    k, out = torch.randint(0, 2, (32,), dtype=I32), torch.zeros(32, dtype=I32)
    run(
        """T: .branchtargets A, B; mov.u32 %o0, 5; setp.lt.s32 %p1, %tid, 9; @%p1 brx.idx %a0, T; bra E;
           A: mov.u32 %o0, 10; bra E; B: mov.u32 %o0, 20; E:""",
        [k],
        [out],
    )
    assert out.tolist() == [10 * (v + 1) if i < 9 else 5 for i, v in enumerate(k.tolist())]


def test_blocks_end_at_different_times() -> None:
    out = torch.zeros(256, dtype=I32)
    run("mov.u32 %o0, 1; setp.eq.s32 %p1, %r30, 1; @%p1 bra DONE; bar.sync 0;", [], [out], grid=4)
    assert out.reshape(4, 64).sum(1).tolist() == [64, 0, 64, 64]


def test_a_barrier_for_some_warps() -> None:
    out = torch.zeros(64, dtype=I32)
    run("setp.lt.s32 %p1, %tid, 32; @!%p1 bra L; bar.sync 1, 32; L: mov.u32 %o0, 1;", [], [out])
    assert out.tolist() == [1] * 64


def test_arriving_is_not_waiting() -> None:
    """Half of the threads hand a value to the other half."""
    out = torch.zeros(64, dtype=I32)
    run(
        """setp.lt.s32 %p1, %tid, 32; @%p1 bra TAKE;
           st.shared.b32 [smem], 42; bar.arrive 1, 64; bra END;
           TAKE: bar.sync 1, 64; ld.shared.b32 %o0, [smem]; END:""",
        [],
        [out],
    )
    assert out.tolist() == [42] * 32 + [0] * 32


def test_barrier_errors() -> None:
    a = torch.zeros(64)
    with pytest.raises(DeadlockError, match="32 threads in barrier 0"):
        run("setp.lt.s32 %p1, %tid, 32; @!%p1 bra L; bar.sync 0, 64; L:", [a])
    with pytest.raises(DivergenceError, match="part of a warp"):
        run("setp.lt.s32 %p1, %tid, 40; @!%p1 bra L; bar.sync 0; bra DONE; L: bar.sync 0;", [a])
    with pytest.raises(DivergenceError):
        run(
            """setp.lt.s32 %p1, %tid, 5; @!%p1 bra L; shfl.sync.bfly.b32 %r1, %tid, 1, 31, -1; bra DONE;
               L: shfl.sync.bfly.b32 %r1, %tid, 1, 31, -1;""",
            [a],
        )
    with pytest.raises(DeviceTrap, match=r"block \(0, 0, 0\)"):
        run("trap;", [a])


def test_out_of_bounds_and_misaligned() -> None:
    a, out = torch.zeros(32), torch.zeros(32)
    with pytest.raises(
        MemoryFault, match=r"out of bounds; 128 bytes into tensor \(32,\).*thread 31(.|\n)*ld.global.b32 %o0"
    ):
        run("ld.global.b32 %o0, [%ptr_a0+4];", [a], [out])
    with pytest.raises(MemoryFault, match="misaligned for its 8 bytes"):
        run("ld.global.v2.b32 {%o0, %r1}, [%ptr_a0];", [a], [out])
    with pytest.raises(MemoryFault, match="out of bounds of 16 bytes of shared memory"):
        run("ld.shared.b32 %o0, [smem+16];", [a], [out])
    with pytest.raises(MemoryFault, match="misaligned for its 4 bytes of shared memory"):
        run("ld.shared.b32 %o0, [smem+2];", [a], [out])
    with pytest.raises(MemoryFault, match="out of bounds"):
        run("mov.u64 %d1, 0; ld.global.b32 %o0, [%d1];", [a], [out])


def test_a_thread_cannot_reach_the_local_memory_of_another() -> None:
    out = torch.zeros(32, dtype=I32)
    with pytest.raises(MemoryFault, match="out of bounds of 16 bytes of local memory"):
        run(".local .align 4 .b8 depot[16]; mov.u64 %d1, depot; ld.local.b32 %o0, [%d1+16];", [], [out])


def test_a_spin_within_a_block_is_fair() -> None:
    """A thread at a lower pc spins on a flag set by a thread at a higher pc."""
    flag, out = torch.zeros(32, dtype=I32), torch.zeros(32, dtype=I32)
    run(
        """ld.param.u64 %d1, [p_a0]; setp.eq.s32 %p1, %tid, 0; @%p1 bra SET;
           SPIN: ld.volatile.global.b32 %r1, [%d1]; setp.eq.s32 %p2, %r1, 0; @%p2 bra SPIN; bra END;
           SET: st.volatile.global.b32 [%d1], 1; END: mov.u32 %o0, 1;""",
        [flag],
        [out],
    )
    assert out.tolist() == [1] * 32


@pytest.mark.parametrize("seed", [None, 0])
def test_a_spin_that_nobody_ends_is_a_deadlock(seed: int | None) -> None:
    flag = torch.zeros(64, dtype=I32)
    with pytest.raises(DeadlockError, match=r"no block can make progress\n  blocks 0, 1: 32 threads at"):
        run(
            """ld.param.u64 %d1, [p_a0];
               SPIN: ld.volatile.global.b32 %r1, [%d1]; setp.eq.s32 %p2, %r1, 0; @%p2 bra SPIN;""",
            [flag],
            grid=2,
            seed=seed,
        )


def test_a_loop_that_counts_without_end_is_given_up() -> None:
    """It is not the same state twice, so that only the limit ends it."""
    with pytest.raises(DeadlockError, match="no change of global memory in"):
        run("SPIN: add.s32 %r1, %r1, 1; bra SPIN;", [torch.zeros(32)], idle_limit=10_000)

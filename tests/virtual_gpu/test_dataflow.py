"""What is known of registers before a kernel runs, and what is done with it."""

import pytest
import torch
from virtual_gpu.ptx import program, run

from tritonamp.testing.virtual_gpu.driver import VirtualGPU
from tritonamp.testing.virtual_gpu.kernel import Kernel, Pool
from tritonamp.testing.virtual_gpu.launch import Launch

pytestmark = pytest.mark.compiled

I32 = torch.int32


def kernel(body: str) -> Kernel:
    t = torch.zeros(32, dtype=I32)
    return Kernel(program(body, [t], [t], 0))


def pc_of(k: Kernel, text: str) -> int:
    return next(i.pc for i in k.program.code if text in i.text)


def test_a_guarded_write_leaves_the_old_value_live() -> None:
    k = kernel("mov.u32 %r1, 1; setp.eq.s32 %p1, %tid, 0; @%p1 mov.u32 %r1, 2; mov.u32 %r2, 3; add.s32 %o0, %r1, %r2;")
    live = k.flow.names(k.flow.live_at(pc_of(k, "setp")))
    assert "%r1" in live and "%r2" not in live and "%p1" not in live


def test_what_a_loop_reads_is_live_at_its_end() -> None:
    k = kernel("mov.u32 %r1, 0; LOOP: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 9; @%p1 bra LOOP; mov.u32 %o0, 0;")
    assert "%r1" in k.flow.names(k.flow.live_at(pc_of(k, "@%p1 bra")))
    assert "%r1" not in k.flow.names(k.flow.live_at(pc_of(k, "mov.u32 %o0, 0")))


def test_registers_read_first_start_as_zero_in_every_launch() -> None:
    out = torch.full((32,), 7, dtype=I32)
    k = Kernel(program("add.s32 %r1, %r1, 5; mov.u32 %o0, %r1;", [], [out], 0))
    assert k.read_first == ["%r1"]
    gpu = VirtualGPU()
    gpu.tensors.register(out)
    for _ in range(2):
        Launch(gpu, k, (1, 1, 1), 32, {"p_o0": out.data_ptr().to_bytes(8, "little")}).run()
        assert out.tolist() == [5] * 32


@pytest.mark.parametrize(
    ("instruction", "is_uniform"),
    [
        ("ld.global.b32 %r1, [%d1]", True),
        ("ld.shared.b32 %r1, [smem]", True),
        ("add.s32 %r1, %r30, 7", True),
        ("mov.u32 %r1, %nctaid.x", True),
        ("@%p2 mov.u32 %r1, 4", True),
        ("mov.u32 %r1, %laneid", False),
        ("add.s32 %r1, %r2, %tid", False),
        ("@%p1 mov.u32 %r1, 4", False),
        ("ld.global.b32 %r1, [%ptr_a0]", False),
        ("ld.local.b32 %r1, [%d2]", False),
        ("atom.global.add.u32 %r1, [%d1], 1", False),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1", False),
    ],
)
def test_uniform_registers(instruction: str, is_uniform: bool) -> None:
    k = kernel(
        f""".local .align 4 .b8 depot[16]; ld.param.u64 %d1, [p_a0]; mov.u64 %d2, depot; mov.u32 %r2, 3;
            setp.eq.s32 %p1, %tid, 0; setp.eq.s32 %p2, %r30, 0; {instruction}; add.s32 %r3, %r1, 1; mov.u32 %o0, %r3;"""
    )
    assert k.is_uniform(pc_of(k, instruction)) == is_uniform
    assert k.is_uniform(pc_of(k, "add.s32 %r3")) == is_uniform


def test_uniform_values_survive_the_threads_of_a_block_parting() -> None:
    """From then on, each thread has registers of its own."""
    a, out = torch.arange(128, dtype=I32), torch.zeros(128, dtype=I32)
    run(
        """add.s32 %r1, %r30, 100; mov.u32 %r2, 0; setp.lt.s32 %p1, %tid, 7; @%p1 bra SOME;
           add.s32 %r1, %r1, 1000; bra.uni JOIN;
           SOME: mov.u32 %r2, 5;
           JOIN: add.s32 %o0, %r1, %r2;""",
        [a],
        [out],
        grid=2,
    )
    want = [100 + b + (5 if t < 7 else 1000) for b in range(2) for t in range(64)]
    assert out.tolist() == want


def test_blocks_of_a_group_take_different_paths() -> None:
    """A loop whose trip count is the block's number, with uniform values all the way."""
    out = torch.zeros(64 * 5, dtype=I32)
    run(
        """mov.u32 %r1, 0; mov.u32 %r2, 0; LOOP: setp.ge.s32 %p1, %r1, %r30; @%p1 bra END;
           add.s32 %r2, %r2, 10; add.s32 %r1, %r1, 1; bar.sync 0; bra.uni LOOP;
           END: add.s32 %o0, %r2, %r1;""",
        [],
        [out],
        grid=5,
    )
    assert out.tolist() == [11 * b for b in range(5) for _ in range(64)]


def test_frames_are_kept_up_to_a_size() -> None:
    k, pool = kernel("mov.u32 %r1, %tid;"), Pool(1000)
    frames = [pool.take(k, 1, 32 * n, 0) for n in (1, 2, 1)]
    for f in frames:
        f.wide.row("%r1")  # of 128, 256 and 128 bytes
        pool.give_back(f)
    assert pool.take(k, 1, 32, 0) is frames[2] and pool.take(k, 1, 32, 0) is frames[0]
    assert pool.take(k, 1, 32, 0) not in frames
    pool.give_back(frames[0])
    large = pool.take(k, 1, 224, 0)
    large.wide.row("%r1")  # of 896 bytes
    pool.give_back(large)
    assert pool.frames == [large]

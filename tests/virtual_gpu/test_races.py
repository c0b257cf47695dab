"""The race detector, on hand-written PTX: what orders accesses, and what does not."""

import numpy as np
import pytest
import torch
from virtual_gpu.ptx import run

from tritonamp.testing.virtual_gpu import RaceError, shadow

pytestmark = pytest.mark.compiled

I32 = torch.int32
SEEDS = [None, 1, 2]

# Block 0 writes data, then a flag; block 1 waits for the flag, then reads the data.
HANDOFF = """ld.param.u64 %d1, [p_a0]; ld.param.u64 %d2, [p_a1]; setp.ne.s32 %p1, %r30, 0; @%p1 bra READER;
setp.ne.s32 %p2, %tid, 0;
@!%p2 st.global.b32 [%d1], 42; {before} @!%p2 st.{st}.global.b32 [%d2], 1; bra END;
READER: ld.{ld}.global.b32 %r1, [%d2]; setp.eq.s32 %p3, %r1, 0; @%p3 bra READER;
{after} ld.global.b32 %o0, [%d1]; END:
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("st", "ld", "before", "after", "is_ordered"),
    [
        ("release.gpu", "acquire.gpu", "", "", True),
        ("relaxed.gpu", "acquire.gpu", "", "", False),
        ("release.gpu", "relaxed.gpu", "", "", False),
        ("volatile", "volatile", "", "", False),
        ("relaxed.gpu", "relaxed.gpu", "fence.acq_rel.gpu;", "fence.acq_rel.gpu;", True),
        ("relaxed.gpu", "relaxed.gpu", "membar.gl;", "membar.gl;", True),
        ("relaxed.gpu", "relaxed.gpu", "fence.acq_rel.gpu;", "", False),
        ("relaxed.gpu", "relaxed.gpu", "fence.acq_rel.cta;", "fence.acq_rel.cta;", False),
        ("release.cta", "acquire.cta", "", "", False),
    ],
)
def test_message_passing(st: str, ld: str, before: str, after: str, is_ordered: bool, seed: int | None) -> None:
    data, flag, out = torch.zeros(64, dtype=I32), torch.zeros(64, dtype=I32), torch.zeros(64, dtype=I32)
    body = HANDOFF.format(st=st, ld=ld, before=before, after=after)
    if is_ordered:
        run(body, [data, flag], [out], threads=32, grid=2, race=True, seed=seed)
        assert out[32:].tolist() == [42] * 32
    else:
        with pytest.raises(RaceError, match=r"data race at byte 0 of tensor(.|\n)*block \((0|1), 0, 0\)"):
            run(body, [data, flag], [out], threads=32, grid=2, race=True, seed=seed)


# Block 0 and block 1 (in turn) hand over to block 2, which waits for the last flag and reads the data of block 0.
CHAIN = """ld.param.u64 %d1, [p_a0]; add.u64 %d1, %d1, 512; add.u64 %d2, %d1, 8; add.u64 %d3, %d1, 16;
setp.ne.s32 %p4, %tid, 0;
setp.eq.s32 %p1, %r30, 0; @%p1 bra FIRST; setp.eq.s32 %p1, %r30, 1; @%p1 bra SECOND;
THIRD: ld.acquire.gpu.global.b32 %r1, [%d3]; setp.eq.s32 %p3, %r1, 0; @%p3 bra THIRD;
ld.global.b32 %r2, [%d1]; bra END;
FIRST: @!%p4 st.global.b32 [%d1], 42; @!%p4 st.release.gpu.global.b32 [%d2], 1; bra END;
SECOND: {fence} WAIT: ld.relaxed.gpu.global.b32 %r1, [%d2]; setp.eq.s32 %p3, %r1, 0; @%p3 bra WAIT;
{update} END:"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_release_hands_on_only_what_was_acquired(seed: int | None) -> None:
    """An atomic that continues a release sequence does not add to what an earlier fence releases."""
    t = torch.zeros(256, dtype=I32)
    passed_on = "fence.acq_rel.gpu; @!%p4 st.relaxed.gpu.global.b32 [%d3], 1;"
    run(CHAIN.format(fence="", update=passed_on), [t], threads=32, grid=3, race=True, seed=seed)
    t.zero_()
    only_an_atomic = "@!%p4 atom.relaxed.gpu.global.add.u32 %r2, [%d2], 1; @!%p4 st.relaxed.gpu.global.b32 [%d3], 1;"
    body = CHAIN.format(fence="fence.acq_rel.gpu;", update=only_an_atomic)
    with pytest.raises(RaceError, match="data race at byte 512"):
        run(body, [t], threads=32, grid=3, race=True, seed=seed)


# What follows accesses the input beyond byte 512: before, every thread reads its element.


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_write_the_same_location(seed: int | None) -> None:
    a, options = torch.zeros(256, dtype=I32), {"grid": 2, "threads": 64, "race": True, "seed": seed}
    with pytest.raises(RaceError, match=r"byte 512(.|\n)*write by block(.|\n)*not ordered after the write by block"):
        run("ld.param.u64 %d1, [p_a0]; st.global.b32 [%d1+512], 1;", [a], **options)
    run("ld.param.u64 %d1, [p_a0]; st.relaxed.gpu.global.b32 [%d1+512], 1;", [a], **options)
    with pytest.raises(RaceError, match="strong write"):
        run(
            """ld.param.u64 %d1, [p_a0]; setp.eq.s32 %p1, %r30, 0; @%p1 st.global.b32 [%d1+512], 1;
               @!%p1 red.relaxed.gpu.global.add.u32 [%d1+512], 1;""",
            [a],
            **options,
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_reading_what_another_block_overwrites(seed: int | None) -> None:
    """The reads are by all threads of several blocks: a table, of which one block then changes an entry."""
    a, options = torch.zeros(256, dtype=I32), {"grid": 3, "threads": 32, "race": True, "seed": seed}
    body = """ld.param.u64 %d1, [p_a0]; ld.global.b32 %r1, [%d1+516]; setp.eq.s32 %p1, %r30, 2;
              @%p1 st.global.b32 [%d1+{offset}], 1;"""
    run(body.format(offset=520), [a], **options)
    with pytest.raises(RaceError, match="data race at byte 516"):
        run(body.format(offset=516), [a], **options)


def test_a_location_is_as_small_as_the_smallest_access() -> None:
    """Neighbouring halves of one word belong to different blocks."""
    h = torch.zeros(512, dtype=torch.float16)
    body = """ld.param.u64 %d1, [p_a0]; mad.wide.u32 %d1, %r30, {step}, %d1; mov.b16 %h1, 0;
              st.global.b16 [%d1+512], %h1;"""
    run(body.format(step=2), [h], grid=2, threads=32, race=True)
    with pytest.raises(RaceError):
        run(body.format(step=0), [h], grid=2, threads=32, race=True)


@pytest.mark.parametrize("room", [1 << 24, 16])
def test_storages_that_overlap(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, reached through two registered tensors."""
    monkeypatch.setattr(shadow, "MAX_ROOM", room)
    whole = np.zeros(512, np.int32)
    a, b = torch.from_numpy(whole[:256]), torch.from_numpy(whole[128:])
    body = """ld.param.u64 %d1, [p_a0]; ld.param.u64 %d2, [p_a1]; setp.eq.s32 %p1, %r30, 0;
              @%p1 st.global.b32 [%d1+{first}], 1; @!%p1 st.global.b32 [%d2+{second}], 2;"""
    options = {"grid": 2, "threads": 32, "race": True}
    run(body.format(first=1000, second=508), [a, b], **options)
    run(body.format(first=300, second=508), [a, b], **options)
    with pytest.raises(RaceError, match=r"byte (1000|488) of"):
        run(body.format(first=1000, second=488), [a, b], **options)
    with pytest.raises(RaceError, match=r"byte 60 of(.|\n)*read by block \(0"):  # what block 0 has read as its input
        run(body.format(first=1000, second=60), [a, b], **options)


def test_a_huge_storage_of_which_little_is_touched() -> None:
    """Far apart, in memory that is never written and so never backed."""
    a = torch.empty(1 << 31, dtype=torch.uint8).view(I32)
    a[:64] = 0
    body = """ld.param.u64 %d1, [p_a0]; add.u64 %d1, %d1, 0x40000000; setp.eq.s32 %p1, %r30, 0;
              @%p1 st.global.b32 [%d1], 1; @!%p1 st.global.b32 [%d1+{offset}], 1;"""
    run(body.format(offset=4), [a], grid=2, threads=32, race=True)
    with pytest.raises(RaceError, match=r"byte 1073741824 of"):
        run(body.format(offset=0), [a], grid=2, threads=32, race=True)


def test_threads_of_a_block() -> None:
    a, out = torch.zeros(64, dtype=I32), torch.zeros(64, dtype=I32)
    body = """ld.param.u64 %d1, [p_a0]; st.global.b32 [%ptr_a0], %tid; {sync}
              xor.b32 %r1, %tid, 32; mad.wide.u32 %d1, %r1, 4, %d1; ld.global.b32 %o0, [%d1];"""
    run(body.format(sync="bar.sync 0;"), [a], [out], race="threads")
    run(body.format(sync=""), [a], [out], race=True)
    with pytest.raises(RaceError):
        run(body.format(sync=""), [a], [out], race="threads")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_release_without_a_barrier_covers_one_thread(seed: int | None) -> None:
    """All threads write, thread 0 sets the flag: only its own write is ordered, unless a barrier comes before."""
    body = """ld.param.u64 %d1, [p_a0]; ld.param.u64 %d2, [p_a1]; setp.ne.s32 %p1, %r30, 0; @%p1 bra READER;
              st.global.b32 [%ptr_a0], 42; {sync}
              setp.eq.s32 %p2, %tid, 0; @%p2 st.release.gpu.global.b32 [%d2], 1; bra END;
              READER: ld.acquire.gpu.global.b32 %r1, [%d2]; setp.eq.s32 %p3, %r1, 0; @%p3 bra READER;
              ld.global.b32 %o0, [%d1+{offset}]; END:"""
    flags = {"threads": 32, "grid": 2, "race": True, "seed": seed}

    def tensors() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [torch.zeros(64, dtype=I32) for _ in range(2)], [torch.zeros(64, dtype=I32)]

    run(body.format(sync="", offset=0), *tensors(), **flags)
    run(body.format(sync="bar.sync 0;", offset=4), *tensors(), **flags)
    with pytest.raises(RaceError, match=r"byte 4(.|\n)*write by block \(0, 0, 0\), thread 1"):
        run(body.format(sync="", offset=4), *tensors(), **flags)

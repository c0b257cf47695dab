"""The concurrent interpreter: programs that wait for each other, and correctly rounded bfloat16."""

import os
import threading
import warnings

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError

from tritonamp.testing.interpreter import GridDeadlockError, LaunchLog, concurrent_interpreter

pytestmark = pytest.mark.interpreted


@triton.jit
def _wait_for(counter, arrivals):
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")
    while tl.atomic_add(counter, 0, sem="acquire") < arrivals:
        pass


@triton.jit
def _sum_over_programs(slots, sums, counter, missing, BLOCK: tl.constexpr):
    """Each program writes its slot and, past the barrier, sums the slots of all."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    tl.store(slots + pid, pid + 1)
    _wait_for(counter, programs + missing)
    offs = tl.arange(0, BLOCK)
    tl.store(sums + pid, tl.sum(tl.load(slots + offs, mask=offs < programs, other=0)))


@triton.jit
def _take_tickets(order, counter, rounds):
    """Write down the order in which programs come by."""
    pid = tl.program_id(0)
    for _ in range(rounds):
        ticket = tl.atomic_add(counter, 1)
        tl.store(order + ticket, pid)


@triton.jit
def _unguarded_increment(value, rounds):
    for _ in range(rounds):
        tl.store(value, tl.load(value) + 1)


@triton.jit
def _wait_for_flag(flag, out, VOLATILE: tl.constexpr):
    """The first program waits, by loads alone, for what the last one stores."""
    pid = tl.program_id(0)
    if pid == 0:
        while tl.load(flag, volatile=VOLATILE) == 0:
            pass
        tl.store(out, 1)
    elif pid == tl.num_programs(0) - 1:
        tl.store(flag, 1)


@triton.jit
def _one_arrives_late(slots, counter, n):
    """The first program hands over at every atomic, and changes nothing by them."""
    if tl.program_id(0) == 0:
        for i in range(n):
            tl.atomic_add(slots + i, 0)
    _wait_for(counter, tl.num_programs(0))


@triton.jit
def _fail(pid, culprit):
    tl.static_assert(pid != culprit, "this one fails")


@triton.jit
def _wait_or_fail(counter, culprit, IN_DEVICE_FUNCTION: tl.constexpr):
    pid = tl.program_id(0)
    if IN_DEVICE_FUNCTION:
        _fail(pid, culprit)
    else:
        tl.static_assert(pid != culprit, "this one fails")
    _wait_for(counter, tl.num_programs(0))


@triton.jit
def _program_ids(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    flat = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + flat, flat + 1)


@triton.jit
def _copy(src, dst, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(dst + offs, tl.load(src + offs).to(dst.dtype.element_ty))


def _zeros(n: int = 1) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


def _ticket_order(seed: int | None, programs: int = 4, rounds: int = 6) -> list[int]:
    order = _zeros(programs * rounds)
    with concurrent_interpreter(programs, seed):
        _take_tickets[(1,)](order, _zeros(), rounds)
    return order.tolist()


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("programs", [1, 2, 5, 7])
def test_grid_barrier_opens_for_any_program_count(programs: int, seed: int | None) -> None:
    slots, sums, counter = _zeros(8), _zeros(8), _zeros()
    with concurrent_interpreter(programs, seed):
        _sum_over_programs[(1,)](slots, sums, counter, 0, BLOCK=8)
    assert counter.item() == programs
    assert sums.tolist() == [programs * (programs + 1) // 2] * programs + [0] * (8 - programs)


def test_without_seed_the_baton_goes_round() -> None:
    assert _ticket_order(None, programs=3, rounds=4) == [0, 1, 2] * 4


def test_equal_seeds_give_equal_runs_and_others_differ() -> None:
    orders = [_ticket_order(seed) for seed in range(6)]
    assert orders == [_ticket_order(seed) for seed in range(6)]
    assert len({tuple(order) for order in orders}) == 6
    for order in orders:
        assert sorted(order) == sorted([0, 1, 2, 3] * 6)


def test_launches_of_one_context_draw_from_one_sequence() -> None:
    def two_launches() -> list[list[int]]:
        orders = [_zeros(24), _zeros(24)]
        with concurrent_interpreter(4, seed=0):
            for order in orders:
                _take_tickets[(1,)](order, _zeros(), 6)
        return [order.tolist() for order in orders]

    first, second = two_launches()
    assert first != second
    assert [first, second] == two_launches()


def test_a_seed_makes_plain_loads_and_stores_switch_points() -> None:
    """A lost update shows up with some seed; in turn, a program without atomics is not interrupted."""
    totals = {}
    for seed in (None, 0, 1, 2):
        value = _zeros()
        with concurrent_interpreter(3, seed):
            _unguarded_increment[(1,)](value, 8)
        totals[seed] = value.item()
    assert totals.pop(None) == 24
    assert min(totals.values()) < 24


@pytest.mark.parametrize("volatile", [True, False])
@pytest.mark.parametrize("seed", [None, 0])
def test_waiting_by_loads_lets_the_others_run(seed: int | None, volatile: bool) -> None:
    out = _zeros()
    with concurrent_interpreter(3, seed):
        _wait_for_flag[(1,)](_zeros(), out, VOLATILE=volatile)
    assert out.item() == 1


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("programs", [1, 5])
def test_waiting_for_one_program_too_many_is_a_deadlock(programs: int, seed: int | None) -> None:
    threads = threading.active_count()
    with (
        concurrent_interpreter(programs, seed),
        pytest.raises(GridDeadlockError, match=rf"deadlock: all {programs} programs .*test_interpreter\.py:\d+"),
    ):
        _sum_over_programs[(1,)](_zeros(8), _zeros(8), _zeros(), 1, BLOCK=8)
    assert threading.active_count() == threads


def test_waiting_by_plain_loads_for_what_never_comes_is_a_deadlock() -> None:
    with concurrent_interpreter(1), pytest.raises(GridDeadlockError):
        _wait_for_flag[(1,)](_zeros(), _zeros(), VOLATILE=False)


def test_a_long_wait_for_a_busy_program_is_no_deadlock() -> None:
    counter = _zeros()
    with concurrent_interpreter(3):
        _one_arrives_late[(1,)](_zeros(1000), counter, 1000)
    assert counter.item() == 3


@pytest.mark.parametrize("in_device_function", [False, True])
@pytest.mark.parametrize("seed", [None, 0])
def test_a_failing_program_ends_the_others(seed: int | None, in_device_function: bool) -> None:
    threads = threading.active_count()
    counter = _zeros()
    with concurrent_interpreter(4, seed):
        with pytest.raises(InterpreterError, match="this one fails") as caught:
            _wait_or_fail[(1,)](counter, 2, IN_DEVICE_FUNCTION=in_device_function)
        # A device function's failure arrives wrapped once more, as from the stock executor.
        root = caught.value.__cause__
        if in_device_function:
            assert isinstance(root, InterpreterError)
            root = root.__cause__
        assert isinstance(root, AssertionError)
        assert threading.active_count() == threads
        # The next launch starts afresh.
        counter.zero_()
        _wait_or_fail[(1,)](counter, 99, IN_DEVICE_FUNCTION=in_device_function)
    assert counter.item() == 4


def test_everything_is_restored() -> None:
    def patched() -> list[object]:
        return [
            stock.GridExecutor.__call__,
            dict(vars(stock.interpreter_builder)),
            tl.load,
            tl.sum,
            dict(vars(tl.tensor)),
        ]

    def without_grid(state: list[object]) -> list[object]:
        builder = {k: v for k, v in state[1].items() if not k.startswith("grid_")}
        return [state[0], builder, *state[2:]]

    # An ordinary launch first: it leaves the interpreter's grid behind.
    _program_ids[(1,)](_zeros())
    before = without_grid(patched())
    with pytest.raises(ZeroDivisionError), concurrent_interpreter(2):
        _program_ids[(1,)](_zeros(2))
        raise ZeroDivisionError
    with pytest.raises(InterpreterError), concurrent_interpreter(2):
        _wait_or_fail[(1,)](_zeros(), 0, IN_DEVICE_FUNCTION=False)
    assert without_grid(patched()) == before
    out = _zeros(3)
    _program_ids[(3,)](out)
    assert out.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("asked", "run"),
    [
        ((1,), (3, 1, 1)),
        ((1, 1), (1, 1, 1)),
        ((1, 1, 1), (1, 1, 1)),
        ((2,), (2, 1, 1)),
        ((1, 2), (1, 2, 1)),
        ((2, 2, 2), (2, 2, 2)),
        (lambda meta: (1,), (3, 1, 1)),
        (lambda meta: (4,), (4, 1, 1)),
    ],
)
def test_only_a_grid_of_one_is_replaced(asked: object, run: tuple[int, int, int]) -> None:
    out = _zeros(8)
    with concurrent_interpreter(3) as log:
        _program_ids[asked](out)
    programs = run[0] * run[1] * run[2]
    assert out.tolist() == list(range(1, programs + 1)) + [0] * (8 - programs)
    assert log[0].grid == run


def test_the_log_names_kernels_in_order_with_their_options() -> None:
    with concurrent_interpreter(2) as log:
        assert len(log) == 0
        _program_ids[(1,)](out=_zeros(2), num_warps=8)
        _take_tickets[(1,)](_zeros(2), _zeros(), rounds=1, launch_cooperative_grid=True)
    assert isinstance(log, LaunchLog)
    assert log.kernels() == ["_program_ids", "_take_tickets"]
    # Tensors are left out: the log must not keep them alive.
    assert [launch.kwargs for launch in log] == [{"num_warps": 8}, {"rounds": 1, "launch_cooperative_grid": True}]


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)


def _convert(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=dtype)
    with concurrent_interpreter(1):
        _copy[(1,)](values, out, BLOCK=values.numel())
    return out


def test_float32_to_bfloat16_rounds_to_nearest_even() -> None:
    edges = torch.tensor(
        [
            0x3F808000,  # a tie above an even neighbour: down
            0x3F818000,  # a tie above an odd neighbour: up
            0x3F808001,  # just above a tie
            0x3F807FFF,  # just below one
            0x3FFF8000,  # a carry into the exponent
            0x7F7F7FFF,  # the last value that stays finite
            0x7F7F8000,  # a tie that becomes infinite
            0x7F7FFFFF,  # the largest float32: infinite
            0x7F800000,  # infinity
            0x00008000,  # half the smallest subnormal: zero
            0x00008001,  # above it: the smallest subnormal
            0x00018000,  # a tie among subnormals
            0x007F8000,  # the largest subnormal, up to the smallest normal
            0x00000001,  # the smallest float32
            0x00000000,
            0x3F800000,
        ],
        dtype=torch.int64,
    )
    bits = torch.cat([edges, edges | 0x80000000]).to(torch.uint32)
    values = bits.view(torch.float32)
    assert torch.equal(_bits(_convert(values, torch.bfloat16)), _bits(values.bfloat16()))


def test_random_bit_patterns_convert_as_in_torch() -> None:
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.where(values.isnan(), torch.ones(()), values)
    assert torch.equal(_bits(_convert(values, torch.bfloat16)), _bits(values.bfloat16()))


def test_nan_stays_nan_whatever_its_payload() -> None:
    # The first payload lies wholly in the bits that bfloat16 drops; the second would carry over.
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001], dtype=torch.int64).to(torch.uint32)
    narrow = _convert(bits.view(torch.float32), torch.bfloat16)
    assert narrow.isnan().all()
    assert _convert(narrow, torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_every_bfloat16_widens_as_in_torch(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.where(values.isnan(), torch.ones((), dtype=torch.bfloat16), values)
    assert torch.equal(_convert(values, dtype), values.to(dtype))


def test_overflow_in_a_program_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _convert(torch.tensor([1e300, -1e300], dtype=torch.float64), torch.float32).isinf().all()


def test_fewer_than_one_program_is_refused() -> None:
    with pytest.raises(ValueError, match="programs must be at least 1, got 0"), concurrent_interpreter(0):
        pass


def test_compiled_mode_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"), concurrent_interpreter():
        pass

"""float16 and bfloat16 parameters: with master copies, and rounded stochastically."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from conftest import Runner
from problem import SHAPES, assert_same_bits, checked_step, make_params, scaled, set_grads
from torch import Tensor

import tritonamp
from tritonamp.rounding import noise, philox, round_stochastically

SGD, Adam, AdamW = tritonamp.SGD, tritonamp.Adam, tritonamp.AdamW
BF16, F16 = torch.bfloat16, torch.float16
RULES: list[tuple[Any, dict[str, Any]]] = [
    (SGD, {}),
    (SGD, {"momentum": 0.9, "dampening": 0.5}),
    (Adam, {"amsgrad": True}),
    (AdamW, {"weight_decay": 0.1}),
]
KEPT: list[dict[str, Any]] = [{"master_weights": True}, {"rounding": "stochastic"}]
rules = pytest.mark.parametrize(("make", "options"), RULES)
ways = pytest.mark.parametrize("kept", KEPT, ids=["master", "stochastic"])


def mixed_params() -> list[Tensor]:
    """bfloat16 of all sizes, one that is not flat memory, and a float32 one."""
    strided = torch.randn(40, 6).to(BF16).t()[:, ::2].requires_grad_()
    return [*make_params(SHAPES, BF16), strided, *make_params([(33,)])]


@rules
@ways
def test_steps_equal_the_oracle(runner: Runner, make: Any, options: dict[str, Any], kept: dict[str, Any]) -> None:
    """With an overflow, which neither moves a master copy nor uses up random numbers."""
    params = mixed_params()
    optimizer = make(params, lr=0.05, max_norm=1.0, backend=runner.backend, **options, **kept)
    for step in range(4):
        set_grads(params, scaled(optimizer))
        if step == 1:
            params[-2].grad[-1, 0] = torch.inf
        checked_step(optimizer)
        assert optimizer.step_was_skipped == (step == 1)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("grad_dtype", [F16, BF16, torch.float32])
def test_a_master_copy_takes_every_dtype(runner: Runner, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    params = make_params([(700,), (3,)], dtype)
    optimizer = AdamW(params, master_weights=True, loss_scale=None, backend=runner.backend)
    for _ in range(2):
        set_grads(params, dtype=grad_dtype)
        checked_step(optimizer)
    assert optimizer.state[params[0]]["master_param"].dtype == torch.float32


def test_a_master_copy_keeps_what_rounding_would_lose(runner: Runner) -> None:
    """A thousandth of an ulp at a time, 600 times."""
    p = torch.ones(20, dtype=BF16, requires_grad=True)
    lost = torch.ones(20, dtype=BF16, requires_grad=True)
    with_copy = SGD([p], lr=1.0, master_weights=True, loss_scale=None, backend=runner.backend)
    without = SGD([lost], lr=1.0, loss_scale=None, backend=runner.backend)
    for optimizer, param in ((with_copy, p), (without, lost)):
        for _ in range(20):
            param.grad = torch.full((20,), -(2.0**-11), dtype=BF16)
            optimizer.step()
    assert bool((lost == 1).all())
    assert bool((p == torch.tensor(1 + 20 * 2.0**-11).to(BF16)).all())
    assert bool((with_copy.state[p]["master_param"] == 1 + 20 * 2.0**-11).all())


def test_parameters_as_they_are_computed_have_no_copy(runner: Runner) -> None:
    params = [*make_params([(5,)]), *make_params([(5,)], torch.float64)]
    optimizer = SGD(params, momentum=0.9, master_weights=True, loss_scale=None, backend=runner.backend)
    set_grads(params)
    checked_step(optimizer)
    assert all(set(optimizer.state[p]) == {"step", "momentum_buffer"} for p in params)


@pytest.mark.parametrize("how", ["load", "clamp", "data"])
def test_what_others_write_to_a_parameter_reaches_its_master_copy(runner: Runner, how: str) -> None:
    """Elements that are still the rounding of the copy keep its lower bits."""
    model = torch.nn.Linear(30, 4, dtype=BF16)
    p = model.weight
    optimizer = SGD(model.parameters(), lr=0.01, master_weights=True, loss_scale=None, backend=runner.backend)
    set_grads(list(model.parameters()))
    optimizer.step()
    before = optimizer.state[p]["master_param"].clone()
    if how == "load":
        model.load_state_dict({name: torch.ones_like(t) for name, t in model.state_dict().items()})
    elif how == "clamp":
        with torch.no_grad():
            p.clamp_(-0.01, 0.01)
    else:
        p.data = torch.full_like(p, 0.5)
    written = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    master = optimizer.state[p]["master_param"]
    assert torch.equal(p, written)
    is_kept = before.to(BF16) == written
    assert torch.equal(master, torch.where(is_kept, before, written.float()))
    assert how != "clamp" or 0 < int(is_kept.sum()) < p.numel()


def test_another_master_copy_where_the_old_one_was_follows_its_parameter(runner: Runner) -> None:
    """As after loading a checkpoint, when the allocator gives the memory of the old state to the new one."""
    params = make_params([(40,)], torch.bfloat16)
    optimizer = SGD(params, lr=0.0, master_weights=True, loss_scale=None, backend=runner.backend)
    for _ in range(2):
        set_grads(params)
        optimizer.step()
    state, before = optimizer.state[params[0]], params[0].detach().clone()
    state["master_param"] = state["master_param"].detach().fill_(7.0)
    set_grads(params)
    optimizer.step()
    assert torch.equal(params[0], before)
    assert torch.equal(state["master_param"], before.float())


def test_a_step_without_foreign_writes_leaves_the_master_copy_alone(runner: Runner) -> None:
    """In particular, our own step is not taken for a foreign write."""
    params = make_params([(300,)], BF16)
    optimizer = SGD(params, lr=0.0, master_weights=True, loss_scale=None, backend=runner.backend)
    set_grads(params)
    optimizer.step()
    optimizer.state[params[0]]["master_param"].add_(2.0**-20)  # not the parameter's rounding any more, in places
    optimizer.state[params[0]]["master_param"][0] = 3.0
    set_grads(params)
    optimizer.step()
    assert float(params[0].detach()[0]) == 3.0


# Random numbers.


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of its authors' library, for 7 and for 10 rounds."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF, dtype=torch.int64)

    def words(key: int, counter: Tensor, rounds: int) -> list[int]:
        return [int(word) for word in philox(key, (counter, counter, counter, counter), rounds)]

    assert words(0, zero, 7) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert words(0, zero, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(2**64 - 1, ones, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_elements_have_the_random_numbers_of_their_place() -> None:
    """Counter: the element divided by 4, in two words, of which the upper has the shard; the step; the place."""

    def word(seed: int, shard: int, place: int, step: int, element: int) -> int:
        c, key = [element >> 2, shard << 16, step, place], [seed & 0xFFFFFFFF, seed >> 32]
        for _ in range(7):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [b >> 32 ^ c[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ key[1], a & 0xFFFFFFFF]
            key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
        return c[element & 3]

    for seed, shard, place, step in ((0, 0, 0, 1), (2**62 + 12345, 5, 77, 1000), (9, 20000, 3, 2)):
        random = noise(seed, place | shard << 48, step, 11)
        assert random.tolist() == [word(seed, shard, place, step, element) for element in range(11)]


def test_stochastic_rounding_is_exact_in_the_mean() -> None:
    """Over all 2**16 values of the bits that are used: its mean is x, exactly."""
    bits = torch.arange(2**16)
    for x in (1.0, 1.00390625, 1.001, -3.1415927, 1e-40, -(2.0**-133), 65504.3):
        x32 = torch.tensor(x, dtype=torch.float32)
        rounded = round_stochastically(x32.expand(2**16).contiguous(), bits)
        assert float(rounded.double().mean()) == float(x32)
        assert len(rounded.unique()) <= 2


def test_stochastic_rounding_leaves_infinity_and_nan() -> None:
    nan = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.tensor([math.inf, -math.inf, 0.0, -0.0]), nan])
    rounded = round_stochastically(x, torch.full((6,), 0xFFFF))
    assert rounded[:4].tolist() == [math.inf, -math.inf, 0.0, -0.0] and bool(rounded[4:].isnan().all())


def test_the_random_bits_are_uniform_and_independent() -> None:
    """Of each of the 16 bits that are used, and of neighbours, steps and parameters; to 5 standard deviations."""
    n = 1 << 16
    streams = [noise(7, 0, 1, n), noise(7, 0, 2, n), noise(7, 1, 1, n), noise(8, 0, 1, n)]
    bits = [(stream[:, None] >> torch.arange(16) & 1).double() * 2 - 1 for stream in streams]
    limit = 5 / math.sqrt(n)
    for i, a in enumerate(bits):
        assert float(a.mean(0).abs().max()) < limit
        for b in (*bits[:i], a.roll(1, 0), a.roll(4, 0)):
            assert float((a * b).mean(0).abs().max()) < limit


@rules
def test_stochastic_training_is_reproducible_from_its_seed(runner: Runner, make: Any, options: dict[str, Any]) -> None:
    """Skipped steps use up no random numbers."""

    def trained(seed: int, *, skips: bool) -> list[Tensor]:
        params = [torch.ones(600, dtype=BF16, requires_grad=True)]
        optimizer = make(params, lr=1e-3, backend=runner.backend, rounding="stochastic", loss_scale=8.0, **options)
        optimizer.param_groups[0]["rounding_seed"] = seed
        for step in range(3):
            for is_bad in (True, False) if skips else (False,):
                scaled(optimizer)
                params[0].grad = torch.full((600,), 4.0 * (step + 1), dtype=BF16)
                if is_bad:
                    params[0].grad[5] = torch.nan
                optimizer.step()
        return [p.detach() for p in params]

    assert_same_bits(trained(0, skips=False), trained(0, skips=False))
    assert_same_bits(trained(0, skips=False), trained(0, skips=True))
    assert not torch.equal(trained(0, skips=False)[0], trained(1, skips=False)[0])


def test_the_mean_of_many_steps_is_that_of_float32(runner: Runner) -> None:
    """4096 weights, 8 steps of a tenth of an ulp: rounded to nearest, nothing would move at all."""
    n, steps, ulp = 4096, 8, 2.0**-7
    p = torch.ones(n, dtype=BF16, requires_grad=True)
    optimizer = SGD([p], lr=1.0, rounding="stochastic", loss_scale=None, backend=runner.backend)
    for _ in range(steps):
        p.grad = torch.full((n,), -ulp / 10, dtype=torch.float32).to(BF16)
        moved = -float(p.grad[0])
        optimizer.step()
    # A step's rounding error has a standard deviation of at most half an ulp.
    assert abs(float(p.detach().double().mean()) - (1 + steps * moved)) < 5 * math.sqrt(steps / n) * ulp / 2


def train(optimizer: Any, params: list[Tensor], grads: list[list[Tensor]]) -> None:
    for of_step in grads:
        scaled(optimizer)
        for p, g in zip(params, of_step, strict=True):
            p.grad = g.clone()
        optimizer.step()


def assert_same(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Bitwise, parameters and state."""
    assert_same_bits(a.param_groups[0]["params"], b.param_groups[0]["params"])
    of_a, of_b = a.state_dict()["state"], b.state_dict()["state"]
    assert of_a.keys() == of_b.keys()
    for number, state in of_a.items():
        assert state.keys() == of_b[number].keys()
        assert_same_bits(list(state.values()), [of_b[number][key] for key in state])


@rules
@ways
def test_a_checkpoint_carries_master_copies_and_random_stream(
    runner: Runner, make: Any, options: dict[str, Any], kept: dict[str, Any]
) -> None:
    params = mixed_params()
    optimizer = make(params, lr=0.05, backend=runner.backend, **options, **kept)
    if "rounding" in kept:
        optimizer.param_groups[0]["rounding_seed"] = 2**62 + 1
    grads = [[torch.randn_like(p) * 65536 for p in params] for _ in range(4)]
    train(optimizer, params, grads[:2])
    file = io.BytesIO()
    torch.save([[p.detach() for p in params], optimizer.state_dict()], file)
    file.seek(0)
    saved, state_dict = torch.load(file)
    resumed = mixed_params()
    fresh = make(resumed, lr=1.0, backend=runner.backend, **kept)
    fresh.load_state_dict(state_dict)  # ahead of the parameters, as some loops do
    with torch.no_grad():
        for p, value in zip(resumed, saved, strict=True):
            p.copy_(value)
    copied, of_copy = copy.deepcopy((optimizer, params))
    for each, tensors in ((optimizer, params), (fresh, resumed), (copied, of_copy)):
        train(each, tensors, grads[2:])
    assert_same(fresh, optimizer)
    assert_same(copied, optimizer)


def test_a_checkpoint_without_master_copies_takes_the_parameters(runner: Runner) -> None:
    """torch's, of a bfloat16 model; the parameters are loaded afterwards."""
    theirs = make_params([(50,)], BF16)
    reference = torch.optim.AdamW(theirs, foreach=False)
    set_grads(theirs)
    reference.step()
    ours = make_params([(50,)], BF16)
    optimizer = AdamW(ours, master_weights=True, loss_scale=None, backend=runner.backend)
    optimizer.load_state_dict(reference.state_dict())
    with torch.no_grad():
        ours[0].copy_(theirs[0])
    set_grads(ours)
    checked_step(optimizer)
    # And back: torch passes over what it does not know.
    reference.load_state_dict(optimizer.state_dict())


def test_master_copies_are_dropped_where_there_are_to_be_none(runner: Runner) -> None:
    params = make_params([(50,)], BF16)
    optimizer = AdamW(params, master_weights=True, loss_scale=None, backend=runner.backend)
    set_grads(params)
    optimizer.step()
    other = AdamW(params, loss_scale=None, backend=runner.backend)
    other.load_state_dict(optimizer.state_dict())
    assert "master_param" not in other.state[params[0]]
    set_grads(params)
    checked_step(other)


# Errors.


def test_ways_to_keep_a_parameter_are_checked() -> None:
    params = make_params([(3,)], BF16)
    with pytest.raises(ValueError, match="'nearest' or 'stochastic', got 'up'"):
        SGD(params, rounding="up")
    with pytest.raises(ValueError, match="without master copies"):
        SGD(params, rounding="stochastic", master_weights=True)
    with pytest.raises(ValueError, match="rounding_seed must be an integer"):
        SGD([{"params": params, "rounding_seed": -1}], rounding="stochastic")


def test_float16_is_not_rounded_stochastically(runner: Runner) -> None:
    """Nor where the model is cast only after the optimizer was made."""
    with pytest.raises(TypeError, match="for bfloat16 parameters"):
        SGD(make_params([(3,)], F16), rounding="stochastic", loss_scale=None)
    params = make_params([(3,)])
    optimizer = SGD(params, rounding="stochastic", loss_scale=None, backend=runner.backend)
    params[0].data = params[0].data.half()
    set_grads(params)
    with pytest.raises(TypeError, match="for bfloat16 parameters"):
        optimizer.step()

"""Norm, clipping and the update rules. Cases from public bug reports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases.tools import leaf, params_of, scale_and_tracker, set_true_grads, steps_of, train
from conftest import Runner
from problem import assert_same_bits, values

from tritonamp import SGD, Adam, AdamW, LossScale
from tritonamp.backends import table

INF, NAN = float("inf"), float("nan")
HALVES = [torch.float16, torch.bfloat16]


# The update rules, one element over a few steps.


def trajectory(what: str, make: Any, start: float, grads: list[float], expected: list[float], **options: Any) -> Any:
    return pytest.param(make, options, start, grads, expected, id=what.replace(" ", "_"))


TRAJECTORIES = [
    # KN-04, pytorch/pytorch#78807; KN-05, pytorch/pytorch#142351: the maximum is of the uncorrected second moment
    trajectory(
        "amsgrad keeps the maximum", Adam, 0.0, [10, 1, 1], [-1.0, -1.725476, -2.332933],
        lr=1.0, betas=(0.9, 0.9), eps=0.0, amsgrad=True,
    ),
    trajectory(
        "no maximum without amsgrad", Adam, 0.0, [10, 1, 1], [-1.0, -1.760506, -2.427678],
        lr=1.0, betas=(0.9, 0.9), eps=0.0,
    ),
    # KN-07, bitsandbytes-foundation/bitsandbytes#2010
    trajectory("AdamW decays before the update", AdamW, 1.0, [1], [0.80], lr=0.1, weight_decay=1.0),
    # KN-10, kozistr/pytorch_optimizer#528
    trajectory("SGD maximizes but decays", SGD, 1.0, [0.5], [0.95], lr=0.1, weight_decay=1.0, maximize=True),
    trajectory("Adam maximizes but decays", Adam, 1.0, [0.5], [0.9], lr=0.1, weight_decay=1.0, maximize=True),
    # KN-11, ml-explore/mlx#440
    trajectory("SGD without momentum decays", SGD, 1.0, [0], [0.9], lr=1.0, weight_decay=0.1),
    # KN-12, ml-explore/mlx#473, pytorch/pytorch#152833
    trajectory(
        "first momentum is not dampened", SGD, 0.0, [1, 1, 1], [-1.0, -2.4, -4.16],
        lr=1.0, momentum=0.9, dampening=0.5,
    ),
    trajectory(
        "nesterov looks ahead", SGD, 0.0, [1, 1, 1], [-1.9, -4.61, -8.049], lr=1.0, momentum=0.9, nesterov=True,
    ),
    # KN-13, kozistr/pytorch_optimizer#516
    trajectory("momentum builds up", SGD, 0.0, [1, 1, 1], [-1.0, -2.9, -2.9 - 2.71], lr=1.0, momentum=0.9),
    # KN-15, tenstorrent/tt-metal#55935: 1 - beta2 is neither 0 nor rounded to float32 first
    trajectory("beta2 close to 1", Adam, 0.0, [1], [-1.0], lr=1.0, betas=(0.9, 0.999999), eps=0.0),
    # KN-18, Oneflow-Inc/oneflow#5960
    trajectory("eps outside of the correction", Adam, 0.0, [1], [-0.5], lr=1.0, eps=1.0),
    # KN-31: decay is no part of the clipped norm
    trajectory("decay is not clipped", SGD, 1.0, [10], [0.80], lr=0.1, weight_decay=1.0, max_norm=1.0),
    # KN-32, triton-lang/triton#6547: no tuning on live data
    trajectory("very first SGD step", SGD, 1.0, [1], [0.9], lr=0.1),
    trajectory("very first Adam step", Adam, 1.0, [1], [0.9], lr=0.1),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "start", "grads", "expected"), TRAJECTORIES)
def test_update_rule(
    runner: Runner, make: Any, options: dict[str, Any], start: float, grads: list[float], expected: list[float]
) -> None:
    p = leaf(start)
    optimizer = make([p], loss_scale=LossScale(8.0), backend=runner.backend, **options)
    seen = []
    for grad in grads:
        train(optimizer, grad)
        seen.append(p.item())
    assert seen == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert scale_and_tracker(optimizer) == (8.0, len(grads))
    if make is not SGD:
        assert steps_of(optimizer) == [len(grads)]


def test_amsgrad_stores_the_uncorrected_maximum(runner: Runner) -> None:
    # KN-04, pytorch/pytorch#78807
    p = leaf(0.0)
    optimizer = Adam([p], betas=(0.9, 0.9), eps=0.0, amsgrad=True, loss_scale=None, backend=runner.backend)
    for grad in (10, 1, 1):
        train(optimizer, grad)
        assert optimizer.state[p]["max_exp_avg_sq"].item() == pytest.approx(10.0)


def test_amsgrad_keeps_a_nan_in_every_element(runner: Runner) -> None:
    """Of a parameter that is NaN, with weight decay; in vectors and in what is left over after them."""
    p = torch.full((13,), torch.nan, requires_grad=True)
    optimizer = Adam([p], weight_decay=0.1, amsgrad=True, loss_scale=None, backend=runner.backend)
    p.grad = torch.zeros(13)
    optimizer.step()
    assert bool(optimizer.state[p]["max_exp_avg_sq"].isnan().all())


def test_the_kind_of_decay_is_read_at_every_step(runner: Runner) -> None:
    # KN-06, flagos-ai/FlagGems#4988, deepspeedai/DeepSpeed#8307
    for is_decoupled in (False, True, False, True):
        p = leaf(1.0)
        optimizer = Adam([p], lr=0.1, weight_decay=1.0, loss_scale=None, backend=runner.backend)
        optimizer.param_groups[0]["decoupled_weight_decay"] = is_decoupled
        train(optimizer, -0.5)
        assert p.item() == pytest.approx(1.0 if is_decoupled else 0.9)
        assert optimizer.state[p]["exp_avg"].item() == pytest.approx(-0.05 if is_decoupled else 0.05)


def test_groups_decay_in_their_own_way(runner: Runner) -> None:
    # KN-06, flagos-ai/FlagGems#4989
    groups = [{"params": [leaf(1.0)], "decoupled_weight_decay": flag} for flag in (False, True)]
    optimizer = Adam(groups, lr=0.1, weight_decay=1.0, loss_scale=None, backend=runner.backend)
    train(optimizer, -0.5, -0.5)
    assert [p.item() for p in params_of(optimizer)] == pytest.approx([0.9, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("make", [SGD, Adam])
def test_maximizing_negates_neither_decay_nor_grad(runner: Runner, make: Any, dtype: torch.dtype) -> None:
    # KN-10, kozistr/pytorch_optimizer#528, OpenBMB/BMTrain#35
    p = leaf(1.0, grad=0.5, dtype=dtype)
    optimizer = make([p], lr=0.1, weight_decay=1.0, maximize=True, loss_scale=None, backend=runner.backend)
    optimizer.step()
    assert p.item() == pytest.approx(torch.tensor(0.95 if make is SGD else 0.9, dtype=dtype).item())
    assert p.grad is not None and p.grad.item() == 0.5
    if make is Adam:
        assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.05)


# Counters and state of single parameters.


def test_a_step_counts_once_for_every_parameter(runner: Runner) -> None:
    # KN-22, DiffSharp#292
    optimizer = Adam([leaf(1.0) for _ in range(3)], loss_scale=None, backend=runner.backend)
    train(optimizer, 1.0, 1.0, 1.0)
    assert steps_of(optimizer) == [1, 1, 1]


def test_a_late_parameter_counts_from_its_own_first_step(runner: Runner) -> None:
    # KN-23, InfiniTrain#235
    a, b = leaf(1.0), leaf(1.0)
    optimizer = Adam([a, b], lr=0.01, loss_scale=None, backend=runner.backend)
    train(optimizer, 0.5, None)
    train(optimizer, 0.5, 0.5)
    assert [a.item(), b.item()] == pytest.approx([0.98, 0.99])
    assert steps_of(optimizer) == [2, 1]


def test_a_late_parameter_seeds_its_momentum_undampened(runner: Runner) -> None:
    # KN-24, pytorch/pytorch#122131
    a, b = leaf(0.0), leaf(0.0)
    optimizer = SGD([a, b], lr=1.0, momentum=0.9, dampening=0.5, loss_scale=None, backend=runner.backend)
    train(optimizer, 1.0, None)
    train(optimizer, 1.0, 1.0)
    assert [a.item(), b.item()] == pytest.approx([-2.4, -1.0])


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("bfloat16_by_default")
def test_state_does_not_take_the_default_dtype(runner: Runner) -> None:
    # KN-14, pytorch/ao#4915: a bfloat16 counter stops at 256. The first 250 steps are done on the quick backend.
    p = leaf(1.0)
    optimizer = Adam([p], lr=1e-3, loss_scale=None, backend="torch")
    for step in range(300):
        if step == 250:
            state_dict = optimizer.state_dict()
            optimizer = Adam([p], lr=1e-3, loss_scale=None, backend=runner.backend)
            optimizer.load_state_dict(state_dict)
        train(optimizer, 0.1)
    state = optimizer.state[p]
    assert state["step"].item() == 300.0
    assert {state[key].dtype for key in ("step", "exp_avg", "exp_avg_sq")} == {torch.float32}
    assert p.item() == pytest.approx(0.7000, abs=1e-5)


# Low precision.


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_summed_in_float32(runner: Runner, dtype: torch.dtype) -> None:
    # KN-02, tracel-ai/burn#5699, facebookresearch/fairscale#263
    p = leaf([0.0], dtype=dtype)
    optimizer = SGD([p], lr=1.0, max_norm=1.0, loss_scale=None, backend=runner.backend)
    train(optimizer, 300.0)
    assert p.item() == pytest.approx(-1.0, abs=1e-5)


@pytest.mark.parametrize(("grad", "norm"), [(5000.0, 10000.0), (40000.0, 80000.0)])
def test_the_norm_of_halves_may_be_beyond_their_range(runner: Runner, grad: float, norm: float) -> None:
    # KN-02, facebookresearch/fairseq#2384
    optimizer = SGD([leaf([0.0] * 4, dtype=torch.float16)], loss_scale=None, backend=runner.backend)
    train(optimizer, grad)
    assert optimizer.grad_norm.dtype == torch.float32
    assert float(optimizer.grad_norm) == pytest.approx(norm)


@pytest.mark.parametrize("total", [5120, 3000])
@pytest.mark.parametrize("split", ["whole", "head", "thirds", "many"])
def test_the_norm_does_not_depend_on_how_tensors_are_split(runner: Runner, total: int, split: str) -> None:
    # KN-03, facebookresearch/fairscale#1092, pytorch/pytorch#194033: in bfloat16 it would be 71.5 and 54.75
    cuts = {"whole": [], "head": [1], "thirds": [511, 1024], "many": range(100, total, 100)}[split]
    params = [part.requires_grad_() for part in torch.zeros(total, dtype=torch.bfloat16).tensor_split(list(cuts))]
    optimizer = SGD(params, loss_scale=None, backend=runner.backend)
    train(optimizer, *[1.0] * len(params))
    assert float(optimizer.grad_norm) == pytest.approx({5120: 71.55417528, 3000: 54.77225575}[total], rel=1e-6)


@pytest.mark.parametrize("is_half_first", [False, True])
def test_every_gradient_is_read_in_its_own_dtype(runner: Runner, is_half_first: bool) -> None:
    # KN-09, NVIDIA/Megatron-LM#7338
    a, b = leaf([0.0], grad=[3.0]), leaf([0.0], grad=[4.0], dtype=torch.bfloat16)
    optimizer = SGD([b, a] if is_half_first else [a, b], lr=1.0, max_norm=1.0, loss_scale=None, backend=runner.backend)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(5.0)
    assert a.item() == pytest.approx(-0.6)
    assert b.item() == torch.tensor(-0.8, dtype=torch.bfloat16)


@pytest.mark.parametrize("beta2", [0.999, 0.9999])
def test_moments_of_halves_are_float32(runner: Runner, beta2: float) -> None:
    # KN-15, tenstorrent/tt-metal#55935, tenstorrent/tt-metal#52953
    p = leaf(1.0, dtype=torch.bfloat16)
    optimizer = Adam([p], betas=(0.9, beta2), loss_scale=None, backend=runner.backend)
    train(optimizer, 1.0)
    assert optimizer.state[p]["exp_avg_sq"].item() == pytest.approx({0.999: 1.0e-3, 0.9999: 1.0e-4}[beta2])


@pytest.mark.parametrize("dtype", HALVES)
def test_eps_does_not_vanish_in_halves(runner: Runner, dtype: torch.dtype) -> None:
    # KN-16, google-deepmind/optax#1754, pytorch/pytorch#147437
    p = leaf(1.0, dtype=dtype)
    train(Adam([p], loss_scale=None, backend=runner.backend), 0.0)
    assert p.item() == 1.0


@pytest.mark.parametrize("grad_dtype", HALVES)
@pytest.mark.parametrize("is_param_half", [False, True], ids=["float32", "half"])
def test_squares_of_tiny_gradients_do_not_vanish(runner: Runner, is_param_half: bool, grad_dtype: torch.dtype) -> None:
    # KN-17, drjit#411
    p = leaf(1.0, dtype=grad_dtype if is_param_half else torch.float32)
    p.grad_dtype = grad_dtype  # type: ignore[attr-defined]
    optimizer = Adam([p], lr=0.1, loss_scale=None, backend=runner.backend)
    train(optimizer, 1e-4)
    # float16 has 1.0002e-4, bfloat16 1.0014e-4.
    assert p.item() == pytest.approx(torch.tensor(0.90001, dtype=p.dtype).item(), rel=1e-6)
    assert optimizer.state[p]["exp_avg_sq"].item() == pytest.approx(1e-11, rel=3e-3)


def test_decay_and_update_are_rounded_once(runner: Runner) -> None:
    # KN-20, Nerogar/OneTrainer#996, pytorch/pytorch#120376
    p = leaf(1.0, dtype=torch.bfloat16)
    train(AdamW([p], lr=0.0012, weight_decay=1.0, loss_scale=None, backend=runner.backend), 1.0)
    assert p.item() == 0.99609375


def test_a_decay_below_half_an_ulp_is_lost_on_halves(runner: Runner) -> None:
    # KN-21, Nerogar/OneTrainer#1005: the parameter is all there is. It stays, so that any step is like the last.
    p = leaf(1.0, dtype=torch.bfloat16)
    optimizer = AdamW([p], lr=1e-3, weight_decay=0.01, loss_scale=None, backend=runner.backend)
    for _ in range(1000 if runner.name == "torch" else 10):
        train(optimizer, 0.0)
    assert p.item() == 1.0


# Subnormal numbers.


def test_a_subnormal_reciprocal_of_the_scale_is_not_flushed(runner: Runner) -> None:
    # KN-19, pytorch/pytorch#125557, triton-lang/triton#8557
    p = leaf(1.0)
    train(SGD([p], lr=1.0, loss_scale=LossScale(2.0**127), backend=runner.backend), 0.5)
    assert p.item() == 0.5


def test_a_subnormal_half_is_unscaled(runner: Runner) -> None:
    # KN-19, pytorch/pytorch#188546
    p = leaf(0.0)
    p.grad_dtype = torch.float16  # type: ignore[attr-defined]
    optimizer = SGD([p], lr=1.0, loss_scale=LossScale(65536.0), backend=runner.backend)
    train(optimizer, 2.0**-40)
    assert p.grad is not None and p.item() == -(2.0**-40)  # 9.09e-13, from 6e-8
    assert float(optimizer.grad_norm) == pytest.approx(2.0**-40)


# Clipping.


def test_unscaled_gradients_are_clipped(runner: Runner) -> None:
    # KN-25, waifu-diffusion#64
    p = leaf([0.0, 0.0])
    train(SGD([p], lr=1.0, max_norm=1.0, loss_scale=LossScale(1024.0), backend=runner.backend), [0.3, 0.4])
    assert p.tolist() == pytest.approx([-0.3, -0.4])


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 3.0, 128.0, 65536.0, 2.0**120])
@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale"])
def test_the_reported_norm_is_unscaled_and_unclipped(runner: Runner, scale: float, unscale_first: bool) -> None:
    # KN-26, deepspeedai/DeepSpeed#8588
    optimizer = SGD([leaf([0.0, 0.0])], max_norm=0.1, loss_scale=LossScale(scale), backend=runner.backend)
    set_true_grads(optimizer, [0.6, 0.8])
    if unscale_first:
        optimizer.unscale_()
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(1.0)


@pytest.mark.parametrize("value", [NAN, INF])
def test_clipping_does_not_spread_an_overflow(runner: Runner, value: float) -> None:
    # KN-27, deepspeedai/DeepSpeed#7171
    optimizer = SGD([leaf([1.0, 2.0])], lr=0.1, max_norm=1.0, loss_scale=LossScale(8.0), backend=runner.backend)
    before = values(optimizer)
    train(optimizer, [value, 1.0])
    assert_same_bits(values(optimizer), before)
    assert float(optimizer.grad_norm) == pytest.approx(value, nan_ok=True)
    assert scale_and_tracker(optimizer) == (4.0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss_scale", [None, "auto"])
@pytest.mark.parametrize("is_set_later", [False, True], ids=["made", "set"])
def test_max_norm_works_without_a_loss_scale(
    runner: Runner, dtype: torch.dtype, loss_scale: str | None, is_set_later: bool
) -> None:
    # KN-28, mlcommons/training#723, deepspeedai/DeepSpeed#3790
    p = leaf([0.0, 0.0], grad=[3.0, 4.0], dtype=dtype)
    optimizer = SGD([p], lr=1.0, max_norm=None if is_set_later else 1.0, loss_scale=loss_scale, backend=runner.backend)
    optimizer.param_groups[0]["max_norm"] = 1.0
    optimizer.step()
    assert p.tolist() == pytest.approx(torch.tensor([-0.6, -0.8], dtype=dtype).tolist())


@pytest.mark.parametrize("max_norm", [-1.0, -INF, NAN])
def test_a_max_norm_below_0_is_refused(max_norm: float) -> None:
    # KN-29, pytorch/pytorch#31367
    with pytest.raises(ValueError, match="max_norm"):
        SGD([leaf(1.0)], max_norm=max_norm)
    with pytest.raises(ValueError, match="max_norm"):
        SGD([{"params": [leaf(1.0)], "max_norm": max_norm}])


@pytest.mark.parametrize("max_norm", [-1.0, NAN])
def test_a_max_norm_below_0_set_in_a_group_is_refused(runner: Runner, max_norm: float) -> None:
    # KN-29, pytorch/torchtitan#4295: read at every step, it would turn the gradient round, or poison it
    p = leaf([0.0, 0.0])
    optimizer = SGD([p], lr=1.0, max_norm=1.0, loss_scale=None, backend=runner.backend)
    optimizer.param_groups[0]["max_norm"] = max_norm
    with pytest.raises(ValueError, match="max_norm"):
        train(optimizer, [3.0, 4.0])
    assert p.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("max_norm", "expected"), [(INF, [-3.0, -4.0]), (None, [-3.0, -4.0]), (0.0, [0.0, 0.0])])
def test_max_norm_at_its_limits(runner: Runner, max_norm: float | None, expected: list[float]) -> None:
    # KN-29, ml-explore/mlx#4058: inf does not clip, 0 leaves a zero gradient, as in torch
    p = leaf([0.0, 0.0])
    optimizer = SGD([p], lr=1.0, max_norm=max_norm, loss_scale=None, backend=runner.backend)
    train(optimizer, [3.0, 4.0])
    assert p.tolist() == expected
    assert float(optimizer.grad_norm) == pytest.approx(5.0)


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_zero_gradients_are_clipped_without_nan(runner: Runner, max_norm: float) -> None:
    # KN-29, OpenNMT/OpenNMT-py#1140
    p = leaf([1.0, 2.0])
    optimizer = SGD([p], lr=1.0, max_norm=max_norm, loss_scale=None, backend=runner.backend)
    train(optimizer, 0.0)
    assert p.tolist() == [1.0, 2.0]
    assert float(optimizer.grad_norm) == 0.0


def test_one_norm_over_groups_of_their_own_lr(runner: Runner) -> None:
    # KN-30, bagua#356
    groups = [{"params": [leaf([0.0])], "lr": 1.0}, {"params": [leaf([0.0])], "lr": 0.1}]
    optimizer = SGD(groups, max_norm=1.0, loss_scale=None, backend=runner.backend)
    train(optimizer, 3.0, 4.0)
    assert float(optimizer.grad_norm) == pytest.approx(5.0)
    assert [p.item() for p in params_of(optimizer)] == pytest.approx([-0.6, -0.08])


@pytest.mark.parametrize("make", [SGD, AdamW])
def test_a_group_excluded_from_decay_stays_undecayed(runner: Runner, make: Any) -> None:
    # KN-30, deepspeedai/DeepSpeed#8440
    groups = [{"params": [leaf(1.0)], "weight_decay": 0.5}, {"params": [leaf(1.0)], "weight_decay": 0.0}]
    optimizer = make(groups, lr=0.1, loss_scale=None, backend=runner.backend)
    train(optimizer, 0.0, 0.0)
    assert [p.item() for p in params_of(optimizer)] == pytest.approx([0.95, 1.0])


# How the norm is gathered.


def test_the_norm_reads_no_slot_that_was_not_written(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    # KN-33, pytorch/pytorch#140066: sizes divided by 1024, and more chunks than a program adds up in one go
    monkeypatch.setattr(table, "MIN_CHUNK", 40)
    sizes = [4800, 4800, 4800, 2400, 0, 0, 4800]
    params = [torch.zeros(size).requires_grad_() for size in sizes]
    optimizer = SGD(params, loss_scale=None, skip_norm=0.0, backend=runner.backend)  # the norm is all we want
    train(optimizer, *[1.0] * 7)
    assert float(optimizer.grad_norm) == pytest.approx(math.sqrt(21600), rel=1e-6)
    train(optimizer, *[None] * 3, 1.0, *[None] * 3)  # a workspace full of larger numbers
    assert float(optimizer.grad_norm) == pytest.approx(math.sqrt(2400), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_norm_of_many_large_tensors(backend: str) -> None:
    # KN-33, pytorch/pytorch#140066
    sizes = [4915200, 4915200, 4915200, 2457600, 0, 0, 4915200]
    params = [torch.zeros(size, device="cuda").requires_grad_() for size in sizes]
    optimizer = SGD(params, loss_scale=None, backend=backend)
    for grad, norm in [(100.0, 470302.03), (1.0, 4703.0203)]:
        for p in params:
            p.grad = torch.full_like(p, grad)
        optimizer.step()
        assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("at", range(4))
def test_one_nonfinite_lane_is_never_overlooked(runner: Runner, value: float, at: int) -> None:
    # KN-34, triton-lang/triton#10291, pytorch/pytorch#100572: a maximum passes over NaN
    p = leaf([1.0] * 4)
    optimizer = SGD([p], loss_scale=LossScale(8.0), backend=runner.backend)
    grads = [1.0, 5.0, 2.0, 3.0]
    grads[at] = value
    train(optimizer, grads)
    assert optimizer.step_was_skipped and p.tolist() == [1.0] * 4
    assert scale_and_tracker(optimizer) == (4.0, 0)

"""The oracle judged: by torch, in float64; by torch's float32 run, which has to fit; by mutants, which must not."""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonamp
from tritonamp.backends import GRAD_NORM, SKIPPED
from tritonamp.testing import oracle
from tritonamp.testing.bounds import assert_within
from tritonamp.testing.reference import TorchReference
from tritonamp.testing.scale import ScaleState

SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
ADAM = {
    "lr": 0.1,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": False,
}

CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    *(
        (torch.optim.SGD, {"momentum": momentum, "weight_decay": decay, "maximize": maximize, **extra})
        for momentum, decay, maximize in itertools.product((0.0, 0.9), (0.0, 0.1), (False, True))
        for extra in ({}, *([{"dampening": 0.5}, {"nesterov": True}] if momentum else []))
    ),
    *(
        (kind, {"weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize, "betas": betas, "eps": eps})
        for kind in (torch.optim.Adam, torch.optim.AdamW)
        for decay, amsgrad, maximize in itertools.product((0.0, 0.1), (False, True), (False, True))
        for betas, eps in (((0.9, 0.999), 1e-8), ((0.0, 0.9999), 1e-3))
    ),
]
IDS = [f"{kind.__name__}-{'-'.join(str(v) for v in options.values())}" for kind, options in CASES]


def _randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _hard(n: int, seed: int, limit: int = 30) -> Tensor:
    """float32 numbers of very different sizes, with zeros, subnormals and ones among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-limit, limit // 4, (n,), generator=generator)
    values = torch.ldexp(torch.randn(n, generator=generator), exponents)
    values[:4] = torch.tensor([0.0, -0.0, 1e-42, 1.0])
    return values[torch.randperm(n, generator=generator)]


def _step_of(reference: TorchReference, grads: list[Tensor | None], **options: Any) -> oracle.Step:
    groups = [group for group in reference.optimizer.param_groups for _ in group["params"]]
    states = [reference.state(i) for i in range(len(reference.params))]
    return oracle.step(reference.params, grads, states, groups, **options)


def _assert_fits(reference: TorchReference, want: oracle.Step) -> float:
    """Check parameters and state against the bounds; returns the largest share of a bound that was used."""
    used = 0.0
    for i, param in enumerate(reference.params):
        state = reference.state(i)
        assert state.keys() == want.states[i].keys()
        pairs = [(param, want.params[i], want.param_errors[i])]
        pairs += [(state[k], want.states[i][k], want.state_errors[i][k]) for k in state]
        for actual, value, error in pairs:
            assert_within(actual, value, error)
            reals = torch.view_as_real(actual) if actual.is_complex() else actual
            share = ((reals.detach().double() - value).abs() / error)[(error > 0) & error.isfinite()]
            used = max(used, float(share.max()) if share.numel() else 0.0)
    return used


@pytest.mark.parametrize(("kind", "options"), CASES, ids=IDS)
def test_agrees_with_torch_in_float64(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Two groups, one clipped, over a loss scale that grows and backs off; a parameter that comes late."""
    shapes = [(7,), (2, 3), ()]
    params = [_randn(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
    groups = [{"params": params[:2], "max_norm": 0.5}, {"params": params[2:], "lr": 0.01}]
    scale = ScaleState(scale=4.0, growth_interval=2)
    reference = TorchReference(kind, groups, scale=scale, lr=0.1, **options)
    for i in range(6):
        grads: list[Tensor | None] = [
            _randn(*shape, seed=100 * i + k, dtype=torch.float64) * scale.scale for k, shape in enumerate(shapes)
        ]
        if i < 2:
            grads[1] = None
        if i == 3:
            assert grads[0] is not None
            grads[0][2] = -math.inf
        want = _step_of(reference, grads, scale=scale)
        outcome = reference.step(grads)
        for k, param in enumerate(reference.params):
            torch.testing.assert_close(param.detach(), want.params[k], rtol=1e-12, atol=1e-12)
            assert reference.state(k).keys() == want.states[k].keys()
            for key, value in reference.state(k).items():
                torch.testing.assert_close(value.double(), want.states[k][key], rtol=1e-12, atol=1e-12)
        assert (outcome.skipped, outcome.scale) == (want.skipped, want.scale) == (i == 3, want.scale)
        assert want.skipped or outcome.norm == pytest.approx(want.norm, rel=1e-7)
        assert isinstance(want.scale, ScaleState)
        scale = want.scale


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=IDS)
def test_bounds_hold_for_torch_in_float32(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], max_norm: float | None
) -> None:
    params = [_hard(300, seed=1), _hard(200, seed=2)]
    scale = ScaleState(scale=100.0)
    reference = TorchReference(kind, params, scale=scale, max_norm=max_norm, lr=0.1, **options)
    used = 0.0
    for i in range(5):
        grads: list[Tensor | None] = [_hard(300, seed=3 + i) * 100, _hard(200, seed=30 + i) * 100]
        want = _step_of(reference, grads, scale=scale)
        reference.step(grads)
        used = max(used, _assert_fits(reference, want))
    # A bound of which nothing is ever used would prove little.
    assert used > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_bounds_hold_for_low_precision_rounded_once(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    low = _randn(200, seed=0).to(dtype)
    reference = TorchReference(kind, [low], max_norm=1.0, lr=0.1, weight_decay=0.1)
    groups = list(reference.optimizer.param_groups)
    for i in range(4):
        grad = _hard(200, seed=i, limit=12).to(dtype)
        want = oracle.step([low], [grad], [reference.state(0)], groups)
        reference.step([grad])
        low = reference.params[0].detach().to(dtype)
        assert_within(low, want.params[0], want.param_errors[0])
        for key, value in reference.state(0).items():
            assert_within(value, want.states[0][key], want.state_errors[0][key])


def test_bounds_hold_for_complex_parameters_as_pairs_of_reals() -> None:
    param = torch.complex(_randn(9, seed=0), _randn(9, seed=1))
    reference = TorchReference(torch.optim.Adam, [param], lr=0.1, amsgrad=True, weight_decay=0.1)
    for i in range(3):
        grad = torch.complex(_randn(9, seed=10 + i), _hard(9, seed=20 + i))
        want = _step_of(reference, [grad])
        assert want.params[0].shape == (9, 2)
        reference.step([grad])
        _assert_fits(reference, want)


def _adam_in_float32(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, h: dict[str, Any], mutant: str) -> Tensor:
    """One AdamW step with clipping, or one of the ways to get it wrong."""
    beta1, beta2 = h["betas"]
    norm = float(g.double().norm()) * (1 + 1e-6 * (mutant == "norm off by 1e-6"))
    if mutant == "decay in the norm":
        norm = float((g + h["weight_decay"] * p).double().norm())
    clip = min(1.0, h["max_norm"] / (norm + 1e-6))
    if mutant != "no clipping":
        g = g * clip
    decay = 1 - h["lr"] * h["weight_decay"]
    if mutant == "coupled decay":
        g, decay = g + h["weight_decay"] * p, 1.0
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    correction1, correction2 = 1 - beta1**t, 1 - beta2**t
    if mutant == "no bias correction":
        correction1 = correction2 = 1.0
    if mutant == "correction one step behind":
        correction1, correction2 = 1 - beta1 ** (t - 1), 1 - beta2 ** (t - 1)
    if mutant == "correction in float32":
        correction2 = float(1 - torch.tensor(beta2) ** t)
    if mutant == "eps inside the root":
        denom = (v / correction2 + h["eps"]).sqrt()
    elif mutant == "eps before the correction":
        denom = (v.sqrt() + h["eps"]) / math.sqrt(correction2)
    else:
        denom = v.sqrt() / math.sqrt(correction2) + h["eps"]
    update = h["lr"] / correction1 * m / denom
    return (p - update) * decay if mutant == "decay after the update" else p * decay - update


MUTANTS = [
    "no bias correction",
    "correction one step behind",
    "correction in float32",
    "eps inside the root",
    "eps before the correction",
    "no clipping",
    "decay in the norm",
    "coupled decay",
    "decay after the update",
]


@pytest.mark.parametrize("mutant", ["none", *MUTANTS])
def test_bounds_reject_mutants_of_adam(mutant: str) -> None:
    h = {**ADAM, "betas": (0.9, 0.9999), "weight_decay": 0.1, "max_norm": 1.0, "decoupled_weight_decay": True}
    p, g = _randn(100, seed=0) * 0.1, _randn(100, seed=1) * 3
    m, v = _randn(100, seed=2) * 0.1, _randn(100, seed=3).square() * 0.01
    # A few small moments, so that eps matters.
    m[:10], v[:10], g[:10] = 1e-9, 1e-17, 1e-8
    state = {"step": torch.tensor(1.0), "exp_avg": m, "exp_avg_sq": v}
    want = oracle.step([p], [g], [state], [h])
    actual = _adam_in_float32(p, g, m, v, 2, h, mutant)
    if mutant == "none":
        assert_within(actual, want.params[0], want.param_errors[0])
    else:
        with pytest.raises(AssertionError, match="out of bounds"):
            assert_within(actual, want.params[0], want.param_errors[0])


@pytest.mark.parametrize(
    ("max_norm", "size", "wrong"),
    [
        (0.5, 1.0, lambda norm, max_norm: max_norm / (norm * (1 + 1.2e-6) + 1e-6)),
        (0.5, 1.0, lambda norm, max_norm: max_norm / (norm + 1e-6) * 1024),
        (0.5, 1.0, lambda norm, max_norm: max_norm / (norm * 1024 + 1e-6)),
        (0.5, 1.0, lambda norm, max_norm: 1.0),
        (1e3, 1.0, lambda norm, max_norm: max_norm / (norm + 1e-6)),
        (1e3, 1.0, lambda norm, max_norm: min(1.0, max_norm / (norm * 1024 + 1e-6))),
        (1e-4, 1e-3, lambda norm, max_norm: max_norm / norm),
    ],
    ids=["norm off", "not unscaled", "scaled norm", "not clipped", "not capped at 1", "scaled norm, large", "no 1e-6"],
)
def test_bounds_reject_wrong_clipping(max_norm: float, size: float, wrong: Callable[[float, float], float]) -> None:
    """By SGD with lr 1 a parameter of 0 becomes the gradient, negated."""
    g = _randn(50, seed=0) * size
    norm = float(g.double().norm())
    want = oracle.step([torch.zeros(50)], [g * 1024], [{}], [{**SGD, "lr": 1.0, "max_norm": max_norm}], scale=1024.0)
    assert_within(-g * min(1.0, max_norm / (norm + 1e-6)), want.params[0], want.param_errors[0])
    with pytest.raises(AssertionError, match="out of bounds"):
        assert_within(-g * wrong(norm, max_norm), want.params[0], want.param_errors[0])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_nonfinite_gradient_leaves_everything_unchanged(bad: float) -> None:
    params = [torch.ones(2), torch.full((2,), math.nan), torch.zeros(3, dtype=torch.bfloat16)]
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    grads: list[Tensor | None] = [torch.tensor([1.0, bad]), torch.ones(2), None]
    want = oracle.step(params, grads, [state, {}, {}], [{**ADAM, "max_norm": 1.0}] * 3, scale=ScaleState(16.0))
    assert want.found_inf and want.skipped and not math.isfinite(want.norm)
    for param, value, error in zip(params, want.params, want.param_errors, strict=True):
        assert_within(param, value, error)
        assert (error == 0).all()
    assert want.states[0].keys() == state.keys() and want.states[1:] == [{}, {}]
    for key, value in state.items():
        assert torch.equal(want.states[0][key], value.double())
    assert want.scale == ScaleState(8.0, hysteresis_tracker=1)


def test_a_finite_gradient_that_unscaling_overflows_skips() -> None:
    want = oracle.step([torch.ones(1)], [torch.tensor([3e38])], [{}], [SGD], scale=ScaleState(0.5))
    assert want.found_inf and want.skipped and want.norm == math.inf


def test_a_nonfinite_parameter_is_no_overflow() -> None:
    want = oracle.step([torch.tensor([math.inf, 1.0])], [torch.ones(2)], [{}], [SGD])
    assert not want.found_inf
    assert_within(torch.tensor([math.inf, 0.9]), want.params[0], want.param_errors[0])


def test_nothing_to_do_is_a_no_op() -> None:
    params, scale = [torch.ones(2), torch.empty(0)], ScaleState(16.0, growth_tracker=1)
    grads: list[Tensor | None] = [None, torch.empty(0)]
    want = oracle.step(params, grads, [{}, {}], [{**ADAM, "weight_decay": 1.0}] * 2, scale=scale, found_inf=True)
    assert (want.norm, want.found_inf, want.skipped, want.scale) == (0.0, False, False, scale)
    assert torch.equal(want.params[0], torch.ones(2, dtype=torch.float64)) and want.states == [{}, {}]


def test_a_norm_beyond_skip_norm_skips_without_backoff() -> None:
    scale = ScaleState(4.0)
    want = oracle.step([torch.ones(1)], [torch.tensor([12.0])], [{}], [SGD], scale=scale, skip_norm=2.0)
    assert (want.norm, want.found_inf, want.skipped) == (3.0, False, True)
    assert want.scale == replace(scale, growth_tracker=1)


def test_a_norm_beyond_float32_is_reported_infinite_and_clips_all_the_same() -> None:
    g = torch.full((2,), 3e38)
    want = oracle.step([torch.zeros(2)], [g], [{}], [{**SGD, "lr": 1.0, "max_norm": 1.0}])
    assert want.norm == math.inf and not want.found_inf
    assert_within(torch.full((2,), -(0.5**0.5)), want.params[0], want.param_errors[0])


def test_norms_at_the_ends_of_float64_are_right() -> None:
    for size in (1e-300, 1e-200, 1e200, 1e300):
        g = torch.tensor([3 * size, 4 * size], dtype=torch.float64)
        assert oracle._global_norm([g]) == pytest.approx(5 * size, rel=1e-15)


def test_overflow_of_the_updates_own_arithmetic_follows_ieee() -> None:
    g = torch.tensor([1e21, 1.0])
    reference = TorchReference(torch.optim.Adam, [torch.ones(2)], lr=0.1)
    want = _step_of(reference, [g])
    assert want.states[0]["exp_avg_sq"][0] == math.inf and want.params[0][0] == 1.0
    reference.step([g])
    _assert_fits(reference, want)


def test_zero_gradients_are_exact_even_with_eps_zero() -> None:
    want = oracle.step([torch.ones(1, dtype=torch.float16)], [torch.zeros(1)], [{}], [ADAM])
    assert want.params[0].item() == 1.0
    want = oracle.step([torch.ones(1)], [torch.zeros(1)], [{}], [{**ADAM, "eps": 0.0}])
    assert want.params[0].isnan().all()


def test_master_weights_are_the_truth() -> None:
    p = torch.ones(1, dtype=torch.bfloat16)
    states: list[dict[str, Tensor]] = [{}]
    for _ in range(10):
        group = {**SGD, "lr": 1e-3, "master_weights": True}
        want = oracle.step([p], [torch.ones(1)], states, [group])
        states = [{key: value.float() for key, value in want.states[0].items()}]
    assert states[0]["master_param"].item() == pytest.approx(0.99)
    # The bound of the parameter is half an ulp of bfloat16, near 1 from below; the master's is a float32 one.
    assert want.param_errors[0].item() == pytest.approx(2.0**-9, rel=1e-3)
    assert want.state_errors[0]["master_param"].item() < 1e-6


def test_stochastic_rounding_gives_the_neighbour_that_the_seed_says() -> None:
    p, g = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 0.01)
    group = {**SGD, "lr": 1.0, "rounding": "stochastic"}
    steps = [oracle.step([p], [g], [{}], [{**group, "rounding_seed": seed}]) for seed in range(20)]
    assert {float(step.params[0]) for step in steps} == {1 - 2.0**-7, 1 - 3 * 2.0**-8}
    assert all(float(step.param_errors[0]) == 0 for step in steps)


def test_nothing_is_modified() -> None:
    params = [_randn(3, seed=0, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.float16)]
    grads: list[Tensor | None] = [torch.ones_like(p) for p in params]
    states = [{"step": torch.tensor(1.0), "exp_avg": p.clone(), "exp_avg_sq": p.square()} for p in params]
    before = copy.deepcopy((params, grads, states))
    want = oracle.step(params, grads, states, [{**ADAM, "max_norm": 0.1}] * 3, scale=ScaleState(4.0))
    for value in [*want.params, *want.states[0].values()]:
        value.zero_()
    torch.testing.assert_close((params, grads, states), before, rtol=0, atol=0)


def test_expect_checks_a_live_optimizer() -> None:
    params = [torch.nn.Parameter(_randn(5, seed=i)) for i in range(3)]
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], weight_decay=0.1)
    for i in range(3):
        params[0].grad, params[2].grad = _randn(5, seed=10 + i), _randn(5, seed=20 + i)
        expected = oracle.expect(optimizer)
        optimizer.step()
        expected.check()
    expected = oracle.expect(optimizer)
    with pytest.raises(AssertionError, match="param 0: 5 of 5 elements are out of bounds"):
        expected.check()
    optimizer.step()
    optimizer.state[params[2]]["exp_avg_sq"].mul_(1 + 1e-6)
    with pytest.raises(AssertionError, match="state 'exp_avg_sq' of param 2"):
        expected.check()


def test_an_expectation_checks_what_the_optimizer_reports() -> None:
    param = torch.nn.Parameter(_randn(5, seed=0))
    optimizer = tritonamp.AdamW([param], loss_scale=4.0, backend="torch")

    def overflow() -> oracle.Expectation:
        optimizer.scale(torch.ones(()))
        param.grad = torch.tensor([1.0, math.inf, 0.0, 0.0, 0.0])
        expected = oracle.expect(optimizer)
        optimizer.step()
        expected.check()
        return expected

    expected = overflow()
    optimizer.state[param]["exp_avg"][3] = 1.0
    with pytest.raises(AssertionError, match="state 'exp_avg' of param 0: expected none before an applied step"):
        expected.check()
    expected = overflow()
    optimizer._outcome_state()[GRAD_NORM] = 2.0
    with pytest.raises(AssertionError, match=r"grad_norm: 2\.0 although a gradient is not finite"):
        expected.check()
    expected = overflow()
    optimizer._outcome_state()[SKIPPED] = 0.0
    with pytest.raises(AssertionError, match=r"\(found_inf, skipped\): \(True, False\), expected \(True, True\)"):
        expected.check()


def test_an_expectation_misses_state_that_is_not_there() -> None:
    param = torch.nn.Parameter(_randn(5, seed=0))
    optimizer = torch.optim.SGD([param], momentum=0.9)
    param.grad = _randn(5, seed=1)
    expected = oracle.expect(optimizer)
    optimizer.step()
    del optimizer.state[param]["momentum_buffer"]
    with pytest.raises(AssertionError, match="state 'momentum_buffer' of param 0: expected a tensor, got None"):
        expected.check()


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="got 1 params, 2 grads, 1 states and 1 groups"):
        oracle.step([torch.ones(1)], [None, None], [{}], [SGD])

"""The strategies reach what they promise, stay small, and give the same tensors at each call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tritonamp
from tritonamp.testing import strategies as s

QUICK = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def drawn(strategy: st.SearchStrategy[Any], n: int) -> list[Any]:
    """What Hypothesis draws first, shrinking nothing."""
    examples = []

    @settings(QUICK, max_examples=n, phases=[Phase.generate], database=None)
    @given(strategy)
    def collect(example: Any) -> None:
        examples.append(example)

    collect()
    return examples


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_reach_every_class(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    classes: list[Callable[[float], bool]] = [
        lambda x: x == 0 and math.copysign(1, x) < 0,
        lambda x: 0 < abs(x) < info.tiny,
        lambda x: x == info.tiny,
        lambda x: abs(x) == info.max,
        lambda x: abs(x) > 4 and math.frexp(x)[0] in (0.5, -0.5),
        lambda x: 0.1 < abs(x) < 10 and math.frexp(x)[0] not in (0.5, -0.5, 0.75),
    ]
    examples = drawn(s.values(dtype), 300)
    assert [any(map(condition, examples)) for condition in classes] == [True] * len(classes)
    assert all(map(math.isfinite, examples))
    examples = drawn(s.values(dtype, nonfinite=True), 100)
    assert math.inf in examples and -math.inf in examples and any(map(math.isnan, examples))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_exact(dtype: torch.dtype) -> None:
    @QUICK
    @given(s.values(dtype))
    def check(x: float) -> None:
        assert torch.tensor(x, dtype=torch.float64).to(dtype).item() == x

    check()


def test_problems_reach_every_kind_of_tensor() -> None:
    tensors = drawn(s.tensor_specs(dtypes=DTYPES), 700)
    assert {math.prod(shape) for shape in drawn(s.shapes(), 1500)} >= {
        0,
        1,
        7,
        8,
        9,
        127,
        128,
        129,
        511,
        512,
        513,
        1023,
        1024,
        1025,
    }
    conditions: list[Callable[[s.TensorSpec], Any]] = [
        lambda t: t.shape == (),
        lambda t: len(t.shape) >= 3,
        lambda t: t.layout == "transposed" and len(t.shape) > 1,
        lambda t: t.layout == "misaligned" and t.grad_layout == "sliced",
        lambda t: t.grad_layout == "expanded" and len(t.shape) > 1,
        lambda t: t.dtype == torch.float64,
        lambda t: t.dtype == torch.bfloat16 and t.grad_dtype == torch.float32,
        lambda t: t.grad == "none",
        lambda t: t.grad == "hard",
        lambda t: t.grad_hard,
    ]
    assert [any(map(condition, tensors)) for condition in conditions] == [True] * len(conditions)


@QUICK
@given(s.problems(dtypes=DTYPES), s.step_specs())
def test_problems_are_small_and_repeat_themselves(problem: s.Problem, step: s.StepSpec) -> None:
    assert 1 <= len(problem.tensors) <= 6
    first, second = problem.params(), problem.params()
    assert sum(param.numel() for param in first) <= 4096
    for params in (first, second):
        problem.set_grads(params, 8.0, step)
    for i, (a, b, spec) in enumerate(zip(first, second, problem.tensors, strict=True)):
        assert a.is_leaf and a.requires_grad and a.shape == spec.shape and a.dtype == spec.dtype
        assert torch.equal(a, b) and a.isfinite().all()
        assert (a.grad is None) == (b.grad is None) == (spec.grad == "none" or i in step.missing)
        if a.grad is not None and b.grad is not None:
            assert torch.equal(a.grad.nan_to_num(), b.grad.nan_to_num())
            assert a.grad.dtype == spec.grad_dtype and a.grad.shape == spec.shape


@QUICK
@given(s.problems(dtypes=DTYPES), s.step_specs(), st.sampled_from([1.0, 2.0**60, 2.0**-60]))
def test_gradients_are_finite_but_for_one_element(problem: s.Problem, step: s.StepSpec, scale: float) -> None:
    params = problem.params()
    problem.set_grads(params, scale, step)
    grads = [param.grad for param in params if param.grad is not None]
    bad = [grad for grad in grads if not grad.isfinite().all()]
    assert len(bad) == (step.overflow is not None and problem.has_elements(step))
    assert problem.has_elements(step) == any(grad.numel() > 0 for grad in grads)


def test_layouts_are_what_they_say() -> None:
    def of(layout: s.Layout) -> torch.Tensor:
        return s.TensorSpec((3, 8), layout=layout).param()

    assert of("contiguous").is_contiguous() and of("misaligned").storage_offset() == 1
    assert of("transposed").stride() == (1, 3) and of("sliced").stride() == (16, 2)
    for layout in ("misaligned", "transposed", "sliced"):
        assert torch.equal(of(layout), of("contiguous"))  # type: ignore[arg-type]
    expanded = s.TensorSpec((3, 8), grad_layout="expanded").gradient()
    assert expanded is not None and expanded.stride() == (0, 1)


@QUICK
@given(s.loss_scales(), s.loss_scales(bounds=False))
def test_loss_scales_are_accepted(settings: dict[str, Any], unbounded: dict[str, Any]) -> None:
    tritonamp.LossScale(**settings)
    tritonamp.LossScale(**unbounded)
    torch.amp.GradScaler("cpu", **unbounded)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_hyperparameters_are_accepted(name: str) -> None:
    param = torch.zeros(1, requires_grad=True)

    @QUICK
    @given(s.hyperparameters(name), s.hyperparameters(name, with_max_norm=True))
    def check(options: dict[str, Any], clipped: dict[str, Any]) -> None:
        getattr(torch.optim, name)([param], **options)
        getattr(tritonamp, name)([param], **clipped)

    check()


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 'SGD', 'Adam' or 'AdamW', got 'Lion'"):
        s.hyperparameters("Lion")

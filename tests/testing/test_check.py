"""``check_optimizer`` finds what is wrong, and nothing where nothing is: on torch's, ours, and broken optimizers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from conftest import Runner
from hypothesis import strategies as st
from torch import Tensor

import tritonamp
from tritonamp.testing import strategies
from tritonamp.testing.check import LAWS, Adapter, GradScalerAdapter, OwnScaleAdapter, Report, check_optimizer
from tritonamp.testing.problems import Layout

check = functools.partial(check_optimizer, derandomize=True, raise_on_failure=False, max_examples=20)
# GradScaler cannot unscale gradients that were expanded.
WITHOUT_EXPANDED: tuple[Layout, ...] = ("contiguous", "misaligned", "transposed", "sliced")
DENSE: tuple[Layout, ...] = ("contiguous", "misaligned")
TORCH_2_13 = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="about faults of torch 2.13")


def broken(report: Report) -> set[str]:
    return {finding.law for finding in report.findings}


@pytest.mark.parametrize("rule", ["SGD", "Adam", "AdamW"])
def test_torch_nonfused_with_a_scaler_is_clean(rule: str) -> None:
    make = functools.partial(getattr(torch.optim, rule), foreach=False, fused=False)
    report = check(make, rule=rule, adapter=GradScalerAdapter, layouts=WITHOUT_EXPANDED)
    assert str(report).startswith("no fault found"), report
    assert report.laws == tuple(law for law in LAWS if law != "nothing")


@TORCH_2_13
def test_torch_scaler_refuses_expanded_gradients() -> None:
    make = functools.partial(torch.optim.SGD, foreach=False, fused=False)
    (finding,) = check(make, rule="SGD", adapter=GradScalerAdapter, laws=["scale"]).findings
    assert "more than one element of the written-to tensor refers to a single memory location" in finding.message
    assert "grad_layout='expanded'" in str(finding)


@TORCH_2_13
def test_torch_fused_reads_strided_gradients_wrongly() -> None:
    make = functools.partial(torch.optim.AdamW, fused=True)
    (finding,) = check(make, adapter=GradScalerAdapter, layouts=WITHOUT_EXPANDED, laws=["values"]).findings
    assert "TensorSpec(shape=(2,), grad_layout='sliced')" in str(finding)


@TORCH_2_13
def test_torch_fused_sgd_fails_on_a_late_parameter() -> None:
    make = functools.partial(torch.optim.SGD, fused=True)
    options = st.just({"lr": 0.1, "momentum": 0.9})
    report = check(make, adapter=GradScalerAdapter, layouts=DENSE, laws=["scale"], options=options)
    assert "TypeError: expected Tensor as element 0 in argument 2, but got NoneType" in str(report)


def test_torch_fused_on_dense_tensors_is_clean() -> None:
    """But for amsgrad, whose maximum drops a NaN."""
    make = functools.partial(torch.optim.AdamW, fused=True)
    options = strategies.hyperparameters("AdamW").filter(lambda options: not options["amsgrad"])
    report = check(make, adapter=GradScalerAdapter, layouts=DENSE, options=options, rule="AdamW")
    assert not report.findings, report


@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
@pytest.mark.parametrize("adapter", [Adapter, OwnScaleAdapter, GradScalerAdapter])
def test_ours_is_clean(runner: Runner, rule: str, adapter: type[Adapter]) -> None:
    make = functools.partial(getattr(tritonamp, rule), backend=runner.backend)
    if adapter is not OwnScaleAdapter:
        make = functools.partial(make, loss_scale=None)
    layouts = WITHOUT_EXPANDED if adapter is GradScalerAdapter else None
    # Each set of dtypes is a kernel of its own, to be compiled.
    dtypes = [torch.float32, torch.float16, torch.bfloat16][: 3 if runner.backend == "torch" else 1]
    max_examples = 20 if runner.backend == "torch" else 4
    report = check(
        make,
        rule=rule,
        adapter=adapter,
        dtypes=dtypes,
        grad_dtypes=dtypes,
        layouts=layouts,
        max_examples=max_examples,
    )
    assert not report.findings, report


class Homemade(torch.optim.Optimizer):
    """Adam, one parameter after the other, with a fault if asked for."""

    fault: ClassVar[str] = ""
    _step_supports_amp_scaling = True

    def __init__(self, params: list[Tensor], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.first_lr = lr
        self.counts: dict[Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found_inf = getattr(self, "found_inf", None)
        is_bad = found_inf is not None and bool(found_inf)
        grad_scale = getattr(self, "grad_scale", None)
        inv_scale = 1.0 if grad_scale is None else 1 / grad_scale.double()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad.double() * inv_scale, group, is_bad)
                elif self.fault == "decays without a gradient":
                    param.mul_(0.5)
                elif self.fault == "counts without a gradient":
                    self.state[param]["step"] = torch.ones(())
                elif self.fault == "forgets without a gradient":
                    self.state.pop(param, None)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], is_bad: bool) -> None:
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        if self.fault == "reads lr once":
            lr = self.first_lr
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        if not is_bad or self.fault == "counts skipped steps":
            state["step"] += 1
        if is_bad:
            return
        self.counts[param] = self.counts.get(param, 0) + 1
        t = self.counts[param] if self.fault == "forgets the count" else float(state["step"])
        m = state["exp_avg"].double().lerp(grad, 1 - beta1)
        v = state["exp_avg_sq"].double() * beta2 + grad * grad * (1 - beta2)
        m = state["exp_avg"].copy_(m).double()
        v = state["exp_avg_sq"].copy_(v).double()
        root = v / (1 - beta2**t)
        denom = (root + eps).sqrt() if self.fault == "eps inside the root" else root.sqrt() + eps
        param.copy_(param - lr / (1 - beta1**t) * m / denom)


OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.1, 1e-3]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
    }
)
FAULTS = {
    "": set(),
    "eps inside the root": {"values", "hyperparameters"},
    "counts skipped steps": {"overflow"},
    "reads lr once": {"hyperparameters"},
    "forgets the count": {"resume"},
}


@pytest.mark.parametrize(("fault", "laws"), FAULTS.items())
def test_each_fault_breaks_its_laws(fault: str, laws: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Homemade, "fault", fault)
    report = check(Homemade, rule="Adam", adapter=GradScalerAdapter, options=OPTIONS, layouts=DENSE)
    assert broken(report) == laws, report


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("decays without a gradient", ", element 0 (flat): "),
        ("counts without a gradient", " is not zero: [1.0]"),
        ("forgets without a gradient", "vanished: [("),
    ],
)
def test_an_update_without_a_gradient_is_found(fault: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Homemade, "fault", fault)
    laws, n = ["absent"], 200  # until the first is found
    (finding,) = check(Homemade, adapter=Adapter, options=OPTIONS, layouts=DENSE, laws=laws, max_examples=n).findings
    assert message in finding.message


class DoubledScale(OwnScaleAdapter):
    """Doubles the scale after every step, with gradients or without."""

    def step(self) -> None:
        super().step()
        self._own.loss_scale.update(min(2 * self._own.loss_scale.get_scale(), 2.0**100))


def test_a_scale_that_moves_by_itself_is_found() -> None:
    make = functools.partial(tritonamp.SGD, backend="torch")
    report = check(make, rule="SGD", adapter=DoubledScale, layouts=DENSE, laws=["nothing", "scale"])
    assert broken(report) == {"nothing", "scale"}
    assert all(finding.message.startswith("loss scale: ScaleState(scale=") for finding in report.findings)


def test_findings_are_raised_with_the_smallest_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Homemade, "fault", "counts skipped steps")
    with pytest.raises(AssertionError) as raised:
        check(Homemade, rule="Adam", adapter=GradScalerAdapter, options=OPTIONS, layouts=DENSE, raise_on_failure=True)
    text = str(raised.value)
    assert "overflow: a step with one non-finite gradient changes nothing but the loss scale; but" in text
    assert "state 'step' of param 0, element 0 (flat): 2.0, was 1.0" in text
    assert "problem = Problem(tensors=[TensorSpec(shape=(1,))])" in text
    assert "steps = [StepSpec(overflow=Overflow(tensor=0, position=0, value=inf))]" in text


def test_a_reference_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a rule that the oracle does not know."""
    options = st.fixed_dictionaries({"lr": st.sampled_from([0.1, 1e-3]), "alpha": st.sampled_from([0.9, 0.99])})

    def wrong(params: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(params, **{**options, "eps": 1e-3})

    laws = ["values", "absent", "resume"]
    assert not check(torch.optim.RMSprop, torch.optim.RMSprop, options=options, laws=laws).findings
    assert broken(check(wrong, torch.optim.RMSprop, options=options, laws=laws)) == {"values"}


def test_laws_that_do_not_apply_are_refused() -> None:
    with pytest.raises(ValueError, match="with Adapter, got 'scale'"):
        check(torch.optim.AdamW, laws=["scale"])
    with pytest.raises(ValueError, match="got 'speed'"):
        check(torch.optim.AdamW, laws=["speed"])

"""One call that looks for faults in an optimizer, of whatever origin, and shows the smallest example of each.

    report = check_optimizer(MyAdamW, rule="AdamW", adapter=GradScalerAdapter)

Examples come from :mod:`tritonamp.testing.strategies`, and are shrunk by Hypothesis, which has to be installed.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.optim import Optimizer

import tritonamp
from tritonamp.testing import oracle
from tritonamp.testing.bounds import Format, assert_within
from tritonamp.testing.scale import ScaleState, next_scale
from tritonamp.testing.strategies import Layout, Problem, hyperparameters, loss_scales, problems, sequences

__all__ = ["LAWS", "Adapter", "Finding", "GradScalerAdapter", "OwnScaleAdapter", "Report", "check_optimizer"]

Make = Callable[..., Optimizer]

LAWS = {
    "values": "every step computes what the float64 reference computes, up to rounding",
    "overflow": "a step with one non-finite gradient changes nothing but the loss scale",
    "absent": "a parameter without a gradient, or without elements, is left as it is",
    "nothing": "a step without any gradient changes nothing",
    "resume": "save, load and continue gives the same bits as to continue",
    "hyperparameters": "a changed hyperparameter takes effect in the next step",
    "scale": "the loss scale grows and backs off by GradScaler's rule",
}
"""The laws by their names."""

# They can be changed at any time; others decide which state there is.
_CHANGEABLE = ("lr", "weight_decay", "betas", "eps", "dampening")


class Adapter:
    """Drives an optimizer that has no loss scale; base of the adapters for those that have.

    Attributes:
        scales: whether there is a loss scale.
        takes_nothing: whether a step may be made when there is no gradient at all.
        optimizer: what is driven.
    """

    scales = False
    takes_nothing = True

    def __init__(self, make: Make, params: list[Tensor], options: Mapping[str, Any], scale: Mapping[str, Any]) -> None:
        """Make the optimizer.

        Args:
            make: the optimizer's class, or a function that is called as one.
            params: parameters.
            options: hyperparameters, keyword arguments of ``make``.
            scale: settings of a dynamic loss scale, keyword arguments of ``torch.amp.GradScaler``.
        """
        del scale  # there is none
        self.optimizer = make(params, **options)

    def scale(self) -> float:
        """Scale a loss; returns what it is multiplied by."""
        return 1.0

    def step(self) -> None:
        """Make the step that follows the backward pass, and whatever ends the iteration."""
        self.optimizer.step()

    def scale_state(self) -> ScaleState | None:
        """Return the loss scale as it is now."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return all that is saved."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned."""
        self.optimizer.load_state_dict(state_dict["optimizer"])


class GradScalerAdapter(Adapter):
    """Drives an optimizer with ``torch.amp.GradScaler``, which refuses a step without any gradient."""

    scales = True
    takes_nothing = False

    def __init__(self, make: Make, params: list[Tensor], options: Mapping[str, Any], scale: Mapping[str, Any]) -> None:
        super().__init__(make, params, options, scale)
        device = next((param.device.type for param in params), "cpu")
        self.scaler = torch.amp.GradScaler(device, **scale)

    def scale(self) -> float:
        """As ``GradScaler.scale``."""
        device = self.optimizer.param_groups[0]["params"][0].device
        return float(self.scaler.scale(torch.ones((), device=device)))

    def step(self) -> None:
        """``GradScaler.step`` and ``update``."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def scale_state(self) -> ScaleState:
        """The scaler's state."""
        return ScaleState.from_state_dict(self.scaler.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Both state dicts."""
        return {"scaler": self.scaler.state_dict(), **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both."""
        super().load_state_dict(state_dict)
        self.scaler.load_state_dict(state_dict["scaler"])


class OwnScaleAdapter(Adapter):
    """Drives an optimizer of tritonamp with its own loss scale."""

    scales = True

    def __init__(self, make: Make, params: list[Tensor], options: Mapping[str, Any], scale: Mapping[str, Any]) -> None:
        super().__init__(make, params, {**options, "loss_scale": tritonamp.LossScale(**scale)}, scale)
        self._own: Any = self.optimizer

    def scale(self) -> float:
        """As the optimizer's ``scale``."""
        return float(self._own.scale(torch.ones(())))

    def scale_state(self) -> ScaleState:
        """The state of the optimizer's loss scale."""
        return ScaleState.from_state_dict(self._own.loss_scale.state_dict())


@dataclass(frozen=True)
class Finding:
    """A law that does not hold.

    Attributes:
        law: its name in :data:`LAWS`.
        example: the smallest example found: problem, options, scale, steps.
        message: what went wrong.
    """

    law: str
    example: Mapping[str, Any]
    message: str

    def __str__(self) -> str:
        lines = [f"{self.law}: {LAWS[self.law]}; but", f"    {self.message}", "  with"]
        lines += [f"    {name} = {_brief(value)}" for name, value in self.example.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """What a run of :func:`check_optimizer` has found.

    Attributes:
        laws: the names of the laws that were checked.
        findings: one for each that does not hold.
    """

    laws: tuple[str, ...]
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.findings:
            return f"no fault found; checked: {', '.join(self.laws)}"
        broken = f"{len(self.findings)} of {len(self.laws)} laws do not hold"
        return "\n\n".join([broken, *map(str, self.findings)])


def _brief(value: object) -> str:
    """As ``repr``, without the fields of dataclasses that have their default value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [
            f"{f.name}={_brief(getattr(value, f.name))}"
            for f in dataclasses.fields(value)
            if getattr(value, f.name) != f.default
        ]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, (list, tuple)) and any(map(dataclasses.is_dataclass, value)):
        return f"[{', '.join(map(_brief, value))}]"
    return repr(value)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, copied, in logical order."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def _snapshot(optimizer: Optimizer) -> dict[tuple[int, str], Tensor]:
    """Parameters and state tensors by the parameter's number and their name."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = {(i, "param"): param.detach().clone() for i, param in enumerate(params)}
    for i, state in optimizer.state_dict()["state"].items():
        found.update({(i, key): value.clone() for key, value in state.items() if isinstance(value, Tensor)})
    return found


def _assert_same(now: Mapping[tuple[int, str], Tensor], before: Mapping[tuple[int, str], Tensor]) -> None:
    """The same bits; state may be new if it is zero: it was made ahead of the first applied step."""
    for (i, name), tensor in now.items():
        old = before.get((i, name))
        what = f"param {i}" if name == "param" else f"state {name!r} of param {i}"
        if old is None and bool((tensor != 0).any()):
            raise AssertionError(f"{what} is not zero: {tensor.flatten()[:4].tolist()}")
        if old is not None and not torch.equal(_bits(tensor), _bits(old)):
            at = int((_bits(tensor) != _bits(old)).nonzero()[0]) // tensor.element_size()
            raise AssertionError(
                f"{what}, element {at} (flat): {tensor.flatten()[at].item()!r}, was {old.flatten()[at].item()!r}"
            )
    if before.keys() - now.keys():
        raise AssertionError(f"vanished: {sorted(before.keys() - now.keys())}")


class _Oracle:
    """Judges a step by the float64 oracle."""

    def __init__(self, adapter: Adapter, rule: str) -> None:
        self.adapter = adapter
        self.other_groups: list[dict[str, Any]] = []
        # What an optimizer's groups may not tell.
        self._defaults: dict[str, Any] = {
            "maximize": False,
            "amsgrad": False,
            "decoupled_weight_decay": rule == "AdamW",
        }
        self._defaults |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}

    def step(self, scale: float) -> None:
        """Make the step and check it."""
        del scale  # the scale's state says more
        optimizer = self.adapter.optimizer
        pairs = [(p, {**self._defaults, **group}) for group in optimizer.param_groups for p in group["params"]]
        states = optimizer.state_dict()["state"]
        want = oracle.step(
            [p for p, _ in pairs],
            [p.grad for p, _ in pairs],
            [states.get(i, {}) for i in range(len(pairs))],
            [group for _, group in pairs],
            scale=self.adapter.scale_state(),
        )
        for (param, _), state in zip(pairs, want.states, strict=True):
            if param.numel() == 0:
                state.pop("step", None)  # torch counts steps that have nothing to update, too
        self.adapter.step()
        # The scale has a law of its own, and may be another object's.
        oracle.Expectation(optimizer, replace(want, scale=None)).check()


class _Reference:
    """Judges a step by another optimizer, which runs in float64 on copies of the parameters."""

    def __init__(self, adapter: Adapter, make: Make, options: Mapping[str, Any], rtol: float) -> None:
        self.adapter = adapter
        self.rtol = rtol
        self.params = [p for group in adapter.optimizer.param_groups for p in group["params"]]
        self.copies = [p.detach().cpu().double().clone().requires_grad_() for p in self.params]
        self.reference = make(self.copies, **options)
        self.other_groups = self.reference.param_groups
        self.sizes = [torch.zeros(p.shape, dtype=torch.float64) for p in self.params]

    def step(self, scale: float) -> None:
        """Make the step with both. Each step begins at the same parameters."""
        before = [p.detach().cpu().double() for p in self.params]
        with torch.no_grad():
            for copy, param, old in zip(self.copies, self.params, before, strict=True):
                copy.copy_(old)
                copy.grad = None if param.grad is None else param.grad.cpu().double() / scale
        self.adapter.step()
        self.reference.step()
        for i, (param, copy, old) in enumerate(zip(self.params, self.copies, before, strict=True)):
            want = copy.detach()
            # Rounding of state shows up in updates of the size of earlier ones.
            self.sizes[i] += (want - old).abs()
            error = self.rtol * (self.sizes[i] + old.abs()) + Format.of(param.dtype).half_ulp(want.abs())
            assert_within(param, want, error, f"param {i}")


class _Suite:
    """The laws, each a method named after it that checks one example."""

    def __init__(
        self, make: Make, reference: Make | None, rule: str, adapter: type[Adapter], rtol: float, device: str
    ) -> None:
        self.make, self.reference, self.rule, self.adapter = make, reference, rule, adapter
        self.rtol, self.device = rtol, device

    def _start(self, example: Mapping[str, Any]) -> tuple[Problem, list[Tensor], Adapter]:
        params = example["problem"].params(self.device)
        adapter = self.adapter(self.make, params, example["options"], example.get("scale", {}))
        return example["problem"], params, adapter

    def _judge(self, adapter: Adapter, example: Mapping[str, Any]) -> _Oracle | _Reference:
        if self.reference is None:
            return _Oracle(adapter, self.rule)
        return _Reference(adapter, self.reference, example["options"], self.rtol)

    def values(self, example: Mapping[str, Any]) -> None:
        problem, params, adapter = self._start(example)
        judge = self._judge(adapter, example)
        for step in example["steps"]:
            scale = adapter.scale()
            problem.set_grads(params, scale, step)
            judge.step(scale)

    def hyperparameters(self, example: Mapping[str, Any]) -> None:
        problem, params, adapter = self._start(example)
        judge = self._judge(adapter, example)
        for i, step in enumerate(example["steps"]):
            scale = adapter.scale()
            problem.set_grads(params, scale, step)
            judge.step(scale)
            later = example["later"] if i % 2 == 0 else example["options"]
            for group in [*adapter.optimizer.param_groups, *judge.other_groups]:
                group.update({key: later[key] for key in _CHANGEABLE if key in later and not group.get("nesterov")})

    def overflow(self, example: Mapping[str, Any]) -> None:
        problem, params, adapter = self._start(example)
        for step in example["steps"]:
            # A good step first: there is more to spoil then.
            for each in (replace(step, overflow=None), step):
                problem.set_grads(params, adapter.scale(), each)
                before = _snapshot(adapter.optimizer)
                adapter.step()
            _assert_same(_snapshot(adapter.optimizer), before)

    def absent(self, example: Mapping[str, Any]) -> None:
        problem, params, adapter = self._start(example)
        for step in example["steps"]:
            problem.set_grads(params, adapter.scale(), step)
            idle = [i for i, p in enumerate(params) if p.grad is None or p.numel() == 0]
            before = _snapshot(adapter.optimizer)
            adapter.step()
            now = {(i, name): tensor for (i, name), tensor in _snapshot(adapter.optimizer).items() if i in idle}
            # Whether steps are counted that have no element to update does not matter.
            for old in (before, now):
                for i in idle:
                    if params[i].numel() == 0:
                        old.pop((i, "step"), None)
            _assert_same(now, {at: tensor for at, tensor in before.items() if at[0] in idle})

    def nothing(self, example: Mapping[str, Any]) -> None:
        problem, params, adapter = self._start(example)
        for step in example["steps"]:
            problem.set_grads(params, adapter.scale(), step)
            adapter.step()
            before, scale = _snapshot(adapter.optimizer), adapter.scale_state()
            for param in params:
                param.grad = None
            adapter.step()
            _assert_same(_snapshot(adapter.optimizer), before)
            if adapter.scale_state() != scale:
                raise AssertionError(f"loss scale: {adapter.scale_state()}, was {scale}")

    def resume(self, example: Mapping[str, Any]) -> None:
        problem, params, adapter = self._start(example)
        _, others, other = self._start(example)
        for step in example["steps"]:
            for each, run in ((params, adapter), (others, other)):
                problem.set_grads(each, run.scale(), step)
                run.step()
            _assert_same(_snapshot(other.optimizer), _snapshot(adapter.optimizer))
            saved = io.BytesIO()
            torch.save(adapter.state_dict(), saved)
            saved.seek(0)
            _, others, other = self._start(example)
            with torch.no_grad():
                for copy, param in zip(others, params, strict=True):
                    copy.copy_(param)
            other.load_state_dict(torch.load(saved, weights_only=True))

    def scale(self, example: Mapping[str, Any]) -> None:
        problem, params, adapter = self._start(example)
        for step in example["steps"]:
            problem.set_grads(params, adapter.scale(), step)
            old = adapter.scale_state()
            assert old is not None
            adapter.step()
            want, got = next_scale(old, step.overflow is not None), adapter.scale_state()
            assert got is not None
            if want.hysteresis == 1:  # then nothing depends on the count
                want, got = replace(want, hysteresis_tracker=0), replace(got, hysteresis_tracker=0)
            if got != want:
                raise AssertionError(f"loss scale: {got}, expected {want}, after {old}")


def _with_elements(example: dict[str, Any]) -> dict[str, Any]:
    """Let no gradient be missing in steps that would have none left."""
    steps = [
        step if example["problem"].has_elements(step) else replace(step, missing=frozenset())
        for step in example["steps"]
    ]
    return {**example, "steps": steps}


def _find(
    law: str, check: Callable[[Mapping[str, Any]], None], drawn: SearchStrategy[Any], how: settings
) -> list[Finding]:
    last: dict[str, Any] = {}

    @how
    @given(drawn)
    def run(example: dict[str, Any]) -> None:
        # The last example that Hypothesis runs is the smallest one that fails.
        last.clear()
        last.update(example)
        check(example)

    try:
        run()
    except Exception as error:  # noqa: BLE001 - whatever the optimizer raises is a finding
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return [Finding(law, dict(last), f"{kind}{error}")]
    return []


def check_optimizer(
    make_fused: Make,
    make_reference: Make | None = None,
    *,
    rule: str = "AdamW",
    adapter: type[Adapter] = Adapter,
    laws: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    grad_dtypes: Sequence[torch.dtype] | None = None,
    layouts: Sequence[Layout] | None = None,
    options: SearchStrategy[dict[str, Any]] | None = None,
    rtol: float = 1e-5,
    device: str = "cpu",
    max_examples: int = 30,
    derandomize: bool = False,
    raise_on_failure: bool = True,
) -> Report:
    """Check an optimizer against the laws of :data:`LAWS`, and report the smallest example that breaks each.

    Args:
        make_fused: called with a list of parameters and hyperparameters; the optimizer's class will do.
        make_reference: called alike, what to compare values with; it runs in float64. By default it is the oracle,
            with bounds derived from the dtype; it knows the rules of SGD, Adam and AdamW.
        rule: ``"SGD"``, ``"Adam"`` or ``"AdamW"``: which hyperparameters are drawn, and for the oracle.
        adapter: how the optimizer is driven: without a loss scale, or with :class:`GradScalerAdapter`,
            :class:`OwnScaleAdapter`, or a class of your own.
        laws: names in :data:`LAWS`; by default all that apply to the adapter.
        dtypes: of the parameters.
        grad_dtypes: of the gradients; None: the parameter's.
        layouts: how tensors lie in memory; None: all that :data:`~tritonamp.testing.strategies.Layout` knows.
        options: a strategy for the hyperparameters, instead of those of ``rule``.
        rtol: where there is a ``make_reference``, the error permitted to a parameter relative to its value and
            updates.
        device: where the tensors are.
        max_examples: how many examples each law is tried on.
        derandomize: try the same examples each time.
        raise_on_failure: whether to raise, or only to report.

    Raises:
        AssertionError: with all findings, if there are any.
        ValueError: for a law that there is not, or that does not apply to the adapter.
    """
    applicable = [law for law in LAWS if adapter.scales or law not in ("overflow", "scale")]
    applicable = [law for law in applicable if adapter.takes_nothing or law != "nothing"]
    for law in laws or ():
        if law not in applicable:
            raise ValueError(f"laws must be among {applicable} with {adapter.__name__}, got {law!r}")
    suite = _Suite(make_fused, make_reference, rule, adapter, rtol, device)
    tensors: dict[str, Any] = {"dtypes": dtypes, "grad_dtypes": grad_dtypes, "max_tensors": 4, "max_elements": 600}
    tensors["layouts"] = True if layouts is None else layouts
    if make_reference is not None:
        # A relative tolerance is no match for numbers of all sizes in one sum.
        tensors |= {"grads": ("normal", "none"), "exponents": (-5, 5), "max_hard": 0}
    drawn_options = hyperparameters(rule, extreme=make_reference is None) if options is None else options
    how = settings(
        max_examples=max_examples,
        derandomize=derandomize,
        database=None,
        # Without the phase that explains what matters in the example: it takes longer than all others.
        phases=[Phase.generate, Phase.shrink],
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    report = Report(tuple(laws or applicable))
    for law in report.laws:
        overflow = {"overflow": True, "scale": None}.get(law, False)
        parts: dict[str, SearchStrategy[Any]] = {
            "problem": problems(**tensors).filter(Problem.has_elements),
            "options": drawn_options,
            "steps": sequences(overflow=overflow, max_steps=8 if law == "scale" else 3),
        }
        if adapter.scales:
            parts["scale"] = loss_scales(bounds=adapter is OwnScaleAdapter)
        if law == "hyperparameters":
            parts["later"] = drawn_options
        drawn = st.fixed_dictionaries(parts).map(_with_elements)
        report.findings.extend(_find(law, getattr(suite, law), drawn, how))
    if report.findings and raise_on_failure:
        raise AssertionError(str(report))
    return report

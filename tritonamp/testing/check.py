"""One call that looks for faults in an optimizer, of whatever origin, and shows the smallest example of each.

    report = check_optimizer(MyAdamW, rule="AdamW", adapter=GradScalerAdapter)

Examples come from :mod:`tritonamp.testing.strategies`, and are shrunk by Hypothesis, which has to be installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tritonamp.testing.adapters import Adapter, GradScalerAdapter, Make, OwnScaleAdapter
from tritonamp.testing.laws import LAWS, Suite
from tritonamp.testing.problems import Layout, Problem
from tritonamp.testing.strategies import hyperparameters, loss_scales, problems, sequences

__all__ = ["LAWS", "Adapter", "Finding", "GradScalerAdapter", "OwnScaleAdapter", "Report", "check_optimizer"]


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
        layouts: how tensors lie in memory; None: all that :data:`~tritonamp.testing.problems.Layout` knows.
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
    suite = Suite(make_fused, make_reference, rule, adapter, rtol, device)
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

"""The laws that :func:`~tritonamp.testing.check.check_optimizer` checks, each on one example."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.testing import oracle
from tritonamp.testing.adapters import Adapter, Make
from tritonamp.testing.bounds import Format, assert_within
from tritonamp.testing.problems import Problem
from tritonamp.testing.scale import next_scale

__all__ = ["LAWS", "Suite"]

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


class Suite:
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
        """Judge every step."""
        problem, params, adapter = self._start(example)
        judge = self._judge(adapter, example)
        for step in example["steps"]:
            scale = adapter.scale()
            problem.set_grads(params, scale, step)
            judge.step(scale)

    def hyperparameters(self, example: Mapping[str, Any]) -> None:
        """Judge every step, with other hyperparameters from step to step."""
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
        """Compare what there is before and after each step that overflows."""
        problem, params, adapter = self._start(example)
        for step in example["steps"]:
            # A good step first: there is more to spoil then.
            for each in (replace(step, overflow=None), step):
                problem.set_grads(params, adapter.scale(), each)
                before = _snapshot(adapter.optimizer)
                adapter.step()
            _assert_same(_snapshot(adapter.optimizer), before)

    def absent(self, example: Mapping[str, Any]) -> None:
        """Compare, before and after each step, the parameters that it has nothing to update of."""
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
        """Compare what there is before and after a step without gradients, following a good one."""
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
        """Compare with a second run, which is saved and loaded after each step."""
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
        """Compare the loss scale after each step with :func:`~tritonamp.testing.scale.next_scale`."""
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

"""Parameters and gradients of a workload, and the check that a contender's steps are right.

A contender that is wrong is not timed. It takes three steps: one that clips, one with an inf in it, one that does not
clip. Each is computed anew in float64 by the oracle, from the values that the contender starts it from. Where there are
many elements a sample is compared: the first, the last, and random ones of the tensors. The sample's step is that of
the whole all the same: one more parameter, of one element, carries the norm of all gradients that are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonamp.testing import assert_within, oracle

from .contenders import LOSS_SCALE, MAX_NORM, Contender, Step
from .workloads import Shape

GRAD_NORM = 2.0  # of the unscaled gradients, whatever the size: the step clips
_BLOCK = 1 << 24  # elements whose squares are added up in float64 at a time
SAMPLED_TENSORS = 100
SAMPLED_ELEMENTS = 2000  # of each of these


class Problem:
    """Parameters, and gradients as a backward pass of a scaled loss leaves them.

    Args:
        shapes: of the parameters, float32.
        device: where they are.
        grad_dtype: of the gradients.
    """

    def __init__(self, shapes: Sequence[Shape], device: torch.device, grad_dtype: torch.dtype = torch.float32) -> None:
        self.device, self.grad_dtype = device, grad_dtype
        self.numel = sum(map(math.prod, shapes))
        self.params = [torch.empty(shape, device=device, requires_grad=True) for shape in shapes]
        self.fill()
        generator = torch.Generator(device).manual_seed(1)
        std = GRAD_NORM * LOSS_SCALE / math.sqrt(self.numel)
        self.pristine = [torch.randn(s, device=device, generator=generator).mul_(std).to(grad_dtype) for s in shapes]
        if grad_dtype != torch.float32:
            for param in self.params:
                param.grad_dtype = grad_dtype  # type: ignore[attr-defined]

    @torch.no_grad()
    def fill(self) -> None:
        """Start the parameters anew."""
        generator = torch.Generator(self.device).manual_seed(0)
        for param in self.params:
            param.normal_(0.0, 0.02, generator=generator)

    @property
    def bytes(self) -> int:
        """Memory of parameters, gradients and their pristine copies."""
        return self.numel * bytes_per_element(self.grad_dtype)

    def restore(self, factor: float = 1.0) -> None:
        """Give every parameter a new copy of its pristine gradient, at another address, as a backward pass may."""
        for param, pristine in zip(self.params, self.pristine, strict=True):
            param.grad = pristine * factor if factor != 1.0 else pristine.clone()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Drop the gradients."""
        for param in self.params:
            param.grad = None


def bytes_per_element(grad_dtype: torch.dtype) -> int:
    """Memory that a :class:`Problem` takes per element."""
    return 4 + 2 * grad_dtype.itemsize


def check(contender: Contender, step: Step, problem: Problem) -> None:
    """Take three steps, and hold them against the oracle.

    Raises:
        AssertionError: saying what is wrong.
    """
    for factor, overflows in [(1.0, False), (1.0, True), (1 / 8, False)]:
        problem.restore(factor)
        step.scale_loss()
        if overflows:
            grad = problem.params[-1].grad
            assert grad is not None
            grad.view(-1)[-1] = math.inf
        scale = step.scale()
        expected = _Expected(problem, step, scale)
        step()
        expected.check(contender, step, overflows)
        want = scale * (0.5 if overflows else 1.0)
        if step.scale() != want:
            raise AssertionError(f"loss scale: {step.scale()}, expected {want}")
    problem.clear()


@dataclass(frozen=True)
class _Sample:
    """Elements of one parameter: where, and copies on CPU of what was there."""

    number: int
    at: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor, copied."""
        return tensor.detach().reshape(-1)[self.at.to(tensor.device)].cpu()


class _Expected:
    """What the next step has to give to a sample of elements."""

    def __init__(self, problem: Problem, step: Step, scale: float) -> None:
        self.problem, self.scale = problem, scale
        self.samples = _samples(problem)
        self.norm = _norm([param.grad for param in problem.params if param.grad is not None]) / scale
        self.params = [sample.of(problem.params[sample.number]) for sample in self.samples]
        self.grads = [sample.of(_grad(problem, sample.number)) for sample in self.samples]
        self.states = _states(step, self.samples, problem)

    def check(self, contender: Contender, step: Step, overflows: bool) -> None:
        """Compare what is there now.

        Raises:
            AssertionError: naming the tensor and the element that is furthest off.
        """
        if not overflows:
            self._check_norm(contender, step.norm())
        want = self._compute(step, self.norm if contender.is_ours or overflows else step.norm())
        states = _states(step, self.samples, self.problem)
        has_known_state = contender.is_ours or contender.module == "torch"
        if not has_known_state and any(self.states) and not overflows:
            return  # a later step cannot be computed from a state of unknown meaning
        for i, sample in enumerate(self.samples):
            name = f"param {sample.number} (numbered within the sample)"
            got = sample.of(self.problem.params[sample.number])
            allowed = want.param_errors[i] + self._bias_error(contender, step, want, i)
            assert_within(got, want.params[i], allowed, name)
            for key, value in want.states[i].items() if has_known_state else ():
                assert_within(states[i][key], value, want.state_errors[i][key], f"state {key!r} of {name}")

    def _check_norm(self, contender: Contender, norm: float) -> None:
        # A float32 sum of n squares is off by no more than about 4 sqrt(n) roundings, in what order whatever (Higham
        # and Mary, A new approach to probabilistic rounding error analysis, 2019).
        n = max(param.numel() for param in self.problem.params) + len(self.problem.params)
        relative = oracle.NORM_ERROR if contender.is_ours else 4 * math.sqrt(n) * 2.0**-24 + oracle.NORM_ERROR
        if not abs(norm - self.norm) <= relative * self.norm:
            raise AssertionError(f"norm: {norm!r}, expected {self.norm!r} within {relative:.1g} of it")

    def _bias_error(self, contender: Contender, step: Step, want: oracle.Step, i: int) -> Tensor | float:
        """What a parameter's update may be off by where ``1 - beta ** step``, its divisor, is formed in float32."""
        group = step.optimizer.param_groups[0]
        if contender.is_double or "betas" not in group:
            return 0.0
        count = float(want.states[i]["step"]) if "step" in want.states[i] else 1.0
        update = (want.params[i] - self.params[i].double()).abs()
        # Each power and difference is off by a rounding of 1.
        return update * sum(2 * 2.0**-24 / (1 - beta**count) for beta in group["betas"])

    def _compute(self, step: Step, norm: float) -> oracle.Step:
        """The step of the sample, clipped as a ``norm`` of all gradients asks for."""
        group = {**step.optimizer.param_groups[0], "max_norm": MAX_NORM}
        group["lr"] = float(group["lr"])
        group.setdefault("maximize", False)
        sampled = _norm(self.grads)
        rest = math.sqrt(max((norm * self.scale) ** 2 - sampled**2, 0.0)) if math.isfinite(norm) else math.inf
        carrier = torch.tensor([rest], dtype=torch.float64)
        return oracle.step(
            [*self.params, torch.zeros_like(carrier)],
            [*self.grads, carrier],
            [*self.states, {}],
            [group] * (len(self.samples) + 1),
            scale=self.scale,
        )


def _samples(problem: Problem) -> list[_Sample]:
    count = len(problem.params)
    numbers = (
        range(count) if count <= SAMPLED_TENSORS else torch.linspace(0, count - 1, SAMPLED_TENSORS).long().tolist()
    )
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in numbers:
        n = problem.params[number].numel()
        at = torch.arange(n)
        if n > SAMPLED_ELEMENTS:
            third = SAMPLED_ELEMENTS // 3
            random = torch.randint(n, (third,), generator=generator)
            at = torch.cat([torch.arange(third), random, torch.arange(n - third, n)]).unique()
        samples.append(_Sample(number, at))
    return samples


def _states(step: Step, samples: Sequence[_Sample], problem: Problem) -> list[dict[str, Tensor]]:
    """The samples' state, keys as in ``torch.optim``."""
    states = []
    # Not `optimizer.state`: that may hold momentum buffers which are not seeded yet.
    saved: dict[int, dict[str, Any]] = step.optimizer.state_dict()["state"]
    for sample in samples:
        shape = problem.params[sample.number].shape
        state = saved.get(sample.number, {})
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        states.append(
            {
                key: sample.of(value) if value.shape == shape and key != "step" else value.detach().to("cpu", copy=True)
                for key, value in tensors.items()
            }
        )
    return states


def _grad(problem: Problem, number: int) -> Tensor:
    grad = problem.params[number].grad
    assert grad is not None
    return grad


def _norm(tensors: Sequence[Tensor]) -> float:
    """L2 norm in float64."""
    squares = 0.0
    blocks = [block for tensor in tensors for block in tensor.reshape(-1).split(_BLOCK)]
    for i in range(0, len(blocks), 256):
        norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks[i : i + 256]]
        squares += float(torch.stack(norms).square().sum())
    return math.sqrt(squares)

"""Any sequence of calls that a training loop may make equals a model of it, step by step."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from property.tools import (
    EVERYWHERE,
    assert_same_bits,
    everything,
    how,
    is_bad,
    numbers_of,
    params_of,
    runners,
    seeds,
    values,
    world,
)
from torch import Tensor

import tritonamp
from tritonamp.testing import ScaleState, expect, next_scale

SHAPES = [(), (0,), (1,), (7,), (3, 171), (515,), (1030,)]
OPTIONS: dict[str, list[Any]] = {
    "lr": [0.0, 1e-3, 0.1],
    "weight_decay": [0.0, 0.1],
    "max_norm": [None, 0.0, 0.5, 100.0, float("inf")],
    "maximize": [False, True],
}
SGD_OPTIONS = {**OPTIONS, "momentum": [0.0, 0.9], "dampening": [0.0, 0.5]}
ADAM_OPTIONS = {**OPTIONS, "betas": [(0.9, 0.999), (0.0, 0.5)], "eps": [1e-8, 1e-3], "amsgrad": [False, True]}
KINDS = [tritonamp.SGD, tritonamp.Adam, tritonamp.AdamW]

REACHED = st.just(255) | st.integers(0, 7)  # a bit for each parameter
ENDS = st.sampled_from(["stepped", "stepped", "abandoned"])

picks = st.integers(0, 2**16)  # of one among what there is by then
scales = st.builds(
    ScaleState,
    scale=st.sampled_from([1.0, 3.0, 1024.0, 65536.0]),
    growth_factor=st.sampled_from([2.0, 1.1]),
    backoff_factor=st.sampled_from([0.5, 0.9]),
    growth_interval=st.integers(1, 3),
    min_scale=st.just(0.5),
    max_scale=st.just(2.0**17),
    hysteresis=st.integers(1, 3),
)


def made_loss_scale(state: ScaleState) -> tritonamp.LossScale:
    return tritonamp.LossScale(
        state.scale,
        state.growth_factor,
        state.backoff_factor,
        state.growth_interval,
        min_scale=state.min_scale,
        max_scale=state.max_scale,
        hysteresis=state.hysteresis,
    )


class Training(RuleBasedStateMachine):
    """An optimizer with a loss scale, and a model of what it should know.

    Attributes:
        scale: the loss scale.
        skipped, consecutive: the skip counters.
        is_scaled: a loss was scaled since the last step.
        is_unscaled, pending: ``unscale_()`` was called, and has seen an inf or NaN.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.runners = runners(name)
        self.stack = contextlib.ExitStack()

    def teardown(self) -> None:
        self.stack.close()

    @initialize(
        kind=st.sampled_from(KINDS),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
        shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
        seed=seeds,
        scale=scales,
        skip_norm=st.sampled_from([None, None, 50.0]),
        data=st.data(),
    )
    def start(
        self,
        kind: Any,
        dtype: torch.dtype,
        shapes: list[tuple[int, ...]],
        seed: int,
        scale: ScaleState,
        skip_norm: float | None,
        data: st.DataObject,
    ) -> None:
        runner = data.draw(self.runners)
        self.stack.enter_context(world(runner))
        self.backend = runner.backend
        self.kind, self.dtype, self.skip_norm = kind, dtype, skip_norm
        self.options = SGD_OPTIONS if kind is tritonamp.SGD else ADAM_OPTIONS
        self.scale, self.skipped, self.consecutive = scale, 0, 0
        self.is_scaled = self.is_unscaled = self.pending = False
        chosen = data.draw(st.fixed_dictionaries({k: st.sampled_from(v) for k, v in self.options.items()}))
        torch.manual_seed(seed)
        self.optimizer = self.made([self.param(shape) for shape in shapes], **chosen)

    def param(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape).to(self.dtype).requires_grad_()

    def made(self, params: Any, **options: Any) -> Any:
        return self.kind(
            params,
            loss_scale=made_loss_scale(self.scale),
            skip_norm=self.skip_norm,
            backend=self.backend,
            **options,
        )

    def params(self) -> list[Tensor]:
        return params_of(self.optimizer)

    def grads(self) -> list[Tensor]:
        return [param.grad for param in self.params() if param.grad is not None]

    def has_work(self) -> bool:
        return any(grad.numel() for grad in self.grads())

    # What a training loop does.

    def can_scale(self) -> bool:
        return not (self.is_unscaled and self.grads())

    @precondition(can_scale)
    @rule(seed=seeds, exponent=st.integers(-6, 3), which=st.integers(0, 2**8))
    def accumulate(self, seed: int, exponent: int, which: int) -> None:
        """A backward pass that reaches some of the parameters, all of them most of the time."""
        self.backward(seed, exponent, which)

    def backward(self, seed: int, exponent: int, which: int) -> None:
        factor = float(self.optimizer.scale(torch.ones(())))
        assert factor == self.scale.scale
        self.is_scaled, self.is_unscaled, self.pending = True, False, False
        torch.manual_seed(seed)
        for i, param in enumerate(self.params()):
            if which > 127 or which >> i & 1:
                grad = (torch.randn(param.shape) * 2.0**exponent * factor).to(param.dtype)
                param.grad = grad if param.grad is None else param.grad + grad

    @precondition(lambda self: not self.can_scale())
    @rule()
    def scaling_beside_unscaled_gradients_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match=r"scale\(\) after unscale_"):
            self.optimizer.scale(torch.ones(()))

    @precondition(has_work)
    @rule(which=picks, where=picks, value=st.sampled_from([torch.inf, -torch.inf, torch.nan]))
    def overflow(self, which: int, where: int, value: float) -> None:
        grads = [grad for grad in self.grads() if grad.numel()]
        grad = grads[which % len(grads)]
        grad.view(-1)[where % grad.numel()] = value

    @precondition(lambda self: self.is_scaled or not self.has_work())
    @rule()
    def step(self) -> None:
        self.checked_step()

    def checked_step(self) -> None:
        had_work = self.has_work()
        expectation = expect(self.optimizer, found_inf=self.pending)
        want = expectation.step
        assert want.found_inf == (had_work and (self.pending or any(map(is_bad, self.grads()))))
        before = values(self.optimizer)
        self.optimizer.step()
        expectation.check()
        if had_work:
            self.scale = next_scale(self.scale, want.found_inf)
            self.skipped += want.skipped
            self.consecutive = self.consecutive + 1 if want.skipped else 0
        if want.skipped or not had_work:
            after = values(self.optimizer)
            new = len(after) - len(before)
            if not new:  # else: state was made, and is zero
                assert_same_bits(after, before)
        self.is_scaled = self.is_unscaled = self.pending = False

    @precondition(can_scale)
    @rule(seed=seeds, exponent=st.integers(-6, 3), overflows=st.booleans(), which=REACHED, ends=ENDS)
    def iteration(self, seed: int, exponent: int, overflows: bool, which: int, ends: str) -> None:
        """All at once: drawn one by one, most sequences would hold hardly a step."""
        self.optimizer.zero_grad()
        self.backward(seed, exponent, which)
        if overflows and self.grads():
            self.grads()[-1].view(-1)[-1:] = torch.inf
        if ends == "abandoned":
            self.unscale()
            self.zero_grad(set_to_none=True)
        else:
            self.checked_step()

    @precondition(lambda self: not self.is_scaled and self.has_work())
    @rule()
    def step_without_scaling(self) -> None:
        """Refused, for then gradients are taken for scaled ones; unless nothing moves anyway."""
        if any(group["lr"] for group in self.optimizer.param_groups):
            before = everything(self.optimizer)
            with pytest.raises(RuntimeError, match="nothing was scaled"):
                self.optimizer.step()
            assert_same_bits(everything(self.optimizer), before)

    @precondition(lambda self: self.is_scaled)
    @rule()
    def unscale(self) -> None:
        inv_scale = torch.tensor(1 / self.scale.scale).to(torch.float32)
        want = [
            grad.clone() if self.is_unscaled else (grad.float() * inv_scale).to(grad.dtype) for grad in self.grads()
        ]
        if not self.is_unscaled:
            self.pending = any(map(is_bad, self.grads()))
        self.optimizer.unscale_()
        self.is_unscaled = self.is_unscaled or self.has_work()
        for grad, wanted in zip(self.grads(), want, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=2.0**-22, atol=0.0, equal_nan=True)

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)
        self.is_unscaled = self.pending = False

    # What it may do besides.

    @rule(which=picks)
    def lose_a_gradient(self, which: int) -> None:
        params = self.params()
        params[which % len(params)].grad = None

    @rule(which=picks, seed=seeds)
    def swap_data(self, which: int, seed: int) -> None:
        param = self.params()[which % len(self.params())]
        torch.manual_seed(seed)
        param.data = torch.randn(param.shape).to(param.dtype)

    @rule(which=picks)
    def lose_state(self, which: int) -> None:
        params = self.params()
        self.optimizer.state.pop(params[which % len(params)], None)

    @precondition(lambda self: len(self.optimizer.param_groups) < 3)
    @rule(shape=st.sampled_from(SHAPES), data=st.data(), seed=seeds)
    def add_group(self, shape: tuple[int, ...], data: st.DataObject, seed: int) -> None:
        own = data.draw(st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in self.options.items()}))
        torch.manual_seed(seed)
        self.optimizer.add_param_group({"params": [self.param(shape)], **own})

    @rule(which=picks, data=st.data())
    def change_an_option(self, which: int, data: st.DataObject) -> None:
        groups = self.optimizer.param_groups
        name = data.draw(st.sampled_from(sorted(self.options)))
        groups[which % len(groups)][name] = data.draw(st.sampled_from(self.options[name]))

    @rule(scale=st.sampled_from([0.5, 1.0, 48.0, 2.0**17]))
    def set_the_scale_by_hand(self, scale: float) -> None:
        self.optimizer.loss_scale.update(scale)
        self.scale = ScaleState(**{**vars(self.scale), "scale": scale})

    # Checkpoints and copies.

    @rule()
    def load_into_a_fresh_optimizer(self) -> None:
        """Of other options and another scale; what does not travel: gradients, skip counters."""
        checkpoint = copy.deepcopy(self.optimizer.state_dict())
        params = iter([param.detach().clone().requires_grad_() for param in self.params()])
        groups = [{"params": [next(params) for _ in group["params"]]} for group in self.optimizer.param_groups]
        fresh = self.kind(groups, lr=7.0, loss_scale="dynamic", skip_norm=self.skip_norm, backend=self.backend)
        fresh.load_state_dict(checkpoint)
        again = fresh.state_dict()
        for group, saved in zip(again["param_groups"], checkpoint["param_groups"], strict=True):
            assert {key: group[key] for key in saved} == saved
        assert again["state"].keys() == checkpoint["state"].keys()
        for number, state in checkpoint["state"].items():
            # What an option that is off by now has left is kept, but not made.
            assert state.keys() <= again["state"][number].keys()
            assert_same_bits([again["state"][number][key] for key in state], list(state.values()))
        self.optimizer = fresh
        self.skipped = self.consecutive = 0
        self.is_scaled = self.is_unscaled = self.pending = False

    @rule()
    def deepcopy(self) -> None:
        """Everything travels, gradients too."""
        self.optimizer = copy.deepcopy(self.optimizer)

    @invariant()
    def reports_equal_the_model(self) -> None:
        if hasattr(self, "optimizer"):
            assert ScaleState.from_state_dict(numbers_of(self.optimizer)) == self.scale
            counts = (int(self.optimizer.skipped_steps), int(self.optimizer.consecutive_skips))
            assert counts == (self.skipped, self.consecutive)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_any_sequence_of_calls_equals_the_model(name: str) -> None:
    run_state_machine_as_test(lambda: Training(name), settings=settings(how(name, 3), stateful_step_count=30))

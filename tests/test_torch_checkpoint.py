"""What torch has for checkpoints: files, copies, its distributed helpers. A resumed run equals the unbroken one, and
torch's optimizers and ours take over from each other.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Runner
from problem import assert_same_bits, values
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import tritonamp
from tritonamp.testing import expect

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW": {},
}
FLAT, NESTED = StateDictOptions(flatten_optimizer_state_dict=True), StateDictOptions()


class Pair:
    """A model and an optimizer with two groups, made anew or copied."""

    def __init__(self, name: str, runner: Runner | None, lr: float = 0.1, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        for param in self.model[1].parameters():
            param.requires_grad_(False)
        self.model.append(nn.Linear(2, 2))
        groups = [
            {"params": [*self.model[0].parameters(), *self.model[1].parameters()]},  # the latter are frozen
            {"params": list(self.model[2].parameters()), "lr": lr / 10},
        ]
        options = {"lr": lr, **OPTIONS[name], **options}
        self.optimizer: Any
        if runner is None:
            self.optimizer = getattr(torch.optim, name)(groups, foreach=False, fused=False, **options)
        else:
            self.optimizer = getattr(tritonamp, name)(groups, backend=runner.backend, **options)

    def train(self, *losses: float) -> None:
        """A step for each number, by which the loss is multiplied."""
        for at, factor in enumerate(losses):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(at))
            loss = self.model(x).square().mean() * factor
            if isinstance(self.optimizer, tritonamp.optimizer.FusedOptimizer):
                self.optimizer.backward(loss)
            else:
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def expect(self, losses: int) -> None:
        """So many steps on unscaled losses, each compared with the oracle."""
        for at in range(losses):
            self.model(torch.randn(4, 3, generator=torch.Generator().manual_seed(at))).square().mean().backward()
            expectation = expect(self.optimizer)
            self.optimizer.step()
            expectation.check()
            self.optimizer.zero_grad()


def by_file(saved: Pair, fresh: Pair, folder: Path) -> None:
    file = io.BytesIO()
    torch.save({"model": saved.model.state_dict(), "optimizer": saved.optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    fresh.model.load_state_dict(loaded["model"])
    fresh.optimizer.load_state_dict(loaded["optimizer"])


def by_deepcopy(saved: Pair, fresh: Pair, folder: Path) -> None:
    vars(fresh).update(vars(copy.deepcopy(saved)))


def by_pickle(saved: Pair, fresh: Pair, folder: Path) -> None:
    vars(fresh).update(vars(pickle.loads(pickle.dumps(saved))))


def by_helpers(options: StateDictOptions) -> Callable[[Pair, Pair, Path], None]:
    def transfer(saved: Pair, fresh: Pair, folder: Path) -> None:
        fresh.model.load_state_dict(saved.model.state_dict())
        of_optimizer = copy.deepcopy(get_optimizer_state_dict(saved.model, saved.optimizer, options=options))
        set_optimizer_state_dict(fresh.model, fresh.optimizer, of_optimizer, options=options)

    return transfer


def by_folder(options: StateDictOptions, partial: bool = False) -> Callable[[Pair, Pair, Path], None]:
    """``partial``: what the checkpoint lacks keeps its value."""

    def transfer(saved: Pair, fresh: Pair, folder: Path) -> None:
        both = get_state_dict(saved.model, saved.optimizer, options=options)
        dcp.save(dict(zip(("model", "optimizer"), both, strict=True)), checkpoint_id=folder, no_dist=True)
        both = get_state_dict(fresh.model, fresh.optimizer, options=options)
        loaded = dict(zip(("model", "optimizer"), both, strict=True))
        dcp.load(loaded, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=partial), no_dist=True)
        set_state_dict(
            fresh.model,
            fresh.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
            options=options,
        )

    return transfer


ROUTES = {
    "file": by_file,
    "deepcopy": by_deepcopy,
    "pickle": by_pickle,
    "helpers": by_helpers(NESTED),
    "helpers, flat": by_helpers(FLAT),
    "folder": by_folder(NESTED),
    "folder, flat": by_folder(FLAT),
}


def numbers(pair: Pair) -> list[Any]:
    """Everything of a group but its parameters; the loss scale with its trackers is part of it."""
    groups = pair.optimizer.state_dict()["param_groups"]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def tensors(pair: Pair) -> list[Tensor]:
    """Parameters and state, by name."""
    states = pair.optimizer.state_dict()["state"]
    return [*pair.model.parameters(), *(states[i][key] for i in sorted(states) for key in sorted(states[i]))]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("losses", [(1.0, torch.inf, 1.0), (torch.inf,), ()], ids=["in between", "skipped", "new"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_equals_the_unbroken_one(
    runner: Runner, name: str, losses: tuple[float, ...], route: str, tmp_path: Path
) -> None:
    """Also before the first applied step, when there is no state, or state that no step has seeded."""
    scale = {"init_scale": 64.0, "growth_interval": 3, "hysteresis": 2}
    unbroken = Pair(name, runner, max_norm=0.5, loss_scale=tritonamp.LossScale(**scale))
    unbroken.train(*losses)
    resumed = Pair(name, runner, lr=0.7, max_norm=0.1, loss_scale="auto")
    ROUTES[route](unbroken, resumed, tmp_path)
    assert numbers(resumed) == numbers(unbroken)
    for pair in (unbroken, resumed):
        pair.train(1.0, 1.0, torch.inf, 1.0)
    assert numbers(resumed) == numbers(unbroken)
    assert_same_bits(tensors(resumed), tensors(unbroken))


@pytest.mark.parametrize("route", ["file", "deepcopy", "pickle"])
def test_dampening_spares_the_first_applied_step_of_a_resumed_run(runner: Runner, route: str, tmp_path: Path) -> None:
    """Torch's helpers for distributed checkpoints lose this, for torch's optimizers too."""
    unbroken = Pair("SGD", runner, dampening=0.5)
    unbroken.train(torch.inf)
    resumed = Pair("SGD", runner, dampening=0.5)
    ROUTES[route](unbroken, resumed, tmp_path)
    for pair in (unbroken, resumed):
        pair.train(1.0, 1.0)
    assert_same_bits(tensors(resumed), tensors(unbroken))


# From a folder torch loads what the live groups have: options of one side alone only partially.
BETWEEN = {
    "file": by_file,
    "helpers": by_helpers(NESTED),
    "folder": by_folder(NESTED, partial=True),
    "folder, flat": by_folder(FLAT, partial=True),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("route", BETWEEN)
@pytest.mark.parametrize("direction", ["to torch", "from torch"])
@pytest.mark.parametrize("name", OPTIONS)
def test_torch_and_ours_take_over_from_each_other(
    runner: Runner, name: str, direction: str, route: str, tmp_path: Path
) -> None:
    """State and options arrive as they are, and the steps that follow equal the oracle."""
    first, second = Pair(name, runner, loss_scale=None), Pair(name, None, lr=0.7)
    if direction == "from torch":
        first, second = Pair(name, None), Pair(name, runner, lr=0.7, loss_scale=None)
    first.train(1.0, 2.0)
    BETWEEN[route](first, second, tmp_path)
    assert_same_bits(tensors(second), tensors(first))
    for ours, theirs in zip(numbers(second), numbers(first), strict=True):
        assert all(ours[key] == theirs[key] for key in OPTIONS[name] | {"lr": 0.0, "maximize": False})
    second.expect(2)


def test_an_adamw_stays_one_when_it_takes_over_from_an_adam(runner: Runner) -> None:
    adam, ours = Pair("Adam", None), Pair("AdamW", runner)
    adam.train(1.0)
    ours.optimizer.load_state_dict(adam.optimizer.state_dict())
    assert all(group["decoupled_weight_decay"] for group in ours.optimizer.param_groups)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_checkpoint_that_counts_steps_but_lacks_a_moment_is_refused(key: str, runner: Runner) -> None:
    """Zeros with a large step counter would make the next steps far too large."""
    ours = Pair("AdamW", runner)
    ours.train(1.0, 2.0)
    checkpoint = copy.deepcopy(ours.optimizer.state_dict())
    del checkpoint["state"][0][key]
    before = values(ours.optimizer)
    with pytest.raises(ValueError, match=f"counts 2 steps, but has no state '{key}'"):
        ours.optimizer.load_state_dict(checkpoint)
    assert_same_bits(values(ours.optimizer), before)

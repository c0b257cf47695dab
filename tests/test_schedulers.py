"""Every scheduler of torch's steers our optimizers as it steers torch's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Runner
from problem import checked_step, make_params, set_grads
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from tritonamp import SGD, Adam, AdamW

# Such that something changes within six steps. CyclicLR and OneCycleLR cycle the momentum, or the first beta, too.
SCHEDULERS: dict[type, Callable[[Any], Any]] = {
    lr_scheduler.LambdaLR: lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch),
    lr_scheduler.MultiplicativeLR: lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda epoch: 0.5),
    lr_scheduler.StepLR: lambda opt: lr_scheduler.StepLR(opt, 2),
    lr_scheduler.MultiStepLR: lambda opt: lr_scheduler.MultiStepLR(opt, [1, 4]),
    lr_scheduler.ConstantLR: lambda opt: lr_scheduler.ConstantLR(opt, total_iters=2),
    lr_scheduler.LinearLR: lambda opt: lr_scheduler.LinearLR(opt, total_iters=3),
    lr_scheduler.ExponentialLR: lambda opt: lr_scheduler.ExponentialLR(opt, 0.5),
    lr_scheduler.PolynomialLR: lambda opt: lr_scheduler.PolynomialLR(opt, 4),
    lr_scheduler.CosineAnnealingLR: lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4),
    lr_scheduler.CosineAnnealingWarmRestarts: lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    lr_scheduler.ReduceLROnPlateau: lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    lr_scheduler.CyclicLR: lambda opt: lr_scheduler.CyclicLR(opt, 0.1, 0.5, step_size_up=2),
    lr_scheduler.OneCycleLR: lambda opt: lr_scheduler.OneCycleLR(opt, 0.5, total_steps=7),
    lr_scheduler.SequentialLR: lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.5)], [2]
    ),
    lr_scheduler.ChainedScheduler: lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(opt, 1), lr_scheduler.ExponentialLR(opt, 0.5)]
    ),
    swa_utils.SWALR: lambda opt: swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=4),
}


def test_no_scheduler_is_left_out() -> None:
    public = [value for name, value in vars(lr_scheduler).items() if inspect.isclass(value) and name[0] != "_"]
    assert {kind for kind in public if issubclass(kind, LRScheduler)} - {LRScheduler} <= SCHEDULERS.keys()


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """What schedulers may set."""
    return [
        {name: group[name] for name in ("lr", "momentum", "betas", "initial_lr") if name in group}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("kind", SCHEDULERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("make", "options"),
    [(SGD, {"momentum": 0.9, "lr": 0.1}), (Adam, {"lr": 0.1}), (AdamW, {"lr": torch.tensor(0.1)})],
    ids=["SGD", "Adam", "AdamW, tensor lr"],
)
def test_schedulers_steer_ours_as_torchs(runner: Runner, make: Any, options: dict[str, Any], kind: type) -> None:
    """The same options after every step, and steps that follow them; also where both go on from a checkpoint."""

    def start(make: Any, **extra: Any) -> tuple[Any, Any]:
        own = copy.deepcopy(options)
        params = make_params([(5,), (2, 3)])
        optimizer = make([{"params": params[:1]}, {"params": params[1:], "lr": own["lr"] * 2}], **own, **extra)
        return optimizer, SCHEDULERS[kind](optimizer)

    def start_both() -> list[tuple[Any, Any]]:
        theirs = getattr(torch.optim, make.__name__)
        return [start(make, loss_scale=None, backend=runner.backend), start(theirs, foreach=False, fused=False)]

    pairs, seen = start_both(), []
    for step in range(6):
        if step == 3:
            saved = [(optimizer.state_dict(), scheduler.state_dict()) for optimizer, scheduler in pairs]
            pairs = start_both()
            for (optimizer, scheduler), (of_optimizer, of_scheduler) in zip(pairs, saved, strict=True):
                optimizer.load_state_dict(of_optimizer)
                scheduler.load_state_dict(of_scheduler)
        for optimizer, scheduler in pairs:
            set_grads([param for group in optimizer.param_groups for param in group["params"]])
            if isinstance(optimizer, make):
                checked_step(optimizer)
            else:
                optimizer.step()
            scheduler.step(*[1.0] if kind is lr_scheduler.ReduceLROnPlateau else [])
        ours, theirs = (options_of(optimizer) for optimizer, _ in pairs)
        assert ours == theirs
        seen.append(copy.deepcopy(ours))
    assert any(options != seen[0] for options in seen)

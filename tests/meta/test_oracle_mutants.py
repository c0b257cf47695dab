"""The judge is judged: an oracle with one mistake in it does not agree with torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from meta.mutate import mutate
from torch import Tensor

from tritonamp.testing import TorchReference, oracle
from tritonamp.testing import scale as oracle_scale

SGD = (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1})
NESTEROV = (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True})
ADAM = (torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-3})
ADAMW = (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True})


class Mutant(NamedTuple):
    mistake: str
    function: str
    old: str
    new: str
    optimizer: tuple[Any, dict[str, Any]] = SGD


MUTANTS = [
    Mutant("first buffer dampened", "_sgd", "g if buf is None", 'number(1 - group["dampening"]) * g if buf is None'),
    Mutant("no dampening", "_sgd", 'number(1 - group["dampening"]) * g', "g"),
    Mutant("no nesterov", "_sgd", 'if group["nesterov"]', "if False", NESTEROV),
    Mutant("no maximize", "_update", 'group["maximize"]', "False", NESTEROV),
    Mutant("no weight decay", "_sgd", 'group["weight_decay"] != 0', "False"),
    Mutant("one step ahead", "_adam", ".value) + 1", ".value) + 2", ADAM),
    Mutant("decoupled", "_adam", '"decoupled_weight_decay", False', '"decoupled", True', ADAM),
    Mutant("coupled", "_adam", 'group.get("decoupled_weight_decay", False)', "False", ADAMW),
    Mutant("no eps", "_adam", ' + number(group["eps"])', "", ADAM),
    Mutant(
        "eps in the root",
        "_adam",
        'v.sqrt() / root + number(group["eps"])',
        '(v + number(group["eps"])).sqrt() / root',
        ADAM,
    ),
    Mutant("amsgrad forgets", "_adam", 'state.get("max_exp_avg_sq", zero)', "zero", ADAMW),
    Mutant("no bias correction", "_adam", "1 - beta1**t, 1 - beta2**t", "1 - beta1**t, 1.0", ADAMW),
    Mutant("clip not capped", "_clip_coefficient", "coefficient = raw.clamp(max=1.0)", "coefficient = raw"),
    Mutant("clip not at all", "_update", 'if group.get("max_norm") is not None:', "if False:"),
    Mutant("norm not euclidean", "_global_norm", "vector_norm(flat / largest)", "vector_norm(flat / largest, 3)"),
    Mutant("not unscaled", "_unscaled", "inv_scale == 1.0", "inv_scale <= 1.0"),
    Mutant("not skipped", "step", "if skipped or grad is None", "if grad is None"),
    Mutant("overflow not seen", "_look", "finite &= ", "finite |= "),
    Mutant("growth a step late", "next_scale", "tracker < ", "tracker <= "),
    Mutant("no backoff", "next_scale", "state.backoff_factor", "1.0"),
]


def compare(kind: Any, options: dict[str, Any]) -> None:
    """Small and large gradients, an overflow, growth; two groups, of which one is clipped. Raises AssertionError."""
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    groups = [{"params": [draw(7), draw(5)], "max_norm": 1.0}, {"params": [draw(3)], "lr": 0.01}]
    scale = oracle_scale.ScaleState(scale=4.0, growth_interval=2)
    reference = TorchReference(kind, groups, scale=scale, lr=0.1, **options)
    of_params = [group for group in reference.optimizer.param_groups for _ in group["params"]]
    for step, size in enumerate([1.0, 0.01, math.inf, 0.1, 1.0]):
        grads: list[Tensor | None] = [draw(p.numel()) * scale.scale * size for p in reference.params]
        states = [reference.state(i) for i in range(len(grads))]
        want = oracle.step(reference.params, grads, states, of_params, scale=scale)
        outcome = reference.step(grads)
        assert (outcome.skipped, outcome.scale) == (want.skipped, want.scale) == (step == 2, want.scale)
        for i, param in enumerate(reference.params):
            torch.testing.assert_close(param.detach(), want.params[i], rtol=1e-12, atol=1e-12)
            for key, value in reference.state(i).items():
                torch.testing.assert_close(value.double(), want.states[i][key], rtol=1e-12, atol=1e-12)
        assert isinstance(want.scale, oracle_scale.ScaleState)
        scale = want.scale


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.mistake)
def test_torch_rejects(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compare(*mutant.optimizer)
    mutate(monkeypatch, tmp_path, [oracle, oracle_scale], mutant.function, {mutant.old: mutant.new})
    with pytest.raises(AssertionError):
        compare(*mutant.optimizer)

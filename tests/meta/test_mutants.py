"""The tests can fail: a step with one mistake in it does not pass for the oracle's, in kernels and torch backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import RUNNERS, Runner, choose
from meta.mutate import mutate, mutate_kernels
from problem import checked_step, make_params, scaled, set_grads

import tritonamp
from tritonamp import loss_scale
from tritonamp.backends import norm
from tritonamp.backends import torch as torch_backend
from tritonamp.backends import triton as triton_backend

MODULES = [loss_scale, norm, torch_backend]
SGD, AdamW = tritonamp.SGD, tritonamp.AdamW

Edits = dict[str, str]


class Mutant(NamedTuple):
    """A mistake, where the kernel and the torch backend would have it: (function, edits); and what it shows in."""

    mistake: str
    kernel: tuple[str, Edits]
    torch: tuple[str, Edits]
    make: Any = AdamW
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    message: str = "out of bounds"


MUTANTS = [
    Mutant(
        "no bias correction",
        ("adam_scalars", {"1 - tl.exp(step * tl.load(hyper + LOG_BETA2))": "tl.full((), 1.0, tl.float64)"}),
        ("_adam_plain", {"math.sqrt(1 - beta2**step)": "1.0"}),
    ),
    Mutant(
        "bias correction in float32",
        (
            "adam_scalars",
            {
                "tl.exp(step * tl.load(hyper + LOG_BETA2))": "tl.exp((step * tl.load(hyper + LOG_BETA2))"
                ".to(tl.float32)).to(tl.float64)"
            },
        ),
        ("_adam_plain", {"1 - beta2**step": "1 - float(torch.tensor(beta2) ** step)"}),
    ),
    Mutant(
        "eps inside the root",
        (
            "adam_update",
            {
                "divide(root(largest, C), correction2_sqrt, C) + eps": "root("
                "divide(largest, correction2_sqrt * correction2_sqrt, C) + eps, C)"
            },
        ),
        (
            "_adam_plain",
            {
                '(largest.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])': "(largest / (1 - beta2**step))"
                '.add_(group["eps"]).sqrt_()'
            },
        ),
    ),
    Mutant(
        "coupled weight decay",
        ("adam_scalars", {"tl.load(hyper + DECOUPLED) != 0": "tl.load(hyper + DECOUPLED) > 1"}),
        ("_adam_plain", {'group["decoupled_weight_decay"]': 'not group["decoupled_weight_decay"]'}),
    ),
    Mutant(
        "weight decay after the update",
        (
            "adam_update",
            {
                "    p = p * decay\n": "",
                "return p - divide(step_size * m, denom, C), state": "return ("
                "p - divide(step_size * m, denom, C)) * decay, state",
            },
        ),
        (
            "_adam_plain",
            {
                "p.mul_(1 - lr * weight_decay)": "pass",
                "p.addcdiv_(m, denom, value=-lr / (1 - beta1**step))": "p.addcdiv_("
                "m, denom, value=-lr / (1 - beta1**step)).mul_(1 - lr * weight_decay)",
            },
        ),
    ),
    Mutant(
        "clipping before unscaling",
        ("grad_factors", {"max_norm / (norm + 1e-6)": "max_norm / (norm / inv_scale + 1e-6)"}),
        ("TorchBackend._finish", {'_clip(g["max_norm"], norm)': '_clip(g["max_norm"], norm / inv_scale)'}),
    ),
    Mutant(
        "no unscaling",
        ("grad_factors", {"coefficient * inv_scale": "coefficient"}),
        ("TorchBackend._finish", {"inv_scale * _clip": "1.0 * _clip"}),
    ),
    Mutant(
        "clip coefficient beyond 1",
        (
            "grad_factors",
            {"coefficient = tl.minimum(": "coefficient = (", ", 1.0, propagate_nan=tl.PropagateNan.ALL)": ")"},
        ),
        ("_clip", {"coefficient if coefficient < 1 or math.isnan(coefficient) else 1.0": "coefficient"}),
        options={"max_norm": 1e3},
    ),
    Mutant(
        "clip coefficient without 1e-6",
        ("grad_factors", {"norm + 1e-6": "norm + 1e-9"}),
        ("_clip", {"norm + 1e-6": "norm + 1e-9"}),
        make=SGD,
        options={"max_norm": 0.1, "size": 0.01},
    ),
    Mutant(
        "skip ignored",
        ("step_kernel", {"if skip == 0:": "if skip == skip:"}),
        ("TorchBackend._finish", {"if not skip:": "if True:"}),
    ),
    Mutant(
        "step counter advanced on a skip",
        (
            "finish",
            {
                "tl.store(outcome + CONSECUTIVE_SKIPS, consecutive + 1)": "tl.store("
                "outcome + CONSECUTIVE_SKIPS, consecutive + 1)\n            count_steps(words, BLOCK // 4)"
            },
        ),
        (
            "TorchBackend._finish",
            {"if not skip:": "[part.state_of(e)[0].add_(int(skip)) for e in part.entries]\n    if not skip:"},
        ),
        message="state 'step'",
    ),
    Mutant(
        "amsgrad of the corrected moment",
        ("adam_update", {"tl.maximum(state[2], v,": "tl.maximum(state[2], v / (correction2_sqrt * correction2_sqrt),"}),
        ("_adam_plain", {"torch.maximum(states[2], v,": "torch.maximum(states[2], v / (1 - beta2**step),"}),
        options={"amsgrad": True},
    ),
    Mutant(
        "dampening on the first step",
        ("sgd_scalars", {"tl.where(step == 1, 0.0, tl.load(hyper + DAMPENING))": "tl.load(hyper + DAMPENING)"}),
        ("_sgd_plain", {'1.0 if step == 1 else 1 - group["dampening"]': '1 - group["dampening"]'}),
        make=SGD,
        options={"momentum": 0.9, "dampening": 0.5},
    ),
    Mutant(
        "maximize ignored",
        ("grad_factors", {" * tl.load(group + table.SIGN)": ""}),
        ("_run_plain", {'-g if group["maximize"] else g': "g"}),
        options={"maximize": True},
    ),
    Mutant(
        "lanes beyond the end in the norm",
        ("sum_region", {"other=0.0": "other=1.0"}),
        ("_sum_of_flat", {"flat[whole:])": "flat)"}),
        message="grad_norm",
        options={"max_norm": 1e9},
    ),
    Mutant(
        "norm off by 1.2e-6",
        ("decide", {"tl.sqrt(total) * ": "tl.sqrt(total) * (1 + 1.2e-6) * "}),
        ("global_norm", {"math.sqrt(total) * inv_scale": "math.sqrt(total) * inv_scale * (1 + 1.2e-6)"}),
    ),
    Mutant(
        "options of the first group for all",
        ("update_chunk", {"(tl.load(row + table.KIND) >> 32) * table.GROUP": "0"}),
        ("TorchBackend._update", {"optimizer.param_groups[entry.group]": "optimizer.param_groups[0]"}),
    ),
    Mutant(
        "growth one step late",
        ("advance", {"good >= ": "good > "}),
        ("advance", {"state[GROWTH_TRACKER] >= ": "state[GROWTH_TRACKER] > "}),
        message="loss scale",
    ),
]


@pytest.fixture(params=RUNNERS, ids=str)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    runner = choose(request, monkeypatch)
    # The rules of torch's fused kernels are not ours to mutate.
    monkeypatch.setattr(torch_backend, "_can_fuse", lambda entry, group: False)
    with runner.running():
        yield runner


def compare(runner: Runner, make: Any, max_norm: float = 1.0, size: float = 1.0, **options: Any) -> None:
    """A good step, an overflow, two good steps: the last makes the loss scale grow."""
    params = make_params([(40,), (7,), (600,)])
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    if make is AdamW:
        options = {"eps": 1e-3, "weight_decay": 0.1, **options}
    scale = tritonamp.LossScale(256.0, growth_interval=2)
    optimizer = make(groups, lr=0.05, max_norm=max_norm, loss_scale=scale, backend=runner.backend, **options)
    for step in range(4):
        set_grads(params, size * scaled(optimizer))
        if step == 1:
            params[0].grad[-1] = torch.inf
        checked_step(optimizer)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.mistake)
def test_the_comparison_rejects(
    mutant: Mutant, runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compare(runner, mutant.make, **mutant.options)
    if runner.backend == "torch":
        mutate(monkeypatch, tmp_path, MODULES, *mutant.torch)
    else:
        mutate_kernels(monkeypatch, tmp_path, triton_backend, *mutant.kernel)
    with pytest.raises(AssertionError, match=mutant.message):
        compare(runner, mutant.make, **mutant.options)


def test_a_copy_of_the_kernels_without_a_mistake_passes(
    kernel_runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = triton_backend.step_kernel
    mutate_kernels(monkeypatch, tmp_path, triton_backend, "adam_update", {})
    assert triton_backend.step_kernel is not original
    with kernel_runner.running():
        compare(kernel_runner, AdamW)

"""torch's own tables of options and of errors, from the tests of its optimizers, put to ours."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Runner
from problem import make_params, set_grads
from torch import Tensor

from tritonamp import SGD, Adam, AdamW
from tritonamp.optimizer import FusedOptimizer
from tritonamp.testing import assert_within, expect

OURS = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW}
SHAPES = [(), (7,), (0,), (2, 1, 3), (3, 171)]  # beside the borders of an access (8) and a chunk (512)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

# Options that choose among torch's implementations. Here there is one: they are no arguments.
MEANINGLESS = ("foreach", "fused", "capturable", "differentiable")


@pytest.fixture(scope="session")
def tables() -> Any:
    """Option sets by optimizer and dtype, and errors by optimizer."""
    program = Path(__file__).with_name("torch_tables.py")
    done = subprocess.run([sys.executable, str(program), *MEANINGLESS], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


def torch_step(name: str, optimizer: FusedOptimizer, options: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """Parameters and states that torch's own loop makes in float64 of those of the optimizer."""
    params = optimizer.param_groups[0]["params"]
    copies = [param.detach().to(torch.float64, copy=True).requires_grad_() for param in params]
    for double, param in zip(copies, params, strict=True):
        double.grad = param.grad.double()
    reference = getattr(torch.optim, name)(copies, foreach=False, fused=False, **options)
    groups = reference.state_dict()["param_groups"]
    reference.load_state_dict({"state": copy.deepcopy(optimizer.state_dict()["state"]), "param_groups": groups})
    reference.step()
    return copies, [reference.state[double] for double in copies]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OURS)
def test_every_option_set_gives_what_torch_gives(
    runner: Runner, name: str, dtype: torch.dtype, tables: Any, subtests: pytest.Subtests
) -> None:
    """Every step within the derived bound of what torch's non-fused optimizer makes of the same state in float64."""
    # Torch's float64 is exact next to ours, unless ours is float64 too: then each may be wrong by the bound.
    slack = 2.0 if dtype == torch.float64 else 1 + 2.0**-20
    for description, options in tables[0][name, dtype]:
        with subtests.test(description):
            exact = {"lr": float(options.get("lr", 1e-3))}
            if "betas" in options:
                exact["betas"] = tuple(map(float, options["betas"]))
            optimizer = OURS[name](make_params(SHAPES, dtype), loss_scale=None, backend=runner.backend, **options)
            for _ in range(3):
                set_grads(optimizer.param_groups[0]["params"])
                bound = expect(optimizer).step
                params, states = torch_step(name, optimizer, {**options, **exact})
                optimizer.step()
                for i, param in enumerate(optimizer.param_groups[0]["params"]):
                    assert_within(param, params[i].detach(), slack * bound.param_errors[i], f"param {i}")
                    for key, error in bound.state_errors[i].items():
                        if key in states[i] and param.numel() > 0:  # torch counts steps of nothing
                            want = states[i][key].double()
                            assert_within(optimizer.state[param][key], want, slack * error, f"{key} of param {i}")


# What ours say where torch's optimizers themselves, not their base class, refuse.
MESSAGES = {
    "Tensor lr must be 1-element": r"tensor lr must have one element, .* got shape \(2,\)",
    "beta1 should be between 0 and 1": r"beta1 must be in \[0, 1\), got 1\.0",
    "weight_decay should > 0": r"weight_decay must be at least 0, got -1",
    "momentum should be between 0 and 1": r"momentum must be at least 0, got -0\.5",
    "betas must be either both floats or both Tensors": r"betas must be both numbers or both tensors, got .*0\.9",
}


@pytest.mark.parametrize("name", OURS)
def test_every_error_is_raised_as_torch_raises_it(name: str, tables: Any, subtests: pytest.Subtests) -> None:
    for description, params, kwargs, error_on, error, message in tables[1][name]:
        with subtests.test(description):
            assert error_on == "CONSTRUCTION_ERROR"
            if any(option in kwargs for option in MEANINGLESS):
                error, message = TypeError, "unexpected keyword argument"
            raises = pytest.warns if issubclass(error, Warning) else pytest.raises
            with raises(error, match=MESSAGES.get(description, message)):
                OURS[name](make_params([(1, 1)]) if params is None else params, **kwargs)


@pytest.mark.parametrize("option", MEANINGLESS)
@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_options_without_a_meaning_are_no_arguments(make: Any, option: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        make(make_params([(1,)]), **{option: True})


@pytest.mark.parametrize("make", [Adam, AdamW])
def test_tensor_betas_are_read_by_the_host(make: Any) -> None:
    with pytest.raises(ValueError, match=r"beta2 must have one element, got shape \(2,\)"):
        make(make_params([(1,)]), betas=(torch.tensor(0.9), torch.tensor([0.9, 0.99])))
    with pytest.raises(ValueError, match="beta1 must lie on the CPU, where it is read, got meta"):
        make(make_params([(1,)]), betas=(torch.tensor(0.9, device="meta"), torch.tensor(0.9)))

"""torch.distributed.checkpoint: saved on some ranks, loaded on others, exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Pool, checked_step, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tritonamp

pytestmark = pytest.mark.xdist_group("ranks")

# Class, options, state that travels everywhere.
RULES: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "sgd": (tritonamp.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, ("momentum_buffer",)),
    "adamw": (tritonamp.AdamW, {"lr": 0.1, "amsgrad": True}, ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "masters": (tritonamp.AdamW, {"lr": 0.1, "master_weights": True}, ("step", "exp_avg", "exp_avg_sq")),
}


def make(rule: str, init_scale: float) -> tuple[nn.Module, Any]:
    """Shapes that do not divide, and one that leaves ranks with nothing."""
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    if rule == "masters":
        model = model.bfloat16()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, options, _ = RULES[rule]
    scale = tritonamp.LossScale(init_scale, growth_interval=3)
    return model, optimizer(model.parameters(), max_norm=1.0, loss_scale=scale, backend="torch", **options)


def step(model: nn.Module, opt: Any, seed: int) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    x = x.to(next(model.parameters()).dtype)
    opt.backward(model(x).square().mean())
    checked_step(opt)
    opt.zero_grad()


def everything(model: nn.Module, opt: Any) -> dict[str, Any]:
    """By names: parameters, state, loss scale."""
    found: dict[str, Any] = {"scale": opt.loss_scale.state_dict()}
    states = opt.state_dict()["state"]  # SGD's counters stay at home
    for i, (name, param) in enumerate(model.named_parameters()):
        found[name] = whole(param)
        found.update({f"{name} {key}": whole(value) for key, value in states[i].items()})
    return found


def save(rule: str, folder: Path) -> dict[str, Any]:
    model, opt = make(rule, 256.0)
    for seed in range(4):
        step(model, opt, seed)
    steps = [float(opt.state[param]["step"]) for param in model.parameters()]
    assert steps == [4.0] * len(steps)  # of empty shards too: any rank's may be the one that is saved
    model_state, optim_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    return everything(model, opt)


def load(rule: str, folder: Path) -> dict[str, Any]:
    model, opt = make(rule, 2.0)
    model_state, optim_state = get_state_dict(model, opt)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=model_state, optim_state_dict=optim_state)
    found = everything(model, opt)
    step(model, opt, 9)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_is_loaded_on_other_numbers_of_ranks(rule: str, pool: Pool, tmp_path: Path) -> None:
    saved = pool.run(save, rule, tmp_path, ranks=4)[0]
    assert saved["scale"]["scale"] == 512.0 and saved["scale"]["_growth_tracker"] == 1
    for ranks in (1, 2, 4):
        for found in pool.run(load, rule, tmp_path, ranks=ranks):
            assert found.keys() == saved.keys()
            for name, value in saved.items():
                same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
                assert same, (ranks, name, found[name], value)


def full(rule: str) -> None:
    """The whole state in one process's memory, as it is exchanged with training on one device."""
    model, opt = make(rule, 256.0)
    for seed in range(3):
        step(model, opt, seed)
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    model_state, optim_state = get_state_dict(model, opt, options=options)
    old, saved = everything(model, opt), (model_state, optim_state)
    model_state, optim_state = copy.deepcopy(saved)  # torch distributes it in place
    model, opt = make(rule, 2.0)
    set_state_dict(model, opt, model_state_dict=model_state, optim_state_dict=optim_state, options=options)
    new = everything(model, opt)
    assert new.keys() == old.keys() and new["scale"] == old["scale"]
    assert all(torch.equal(new[name], value) for name, value in old.items() if name != "scale")
    step(model, opt, 9)
    plain: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    plain = plain.bfloat16() if rule == "masters" else plain
    one = RULES[rule][0](plain.parameters(), loss_scale=tritonamp.LossScale(), **RULES[rule][1])
    model_state, optim_state = saved
    set_state_dict(plain, one, model_state_dict=model_state, optim_state_dict=optim_state)
    assert one.loss_scale.get_scale() == old["scale"]["scale"]
    for name, param in plain.named_parameters():
        for key in RULES[rule][2]:
            assert torch.equal(one.state[param][key], old[f"{name} {key}"])
    # And back: whole tensors for shards, without the help of torch's state_dict functions.
    opt.load_state_dict(one.state_dict())
    again = everything(model, opt)
    assert all(torch.equal(again[name], value) for name, value in old.items() if " " in name)


@pytest.mark.parametrize("rule", RULES)
def test_whole_state_is_exchanged_with_one_process(rule: str, pool: Pool) -> None:
    pool.run(full, rule, ranks=2)

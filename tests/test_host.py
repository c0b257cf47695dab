"""What a step costs the host: one launch, at most one upload, no recompilation, and a plan that is never stale."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import IS_INTERPRETED, Runner
from problem import assert_same_bits, checked_step, make_params, scaled, set_grads, values
from torch.utils._python_dispatch import TorchDispatchMode

import tritonamp
from tritonamp.backends.triton import step_kernel

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Dispatched(TorchDispatchMode):
    """Counts the torch operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith("profiler."):  # torch's own range around every Optimizer.step
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def many_groups() -> list[dict[str, Any]]:
    """300 tensors in 20 groups of three dtypes."""
    groups = []
    for i, dtype in zip(range(20), itertools.cycle(DTYPES)):
        groups.append({"params": make_params([(1 + i,)] * 15, dtype), "lr": 0.01 * (i + 1), "max_norm": 1.0 + i})
    return groups


@pytest.mark.parametrize("groups", [lambda: [{"params": make_params([(70,)])}], many_groups], ids=["1", "300"])
def test_one_launch_per_step(kernel_runner: Runner, groups: Any) -> None:
    groups = groups()
    params = [p for group in groups for p in group["params"]]
    with kernel_runner.running() as launches:
        optimizer = tritonamp.AdamW(groups, loss_scale="dynamic", backend="triton")
        for step in range(3):
            set_grads(params, scaled(optimizer))
            if step == 1:
                params[-1].grad[0] = torch.inf
            checked_step(optimizer)
        assert len(launches.launches) == 3
        if IS_INTERPRETED:
            assert all(launch.kwargs["launch_cooperative_grid"] for launch in launches)


@pytest.mark.compiled
@pytest.mark.parametrize("groups", [lambda: [{"params": make_params([(70,)])}], many_groups], ids=["1", "300"])
def test_at_most_one_operator_per_step(kernel_runner: Runner, groups: Any) -> None:
    """From the second step on: nothing where nothing has changed, one copy where gradients or options have."""
    groups = groups()
    params = [p for group in groups for p in group["params"]]
    with kernel_runner.running():
        optimizer = tritonamp.AdamW(groups, loss_scale=8.0, backend="triton")
        for step in range(4):
            scaled(optimizer)
            if step != 2:
                set_grads(params, 8.0)
                optimizer.param_groups[0]["lr"] *= 0.9
            with Dispatched() as dispatched:
                optimizer.step()
            if step:
                assert dispatched.names == ([] if step == 2 else ["aten.copy_.default"])


@pytest.mark.compiled
def test_nothing_recompiles_inside_the_loop(kernel_runner: Runner) -> None:
    """Neither step count, lr, scale, a missing gradient, another alignment nor an odd size makes a new kernel."""
    params = make_params([(70,), (16,), (5, 5)])
    with kernel_runner.running():
        optimizer = tritonamp.AdamW(
            params, max_norm=1.0, loss_scale=tritonamp.LossScale(8.0, growth_interval=3), backend="triton"
        )
        kernels = None
        for step in range(20):
            scale = scaled(optimizer)
            set_grads(params, scale)
            params[1].grad = (torch.randn(19) * scale)[step % 4 : step % 4 + 16]
            if step % 3 == 1:
                params[0].grad = None
            optimizer.param_groups[0]["lr"] = 1.0 / (step + 1)
            checked_step(optimizer)
            compiled = sum(len(caches[0]) for caches in step_kernel.device_caches.values())
            kernels = kernels or compiled
            assert compiled == kernels


def test_item_and_bool_are_never_called(kernel_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params([(70,)])
    with kernel_runner.running():
        optimizer = tritonamp.AdamW(params, max_norm=1.0, loss_scale="dynamic", backend="triton")
        set_grads(params, scaled(optimizer))
        optimizer.step()
        set_grads(params, scaled(optimizer))

        def refuse(*args: Any) -> Any:
            raise AssertionError("a step must not wait for the device")

        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        optimizer.step()


def test_the_plan_is_never_stale(runner: Runner) -> None:  # noqa: C901 - a list of changes, not branches
    """Gradients move, vanish and change strides; data is swapped; state is replaced; groups are added."""
    params = make_params([(600,), (4, 6), (9,)])
    optimizer = tritonamp.AdamW(params, lr=0.1, max_norm=1.0, loss_scale=2.0, backend=runner.backend)

    def swap_param() -> None:
        params[0].data = torch.randn(600)

    def swap_grad_data() -> None:
        params[0].grad.data = torch.randn(600)

    def cast_model() -> None:
        params[2].grad = None
        params[2].data = params[2].data.half()
        set_grads(params[2:], 2.0)

    def transpose_grad() -> None:
        params[1].grad = torch.randn(6, 4).t()

    def transpose_param() -> None:
        params[1].data = torch.randn(6, 4).t()

    def replace_state() -> None:
        optimizer.state[params[0]]["exp_avg"] = torch.randn(600)

    def swap_state_data() -> None:
        optimizer.state[params[0]]["exp_avg"].data = torch.randn(600)

    def replace_state_dict() -> None:
        optimizer.state[params[1]] = {k: v.clone() for k, v in optimizer.state[params[1]].items()}

    def drop_state() -> None:
        del optimizer.state[params[0]]

    def state_on_host() -> None:
        optimizer.state[params[0]] = {"step": 3, "exp_avg": torch.randn(600).double(), "exp_avg_sq": torch.rand(600)}

    def add_group() -> None:
        new = make_params([(33,)])
        optimizer.add_param_group({"params": new, "lr": 0.01})
        set_grads(new, 2.0)

    def remove_param() -> None:
        del optimizer.state[optimizer.param_groups[0]["params"].pop(0)]

    def switch_amsgrad() -> None:
        optimizer.param_groups[0]["amsgrad"] = True

    changes = [
        swap_param, swap_grad_data, cast_model, transpose_grad, transpose_param, replace_state, swap_state_data,
        replace_state_dict, drop_state, add_group, switch_amsgrad, remove_param,
    ]  # fmt: skip
    for change in [lambda: None, *changes, state_on_host]:
        scaled(optimizer)
        for p in params:
            set_grads([p], 2.0, p.dtype)
        if change is state_on_host:
            params[0].grad = None
            optimizer.param_groups[0]["params"].append(params[0])
        change()
        if change is drop_state or change is switch_amsgrad or change is state_on_host:
            optimizer.step()  # the oracle reads the state that this step completes
            continue
        checked_step(optimizer)


@pytest.mark.parametrize("exception", [RuntimeError("device fell over"), KeyboardInterrupt()], ids=repr)
def test_an_aborted_launch_leaves_a_working_optimizer(
    kernel_runner: Runner, exception: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workspace, whose barrier counters may be anything, is dropped."""
    from tritonamp.backends import triton as backend

    params = make_params([(600,), (4,)])
    with kernel_runner.running():
        optimizer = tritonamp.AdamW(params, max_norm=1.0, loss_scale=None, backend="triton")
        set_grads(params)
        checked_step(optimizer)
        before = values(optimizer)

        class Broken:
            def __getitem__(self, grid: Any) -> Any:
                def launch(*args: Any, **kwargs: Any) -> None:
                    args[2].fill_(1)  # one program had arrived at the barrier
                    raise exception

                return launch

        with monkeypatch.context() as patch:
            patch.setattr(backend, "step_kernel", Broken())
            set_grads(params)
            with pytest.raises(type(exception)):
                optimizer.step()
        assert_same_bits(values(optimizer), before)
        checked_step(optimizer)


def test_two_launches_where_a_cooperative_one_is_refused(
    kernel_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tritonamp.backends import triton as backend

    class Refused:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

            return launch

    params = make_params([(600,), (4,)])
    monkeypatch.setattr(backend, "step_kernel", Refused())
    monkeypatch.setattr(backend, "JITFunction", object if not IS_INTERPRETED else int)
    with kernel_runner.running() as launches:
        optimizer = tritonamp.AdamW(params, max_norm=1.0, loss_scale=4.0, backend="triton")
        for step in range(3):
            set_grads(params, scaled(optimizer))
            if step == 1:
                params[0].grad[-1] = torch.nan
            checked_step(optimizer)
        assert len(launches.launches) == 6


@pytest.mark.compiled
def test_a_refused_grid_is_tried_smaller_first(kernel_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of the device may be taken: one program per multiprocessor, before giving up on a single launch."""
    from tritonamp.backends import table
    from tritonamp.backends import triton as backend

    monkeypatch.setattr(table, "MIN_CHUNK", 64)
    params = make_params([(600,), (4,)])
    with kernel_runner.running() as launches:
        optimizer = tritonamp.AdamW(params, max_norm=1.0, loss_scale=None, backend="triton")
        for step in range(3):
            if step == 1:
                launch = next(iter(optimizer._devices.on(params[0].device)._launches.values()))
                assert launch._programs > kernel_runner.programs
                launch._programs = 10_000  # more than there is room for
                monkeypatch.setattr(optimizer._devices.on(params[0].device)._workspace.table, "n_chunks", 10_000)
            set_grads(params)
            checked_step(optimizer)
        assert launch._programs == kernel_runner.programs
        assert [launch.name for launch in launches.launches] == [backend.step_kernel.__name__] * 3

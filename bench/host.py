"""Host time of a step up to the launch, against torch's unscale_ + clip_grad_norm_ + step + update.

The Triton backend runs on the virtual GPU's driver, whose launch is replaced by nothing: everything up to it is timed,
the checks for moved gradients, swapped data and replaced state included. Torch's calls run as they are, on parameters
of one element each, so that next to nothing of their time is arithmetic. Both are timed in turns, in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tritonamp
from tritonamp.testing.virtual_gpu import driver, virtual_gpu


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``host`` takes."""
    parser.add_argument("--params", type=int, nargs="+", default=[10, 150, 1000, 5000], help="numbers of parameters")
    parser.add_argument("--repeat", type=int, default=30, help="steps of each that are timed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    table = Table("parameters", "tritonamp", "torch, fused AdamW", "ratio", title="host time of a step (median)")
    for count in args.params:
        ours, theirs = measure(count, args.repeat)
        table.add_row(f"{count}", f"{ours * 1e3:.3f} ms", f"{theirs * 1e3:.3f} ms", f"{ours / theirs:.1%}")
    Console().print(table)


def measure(count: int, repeat: int) -> tuple[float, float]:
    """Median seconds of our step without its kernel, and of torch's three calls."""
    with virtual_gpu(), mock.patch.object(driver.Launcher, "__call__", return_value=None):
        params = [_params(count), _params(count)]
        calls = [_ours(params[0]), _torch(params[1])]
        for call in calls:
            call()
        times: list[list[float]] = [[], []]
        for _ in range(repeat):
            for of_call, call, taken in zip(params, calls, times, strict=True):
                _move_grads(of_call)
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def _params(count: int) -> list[Tensor]:
    params = [torch.ones(1, requires_grad=True) for _ in range(count)]
    _move_grads(params)
    return params


def _move_grads(params: list[Tensor]) -> None:
    """New gradients elsewhere, as after a backward pass."""
    grads = [torch.ones(1) for _ in params]  # while the old ones are alive
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def _ours(params: list[Tensor]) -> Callable[[], object]:
    optimizer = tritonamp.AdamW(params, max_norm=1.0, loss_scale=1.0, backend="triton")
    loss = torch.ones(())

    def step() -> None:
        optimizer.scale(loss)
        optimizer.step()

    return step


def _torch(params: list[Tensor]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(params, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1 << 30)
    loss = torch.ones(())

    def step() -> None:
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step

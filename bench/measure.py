"""Times contenders in turns on one problem, and counts what a step of theirs does.

Gradients are given anew before every step, since most contenders divide them in place; what is timed begins when they
are there, and ends when the step is done: on a GPU by events, the host's own time being taken besides.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from .contenders import Step
from .problem import Problem

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler tells stderr whenever it starts and stops

WARMUP = 2
COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # far beyond every cache


@dataclass
class Samples:
    """Seconds of every step that was timed.

    Attributes:
        total: until it was done.
        host: until the call returned; empty on a CPU, where that is the same.
    """

    total: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def timed(device: torch.device, call: Callable[[], object], samples: Samples) -> None:
    """Call once, and add the time it takes."""
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        samples.total.append(time.perf_counter() - start)
        return
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    before.record()
    start = time.perf_counter()
    call()
    samples.host.append(time.perf_counter() - start)
    after.record()
    torch.cuda.synchronize(device)
    samples.total.append(before.elapsed_time(after) * 1e-3)


class Copy:
    """A copy of a large buffer: the bandwidth to measure against."""

    def __init__(self, device: torch.device) -> None:
        self._source, self._target = (torch.ones(COPIED_BYTES[device.type] // 4, device=device) for _ in range(2))
        self.bytes = 2 * self._source.nbytes

    def __call__(self) -> None:
        """Copy."""
        self._target.copy_(self._source)


def in_turns(
    problem: Problem, steps: Sequence[Step], rounds: int, tick: Callable[[], object] = lambda: None
) -> tuple[list[Samples], Samples, int]:
    """Time every step ``rounds`` times, in turns, each round beginning with another one.

    Args:
        problem: what is stepped.
        steps: the contenders'.
        rounds: how often each is timed.
        tick: called after every round.

    Returns:
        The steps' times, those of a copy, and the bytes that it moves.
    """
    samples, copy, copied = [Samples() for _ in steps], Copy(problem.device), Samples()
    for number in range(WARMUP + rounds):
        for i in range(len(steps)):
            at = (i + number) % len(steps)
            _ready(problem, steps[at])
            timed(problem.device, steps[at], samples[at])
        timed(problem.device, copy, copied)
        tick()
    problem.clear()
    for taken in [*samples, copied]:
        del taken.total[:WARMUP], taken.host[:WARMUP]
    return samples, copied, copy.bytes


def _ready(problem: Problem, step: Step) -> None:
    problem.restore()
    step.scale_loss()


# What a step does.


@dataclass(frozen=True)
class Counts:
    """What one step does, seen in steps that are not timed.

    Attributes:
        operators: torch operators that are dispatched.
        launches, copies, syncs: kernels, copies and fills on the device, and times that the host waits for it; None
            on a CPU.
        peak_bytes: the most memory that it holds at a time, above what there was before: as CUDA's allocator reports
            it, and on a CPU summed over the allocations that torch's profiler sees.
    """

    operators: int
    launches: int | None
    copies: int | None
    syncs: int | None
    peak_bytes: int


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not str(func).startswith("profiler.")  # torch's own range around every Optimizer.step
        return func(*args, **(kwargs or {}))


def count(problem: Problem, step: Step) -> Counts:
    """Take a step for each thing that is counted."""
    _ready(problem, step)
    with _Operators() as operators:
        step()
    _ready(problem, step)
    if problem.device.type == "cpu":
        counts = Counts(operators.count, None, None, None, _peak_on_cpu(step))
    else:
        before = torch.cuda.memory_allocated(problem.device)
        torch.cuda.reset_peak_memory_stats(problem.device)
        step()
        peak = torch.cuda.max_memory_allocated(problem.device) - before
        _ready(problem, step)
        counts = Counts(operators.count, *on_device(step), peak)
    problem.clear()
    return counts


def _peak_on_cpu(step: Step) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def on_device(call: Callable[[], object]) -> tuple[int, int, int]:
    """Kernels, copies, and waits of a call; the profiler's own are found by profiling nothing."""
    own, seen = _device_events(lambda: None), _device_events(call)
    return seen[0] - own[0], seen[1] - own[1], seen[2] - own[2]


def _device_events(call: Callable[[], object]) -> tuple[int, int, int]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
    events = profiler.events()
    on_device = [e.name for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in on_device)
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
    return len(on_device) - copies, copies, sum(e.name in waits for e in events)

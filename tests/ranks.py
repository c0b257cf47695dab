"""Processes that a test's function runs in at once, as the ranks of a gloo process group, and what it checks there."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.util
import inspect
import math
import multiprocessing
import multiprocessing.connection
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from conftest import Runner
from torch import Tensor

from tritonamp.backends import table
from tritonamp.optimizer import FusedOptimizer
from tritonamp.testing import Expectation, oracle

Runs = tuple[Any, ...]  # a Runner's fields: pytest may have loaded another conftest under the same name
TIMEOUT = 30.0  # seconds that a rank waits for others


@dataclass(frozen=True)
class Failure:
    """What a rank ended with instead of returning: the error's type, or ``"died"`` or ``"hung"``; and its traceback."""

    kind: str
    report: str


class _Task(NamedTuple):
    file: str
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


_World = list[tuple[Any, Any]]  # of each rank the process and the connection to it


class Pool:
    """Process groups of real processes, kept from one call to the next: each has ranks and a timeout of its own.

    The processes are forked from one that has imported torch and run nothing: within a process, torch takes meshes of
    an ended process group for equal ones of a new group.
    """

    def __init__(self, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["ranks"])
        self._folder = folder
        self._n_worlds = 0
        self._worlds: dict[tuple[int, float], _World] = {}

    def _world(self, ranks: int, timeout: float) -> _World:
        if (ranks, timeout) not in self._worlds:
            self._n_worlds += 1
            store = self._folder / f"store-{self._n_worlds}"
            self._worlds[ranks, timeout] = [self._start(rank, ranks, timeout, store) for rank in range(ranks)]
        return self._worlds[ranks, timeout]

    def _start(self, rank: int, ranks: int, timeout: float, store: Path) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(rank, ranks, timeout, store, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _end(self, world: _World) -> None:
        for process, connection in world:
            process.kill()
            process.join()
            connection.close()

    def close(self) -> None:
        """End the processes."""
        for world in self._worlds.values():
            self._end(world)

    def outcomes(
        self,
        work: Callable[..., Any],
        *args: Any,
        ranks: int,
        timeout: float = TIMEOUT,
        patience: float = 120.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``work(*args, **kwargs)`` on that many ranks; what each returns, or a :class:`Failure`.

        ``timeout`` is the process group's, in seconds; after a failure, others are waited for with ``patience``.
        """
        world = self._world(ranks, timeout)
        task = pickle.dumps(_Task(str(inspect.getsourcefile(work)), work.__qualname__, args, kwargs))
        for _, connection in world:
            connection.send_bytes(task)
        found: list[Any] = [Failure("hung", "no answer")] * ranks
        waiting = {connection: rank for rank, (_, connection) in enumerate(world)}
        deadline = time.monotonic() + 120.0
        while waiting and time.monotonic() < deadline:
            for connection in multiprocessing.connection.wait(list(waiting), 1.0):
                rank = waiting.pop(connection)
                found[rank] = _answer(connection)
                if isinstance(found[rank], Failure):
                    deadline = min(deadline, time.monotonic() + patience)
        if any(isinstance(outcome, Failure) for outcome in found):
            self._end(self._worlds.pop((ranks, timeout)))
        return found

    def run(self, work: Callable[..., Any], *args: Any, ranks: int, **kwargs: Any) -> list[Any]:
        """As :meth:`outcomes`, where none may fail."""
        found = self.outcomes(work, *args, ranks=ranks, patience=1.0, **kwargs)
        reports = [f"rank {i}: {o.report}" for i, o in enumerate(found) if isinstance(o, Failure)]
        if reports:
            raise AssertionError("\n".join(reports))
        return found


def _answer(connection: Any) -> Any:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return Failure("died", "its process ended")


def _serve(rank: int, ranks: int, timeout: float, store: Path, connection: Any) -> None:
    torch.set_num_threads(1)
    sys.path.append(str(Path(__file__).parents[1]))  # where pytest's names of test modules, in arguments, start
    wait = dt.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=wait)
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            task: _Task = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            work = getattr(_module(task.file, modules), task.name)
            torch.manual_seed(0)
            answer = pickle.dumps(work(*task.args, **task.kwargs))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test is told
            answer = pickle.dumps(Failure(type(error).__name__, traceback.format_exc()))
        connection.send_bytes(answer)


def _module(file: str, modules: dict[str, ModuleType]) -> ModuleType:
    """The file as a module of its own: pytest's names of test modules do not exist here."""
    if file not in modules:
        name = f"ranks_{Path(file).stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        modules[file] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[file])
    return modules[file]


# What the functions that run there are made of.


@contextlib.contextmanager
def backend(runs: Runs) -> Iterator[str]:
    """Where steps run as the runner's do, with chunks so small that small tensors make several; ``backend=``."""
    runner = Runner(*runs)
    with mock.patch.object(table, "MIN_CHUNK", 512), runner.running():
        yield runner.backend


def whole(tensor: Any) -> Any:
    """A copy of all of a DTensor, of a tensor; None as it is. A collective."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


class Gathered:
    """A distributed optimizer, as a single process would see it: whole tensors, those of all ranks of its group."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self.optimizer = optimizer
        options = {"rounding": optimizer.rounding, "master_weights": optimizer.master_weights}
        states, rows = optimizer.state_dict()["state"], []
        pairs = [(param, group) for group in optimizer.param_groups for param in group["params"]]
        for i, (param, group) in enumerate(pairs):
            state = {key: whole(value) for key, value in states.get(i, {}).items()}
            kept = {key: value for key, value in group.items() if key != "params"}
            rows.append((whole(param), whole(param.grad), state, {**options, **kept}))
        if optimizer.process_group is not None:
            parts: list[Any] = [None] * optimizer.process_group.size()
            dist.all_gather_object(parts, rows, group=optimizer.process_group)
            rows = [row for part in parts for row in part]
        self.params, self.grads, self.states, self.groups = map(list, zip(*rows, strict=True))
        self.param_groups = [{"params": self.params}]

    def state_dict(self) -> dict[str, Any]:
        return {"state": dict(enumerate(self.states))}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def checked_step(optimizer: FusedOptimizer, **known: Any) -> oracle.Step:
    """One step, compared on every rank with the oracle's on the whole; ``known`` is for it."""
    before = Gathered(optimizer)
    everyone: list[Any] = [None] * dist.get_world_size()
    grads = [local(param.grad) for param in optimizer._params() if param.grad is not None]
    dist.all_gather_object(everyone, not all(bool(grad.isfinite().all()) for grad in grads))
    known = {
        "found_inf": any(everyone),
        "unscaled": optimizer._is_unscaled,
        "skip_nonfinite": optimizer._skip_nonfinite,
        **known,
    }
    want = oracle.step(
        before.params,
        before.grads,
        before.states,
        before.groups,
        scale=oracle._own_scale(optimizer),
        skip_norm=optimizer._skip_norm,
        **known,
    )
    if any(everyone) and want.norm < math.inf:  # what overflows is a plain tensor or a replica of another rank
        want = replace(want, norm=math.nan)
    optimizer.step()
    Expectation(Gathered(optimizer), want).check()  # type: ignore[arg-type]
    return want


def agreed(optimizer: FusedOptimizer) -> list[float]:
    """What ranks must never differ in: the loss scale's state and the outcome of the last step."""
    scale = optimizer.loss_scale
    numbers = [] if scale is None else list(map(float, scale.state_dict().values()))
    return [*numbers, *optimizer._outcome_state().nan_to_num(-1.0).tolist()]


def assert_agreed(numbers: list[float]) -> None:
    """The same numbers on all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, numbers)
    assert all(other == everyone[0] for other in everyone), everyone


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [
        t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
        for t in tensors
    ]

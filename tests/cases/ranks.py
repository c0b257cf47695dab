"""Functions run on all ranks of a process group, one process each."""

from __future__ import annotations

import dataclasses
import datetime as dt
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from conftest import Runner
from torch import distributed

RANKS = 2
Run = Callable[..., list[Any]]


@contextmanager
def ranks() -> Iterator[Run]:
    """Processes that wait for work; what is yielded is called with a runner, a free path, a function and arguments.

    On each rank the function is called with the rank, the runner's backend and the arguments; both have to be
    picklable. Results are returned in the order of ranks. What a rank raises is raised.
    """
    with ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn"), initializer=_find_tests) as pool:

        def run(runner: Runner, store: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
            as_numbers = dataclasses.astuple(runner)  # pytest may have loaded another conftest under the same name
            # A rank waits for the others before it does anything, so that each is in a process of its own.
            futures = [pool.submit(_on_rank, rank, as_numbers, store, function, args) for rank in range(RANKS)]
            return [future.result() for future in futures]

        yield run


def _find_tests() -> None:
    """Functions are pickled by the names that pytest gives test modules, from the root on."""
    sys.path.append(str(Path(__file__).parents[2]))


def _on_rank(
    rank: int, as_numbers: tuple[Any, ...], store: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    torch.manual_seed(rank)
    # Not for ever, where one has failed and the other waits for it.
    timeout = dt.timedelta(seconds=30)
    distributed.init_process_group("gloo", f"file://{store}", timeout, RANKS, rank)
    try:
        distributed.barrier()  # before one is through with it, the others have to be connected
        runner = Runner(*as_numbers)
        with runner.running():
            return function(rank, runner.backend, *args)
    finally:
        distributed.destroy_process_group()

"""Writes the options and errors that torch's own tests put to SGD, Adam and AdamW to stdout, pickled.

The arguments name options to leave out. It is a program, as to import these tables changes Hypothesis' profile and
freezes torch's flags.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import torch
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

NAMES = ("SGD", "Adam", "AdamW")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def option_sets(info: OptimizerInfo, dtype: torch.dtype, left_out: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Descriptions and options, without those that are left out, each set once."""
    sets = {}
    # The table for CUDA is that for CPUs and more; nothing in it lies on a GPU.
    for given in info.optim_inputs_func("cuda", dtype):
        options = {name: value for name, value in given.kwargs.items() if name not in left_out}
        sets.setdefault(repr(options), (given.desc, options))
    return list(sets.values())


def errors(info: OptimizerInfo) -> list[tuple[Any, ...]]:
    """Description, parameters, options, the phase that has to raise, the error, and a pattern of its message."""
    return [
        (given.desc, given.params, given.kwargs, error.error_on.name, error.error_type, error.error_regex)
        for error in info.optim_error_inputs_func("cpu", torch.float32)
        for given in [error.optimizer_error_input]
    ]


if __name__ == "__main__":
    infos = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in NAMES}
    tables = (
        {(name, dtype): option_sets(info, dtype, sys.argv[1:]) for name, info in infos.items() for dtype in DTYPES},
        {name: errors(info) for name, info in infos.items()},
    )
    pickle.dump(tables, sys.stdout.buffer)

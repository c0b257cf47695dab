"""Builds the device table that the kernels read (its layout: ``kernels/table.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tritonamp.kernels import table as kernel_table

from ..layout import compute_dtype, layout_of, real_dtype
from ..plan import Entry, Part
from ..state import MASTER

if TYPE_CHECKING:
    from ..optimizer import FusedOptimizer
    from . import Request

Words = npt.NDArray[np.int64]

MIN_CHUNK, MAX_CHUNK = 2048, 65536
TARGET_CHUNKS = 8192  # enough to keep a large device busy to the end, few enough for every program to add up


class Variant(NamedTuple):
    """What a kernel is specialised on.

    Attributes:
        grad, param: dtypes.
        compute: dtype of computation and state.
        states: how many state tensors the rule has.
        kept: how the parameter is kept, as in ``state.py``.
    """

    grad: torch.dtype
    param: torch.dtype
    compute: torch.dtype
    states: int
    kept: int


class _At:
    """The numbers of ``kernels/table.py``, as plain ints."""

    def __getattr__(self, name: str) -> int:
        return int(getattr(kernel_table, name).value)


_AT = _At()


def chunk_size(numel: int) -> int:
    """Elements per chunk where there are ``numel`` in all: a power of two that depends on nothing else."""
    return min(max(1 << (numel // TARGET_CHUNKS).bit_length(), MIN_CHUNK), MAX_CHUNK)


def variant_of(entry: Entry) -> Variant:
    """The variant of a parameter, whether it has a gradient by now or not."""
    param, kept = entry.param, entry.kept
    n_states = entry.n_states - (kept == MASTER)
    return Variant(real_dtype(entry.grad_dtype), real_dtype(param.dtype), compute_dtype(param), n_states, kept)


def grad_kinds(variants: Sequence[Variant]) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    """The distinct (grad dtype, compute dtype) of the variants."""
    return tuple(dict.fromkeys((variant.grad, variant.compute) for variant in variants))


class Table:
    """The table in host memory.

    Attributes:
        words: all of it, int64.
        changing: the words at its beginning that may change from step to step.
        n_chunks: the number of chunks.
        n_slots: the number of pairs of sums that ranks and devices add up; 0 where there are no others.
    """

    def __init__(self, part: Part, variants: Sequence[Variant], n_groups: int) -> None:
        entries = part.entries
        numels = np.array([_real_numel(entry.param) for entry in entries], np.int64)
        size = chunk_size(int(numels.sum()))
        chunks = -(-numels // size)
        self.n_chunks = int(chunks.sum())
        self.n_slots = part.agreement.slots if part.agreement.is_needed else 0
        self._n_groups = n_groups

        at_grads = _AT.HEADER + n_groups * _AT.GROUP
        at_rows = at_grads + len(entries)
        at_chunks = at_rows + len(entries) * _AT.ROW
        self.changing = at_rows

        kinds = grad_kinds(variants)
        rows = np.zeros((len(entries), _AT.ROW), np.int64)
        layouts: list[int] = []
        for row, entry, numel in zip(rows, entries, numels, strict=True):
            variant = variant_of(entry)
            kind = kinds.index((variant.grad, variant.compute))
            row[_AT.PARAM], row[_AT.NUMEL], row[_AT.STREAM] = entry.param.data_ptr(), numel, entry.stream
            row[_AT.KIND] = variants.index(variant) | kind << 16 | entry.group << 32
            step, states = part.state_of(entry)
            row[_AT.STEP] = 0 if step is None else step.data_ptr()
            row[_AT.STATE : _AT.STATE + len(states)] = [state.data_ptr() for state in states]
            row[_AT.SHARE] = entry.share.slot << 1 | entry.share.counts
            layout = layout_of(entry.param, entry.grad_strides)
            row[_AT.LAYOUT] = _AT.FLAT if layout is None else at_chunks + self.n_chunks + len(layouts)
            if layout is not None:
                layouts += [len(layout.sizes), *(word for dim in zip(*layout, strict=True) for word in dim)]

        tensors = np.repeat(np.arange(len(entries)), chunks)
        within = np.arange(self.n_chunks) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        changing = np.zeros(at_rows, np.int64)
        self.words: Words = np.concatenate(
            [changing, rows.ravel(), tensors << 32 | within, np.array(layouts, np.int64)]
        )
        self._header = {
            "N_TENSORS": len(entries),
            "N_CHUNKS": self.n_chunks,
            "CHUNK_SIZE": size,
            "GRADS": at_grads,
            "ROWS": at_rows,
            "CHUNKS": at_chunks,
            "N_SUMS": part.agreement.n_sums if part.agreement.is_needed else self.n_chunks,
            "N_SLOTS": self.n_slots,
        }

    def fill(self, optimizer: FusedOptimizer, grads: Sequence[Tensor | None], request: Request) -> bool:
        """Write what may change from step to step; True if it has changed."""
        words = np.zeros(self.changing, np.int64)
        header = {
            **self._header,
            "UNSCALE": int(request.unscale),
            "ADVANCE": request.advance,
            "SKIP_NONFINITE": int(request.skip_nonfinite),
            "GRAD_SCALE": 0 if request.grad_scale is None else request.grad_scale.data_ptr(),
            "FOUND_INF": 0 if request.found_inf is None else request.found_inf.data_ptr(),
        }
        for name, word in header.items():
            words[getattr(_AT, name)] = word
        words.view(np.float64)[_AT.SKIP_NORM] = request.skip_norm
        rows = words[_AT.HEADER : self._header["GRADS"]].reshape(self._n_groups, _AT.GROUP)
        self._fill_groups(optimizer, request.lrs, rows)
        # An empty gradient may have no address; that it is there counts its step.
        words[self._header["GRADS"] :] = [0 if grad is None else grad.data_ptr() or 1 for grad in grads]
        if np.array_equal(words, self.words[: self.changing]):
            return False
        self.words[: self.changing] = words
        return True

    def _fill_groups(self, optimizer: FusedOptimizer, lrs: Sequence[float | Tensor], rows: Words) -> None:
        for row, real, lr, group in zip(rows, rows.view(np.float64), lrs, optimizer.param_groups, strict=True):
            max_norm = group["max_norm"]
            if isinstance(lr, Tensor):
                row[_AT.LR_ADDRESS], row[_AT.LR_IS_DOUBLE] = lr.data_ptr(), lr.dtype == torch.float64
            else:
                real[_AT.LR] = lr
            real[_AT.MAX_NORM] = np.inf if max_norm is None else max_norm
            real[_AT.SIGN] = -1.0 if group["maximize"] else 1.0
            row[_AT.SEED] = group.get("rounding_seed", 0)
            hyper = optimizer._hyper(group)
            real[_AT.HYPER : _AT.HYPER + len(hyper)] = hyper


def _real_numel(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)

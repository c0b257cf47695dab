"""What a launch works in, and its upload: streams and CUDA graphs are dealt with here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .table import Table

if TYPE_CHECKING:
    from ..optimizer import FusedOptimizer
    from ..plan import Part
    from . import Request


class Workspace:
    """The device table, partials and counters of one optimizer on one device.

    On a GPU the host runs ahead of the device: every upload takes a pinned block of its own, which the allocator
    does not hand out again before the copy has run. What a CUDA graph reads on its replays is kept, and never
    written again by the host; since replays rewrite the device table, every later step uploads all of it.

    Attributes:
        table: the table in host memory.
        words, partials, counters, sums: what the kernels take; see ``kernels/step.py``.

    Raises:
        RuntimeError: when made while a CUDA graph is captured.
    """

    def __init__(self, table: Table, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a step() that makes state or tables cannot be captured in a CUDA graph: run one before")
        self.table = table
        self.words = torch.empty(len(table.words), dtype=torch.int64, device=device)
        self.partials = torch.empty(table.n_chunks, dtype=torch.float64, device=device)
        self.counters = torch.zeros(2, dtype=torch.int32, device=device)
        self.sums = torch.empty(table.n_slots, 2, dtype=torch.float64, device=device)
        self._host_words = torch.from_numpy(table.words)
        self._is_uploaded = False
        self._captured: list[Tensor] = []
        # Views made once: from the second step on, a copy is the only operation.
        self._changing, self._host_changing = self.words[: table.changing], self._host_words[: table.changing]
        if self._is_cuda:
            self._stream = torch.cuda.current_stream()
            self._done = torch.cuda.Event()
            self._spare: Tensor | None = None

    def upload(self, optimizer: FusedOptimizer, part: Part, request: Request) -> None:
        """Bring the device table up to date, on the current stream: at most one copy."""
        capturing = self._is_cuda and self._order()
        if self._is_cuda and not capturing and self._spare is None:
            self._spare = self._host_words.pin_memory()  # for a capture, in which memory may not be pinned
        has_changed = self.table.fill(optimizer, part.grads, request)
        if not self._is_uploaded or capturing or self._captured:
            self._copy(self.words, self._host_words, capturing)
        elif has_changed:
            self._copy(self._changing, self._host_changing, capturing)
        self._is_uploaded = True

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph works in here: to be kept for as long as that may be replayed."""
        return bool(self._captured)

    def launched(self) -> None:
        """To be called after the launch."""
        if self._is_cuda and not torch.cuda.is_current_stream_capturing():
            self._done.record()

    def _order(self) -> bool:
        """Run after the last step, if that was on another stream; returns whether a graph is being captured."""
        capturing = bool(torch.cuda.is_current_stream_capturing())
        stream: Any = torch.cuda.current_stream()
        if stream != self._stream and not capturing:
            stream.wait_event(self._done)
            for tensor in (self.words, self.partials, self.counters, self.sums):
                tensor.record_stream(stream)
            self._stream = stream
        return capturing

    def _copy(self, target: Tensor, source: Tensor, capturing: bool) -> None:
        if capturing:
            source = source.pin_memory() if self._spare is None else self._spare.copy_(source)
            self._spare = None
            self._captured.append(source)
        elif self._is_cuda:
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)

"""As much of ``torch.cuda`` as a workspace uses, in host memory: streams, events, pinned blocks, captured graphs.

Nothing that is put into a stream runs before the test says so, in the order that the test likes. A host that rewrites
what has yet to be copied, or a step that does not wait for the last one, shows in what arrives.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

Work = Callable[[], Any]


def _done() -> None:
    """In the place of work that was carried out: its operands are no longer held."""


class Stream:
    """Runs what was put into it when :meth:`run` is called."""

    def __init__(self) -> None:
        self.work: list[Work] = []
        self.n_done = 0

    def wait_event(self, event: Event) -> None:
        assert event.gpu.graph is None, "a captured graph cannot wait for what is outside of it"
        self.work.append(functools.partial(event.stream.run, event.place))

    def run(self, until: int | None = None) -> None:
        while self.n_done < (len(self.work) if until is None else until):
            at, self.n_done = self.n_done, self.n_done + 1
            work, self.work[at] = self.work[at], _done
            work()


class Event:
    """A place in a stream, the last one recorded: who waits for it waits for what it was when asked to wait."""

    def __init__(self, gpu: FakeCuda) -> None:
        self.gpu = gpu
        self.stream, self.place = Stream(), 0

    def record(self) -> None:
        assert self.gpu.graph is None, "an event of a captured graph cannot be waited for outside of it"
        self.stream, self.place = self.gpu.stream, len(self.gpu.stream.work)


class Pinned(Tensor):
    """A pinned block."""


class FakeCuda:
    """Stands in for ``torch.cuda``.

    Attributes:
        stream: the current one.
        graph: the work of the graph that is captured, None where none is.
        copied: how many elements each upload has.
        recorded: every tensor and stream that ``record_stream`` was told of.
        pinned: for each block that was pinned, whether a graph was captured at the time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = Stream()
        self.graph: list[Work] | None = None
        self.copied: list[int] = []
        self.recorded: list[tuple[Tensor, Stream]] = []
        self.pinned: list[bool] = []
        gpu = self

        class OnDevice(Tensor):
            """Device memory, copied to in the order of the stream."""

            def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
                assert isinstance(source, Pinned) and non_blocking, "the host waits for such a copy"
                gpu.copied.append(source.numel())
                gpu.put(lambda target, block: target.as_subclass(Tensor).copy_(block), self, source)
                return self

            def record_stream(self, stream: Stream) -> None:
                gpu.recorded.append((self, stream))

        def pin_memory(tensor: Tensor) -> Pinned:
            gpu.pinned.append(gpu.is_current_stream_capturing())
            return tensor.clone().as_subclass(Pinned)

        monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
        self.memory = OnDevice

    def put(self, work: Callable[..., Any], *operands: Any) -> None:
        """Put work into the current stream, which holds its operands until then. A graph does not."""
        if self.graph is None:
            self.stream.work.append(functools.partial(work, *operands))
            return
        references = [weakref.ref(operand) for operand in operands]

        def replay() -> None:
            alive = [reference() for reference in references]
            assert all(operand is not None for operand in alive), "a graph works in memory that is free"
            work(*alive)

        self.graph.append(replay)

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Work]]:
        """Capture a graph on a stream of its own, as ``torch.cuda.graph``."""
        outside, self.stream, self.graph = self.stream, Stream(), []
        try:
            yield self.graph
        finally:
            self.stream, self.graph = outside, None

    def replay(self, graph: list[Work]) -> None:
        self.stream.work += graph

    # By the names that `torch.cuda` has.

    def current_stream(self) -> Stream:
        return self.stream

    def is_current_stream_capturing(self) -> bool:
        return self.graph is not None

    def Event(self) -> Event:  # noqa: N802
        return Event(self)


class FakeTorch:
    """Stands in for ``torch`` in a module that allocates device memory: it comes from the host's."""

    def __init__(self, gpu: FakeCuda) -> None:
        self.cuda = gpu

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # What is not written before it is read shows.
        return torch.full(size, -1, dtype=dtype).as_subclass(self.cuda.memory)

    def zeros(self, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(*size, dtype=dtype).as_subclass(self.cuda.memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

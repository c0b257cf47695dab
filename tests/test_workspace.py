"""Streams and CUDA graphs: what reaches the device when the host runs ahead of it (on a fake of ``torch.cuda``)."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import KERNEL_RUNNERS
from fake_cuda import FakeCuda, FakeTorch, Stream
from torch import Tensor

import tritonamp
from tritonamp import plan
from tritonamp.backends import triton as triton_backend
from tritonamp.backends import workspace

RUNNER = KERNEL_RUNNERS[0].chosen(__name__)
CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    gpu = FakeCuda(monkeypatch)
    monkeypatch.setattr(workspace, "torch", FakeTorch(gpu))
    return gpu


class Table:
    """A table of two words that change, both to ``now``, and two that do not."""

    changing, n_chunks, n_slots = 2, 3, 1

    def __init__(self) -> None:
        self.words = np.array([0, 0, 70, 80], np.int64)
        self.now = 0

    def fill(self, *_: Any) -> bool:
        has_changed = bool(self.words[0] != self.now)
        self.words[:2] = self.now
        return has_changed


class Steps:
    """Uploads and launches; ``seen`` are the numbers that the launches find in the device's table."""

    def __init__(self, gpu: FakeCuda) -> None:
        self.gpu, self.table = gpu, Table()
        self.workspace = workspace.Workspace(self.table, CUDA)  # type: ignore[arg-type]
        self.seen: list[Any] = []

    def step(self, now: int) -> None:
        self.table.now = now
        self.workspace.upload(None, SimpleNamespace(grads=[]), None)  # type: ignore[arg-type]
        self.gpu.put(self.look, self.workspace.words)
        self.workspace.launched()

    def look(self, words: Tensor) -> None:
        now, *others = words.tolist()
        self.seen.append(now if others == [now, 70, 80] else words.tolist())


@pytest.fixture
def steps(gpu: FakeCuda) -> Steps:
    return Steps(gpu)


def test_every_upload_comes_from_a_pinned_block_of_its_own(gpu: FakeCuda, steps: Steps) -> None:
    for now in (1, 2, 3):
        steps.step(now)
    assert steps.seen == []  # the host is three steps ahead
    gpu.stream.run()
    assert steps.seen == [1, 2, 3]


def test_only_what_has_changed_is_uploaded(gpu: FakeCuda, steps: Steps) -> None:
    for now in (1, 1, 2):
        steps.step(now)
    gpu.stream.run()
    assert steps.seen == [1, 1, 2] and gpu.copied == [4, 2]


@pytest.mark.parametrize("hurrying", [0, 1])
def test_a_step_on_another_stream_runs_after_the_last_one(hurrying: int, gpu: FakeCuda, steps: Steps) -> None:
    streams = [gpu.stream, Stream()]
    for now, number in enumerate([0, 1, 1, 0]):
        gpu.stream = streams[number]
        steps.step(now)
    streams[hurrying].run()
    streams[1 - hurrying].run()
    assert steps.seen == [0, 1, 2, 3]


def test_memory_is_held_for_every_stream_that_uses_it(gpu: FakeCuda, steps: Steps) -> None:
    steps.step(1)
    assert gpu.recorded == []
    gpu.stream = Stream()
    steps.step(2)
    used = (steps.workspace.words, steps.workspace.partials, steps.workspace.counters, steps.workspace.sums)
    assert [(id(tensor), stream) for tensor, stream in gpu.recorded] == [(id(tensor), gpu.stream) for tensor in used]


def test_steps_on_one_stream_wait_for_nothing(gpu: FakeCuda, steps: Steps) -> None:
    steps.step(1)
    steps.step(2)
    assert len(gpu.stream.work) == 4  # two copies, two launches


def test_a_captured_step_is_replayed_from_a_block_that_nobody_rewrites(gpu: FakeCuda, steps: Steps) -> None:
    steps.step(1)
    with gpu.capture() as graph:
        steps.step(2)
    assert steps.workspace.is_captured and not any(gpu.pinned)
    steps.step(3)
    for _ in range(2):
        gpu.replay(graph)
    gpu.stream.run()
    assert steps.seen == [1, 3, 2, 2]


def test_after_a_capture_every_step_uploads_everything(gpu: FakeCuda, steps: Steps) -> None:
    """Replays put their own table in the place of the last step's."""
    steps.step(1)
    with gpu.capture() as graph:
        steps.step(1)
    for _ in range(2):
        steps.step(3)
        gpu.replay(graph)
    gpu.stream.run()
    assert steps.seen == [1, 3, 1, 3, 1] and gpu.copied == [4] * 4


def test_every_captured_step_has_a_block_of_its_own(gpu: FakeCuda, steps: Steps) -> None:
    """Two in one graph, one in another right after it."""
    steps.step(1)
    with gpu.capture() as first:
        steps.step(2)
        steps.step(3)
    with gpu.capture() as second:
        steps.step(4)
    for graph in (first, second, first):
        gpu.replay(graph)
    gpu.stream.run()
    assert steps.seen == [1, 2, 3, 4, 2, 3]


def test_a_workspace_is_not_made_within_a_capture(gpu: FakeCuda) -> None:
    with gpu.capture(), pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph: run one before"):
        Steps(gpu)


def test_a_step_that_would_make_state_is_refused_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """State made in a graph would hold nothing until that is replayed."""
    param = torch.ones(3, requires_grad=True)
    param.grad = torch.ones(3)
    optimizer = tritonamp.AdamW([param], loss_scale=None)
    monkeypatch.setattr(plan, "device_of", lambda param: CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph: run one before"):
        optimizer.step()
    assert not optimizer.state and optimizer._outcome is None


@pytest.mark.parametrize("reason", ["a new plan", "an aborted launch"])
def test_a_graph_is_replayed_in_the_workspace_it_was_captured_in(
    reason: str, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer itself goes on in another one."""
    launch = triton_backend.TritonBackend._launch_at_once
    monkeypatch.setattr(triton_backend, "Workspace", lambda table, device: workspace.Workspace(table, CUDA))
    monkeypatch.setattr(
        triton_backend.TritonBackend,
        "_launch_at_once",
        lambda self, space, *args: gpu.put(lambda alive: launch(self, alive, *args), space) or True,
    )
    params = [torch.zeros(600, requires_grad=True) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(600)

    def are(*numbers: float) -> bool:
        gpu.stream.run()
        return all(bool((param == number).all()) for param, number in zip(params, numbers, strict=True))

    with RUNNER.running():
        optimizer = tritonamp.SGD(params[:1], lr=1.0, loss_scale=None, backend="triton")
        optimizer.step()
        with gpu.capture() as graph:
            optimizer.step()
        assert are(-1, 0)
        if reason == "a new plan":
            optimizer.add_param_group({"params": params[1:], "lr": 3.0})
        else:
            with monkeypatch.context() as patch:
                patch.delattr(triton_backend.TritonBackend, "_launch_at_once")
                with pytest.raises(AttributeError, match="_launch_at_once"):
                    optimizer.step()
        optimizer.param_groups[0]["lr"] = 2.0
        optimizer.step()
        others = -3 if reason == "a new plan" else 0
        assert are(-3, others)
        gc.collect()
        for n in (1, 2):
            gpu.replay(graph)
            assert are(-3 - n, others)
        optimizer.step()
        assert are(-7, 2 * others)

"""Tensors may have more than 2**31 elements: addresses are formed in 64 bits."""

from __future__ import annotations

import re

import pytest
import torch
from codegen.compile import compiled
from conftest import Runner
from problem import checked_step, set_grads
from torch import Tensor
from tritonamp.kernels import table as layout

from tritonamp import AdamW
from tritonamp.backends.workspace import Workspace

MORE = 2**33  # elements


@pytest.mark.compiled
@pytest.mark.parametrize(("kernel", "phases"), [("step", 2), ("statistics", 1), ("apply", 1)])
def test_the_beginning_of_a_chunk_is_64_bits_wide(kernel: str, phases: int) -> None:
    """Number of the chunk times its size: multiplied in 64 bits, and never narrowed."""
    _, *parts = re.split(r"(?=%\w+ = arith\.andi .*%c4294967295\w* : i64)", compiled(kernel, "mixed", "sm90").ttir)
    assert len(parts) == phases
    for part in parts:
        number = part.split()[0]
        begin = re.search(rf"(%\w+) = arith\.muli {number}, %\w+ : i64", part)
        assert begin
        users = set(re.findall(rf"= (\S+) [^=\n]*{begin[1]}\b", part))
        assert "tt.addptr" in users and users <= {"arith.subi", "arith.addi", "tt.addptr", "tt.splat"}


def begin_earlier(words: Tensor) -> None:
    """Make each float32 tensor of a device table the end of one with ``MORE`` elements before it, in no chunk."""
    at = {name: int(getattr(layout, name).value) for name in ("ROW", "PARAM", "STATE", "NUMEL", "LAYOUT", "FLAT")}
    header = {name: int(words[getattr(layout, name).value]) for name in ("N_TENSORS", "CHUNK_SIZE", "GRADS", "ROWS")}
    chunks = int(words[layout.CHUNKS.value])
    end = chunks + int(words[layout.N_CHUNKS.value])
    rows = words[header["ROWS"] : chunks].view(header["N_TENSORS"], at["ROW"])
    for row, grad in zip(rows, words[header["GRADS"] :], strict=False):
        # Whatever a position has beyond the last dimension is added to the offset.
        before = MORE if row[at["LAYOUT"]] == at["FLAT"] else MORE // int(row[at["NUMEL"]])
        row[at["STATE"] : at["STATE"] + 2] -= 4 * MORE
        row[at["PARAM"]] -= 4 * before
        grad -= 4 * before
        row[at["NUMEL"]] += MORE
    words[chunks:end] += MORE // header["CHUNK_SIZE"]


def test_elements_beyond_2_to_the_33(kernel_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide, left over, misaligned and strided."""
    copy = Workspace._copy

    def copy_and_begin_earlier(workspace: Workspace, target: Tensor, *args: object) -> None:
        copy(workspace, target, *args)
        begin_earlier(target)

    monkeypatch.setattr(Workspace, "_copy", copy_and_begin_earlier)
    params = [torch.randn(1030), torch.randn(140)[1:], torch.randn(64, 16).t()]
    params = [param.requires_grad_() for param in params]
    set_grads(params)
    with kernel_runner.running():
        checked_step(AdamW(params, lr=0.1, max_norm=1.0, loss_scale=None, backend="triton"))

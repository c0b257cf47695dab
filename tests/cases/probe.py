"""A kernel that tells where the step would look, without the gigabytes to look at."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from tritonamp.kernels import table as layout_of_table
from tritonamp.kernels.table import find_chunk, positions


@triton.jit
def probe_kernel(table, layout, out):
    _, _, begin, count = find_chunk(table, 0)
    tl.store(out, begin)
    tl.store(out + 1, count.to(tl.int64))
    in_grad, _ = positions(begin, layout)
    tl.store(out + 2, in_grad)


def find(chunk: int, size: int, numel: int, stride: int) -> tuple[int, int, int]:
    """First element and length of a chunk of ``size`` elements, and that element's offset at a stride."""
    at = {
        name: getattr(layout_of_table, name).value
        for name in ("HEADER", "ROW", "CHUNK_SIZE", "GRADS", "ROWS", "CHUNKS", "NUMEL")
    }
    grads = at["HEADER"]
    rows = grads + 1
    chunks = rows + at["ROW"]
    words = torch.zeros(chunks + 1, dtype=torch.int64)
    words[at["CHUNK_SIZE"]], words[at["GRADS"]], words[at["ROWS"]], words[at["CHUNKS"]] = size, grads, rows, chunks
    words[rows + at["NUMEL"]] = numel
    words[chunks] = chunk
    out = torch.zeros(3, dtype=torch.int64)
    one_dimension = torch.tensor([1, numel, stride, 0])
    probe_kernel[(1,)](words, one_dimension, out)
    begin, count, offset = out.tolist()
    return begin, count, offset

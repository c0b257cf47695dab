"""A small optimizer kernel with a grid barrier, a problem for it, and the same step with torch.

Unscale, norm, grid barrier, clip, AdamW, loss scale, in one cooperative launch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from virtual_gpu.kernels import barrier  # isort: skip (in tests/)

TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def fused_adamw(  # noqa: PLR0915 (one kernel is the point)
    table, chunk_tensor, chunk_start, numels, hyper, state, partials, counter, n_chunks, max_norm, growth_interval,
    G: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n = tl.num_programs(0)
    inv = 1.0 / tl.load(state)
    for c in range(pid, n_chunks, n):
        t = tl.load(chunk_tensor + c)
        start = tl.multiple_of(tl.load(chunk_start + c), 16)
        numel = tl.load(numels + t)
        g = tl.multiple_of(tl.load(table + t * 4).to(tl.pointer_type(G)), 16)
        acc = tl.zeros([BLOCK], tl.float32)
        for o in range(0, CHUNK, BLOCK):
            off = start + o + tl.arange(0, BLOCK)
            x = tl.load(g + off, mask=off < numel, other=0.0).to(tl.float32) * inv
            acc += x * x
        tl.store(partials + c, tl.sum(acc))
    barrier(counter, n, "acq_rel")
    tot = 0.0
    for i in range(0, n_chunks, 1024):
        o = i + tl.arange(0, 1024)
        tot += tl.sum(tl.load(partials + o, mask=o < n_chunks, other=0.0, volatile=True))
    norm = tl.sqrt(tot)
    finite = norm < float("inf")
    coef = tl.minimum(max_norm / (norm + 1e-6), 1.0) * inv
    if finite:
        lr = tl.load(hyper)
        b1 = tl.load(hyper + 1)
        b2 = tl.load(hyper + 2)
        eps = tl.load(hyper + 3)
        wd = tl.load(hyper + 4)
        step = tl.load(state + 2) + 1.0
        bc1 = 1.0 - tl.exp(step.to(tl.float64) * tl.log(b1.to(tl.float64)))
        bc2 = 1.0 - tl.exp(step.to(tl.float64) * tl.log(b2.to(tl.float64)))
        step_size = (lr / bc1).to(tl.float32)
        root = tl.sqrt(bc2).to(tl.float32)
        for i in range(pid, n_chunks, n):
            c = n_chunks - 1 - i
            t = tl.load(chunk_tensor + c)
            start = tl.multiple_of(tl.load(chunk_start + c), 16)
            numel = tl.load(numels + t)
            g = tl.multiple_of(tl.load(table + t * 4).to(tl.pointer_type(G)), 16)
            p = tl.multiple_of(tl.load(table + t * 4 + 1).to(tl.pointer_type(tl.float32)), 16)
            m = tl.multiple_of(tl.load(table + t * 4 + 2).to(tl.pointer_type(tl.float32)), 16)
            v = tl.multiple_of(tl.load(table + t * 4 + 3).to(tl.pointer_type(tl.float32)), 16)
            for o in range(0, CHUNK, BLOCK):
                off = start + o + tl.arange(0, BLOCK)
                mask = off < numel
                x = tl.load(g + off, mask=mask, other=0.0).to(tl.float32) * coef
                w = tl.load(p + off, mask=mask, other=0.0)
                mm = tl.load(m + off, mask=mask, other=0.0)
                vv = tl.load(v + off, mask=mask, other=0.0)
                w = w - lr * wd * w
                mm = mm + (1 - b1) * (x - mm)
                vv = b2 * vv + (1 - b2) * x * x
                w = w - step_size * mm / (tl.sqrt(vv) / root + eps)
                tl.store(p + off, w, mask=mask)
                tl.store(m + off, mm, mask=mask)
                tl.store(v + off, vv, mask=mask)
    tl.debug_barrier()
    done = tl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu")
    if done == n - 1:
        s = tl.load(state)
        tracker = tl.load(state + 1)
        if finite:
            tracker += 1.0
            grow = tracker >= growth_interval
            new_scale = tl.where(grow, s * 2.0, s)
            tracker = tl.where(grow, 0.0, tracker)
            tl.store(state + 2, tl.load(state + 2) + 1.0)  # read by other threads, stored by one
        else:
            new_scale = s * 0.5
            tracker = 0.0
        tl.store(state, new_scale)
        tl.store(state + 1, tracker)
        tl.store(state + 3, norm)
        tl.store(counter, 0)
        tl.store(counter + 1, 0)


class Problem:
    """Parameters P, scaled gradients G, moments M and V; ``state`` is scale, tracker, steps, norm."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], grad_dtype: torch.dtype = torch.float16, chunk: int = 1024
    ) -> None:
        g, scale = torch.Generator().manual_seed(0), 128.0
        self.P = [torch.randn(s, generator=g) for s in shapes]
        self.G = [(torch.randn(s, generator=g) * scale).to(grad_dtype) for s in shapes]
        self.M, self.V = ([torch.zeros(s) for s in shapes] for _ in range(2))
        self.n = sum(p.numel() for p in self.P)
        self.chunk, self.max_norm, self.dtype = chunk, 1.0, grad_dtype
        chunks = [(i, s) for i, p in enumerate(self.P) for s in range(0, p.numel(), chunk)]
        self.tensor = torch.tensor([i for i, _ in chunks], dtype=torch.int32)
        self.start = torch.tensor([s for _, s in chunks])
        self.numel = torch.tensor([p.numel() for p in self.P])
        rows = zip(self.G, self.P, self.M, self.V, strict=True)
        self.table = torch.tensor([[t.data_ptr() for t in row] for row in rows])
        self.hyper = torch.tensor([1e-2, 0.9, 0.999, 1e-8, 0.01])
        self.state = torch.tensor([scale, 0, 0, 0])
        self.partials, self.counter = torch.zeros(len(chunks)), torch.zeros(2, dtype=torch.int32)
        self.reference = [torch.nn.Parameter(p.clone()) for p in self.P]
        self.optimizer = torch.optim.AdamW(self.reference, lr=1e-2, weight_decay=0.01)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those reached through the pointer table."""
        return self.G + self.P + self.M + self.V

    def launch(self, grid: int, *, BLOCK: int = 256, cooperative: bool = True, **options: Any) -> Any:
        return fused_adamw[(grid,)](
            self.table, self.tensor, self.start, self.numel, self.hyper, self.state, self.partials, self.counter,
            len(self.tensor), self.max_norm, 2000,
            G=TL[self.dtype], BLOCK=BLOCK, CHUNK=self.chunk, launch_cooperative_grid=cooperative, **options,
        )  # fmt: skip

    def torch_step(self) -> float:
        """Unscale, skip if not finite, clip, AdamW; returns the norm."""
        for r, g in zip(self.reference, self.G, strict=True):
            r.grad = g.float() / self.state[0]
        norm = torch.nn.utils.clip_grad_norm_(self.reference, self.max_norm)
        if norm.isfinite():
            self.optimizer.step()
        return norm.item()

    def error(self) -> float:
        """Largest difference from torch."""
        pairs = zip(self.P, self.reference, strict=True)
        return max((p - r.detach()).abs().max().item() for p, r in pairs)

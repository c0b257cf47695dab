"""Run hand-written PTX: thread t reads element t of each input into a register, and stores element t of each output."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.testing.virtual_gpu import LaunchStats
from tritonamp.testing.virtual_gpu.driver import VirtualGPU
from tritonamp.testing.virtual_gpu.kernel import Kernel
from tritonamp.testing.virtual_gpu.launch import Launch

REGISTER = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}


def program(body: str, ins: Sequence[Tensor], outs: Sequence[Tensor], shared: int) -> str:
    """A kernel around the body. Registers %a0, %a1... hold the inputs, %o0, %o1... the outputs."""
    registers, loads, stores, params = "", "", "", []
    for kind, tensors in (("a", ins), ("o", outs)):
        for j, t in enumerate(tensors):
            b, p = REGISTER[t.element_size()], f"p_{kind}{j}"
            params.append(f".param .u64 {p}")
            registers += f".reg .{'b16' if b == 'b8' else b} %{kind}{j};\n.reg .b64 %ptr_{kind}{j};\n"
            loads += (
                f"ld.param.u64 %ptr_{kind}{j}, [{p}];\n"
                f"mad.wide.u32 %ptr_{kind}{j}, %gid, {t.element_size()}, %ptr_{kind}{j};\n"
            )
            if kind == "a":
                loads += f"ld.global.{b} %a{j}, [%ptr_a{j}];\n"
            else:
                stores += f"st.global.{b} [%ptr_o{j}], %o{j};\n"
    return f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry k({", ".join(params)})
{{
.reg .pred %p<20>; .reg .b16 %h<40>; .reg .b32 %r<40>; .reg .b64 %d<40>; .reg .b32 %gid; .reg .b32 %tid;
{registers}
.shared .align 16 .b8 smem[{max(shared, 16)}];
mov.u32 %tid, %tid.x;
mov.u32 %r30, %ctaid.x; mov.u32 %r31, %ntid.x;
mad.lo.u32 %gid, %r30, %r31, %tid;
{loads}
{body}
{stores}
DONE:
ret;
}}
"""


def run(
    body: str,
    ins: Sequence[Tensor],
    outs: Sequence[Tensor] = (),
    *,
    threads: int | None = None,
    grid: int = 1,
    shared: int = 0,
    **options: Any,
) -> LaunchStats:
    """Launch; the outputs are filled in."""
    n = (*ins, *outs)[0].numel()
    gpu = VirtualGPU(**options)
    for t in (*ins, *outs):
        gpu.tensors.register(t)
    kernel = Kernel(program(body, ins, outs, shared))
    names = [name for name, _, _ in kernel.program.params]
    params = {name: t.data_ptr().to_bytes(8, "little") for name, t in zip(names, (*ins, *outs), strict=True)}
    Launch(gpu, kernel, (grid, 1, 1), threads or n // grid, params).run()
    return gpu.stats.last


def bits(values: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Raw bits, given as integers of any sign."""
    w = torch.iinfo(dtype).bits
    return torch.tensor([signed(int(v), w) for v in values], dtype=dtype)


def signed(v: int, width: int = 32) -> int:
    """The low bits of an integer, as a signed one."""
    return (v + (1 << width - 1)) % (1 << width) - (1 << width - 1)


def unsigned(t: Tensor) -> list[int]:
    """The elements' bits as unsigned integers."""
    return [int(v) % (1 << t.element_size() * 8) for v in t]


def random_ints(n: int = 64, dtype: torch.dtype = torch.int32) -> Tensor:
    """Any bits, and those at the ends of the range."""
    w = torch.iinfo(dtype).bits
    special = [0, 1, -1, 1 << w - 1, (1 << w - 1) - 1, 5, -7]
    source = random.Random(n)
    return bits([source.getrandbits(w) for _ in range(n - len(special))] + special, dtype)

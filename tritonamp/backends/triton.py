"""The Triton backend: one launch per step, no host synchronisation."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from tritonamp.kernels import rules
from tritonamp.kernels.scale import update_scale_kernel
from tritonamp.kernels.step import apply_kernel, statistics_kernel, step_kernel

from .table import Table, Variant, grad_kinds, variant_of

if TYPE_CHECKING:
    from ..optimizer import FusedOptimizer
    from ..plan import Plan
    from . import Request

BLOCK = 512  # elements per program and turn: 4 per thread, so that float32 moves in 16-byte accesses
WARPS = 4
MAX_RESIDENT = 8  # programs per multiprocessor: 1024 threads, which every device holds
_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class TritonBackend:
    """Launches the kernels for one optimizer on one device.

    What a launch works in (table, partials, counters) belongs to this object. An exception out of a launch drops
    it: a barrier's counters are worthless after an aborted one.

    Raises:
        RuntimeError: where kernels cannot run on such tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_interpreted = not isinstance(step_kernel, JITFunction)
        _check_device(device, self._is_interpreted)
        self._variants: tuple[Variant, ...] = ()
        self._resident: dict[Any, int] = {}  # programs per multiprocessor, by what a kernel is specialised on
        self._is_split = False  # cooperative launches were refused here
        self._stream: Any = None
        self._captured: list[Tensor] = []  # what a CUDA graph reads on every replay
        self._drop()

    def _drop(self) -> None:
        self._generation = -1
        self._table: Table | None = None

    def step(self, optimizer: FusedOptimizer, plan: Plan, request: Request) -> None:
        """One step; see :class:`~tritonamp.backends.Backend`."""
        with self._on_device():
            try:
                self._upload(optimizer, plan, request)
                self._launch_step(optimizer, request)
            except BaseException:
                self._drop()
                raise
        written = [*plan.updated, request.outcome]
        if request.loss_scale is not None:
            written.append(request.loss_scale)
        torch.autograd.graph.increment_version(written)  # as in-place operations do

    def advance(self, loss_scale: Tensor) -> None:
        """See :class:`~tritonamp.backends.Backend`."""
        with self._on_device():
            update_scale_kernel[(1,)](loss_scale)
        torch.autograd.graph.increment_version(loss_scale)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    # The device table.

    def _upload(self, optimizer: FusedOptimizer, plan: Plan, request: Request) -> None:
        """Bring the device table up to date: at most one copy."""
        capturing = False
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream()
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream
            capturing = torch.cuda.is_current_stream_capturing()
        is_new = self._table is None or self._generation != plan.generation
        if is_new:
            self._build(optimizer, plan)
        assert self._table is not None
        has_changed = self._table.fill(optimizer, plan.grads, request)
        if is_new or capturing:
            self._copy(self._words, self._host_words, capturing)
        elif has_changed:
            self._copy(self._changing, self._host_changing, capturing)

    def _build(self, optimizer: FusedOptimizer, plan: Plan) -> None:
        variants = {variant_of(entry) for entry in plan.entries}
        self._variants = tuple(sorted(variants | set(self._variants), key=str))
        self._table = Table(plan.entries, self._variants, len(optimizer.param_groups))
        self._host_words = torch.from_numpy(self._table.words)
        self._host_changing = self._host_words[: self._table.changing]
        self._words = torch.empty_like(self._host_words, device=self.device)
        self._changing = self._words[: self._table.changing]
        self._partials = torch.empty(self._table.n_chunks, dtype=torch.float64, device=self.device)
        self._counters = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._constants = {
            "VARIANTS": tuple(
                (*(_DTYPES[dtype] for dtype in variant[:3]), variant.states) for variant in self._variants
            ),
            "GRADS": tuple((_DTYPES[grad], _DTYPES[compute]) for grad, compute in grad_kinds(self._variants)),
        }
        self._generation = plan.generation

    def _copy(self, target: Tensor, source: Tensor, capturing: bool) -> None:
        """Upload from the table in host memory.

        The host runs ahead of the device: every upload to a GPU takes a pinned block of its own, which the
        allocator does not hand out again before the copy has run.
        """
        if self.device.type == "cuda":
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)
        if capturing:
            self._captured += [source, self._words, self._partials, self._counters]

    # Launches.

    def _launch_step(self, optimizer: FusedOptimizer, request: Request) -> None:
        state = request.outcome if request.loss_scale is None else request.loss_scale
        work = (self._words, self._partials, self._counters, request.outcome, state)
        rule = getattr(rules, optimizer._rule)
        variants, grads = self._constants["VARIANTS"], self._constants["GRADS"]
        if request.needs_norm and not self._is_split:
            try:
                self._launch(step_kernel, work, RULE=rule, VARIANTS=variants, GRADS=grads)
                return
            except RuntimeError as error:
                if "cooperative" not in str(error) and "operation not supported" not in str(error):
                    raise
                self._is_split = True  # refused before anything ran
        if request.needs_norm:
            self._launch(statistics_kernel, (self._words, self._partials, state), GRADS=grads)
        self._launch(apply_kernel, work, RULE=rule, VARIANTS=variants, DECIDE=request.needs_norm)

    def _launch(self, kernel: Any, args: Sequence[Tensor], **constants: Any) -> None:
        """Launch on as many programs as the device holds at once; on one per multiprocessor before that is known."""
        assert self._table is not None
        key = (kernel, *constants.values())
        programs, options = 1, {}
        if not self._is_interpreted:
            driver = triton.runtime.driver.active
            if driver.get_current_target().backend == "cuda":
                options["maxnreg"] = 128  # left alone, ptxas spills for an occupancy that we do not need
            facts = driver.utils.get_device_properties(driver.get_current_device())
            programs = facts["multiprocessor_count"] * self._resident.get(key, 1)
        compiled = kernel[(min(programs, self._table.n_chunks),)](
            *args,
            **constants,
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
            launch_cooperative_grid=kernel is step_kernel,
            **options,
        )
        if key not in self._resident and "maxnreg" in options:
            registers = -(-compiled.n_regs // 8) * 8 * 32 * WARPS
            self._resident[key] = min(facts["max_num_regs"] // registers, MAX_RESIDENT)


def _check_device(device: torch.device, is_interpreted: bool) -> None:
    if is_interpreted:
        if device.type != "cpu":
            raise RuntimeError(
                f"TRITON_INTERPRET=1 runs kernels on CPU tensors, got {device}: unset it, or move the tensors"
            )
        return
    try:
        runs_on = triton.runtime.driver.active.get_active_torch_device().type
    except RuntimeError as error:
        raise RuntimeError(f"backend='triton' finds no device here ({error}): use backend='auto'") from error
    if runs_on != device.type:
        raise RuntimeError(f"backend='triton' runs on {runs_on} tensors here, got {device}: use backend='auto'")

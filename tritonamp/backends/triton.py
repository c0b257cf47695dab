"""The Triton backend: one launch per step, no host synchronisation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from tritonamp.kernels import rules
from tritonamp.kernels.scale import update_scale_kernel
from tritonamp.kernels.step import apply_kernel, statistics_kernel, step_kernel, sums_kernel

from .table import Table, Variant, grad_kinds, variant_of
from .workspace import Workspace

if TYPE_CHECKING:
    from ..optimizer import FusedOptimizer
    from ..plan import Part
    from . import Request

BLOCK = 512  # elements per program and turn
THREADS = BLOCK // 4  # so that float32 moves in 16-byte accesses, in warps of 32 or of 64
SUMS_BLOCK = 1024  # partials that the one program of `sums_kernel` waits for at once
MAX_RESIDENT = 8  # programs per multiprocessor: 1024 threads, which every device holds
_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class TritonBackend:
    """Launches the kernels for one optimizer on one device.

    Raises:
        RuntimeError: where kernels cannot run on such tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_interpreted = not isinstance(step_kernel, JITFunction)
        _check_device(device, self._is_interpreted)
        self._variants: tuple[Variant, ...] = ()
        self._workspace: Workspace | None = None
        self._captured: list[Workspace] = []
        self._generation = -1
        self._launches: dict[Any, _Launch] = {}
        self._is_split = False  # cooperative launches were refused here

    def step(self, optimizer: FusedOptimizer, part: Part, request: Request) -> None:
        """One launch, or two where it cannot be one; see :class:`~tritonamp.backends.Backend`."""
        with self._at_work():
            workspace, rule = self._bring_up_to_date(optimizer, part, request), optimizer._rule
            if not request.needs_norm:
                self._launch_apply(workspace, rule, request, workspace.partials)
            elif self._is_split or not self._launch_at_once(workspace, rule, request):
                self._launch_statistics(workspace, rule, request)
                self._launch_apply(workspace, rule, request, workspace.partials)
            workspace.launched()
        _bump_versions(part, request)

    def local_sums(self, optimizer: FusedOptimizer, part: Part, request: Request) -> Tensor | None:
        """See :class:`~tritonamp.backends.Backend`."""
        with self._at_work():
            workspace = self._bring_up_to_date(optimizer, part, request)
            if not request.needs_norm:
                return None
            self._launch_statistics(workspace, optimizer._rule, request)
            state = _scale_of(request)
            sums_kernel[(1,)](
                workspace.words, workspace.partials, request.outcome, state, workspace.sums, BLOCK=SUMS_BLOCK
            )
            workspace.launched()
            return workspace.sums

    def apply(self, optimizer: FusedOptimizer, part: Part, request: Request, agreed: Tensor | None) -> None:
        """See :class:`~tritonamp.backends.Backend`."""
        workspace = self._workspace
        assert workspace is not None
        with self._at_work():
            self._launch_apply(workspace, optimizer._rule, request, workspace.partials if agreed is None else agreed)
            workspace.launched()
        _bump_versions(part, request)

    def advance(self, loss_scale: Tensor) -> None:
        """See :class:`~tritonamp.backends.Backend`."""
        with self._on_device():
            update_scale_kernel[(1,)](loss_scale)
        torch.autograd.graph.increment_version(loss_scale)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """On the device; what the launches work in is dropped when one fails."""
        with self._on_device():
            try:
                yield
            except BaseException:
                # A barrier's counters are worthless after an aborted launch.
                self._drop()
                raise

    def _drop(self) -> None:
        if self._workspace is not None and self._workspace.is_captured:
            self._captured.append(self._workspace)
        self._workspace = None

    def _bring_up_to_date(self, optimizer: FusedOptimizer, part: Part, request: Request) -> Workspace:
        if self._workspace is None or self._generation != part.generation:
            variants = {variant_of(entry) for entry in part.entries} | set(self._variants)
            self._variants = tuple(sorted(variants, key=str))
            self._drop()
            self._workspace = Workspace(Table(part, self._variants, len(optimizer.param_groups)), self.device)
            self._generation = part.generation
            self._launches = {}
        self._workspace.upload(optimizer, part, request)
        return self._workspace

    def _launch_at_once(self, workspace: Workspace, rule: str, request: Request) -> bool:
        """The whole step as one cooperative launch; False where the device refuses that."""
        work = (workspace.words, workspace.partials, workspace.counters, request.outcome, _scale_of(request))
        try:
            self._launch_of(step_kernel, rule)(workspace.table.n_chunks, *work)
        except RuntimeError as error:
            if not _is_refusal(error):
                raise
            self._is_split = True
            return False
        return True

    def _launch_statistics(self, workspace: Workspace, rule: str, request: Request) -> None:
        launch = self._launch_of(statistics_kernel, rule)
        launch(workspace.table.n_chunks, workspace.words, workspace.partials, _scale_of(request))

    def _launch_apply(self, workspace: Workspace, rule: str, request: Request, partials: Tensor) -> None:
        work = (workspace.words, partials, workspace.counters, request.outcome, _scale_of(request))
        self._launch_of(apply_kernel, rule, DECIDE=request.needs_norm)(workspace.table.n_chunks, *work)

    def _launch_of(self, kernel: Any, rule: str, **decide: bool) -> _Launch:
        """The kernel's launch, made once for as long as the variants stay."""
        key = (kernel, *decide.values())
        if key not in self._launches:
            constants: dict[str, Any] = dict(decide)
            if kernel is not apply_kernel:
                constants["GRADS"] = tuple(map(_as_triton, grad_kinds(self._variants)))
            if kernel is not statistics_kernel:
                # One by one: only functions that are arguments themselves enter the key of Triton's cache by code.
                constants["SCALARS"], constants["UPDATE"] = getattr(rules, rule)
                constants["VARIANTS"] = tuple(map(_as_triton, self._variants))
            self._launches[key] = _Launch(kernel, constants, self._is_interpreted)
        return self._launches[key]


class _Launch:
    """A kernel with its compile-time arguments, launched on as many programs as the device holds at once."""

    def __init__(self, kernel: Any, constants: dict[str, Any], is_interpreted: bool) -> None:
        self._kernel = kernel
        self._options = {**constants, "BLOCK": BLOCK, "launch_cooperative_grid": kernel is step_kernel}
        self._programs = self._multiprocessors = 1
        self._max_registers = 0
        if not is_interpreted:
            driver = triton.runtime.driver.active
            facts = driver.utils.get_device_properties(driver.get_current_device())
            self._multiprocessors = facts["multiprocessor_count"]
            self._programs = self._multiprocessors  # until the kernel's registers are known
            target = driver.get_current_target()
            self._options.update(compile_options(target))
            if target.backend == "cuda":
                self._max_registers = facts["max_num_regs"]

    def __call__(self, n_chunks: int, *args: Tensor) -> None:
        n_chunks = max(n_chunks, 1)  # without work, loss scale and counters are still to be written
        try:
            compiled = self._kernel[(min(self._programs, n_chunks),)](*args, **self._options)
        except RuntimeError as error:
            if not _is_refusal(error) or self._programs <= self._multiprocessors:
                raise
            self._programs = self._multiprocessors  # others hold a part of the device
            compiled = self._kernel[(min(self._programs, n_chunks),)](*args, **self._options)
        if self._max_registers:
            per_program = -(-compiled.n_regs // 8) * 8 * THREADS
            self._programs *= min(self._max_registers // per_program, MAX_RESIDENT)
            self._max_registers = 0


def _scale_of(request: Request) -> Tensor:
    """What kernels take for the loss scale's state; they do not touch it where there is none."""
    return request.outcome if request.loss_scale is None else request.loss_scale


def _bump_versions(part: Part, request: Request) -> None:
    """Count what was written in autograd's versions, as in-place operations do."""
    written = [*part.updated(), request.outcome]
    if request.loss_scale is not None:
        written.append(request.loss_scale)
    torch.autograd.graph.increment_version(written)


def compile_options(target: Any) -> dict[str, Any]:
    """How kernels are compiled for ``target``, a ``GPUTarget`` of Triton's."""
    options = {"num_warps": THREADS // target.warp_size, "enable_fp_fusion": False}
    if target.backend == "cuda":
        options["maxnreg"] = 128  # left alone, ptxas spills for an occupancy that we do not need
    return options


def _is_refusal(error: RuntimeError) -> bool:
    """Whether a cooperative launch was refused, before anything ran."""
    return "cooperative" in str(error) or "operation not supported" in str(error)


def _as_triton(kinds: Sequence[Any]) -> tuple[Any, ...]:
    """Dtypes as Triton's; numbers as they are."""
    return tuple(_DTYPES.get(kind, kind) for kind in kinds)


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

"""Run the programs of an interpreted Triton kernel concurrently.

Triton's interpreter (``TRITON_INTERPRET=1``) runs the programs of a grid one after another, so that
a kernel whose programs wait for each other never ends. Inside :func:`concurrent_interpreter` every
program has a thread of its own. Only the program that holds the baton runs, and it hands the baton
on at known points only, so that a run depends on nothing but the seed.

What this does not model: memory is sequentially consistent, hence a missing ``sem="release"`` or
``debug_barrier`` goes unnoticed here, and so does anything that differs in compiled code.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

__all__ = ["GridDeadlockError", "Launch", "LaunchLog", "concurrent_interpreter"]

# Memory operations that a program repeats on unchanged memory before it counts as waiting.
_SPIN_LIMIT = 200
# With a seed, how often a plain load or store is a switch point too.
_SWITCH_PROBABILITY = 0.25


class GridDeadlockError(RuntimeError):
    """Every program that has not ended waits for a change of memory that none of them will make."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: its name, the grid it ran with, and its keyword arguments but for tensors.

    ``kwargs`` holds launch options (``num_warps``, ``launch_cooperative_grid``, ...) as well.
    """

    kernel: str
    grid: tuple[int, int, int]
    kwargs: Mapping[str, object]


@dataclass
class LaunchLog:
    """The launches made so far inside one :func:`concurrent_interpreter` context, in order."""

    launches: list[Launch] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.launches)

    def __iter__(self) -> Iterator[Launch]:
        return iter(self.launches)

    def __getitem__(self, index: int) -> Launch:
        return self.launches[index]

    def kernels(self) -> list[str]:
        """Return the names of the launched kernels, in order."""
        return [launch.kernel for launch in self.launches]


class _Abandoned(BaseException):
    """Unwinds a suspended program after another one failed; no ``except Exception`` may stop it."""


class _Program:
    """One program of a grid: a thread that runs only between :meth:`resume` and :meth:`pause`."""

    def __init__(self, index: tuple[int, int, int], body: Callable[[], object]) -> None:
        self.index = index
        self.body = body
        self.error: BaseException | None = None
        self.ended = False
        self.seen: set[tuple[object, ...]] = set()
        self.repeats = 0
        self.abandoned = False
        self._may_run, self._has_paused = threading.Lock(), threading.Lock()
        self._may_run.acquire()
        self._has_paused.acquire()
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Let the program run to its next pause or its end; called by the launching thread."""
        if self._thread is None:
            # Daemons, so that a kernel that never ends cannot keep the process alive.
            thread = threading.Thread(target=self._run, name=f"program {self.index}", daemon=True)
            thread.start()
            self._thread = thread
        else:
            self._may_run.release()
        self._has_paused.acquire()

    def pause(self) -> None:
        """Hand the baton back and wait for the next turn; called by the program."""
        self._has_paused.release()
        self._may_run.acquire()
        if self.abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End the program at its next pause."""
        self.abandoned = True
        if self._thread is not None and not self.ended:
            self._may_run.release()
            self._thread.join()

    def where(self) -> str:
        """Return ``file:line`` of the kernel's source that the suspended program has reached."""
        ident = None if self._thread is None else self._thread.ident
        frame = sys._current_frames().get(-1 if ident is None else ident)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            # Up from this module, unittest.mock and triton itself to the kernel's own frame.
            if module not in (__name__, "threading") and not module.startswith("triton."):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return "an unknown line"

    def _run(self) -> None:
        import numpy as np

        try:
            # NumPy keeps its error state per thread.
            with np.errstate(all="ignore"):
                self.body()
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the launching thread
            self.error = error
        finally:
            self.ended = True
            # Nobody waits for this any more where the launching thread was interrupted.
            if self._has_paused.locked():
                self._has_paused.release()


class _Grid:
    """The programs of one launch, the baton, and the watch for deadlock."""

    def __init__(self, programs: list[_Program], rng: random.Random | None, builder: Any) -> None:
        self.live = programs
        self.rng = rng
        self.builder = builder
        self.current = programs[0] if programs else None

    def run(self) -> None:
        """Run all programs to their end.

        Raises:
            GridDeadlockError: if every program left repeats itself on unchanged memory.
            BaseException: whatever the first program to fail raised; the others are ended.
        """
        turn = 0
        try:
            while self.live:
                turn = turn % len(self.live) if self.rng is None else self.rng.randrange(len(self.live))
                program = self.current = self.live[turn]
                self.builder.grid_idx = program.index
                program.resume()
                if program.error is not None:
                    raise program.error
                if program.ended:
                    del self.live[turn]
                else:
                    turn += 1
                self._check_deadlock()
        finally:
            for program in self.live:
                program.abandon()

    def before(self, key: tuple[object, ...], atomic: bool) -> None:
        """Hand the baton on ahead of the memory operation ``key`` where that is due."""
        assert self.current is not None
        # A plain load that repeats itself is a wait too: nobody else would ever get to run.
        switch = atomic or key in self.current.seen or self.current.abandoned
        if switch or (self.rng is not None and self.rng.random() < _SWITCH_PROBABILITY):
            self.current.pause()

    def after(self, key: tuple[object, ...], changed: bool) -> None:
        """Note whether the current program got on: it changed memory, or did what is new to it."""
        assert self.current is not None
        if changed:
            for program in self.live:
                program.seen.clear()
                program.repeats = 0
        elif key in self.current.seen:
            self.current.repeats += 1
        else:
            self.current.seen.add(key)
            self.current.repeats = 0

    def _check_deadlock(self) -> None:
        if self.live and all(program.repeats > _SPIN_LIMIT for program in self.live):
            stuck = "; ".join(f"program {p.index} at {p.where()}" for p in self.live[:4])
            raise GridDeadlockError(
                f"deadlock: all {len(self.live)} programs that have not ended wait for a change of memory "
                f"that none of them makes: {stuck}"
            )


class _ConcurrentInterpreter:
    """The replacements for parts of ``triton.runtime.interpreter``, and what they share."""

    def __init__(self, interpreter: Any, programs: int, seed: int | None) -> None:
        self.interpreter = interpreter
        self.programs = programs
        self.rng = None if seed is None else random.Random(seed)
        self.log = LaunchLog()
        self.grid: _Grid | None = None

    def patch(self, stack: ExitStack) -> None:
        """Install the replacements until ``stack`` closes."""
        builder = self.interpreter.interpreter_builder

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._launch(executor, args, kwargs)

        stack.enter_context(mock.patch.object(self.interpreter.GridExecutor, "__call__", launch))
        for name in ("create_atomic_rmw", "create_atomic_cas", "create_masked_load", "create_masked_store"):
            stack.enter_context(mock.patch.object(builder, name, self._watched(name, getattr(builder, name))))
        for name in ("cast_impl", "create_fp_to_fp"):
            stack.enter_context(mock.patch.object(builder, name, self._rounded(getattr(builder, name))))

    def _launch(self, executor: Any, args_dev: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``GridExecutor.__call__``, line by line, but for the loop over the grid."""
        interpreter = self.interpreter
        spec = inspect.getfullargspec(executor.fn)
        known = {k: v for k, v in kwargs.items() if k in spec.args or k in spec.kwonlyargs}
        args_hst, kwargs_hst = executor._init_args_hst(args_dev, known)
        for hook in executor.pre_run_hooks:
            hook(*args_hst, **kwargs_hst)
        scope = interpreter._patch_lang(executor.fn)
        try:
            args = inspect.getcallargs(executor.fn, *args_hst, **kwargs_hst)
            args = {k: v if k in executor.constexprs else interpreter._implicit_cvt(v) for k, v in args.items()}
            dim = self._grid_dim(executor.grid(args) if callable(executor.grid) else executor.grid)
            options = {k: v for k, v in kwargs.items() if not hasattr(v, "data_ptr")}
            self.log.launches.append(Launch(executor.fn.__name__, dim, options))
            interpreter.interpreter_builder.set_grid_dim(*dim)
            try:
                self._run_grid(dim, lambda: executor.fn(**args))
            except GridDeadlockError:
                raise
            except Exception as error:
                raise interpreter.InterpreterError(repr(error)) from error
        finally:
            scope.restore()
        executor._restore_args_dev(args_dev, args_hst, known, kwargs_hst)

    def _grid_dim(self, grid: tuple[int, ...]) -> tuple[int, int, int]:
        if len(grid) > 3:
            raise ValueError(f"grid must have at most 3 dimensions, got {grid!r}")
        if len(grid) == 1 and grid[0] == 1:
            return (self.programs, 1, 1)
        x, y, z = (*(int(n) for n in grid), 1, 1, 1)[:3]
        return (x, y, z)

    def _run_grid(self, dim: tuple[int, int, int], body: Callable[[], object]) -> None:
        indices = [(x, y, z) for x in range(dim[0]) for y in range(dim[1]) for z in range(dim[2])]
        programs = [_Program(index, body) for index in indices]
        self.grid = _Grid(programs, self.rng, self.interpreter.interpreter_builder)
        try:
            with warnings.catch_warnings():
                # tl.max over a block of NaN; np.errstate does not cover this one.
                warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
                self.grid.run()
        finally:
            self.grid = None

    def _watched(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a memory operation of the builder: a switch point before it, a progress note after it."""
        atomic, writes = "atomic" in name, name != "create_masked_load"
        # create_atomic_rmw takes the operation before the pointer.
        at = 1 if name == "create_atomic_rmw" else 0

        def operation(*args: Any, **kwargs: Any) -> Any:
            grid = self.grid
            if grid is None:
                return stock(*args, **kwargs)
            pointers = args[at].data
            key = (name, int(pointers.flat[0]), int(pointers.flat[-1]), pointers.size)
            volatile = not writes and bool(kwargs.get("is_volatile", args[-1]))
            grid.before(key, atomic or volatile)
            old = self._peek(args[at], args, name) if writes else b""
            result = stock(*args, **kwargs)
            grid.after(key, writes and old != self._peek(args[at], args, name))
            return result

        return operation

    def _peek(self, handle: Any, args: tuple[Any, ...], name: str) -> bytes:
        """Return the bytes that a write is about to change, or has changed."""
        import numpy as np

        pointers = handle.data
        # Position of the mask among the arguments; compare-and-swap has none.
        at = {"create_atomic_rmw": 3, "create_masked_store": 2}.get(name)
        mask = np.ones_like(pointers, dtype=bool) if at is None else args[at].data
        dtype = self.interpreter._get_np_dtype(handle.get_element_ty())
        zeros = np.zeros(pointers.shape, dtype)
        loaded: bytes = self.interpreter._interpreter.load(pointers, mask, zeros, dtype).tobytes()
        return loaded

    def _rounded(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a conversion of the builder: to bfloat16 it rounds to nearest even, like a GPU."""
        import triton.language as tl

        interpreter = self.interpreter
        truncating = interpreter._ir.ROUNDING_MODE.RTZ

        def convert(src: Any, dst_type: Any, *mode: Any) -> Any:
            source, target = src.dtype.scalar, dst_type.scalar
            eight_bits = 8 in (source.primitive_bitwidth, target.primitive_bitwidth)
            if source == target or tl.bfloat16 not in (source, target) or eight_bits or truncating in mode:
                return stock(src, dst_type, *mode)
            data = _from_bf16(src.data) if source == tl.bfloat16 else src.data
            bits = _to_bf16(data) if target == tl.bfloat16 else data.astype(interpreter._get_np_dtype(target))
            return interpreter.TensorHandle(bits, target)

        return convert


def _to_bf16(values: Any) -> Any:
    """Round an array to bfloat16, nearest even; returns the bits as uint16."""
    import numpy as np

    values = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = values.view(np.uint32)
    # Half an ulp, less one bit where the result would otherwise be odd on a tie. The carry runs
    # into the exponent: that is how subnormals become normal and the largest values infinite.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # A NaN stays one whatever its payload: the quiet bit is set.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def _from_bf16(bits: Any) -> Any:
    """Widen bfloat16 bits (uint16) to float32, exactly."""
    import numpy as np

    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _interpreter_module() -> Any:
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError as error:
        raise RuntimeError("concurrent_interpreter() needs Triton: pip install triton") from error
    # Set too late, the variable leaves Triton's own library functions compiled.
    if os.environ.get("TRITON_INTERPRET") != "1" or not isinstance(tl.sum, interpreter.InterpretedFunction):
        raise RuntimeError(
            "concurrent_interpreter() needs Triton's interpreter: "
            "set TRITON_INTERPRET=1 in the environment before triton is first imported"
        )
    return interpreter


@contextmanager
def concurrent_interpreter(programs: int = 4, seed: int | None = None) -> Iterator[LaunchLog]:
    """Run every interpreted kernel launched inside the context with its programs side by side.

    One program runs at a time. It hands over ahead of each atomic, volatile load, and plain load
    that it has made before on unchanged memory; with a seed also ahead of other loads and stores, at
    random. Conversions between float32 and bfloat16 round to nearest even inside the context, which
    Triton's interpreter does not, and NumPy's floating-point warnings are silent in the programs.

    Args:
        programs: how many programs a launch gets that asks for one, that is for a grid ``(1,)``. Any
            other grid is run as asked for, ``(1, 1)`` for one.
        seed: ``None`` hands the baton round in turn; an int draws the next program from
            ``random.Random(seed)``, so that equal seeds give equal runs.

    Yields:
        The launches, recorded as they begin.

    Raises:
        ValueError: if ``programs`` is less than 1.
        RuntimeError: if Triton is missing or does not interpret.
        GridDeadlockError: out of a launch whose programs all wait for each other. A program that loops
            without touching memory, or that changes memory for ever, is not noticed.
        triton.runtime.errors.InterpreterError: out of a launch one of whose programs failed, with
            that failure as ``__cause__``; the other programs are ended first.
    """
    if programs < 1:
        raise ValueError(f"programs must be at least 1, got {programs!r}")
    concurrent = _ConcurrentInterpreter(_interpreter_module(), programs, seed)
    with ExitStack() as stack:
        concurrent.patch(stack)
        yield concurrent.log

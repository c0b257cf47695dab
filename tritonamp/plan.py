"""What an optimizer's tensors look like right now: checked, with their state, and never stale.

Between two steps gradients move, appear and disappear, ``.data`` is swapped, groups are added, state is loaded.
Each step therefore compares cheaply what it finds with what it found before, and looks closer only at a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .optimizer import FusedOptimizer

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *_REAL)

Strides = tuple[int, ...]


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the reals that a tensor is updated as: complex tensors are pairs of them."""
    return _REAL.get(dtype, dtype)


def compute_dtype(param: Tensor) -> torch.dtype:
    """Dtype of arithmetic and state: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if real_dtype(param.dtype) == torch.float64 else torch.float32


def state_dtype(param: Tensor) -> torch.dtype:
    """Dtype of a state tensor: the compute dtype, complex for complex parameters."""
    compute = compute_dtype(param)
    return compute.to_complex() if param.is_complex() else compute


def dense_strides(tensor: Tensor) -> Strides:
    """Strides of a dense tensor with the given one's order of dimensions: those of its state."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


class Layout(NamedTuple):
    """How the logical elements of a tensor lie, innermost dimension first; the state lies densely in that order."""

    sizes: tuple[int, ...]
    grad: Strides
    param: Strides


def layout_of(param: Tensor, grad_strides: Strides) -> Layout | None:
    """The layout in which param, grad and state are walked together; None where all are flat memory alike."""
    state = dense_strides(param)
    dims = [d for d in range(param.dim()) if param.shape[d] != 1]
    if all(state[d] == param.stride(d) == grad_strides[d] for d in dims):
        return None
    dims.sort(key=lambda d: state[d])
    sizes, grads, params = [], [], []
    if param.is_complex():  # the pair is the innermost dimension
        sizes, grads, params = [2], [1], [1]
    unit = 2 if param.is_complex() else 1
    for d in dims:
        size, grad, stride = param.shape[d], grad_strides[d] * unit, param.stride(d) * unit
        if sizes and grads[-1] * sizes[-1] == grad and params[-1] * sizes[-1] == stride:
            sizes[-1] *= size
        else:
            sizes.append(size)
            grads.append(grad)
            params.append(stride)
    return Layout(tuple(sizes), tuple(grads), tuple(params))


class Entry(NamedTuple):
    """One parameter of the plan; ``step`` and ``state`` (``n_states`` tensors) are missing until its first gradient."""

    param: Tensor
    group: int
    grad_dtype: torch.dtype
    grad_strides: Strides
    n_states: int
    step: Tensor | None
    state: tuple[Tensor, ...]


class Plan:
    """The tensors of one optimizer.

    Attributes:
        entries: one for each parameter, in the order of the groups.
        grads: their gradients as of the last :meth:`look`; None where there is nothing to do.
        device: the device of all of them; None without parameters.
        updated: what a step from these gradients updates: parameters, state and step counters.
        generation: grows whenever anything has changed but the gradients' addresses and presence.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.grads: list[Tensor | None] = []
        self.updated: list[Tensor] = []
        self.device: torch.device | None = None
        self.generation = 0
        self._ids: list[int] = []
        self._found: tuple[Any, ...] | None = None  # None: something has changed since the entries were made
        self._grad_facts: list[Any] = []  # of the last gradient that each parameter had
        self._state_of_params: list[tuple[dict[str, Any], tuple[str, ...]]] = []  # and the keys that are used
        self._is_active: list[bool] = []
        self._has_complex = False

    def look(self, optimizer: FusedOptimizer) -> bool:
        """Find the gradients and check them; True if any parameter has one with elements.

        Raises:
            RuntimeError, TypeError: for a parameter or gradient that cannot be updated. Nothing is changed then.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads: list[Tensor | None] = [param.grad for param in params]
        has_grad = [grad is not None for grad in grads]
        try:
            facts = _facts([grad for grad in grads if grad is not None])
        except (RuntimeError, NotImplementedError):  # sparse gradients have no strides
            _check(params, grads)
            raise
        ids = list(map(id, params))
        if ids != self._ids:
            self._grad_facts = [None] * len(params)
        is_known = self._found is not None and facts == list(compress(self._grad_facts, has_grad))
        if not is_known or self._find(optimizer, params) != self._found:
            _check(params, grads)
            self._found = None
            new = iter(facts)
            self._grad_facts = [next(new) if has else old for has, old in zip(has_grad, self._grad_facts, strict=True)]
        self._ids = ids
        self.device = params[0].device if params else None
        self.grads = [grad if grad is not None and grad.numel() else None for grad in grads]
        return any(grad is not None for grad in self.grads)

    def prepare(self, optimizer: FusedOptimizer) -> None:
        """Make what :meth:`look` found ready for a launch: state that is missing, entries that have changed."""
        if self._found is None:
            self._rebuild(optimizer)
            self._found = self._find(optimizer, [entry.param for entry in self.entries])
        self._resolve()
        is_active = [g is not None for g in self.grads]
        if is_active != self._is_active:
            self.updated = []
            for entry in compress(self.entries, is_active):
                self.updated += [entry.param, *entry.state]
                if entry.step is not None:
                    self.updated.append(entry.step)
            self._is_active = is_active

    def _find(self, optimizer: FusedOptimizer, params: list[Tensor]) -> tuple[Any, ...] | None:
        """Everything a launch depends on, besides the gradients, in a form that compares fast."""
        of_params = self._state_of_params
        if len(of_params) != len(params):
            return None
        try:
            state = [of_param[key] for of_param, keys in of_params for key in keys]
            addresses = list(map(Tensor.data_ptr, state))
        except (KeyError, TypeError):
            return None
        return (
            _facts(params),
            list(map(Tensor.data_ptr, params)),
            list(map(id, optimizer.state.values())),
            list(map(id, state)),
            addresses,
            [(len(group["params"]), optimizer._state_names(group)) for group in optimizer.param_groups],
        )

    def _rebuild(self, optimizer: FusedOptimizer) -> None:
        entries: list[Entry] = []
        self._state_of_params = []
        for number, group in enumerate(optimizer.param_groups):
            names = optimizer._state_names(group)
            for param in group["params"]:
                at = len(entries)
                step: Tensor | None = None
                state: list[Tensor] = []
                if names and (self.grads[at] is not None or optimizer.state.get(param)):
                    step, *state = prepare_state(optimizer.state[param], param, names)
                of_param = ({}, ()) if step is None else (optimizer.state[param], ("step", *names))
                self._state_of_params.append(of_param)
                dtype, strides = getattr(param, "grad_dtype", None) or param.dtype, param.stride()
                if self._grad_facts[at] is not None:
                    dtype, _, _, strides = self._grad_facts[at]
                entries.append(Entry(param, number, dtype, strides, len(names), step, tuple(state)))
        self.entries = entries
        self._has_complex = any(entry.param.is_complex() for entry in entries)
        self._is_active, self.updated = [], []
        self.generation += 1

    def _resolve(self) -> None:
        """Carry out a conjugation or negation that torch has put off: the kernels read memory as it is."""
        present = [g for g in self.grads if g is not None]
        if any(map(Tensor.is_neg, present)) or (self._has_complex and any(map(Tensor.is_conj, present))):
            self.grads = [None if g is None else g.resolve_conj().resolve_neg() for g in self.grads]


_dtype = attrgetter("dtype")


def _facts(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What of each tensor matters to a launch, besides its address. Made once a step: no Python per tensor."""
    of_each = (Tensor.get_device, Tensor.numel, Tensor.stride)
    return list(zip(map(_dtype, tensors), *(map(fact, tensors) for fact in of_each), strict=True))


def prepare_state(state: dict[str, Any], param: Tensor, names: Sequence[str]) -> list[Tensor]:
    """Step counter and state tensors in the form the kernels take: made if missing, converted if need be."""
    step = state.get("step")
    if not isinstance(step, Tensor):
        step = torch.full((), float(step or 0), dtype=torch.float32, device=param.device)
    state["step"] = step.detach().to(device=param.device, dtype=torch.float32).reshape(())
    dtype, strides = state_dtype(param), dense_strides(param)
    for name in names:
        tensor = state.get(name)
        if tensor is None:
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            continue
        if tensor.shape != param.shape:
            raise RuntimeError(f"state {name!r} has shape {tuple(tensor.shape)}, its parameter {tuple(param.shape)}")
        if tensor.dtype != dtype or tensor.device != param.device or tensor.stride() != strides:
            state[name] = torch.empty_strided(param.shape, strides, dtype=dtype, device=param.device).copy_(tensor)
    return [state["step"], *(state[name] for name in names)]


def _check(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Raise for the first parameter or gradient that cannot be updated."""
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        which = f"parameter {i} (shape {tuple(param.shape)}, {param.dtype}, {param.device})"
        if param.dtype not in _DTYPES or param.layout != torch.strided:
            raise TypeError(f"{which} cannot be optimized: dense tensors of {', '.join(map(str, _DTYPES))} can")
        if param.device != params[0].device:
            raise RuntimeError(
                f"{which} lies on another device than parameter 0 ({params[0].device}): use one optimizer per device"
            )
        if any(size > 1 and stride == 0 for size, stride in zip(param.shape, param.stride(), strict=True)):
            raise RuntimeError(f"{which} is an expanded tensor, whose elements share memory: optimize its base")
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise RuntimeError(f"{which} has a sparse gradient ({grad.layout}): only dense ones can be fused")
        if grad.device != param.device:
            raise RuntimeError(f"{which} has a gradient on {grad.device}")
        if grad.shape != param.shape:
            raise RuntimeError(f"{which} has a gradient of shape {tuple(grad.shape)}")
        if grad.dtype not in _DTYPES or grad.is_complex() != param.is_complex():
            raise RuntimeError(f"{which} has a gradient of {grad.dtype}")

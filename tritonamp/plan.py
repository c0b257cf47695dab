"""What an optimizer's tensors look like right now: checked, with their state, and never stale.

Between two steps gradients move, appear and disappear, ``.data`` is swapped, groups are added, state is loaded.
Each step therefore compares cheaply what it finds with what it found before, and looks closer only at a change.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import compress, pairwise
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .distributed import Agreement, Share, any_sharded, like, local_grad, local_of, part_of

if TYPE_CHECKING:
    from .optimizer import FusedOptimizer

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *_REAL)

Strides = tuple[int, ...]

# How a parameter is kept: rounded to nearest, or stochastically, when it is stored; or as the rounding of a master
# copy in the compute dtype. `kernels/table.py` has the same numbers.
ROUNDED, STOCHASTIC, MASTER = 0, 1, 2


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
    """One parameter of the plan; of a sharded one, what this rank holds.

    Attributes:
        param, group: the parameter and the number of its group.
        owner: what the optimizer calls the parameter: a DTensor whose part ``param`` is, or ``param``.
        share: which part.
        grad_dtype, grad_strides: of its last gradient; expected ones before the first.
        stream: of random numbers: its place in the optimizer, and its shard from bit 48 on.
        kept: how it is kept, ``ROUNDED``, ``STOCHASTIC`` or ``MASTER``.
        n_states: how many state tensors it has, besides the step counter; the last is the master copy, if kept so.
        at: where its step counter stands in the plan's ``state``, the state tensors following; -1 before its
            first gradient, and where there is no state.
    """

    param: Tensor
    group: int
    owner: Tensor
    share: Share
    grad_dtype: torch.dtype
    grad_strides: Strides
    stream: int
    kept: int
    n_states: int
    at: int


class Plan:
    """The tensors of one optimizer.

    Gradients and state are held during a step only, so that others may free or offload them in between.

    Attributes:
        entries: one for each parameter that can have a gradient, in the order of the groups.
        grads: their gradients; None where there is nothing to do. Without elements where others hold all of a DTensor.
        state: step counters and state tensors; ``Entry.at`` says whose.
        device: the device of all of them; None without parameters.
        agreement: among which ranks steps are agreed.
        generation: grows whenever anything has changed but the gradients' addresses and presence.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.grads: list[Tensor | None] = []
        self.state: list[Tensor] = []
        self.device: torch.device | None = None
        self.agreement = Agreement((), None)
        self.generation = 0
        self._owners: list[Tensor] = []  # during a step only
        self._ids: list[int] = []
        self._used: list[bool] = []  # of all parameters of the groups
        self._grad_facts: list[Any] = []  # of the last gradient that each entry had
        self._found: tuple[Any, ...] | None = None  # None: something has changed since the entries were made
        self._keys: list[tuple[int, tuple[str, ...]]] = []  # place in the optimizer's state, and the keys used there
        self._state_refs: list[weakref.ref[Tensor]] = []
        self._masters: list[int] = []  # numbers of the entries that have a master copy
        self._versions: dict[int, tuple[int, int]] = {}  # theirs, after the last step
        self._has_complex = False
        self._has_shards = False

    @property
    def is_stale(self) -> bool:
        """Whether :meth:`prepare` has anything to make."""
        return self._found is None

    def look(self, optimizer: FusedOptimizer) -> bool:
        """Find the gradients and check them; True if any parameter has one with elements, on any rank.

        Raises:
            RuntimeError, TypeError: for a parameter or gradient that cannot be updated. Nothing is changed then.
        """
        owners = [param for group in optimizer.param_groups for param in group["params"]]
        self._has_shards = any_sharded(owners)
        if self._has_shards:
            all_params, all_grads = list(map(local_of, owners)), list(map(local_grad, owners))
        else:
            all_params, all_grads = owners, [param.grad for param in owners]
        # Frozen parameters may be anything, quantized or elsewhere.
        used = [grad is not None or owner.requires_grad for owner, grad in zip(owners, all_grads, strict=True)]
        params, grads = list(compress(all_params, used)), list(compress(all_grads, used))
        self._owners = list(compress(owners, used)) if self._has_shards else params
        has_grad = [grad is not None for grad in grads]
        try:
            facts = _facts([grad for grad in grads if grad is not None])
        except (RuntimeError, NotImplementedError):  # sparse gradients have no strides
            _check(optimizer, all_params, all_grads, used)
            raise
        ids = list(map(id, self._owners))
        old = self._grad_facts if ids == self._ids else [None] * len(params)
        is_known = self._found is not None and facts == list(compress(old, has_grad))
        if not is_known or self._find(optimizer, params) != self._found:
            _check(optimizer, all_params, all_grads, used)
            self._found = None
            new = iter(facts)
            self._grad_facts = [next(new) if has else known for has, known in zip(has_grad, old, strict=True)]
            self._ids, self._used = ids, used
        self.device = params[0].device if params else None
        # An empty part of a DTensor stays: its steps are counted, and another rank has something to do.
        self.grads = [
            grad if grad is not None and owner.numel() else None
            for owner, grad in zip(self._owners, grads, strict=True)
        ]
        return optimizer.process_group is not None or any(grad is not None for grad in self.grads)

    def prepare(self, optimizer: FusedOptimizer) -> None:
        """Make what :meth:`look` found ready for a launch: state that is missing, entries that have changed."""
        if self._found is None:
            self._rebuild(optimizer)
            self._found = self._find(optimizer, [entry.param for entry in self.entries])
        self._resolve()
        self._follow_params()

    def release(self) -> None:
        """Let go of gradients and state."""
        self.grads, self.state, self._owners = [], [], []

    def updated_masters(self) -> None:
        """To be called after a step: from here on, who else writes to a parameter with a master copy is noticed."""
        self._versions = {i: _versions(self.entries[i]) for i in self._masters}

    @torch.no_grad()
    def _follow_params(self) -> None:
        """Take over into the master copies what others have written to the parameters since the last step.

        Weights that were loaded, clamped, initialised anew: where a parameter is not its master's rounding any more.
        """
        for i in self._masters:
            entry = self.entries[i]
            if entry.at >= 0 and self._versions.get(i) != _versions(entry):
                master = self.state_of(entry)[1][-1]
                is_rounding = master.to(entry.param.dtype) == entry.param
                master.copy_(torch.where(is_rounding, master, entry.param.to(master.dtype)))

    def state_of(self, entry: Entry) -> tuple[Tensor | None, list[Tensor]]:
        """Step counter and state tensors of an entry; during a step only."""
        if entry.at < 0:
            return None, []
        return self.state[entry.at], self.state[entry.at + 1 : entry.at + 1 + entry.n_states]

    def updated(self) -> list[Tensor]:
        """What a step from the present gradients updates: parameters, step counters, state tensors.

        Of DTensors the local parts, and the parameters themselves: both have a version.
        """
        tensors: list[Tensor] = []
        if not self._has_shards and all(grad is not None for grad in self.grads):
            return [*(entry.param for entry in self.entries), *self.state]
        for entry, grad in zip(self.entries, self.grads, strict=True):
            if grad is not None:
                tensors += {id(tensor): tensor for tensor in (entry.owner, entry.param)}.values()
                tensors += self.state[entry.at : entry.at + 1 + entry.n_states] if entry.at >= 0 else ()
        return tensors

    def _find(self, optimizer: FusedOptimizer, params: list[Tensor]) -> tuple[Any, ...] | None:
        """Everything a launch depends on, besides the gradients, in a form that compares fast; sets ``state``."""
        if len(self.entries) != len(params):
            return None
        of_params = list(optimizer.state.values())
        try:
            state = [of_params[place][key] for place, keys in self._keys for key in keys]
            if self._has_shards:
                state = list(map(local_of, state))
            addresses = list(map(Tensor.data_ptr, state))
        except (IndexError, KeyError, TypeError):
            return None
        if len(state) != len(self._state_refs):
            self._state_refs = list(map(weakref.ref, state))
        elif not all(map(is_, [ref() for ref in self._state_refs], state)):
            return None
        self.state = state
        options = [(len(group["params"]), optimizer._state_names(group)) for group in optimizer.param_groups]
        places = list(map(id, optimizer.state))
        kept = (optimizer.master_weights, optimizer.rounding)
        return _facts(params), list(map(Tensor.data_ptr, params)), places, addresses, options, kept

    def _rebuild(self, optimizer: FusedOptimizer) -> None:
        self.entries, self._keys, self._state_refs, self._versions = [], [], [], {}
        numbered = [(n, param) for n, group in enumerate(optimizer.param_groups) for param in group["params"]]
        self.agreement = Agreement(self._owners, optimizer.process_group)
        at, keys_of = 0, []
        for position, (number, owner) in compress(enumerate(numbered), self._used):
            index, kept, param = len(self.entries), how_kept(optimizer, owner), local_of(owner)
            keys = state_keys(optimizer, optimizer.param_groups[number], owner)
            needs_state = bool(keys) or kept == STOCHASTIC
            has_state = needs_state and (self.grads[index] is not None or bool(optimizer.state.get(owner)))
            if has_state:
                prepare_state(optimizer.state[owner], owner, keys)
                keys_of.append((owner, keys))
            dtype, strides = getattr(owner, "grad_dtype", None) or param.dtype, param.stride()
            if self._grad_facts[index] is not None:
                dtype, _, _, strides = self._grad_facts[index]
            share, at_or_none = self.agreement.share(owner), at if has_state else -1
            stream = position | share.shard << 48
            self.entries.append(Entry(param, number, owner, share, dtype, strides, stream, kept, len(keys), at_or_none))
            at += (1 + len(keys)) * has_state
        places = {id(param): place for place, param in enumerate(optimizer.state)}
        self._keys = [(places[id(param)], ("step", *keys)) for param, keys in keys_of]
        self._masters = [i for i, entry in enumerate(self.entries) if entry.kept == MASTER]
        self._has_complex = any(entry.param.is_complex() for entry in self.entries)
        self.generation += 1

    def _resolve(self) -> None:
        """Carry out a conjugation or negation that torch has put off: the kernels read memory as it is."""
        present = [grad for grad in self.grads if grad is not None]
        if any(map(Tensor.is_neg, present)) or (self._has_complex and any(map(Tensor.is_conj, present))):
            self.grads = [None if grad is None else grad.resolve_conj().resolve_neg() for grad in self.grads]


def _versions(entry: Entry) -> tuple[int, int]:
    """What writing to the parameter changes; a DTensor and its local part are not told of each other's."""
    return entry.owner._version, entry.param._version


_dtype = attrgetter("dtype")


def _facts(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What of each tensor matters to a launch, besides its address. Made once a step: no Python per tensor."""
    of_each = (Tensor.get_device, Tensor.numel, Tensor.stride)
    return list(zip(map(_dtype, tensors), *(map(fact, tensors) for fact in of_each), strict=True))


def how_kept(optimizer: FusedOptimizer, param: Tensor) -> int:
    """``ROUNDED``, ``STOCHASTIC`` or ``MASTER``: how the optimizer keeps a parameter."""
    if real_dtype(param.dtype) == compute_dtype(param):
        return ROUNDED  # as it is computed
    return MASTER if optimizer.master_weights else STOCHASTIC if optimizer.rounding == "stochastic" else ROUNDED


def state_keys(optimizer: FusedOptimizer, group: dict[str, Any], param: Tensor) -> tuple[str, ...]:
    """Keys of a parameter's state tensors, ``"step"`` apart."""
    names = optimizer._state_names(group)
    return (*names, "master_param") if how_kept(optimizer, param) == MASTER else names


def prepare_state(state: dict[str, Any], owner: Tensor, names: Sequence[str]) -> None:
    """Bring step counter and state tensors into the form the kernels take: made if missing, converted if need be.

    Those of a DTensor are distributed as it is.
    """
    param = local_of(owner)
    step = state.get("step")
    if not isinstance(step, Tensor):
        step = torch.full((), float(step or 0), dtype=torch.float32, device=param.device)
    state["step"] = step.detach().to(device=param.device, dtype=torch.float32).reshape(())
    dtype, strides = state_dtype(param), dense_strides(param)
    for name in names:
        tensor = state.get(name, owner.detach() if name == "master_param" else None)
        if tensor is None:
            if name == "momentum_buffer":  # its first step is not dampened
                state["step"] = torch.zeros_like(state["step"])
            state[name] = like(owner, torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format))
            continue
        if tensor.shape != owner.shape:
            raise RuntimeError(f"state {name!r} has shape {tuple(tensor.shape)}, its parameter {tuple(owner.shape)}")
        part = part_of(tensor, owner)
        if part.dtype != dtype or part.device != param.device or part.stride() != strides:
            part = torch.empty_strided(param.shape, strides, dtype=dtype, device=param.device).copy_(part)
        if part is not local_of(tensor):
            state[name] = like(owner, part)


def _check(
    optimizer: FusedOptimizer, params: Sequence[Tensor], grads: Sequence[Tensor | None], used: Sequence[bool]
) -> None:
    """Raise for the first parameter or gradient that is used and cannot be updated.

    Raises:
        RuntimeError, TypeError: naming it.
    """
    device = next((param.device for param in compress(params, used)), None)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if used[i]:
            which = f"parameter {i} (shape {tuple(param.shape)}, {param.dtype}, {param.device})"
            _check_param(which, param, device)
            if param.dtype == torch.float16 and how_kept(optimizer, param) == STOCHASTIC:
                raise TypeError(f"{which}: rounding='stochastic' is for bfloat16 parameters; use master_weights=True")
            if grad is not None:
                _check_grad(which, param, grad)
    _check_apart([param for param in compress(params, used) if param.numel()])


def _check_apart(params: Sequence[Tensor]) -> None:
    """Raise for parameters that share memory: a launch updates all at once."""
    dense = [param for param in params if param.is_contiguous()]
    spans = sorted((param.data_ptr(), param.data_ptr() + param.nbytes, tuple(param.shape)) for param in dense)
    for (_, end, shape), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise RuntimeError(
                f"two parameters share memory (shapes {shape} and {other}), and would be updated at once: make the two "
                "modules use one Parameter"
            )


def _check_param(which: str, param: Tensor, device: torch.device | None) -> None:
    if is_traceable_wrapper_subclass(param):
        raise TypeError(f"{which} is a {type(param).__name__}: only plain tensors and DTensors can be fused")
    if param.dtype not in _DTYPES or param.layout != torch.strided:
        raise TypeError(f"{which} cannot be optimized: dense tensors of {', '.join(map(str, _DTYPES))} can")
    if param.device != device:
        raise RuntimeError(f"{which} lies on another device than the first ({device}): use one optimizer per device")
    if param.device.type == "meta":
        raise RuntimeError(f"{which} has no data: make the optimizer after the model has got its memory")
    span = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1 and stride < span:
            raise RuntimeError(f"{which} has elements that share memory (strides {param.stride()}): optimize its base")
        span += max(size - 1, 0) * stride


def _check_grad(which: str, param: Tensor, grad: Tensor) -> None:
    if is_traceable_wrapper_subclass(grad):
        raise TypeError(f"{which} has a gradient that is a {type(grad).__name__}: only plain tensors can be fused")
    if grad.layout != torch.strided:
        raise RuntimeError(f"{which} has a sparse gradient ({grad.layout}): only dense ones can be fused")
    if grad.device != param.device:
        raise RuntimeError(f"{which} has a gradient on {grad.device}")
    if grad.shape != param.shape:
        raise RuntimeError(f"{which} has a gradient of shape {tuple(grad.shape)}")
    if grad.dtype not in _DTYPES or grad.is_complex() != param.is_complex():
        raise RuntimeError(f"{which} has a gradient of {grad.dtype}")

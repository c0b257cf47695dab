"""What an optimizer's tensors look like right now: checked, with their state, and never stale.

Between two steps gradients move, appear and disappear, ``.data`` is swapped, groups are added, state is loaded.
Each step therefore compares cheaply what it finds with what it found before, and looks closer only at a change.
"""

from __future__ import annotations

import weakref
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .checks import check
from .distributed import Agreement, Share, any_sharded, local_grad, local_of
from .facts import Facts
from .layout import Strides
from .state import MASTER, STOCHASTIC, how_kept, prepare_state, state_keys

if TYPE_CHECKING:
    from .optimizer import FusedOptimizer


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


def device_of(param: Tensor) -> torch.device:
    """Where a parameter is updated."""
    return param.device


class Part:
    """The tensors that are updated together: those of one optimizer, on one device.

    Attributes:
        entries: one for each parameter that can have a gradient, in the order of the groups.
        grads: their gradients; None where there is nothing to do. Without elements where others hold all of a DTensor.
        state: step counters and state tensors of the whole plan; ``Entry.at`` says whose.
        device: where they lie; None without parameters.
        agreement: with which ranks and devices steps are agreed.
        generation: grows whenever anything has changed but the gradients' addresses and presence.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.grads: list[Tensor | None] = []
        self.state: list[Tensor] = []
        self.device: torch.device | None = None
        self.agreement = Agreement((), None)
        self.generation = 0

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
        for entry, grad in zip(self.entries, self.grads, strict=True):
            if grad is not None:
                tensors += {id(tensor): tensor for tensor in (entry.owner, entry.param)}.values()
                tensors += self.state[entry.at : entry.at + 1 + entry.n_states] if entry.at >= 0 else ()
        return tensors


class Plan(Part):
    """The tensors of one optimizer. Its device is that of the first parameter; others may lie elsewhere.

    Gradients and state are held during a step only, so that others may free or offload them in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owners: list[Tensor] = []  # during a step only
        self._ids: list[int] = []  # theirs
        self._used: list[bool] = []  # of all parameters of the groups
        self._param_facts = Facts(())
        self._grad_facts = Facts(())  # of the last gradients
        self._has_grad: list[bool] = []  # which entries had these
        self._last_grads: list[Any] = []  # facts of the last gradient that each entry had, if any
        self._found: tuple[Any, ...] | None = None  # None: something has changed since the entries were made
        self._keys: list[tuple[int, tuple[str, ...]]] = []  # place in the optimizer's state, and the keys used there
        self._state_facts = Facts(())
        self._parts: list[tuple[Part, list[int]]] = []  # where there are several: with the numbers of their entries
        self._masters: list[int] = []  # numbers of the entries that have a master copy
        self._followed: dict[int, tuple[tuple[int, int], weakref.ref[Tensor]]] = {}  # versions, and master copy
        self._has_shards = False
        self._is_complete = False  # every entry is a plain tensor and has something to do

    @property
    def is_stale(self) -> bool:
        """Whether :meth:`prepare` has anything to make."""
        return self._found is None

    def look(self, optimizer: FusedOptimizer) -> bool:
        """Find the gradients and check them; True if any parameter has one with elements, on any rank.

        Raises:
            RuntimeError, TypeError: for a parameter or gradient that cannot be updated. Nothing is changed then.
        """
        owners = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        self._has_shards = any_sharded(owners)
        if self._has_shards:
            all_params, all_grads = list(map(local_of, owners)), list(map(local_grad, owners))
        else:
            all_params, all_grads = owners, [param.grad for param in owners]
        params, grads, present = all_params, all_grads, all_grads
        used = has_grad = [grad is not None for grad in grads]
        if not all(has_grad):
            # Frozen parameters may be anything, quantized or elsewhere.
            used = [has or owner.requires_grad for has, owner in zip(has_grad, owners, strict=True)]
            params, grads, has_grad = ([*compress(column, used)] for column in (all_params, all_grads, has_grad))
            present = [*compress(grads, has_grad)]
        self._owners = [*compress(owners, used)] if self._has_shards else params
        try:
            param_facts, grad_facts = self._param_facts.again(params), self._grad_facts.again(present)
        except RuntimeError:  # a sparse tensor
            check(optimizer, all_params, all_grads, used)
            raise
        ids = list(map(id, self._owners))
        last_grads = self._last_grads if ids == self._ids else [None] * len(params)
        are_as_before = grad_facts is self._grad_facts and has_grad == self._has_grad and ids == self._ids
        is_known = are_as_before or grad_facts.of_each == [*compress(last_grads, has_grad)]
        if (
            self._found is None
            or not is_known
            or used != self._used
            or self._find(optimizer, params, param_facts) != self._found
        ):
            check(optimizer, all_params, all_grads, used)
            self._found = None
            new = iter(grad_facts.of_each)
            self._last_grads = [next(new) if has else last for has, last in zip(has_grad, last_grads, strict=True)]
            self._ids, self._used = ids, used
        self._param_facts, self._grad_facts, self._has_grad = param_facts, grad_facts, has_grad
        self.device = device_of(params[0]) if params else None
        self.grads = grads
        may_be_empty = self._has_shards or param_facts.has_empty
        self._is_complete = all(has_grad) and not may_be_empty
        if may_be_empty:
            # An empty part of a DTensor stays: its steps are counted, and another rank has something to do.
            self.grads = [grad if owner.numel() else None for owner, grad in zip(self._owners, grads, strict=True)]
        return optimizer.process_group is not None or any(grad is not None for grad in self.grads)

    def prepare(self, optimizer: FusedOptimizer) -> None:
        """Make what :meth:`look` found ready for a launch: state that is missing, entries that have changed."""
        if self._found is None:
            self._rebuild(optimizer)
            self._found = self._find(optimizer, [entry.param for entry in self.entries], self._param_facts)
        self._resolve()
        self._follow_params()

    def release(self) -> None:
        """Let go of gradients and state."""
        self.grads, self.state, self._owners = [], [], []
        for part, _ in self._parts:
            part.grads, part.state = [], []

    def updated_masters(self) -> None:
        """To be called after a step: from here on, who else writes to a parameter with a master copy is noticed."""
        self._followed = {
            i: (_versions(entry), weakref.ref(self._master_of(entry)))
            for i in self._masters
            if (entry := self.entries[i]).at >= 0
        }

    def _master_of(self, entry: Entry) -> Tensor:
        return self.state[entry.at + entry.n_states]

    @torch.no_grad()
    def _follow_params(self) -> None:
        """Take over into the master copies what others have written to the parameters since the last step.

        Weights that were loaded, clamped, initialised anew: where a parameter is not its master's rounding any more.
        """
        for i in self._masters:
            entry = self.entries[i]
            if entry.at < 0:
                continue
            master, (versions, known) = self._master_of(entry), self._followed.get(i, (None, None))
            if versions != _versions(entry) or known is None or known() is not master:
                is_rounding = master.to(entry.param.dtype) == entry.param
                master.copy_(torch.where(is_rounding, master, entry.param.to(master.dtype)))

    def updated(self) -> list[Tensor]:
        """As in :class:`Part`."""
        return self._owners + self.state if self._is_complete else super().updated()

    def devices(self) -> list[torch.device]:
        """All devices that parameters lie on, the plan's own first; between :meth:`look` and :meth:`release` only."""
        return list(dict.fromkeys(device_of(local_of(owner)) for owner in self._owners))

    def parts(self) -> list[Part]:
        """The tensors by device, those on the plan's own first; the plan itself where there is one device only."""
        for part, numbers in self._parts:
            part.grads, part.state = [self.grads[i] for i in numbers], self.state
        return [part for part, _ in self._parts] or [self]

    def _find(self, optimizer: FusedOptimizer, params: list[Tensor], facts: Facts) -> tuple[Any, ...] | None:
        """Everything a launch depends on, besides the gradients, in a form that compares fast; sets ``state``."""
        if len(self.entries) != len(params):
            return None
        of_params = list(optimizer.state.values())
        try:
            state = [of_params[place][key] for place, keys in self._keys for key in keys]
            if self._has_shards:
                state = list(map(local_of, state))
            self._state_facts = self._state_facts.again(state)
            addresses = list(map(Tensor.data_ptr, state))
        except (IndexError, KeyError, TypeError, RuntimeError):  # gone, or no dense tensors
            return None
        self.state = state
        options = [(len(group["params"]), optimizer._state_names(group)) for group in optimizer.param_groups]
        places = list(map(id, optimizer.state))
        kept = (optimizer.master_weights, optimizer.rounding)
        return (
            facts.of_each,
            self._state_facts.of_each,
            list(map(Tensor.data_ptr, params)),
            addresses,
            places,
            options,
            kept,
        )

    def _rebuild(self, optimizer: FusedOptimizer) -> None:
        self.entries, self._keys, self._followed = [], [], {}
        numbered = [(n, param) for n, group in enumerate(optimizer.param_groups) for param in group["params"]]
        devices = self.devices()
        self.agreement = Agreement(self._owners, optimizer.process_group, len(devices))
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
            last = self._last_grads[index]
            is_fitting = last is not None and _is_like(last, param)
            if is_fitting:
                dtype, *_, strides = last
            if not is_fitting or (needs_state and not has_state and owner.numel()):
                # The next one, however familiar, is to be checked again, or to make state.
                self._last_grads[index] = None
            share, at_or_none = self.agreement.share(owner), at if has_state else -1
            stream = position | share.shard << 48
            self.entries.append(Entry(param, number, owner, share, dtype, strides, stream, kept, len(keys), at_or_none))
            at += (1 + len(keys)) * has_state
        places = {id(param): place for place, param in enumerate(optimizer.state)}
        self._keys = [(places[id(param)], ("step", *keys)) for param, keys in keys_of]
        self._masters = [i for i, entry in enumerate(self.entries) if entry.kept == MASTER]
        self.generation += 1
        self._parts = [self._part_on(device) for device in devices] if len(devices) > 1 else []

    def _part_on(self, device: torch.device) -> tuple[Part, list[int]]:
        part = Part()
        part.device, part.agreement, part.generation = device, self.agreement, self.generation
        numbers = [i for i, entry in enumerate(self.entries) if device_of(entry.param) == device]
        part.entries = [self.entries[i] for i in numbers]
        return part, numbers

    def _resolve(self) -> None:
        """Carry out lazy conjugations and negations: the kernels read memory as it is."""
        if self._grad_facts.has_lazy:
            self.grads = [None if grad is None else grad.resolve_conj().resolve_neg() for grad in self.grads]


def _is_like(facts: tuple[Any, ...], param: Tensor) -> bool:
    """Whether a gradient of such facts can be the parameter's."""
    dtype, shape, device, *_ = facts
    return bool((shape, device, dtype.is_complex) == (param.shape, param.device, param.is_complex()))


def _versions(entry: Entry) -> tuple[int, int]:
    """What writing to the parameter changes; a DTensor and its local part are not told of each other's."""
    return entry.owner._version, entry.param._version

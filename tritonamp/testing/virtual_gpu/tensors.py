"""Which tensors a kernel may touch: those registered, the arguments of the launch, on request all live ones."""

import gc
import weakref
from collections.abc import Iterable, Iterator

import torch

from .memory import Memory, Region


def region_of(tensor: torch.Tensor, *, keep: bool) -> Region | None:
    """The region of a tensor's whole storage, None for an empty one; ``keep``: hold on to the storage.

    Raises:
        ValueError: the tensor is not in host memory.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"the virtual GPU works on CPU tensors, got one on {tensor.device}")
    s = tensor.untyped_storage()
    if not s.nbytes():
        return None
    return Region(s.data_ptr(), s.nbytes(), f"tensor {tuple(tensor.shape)} {tensor.dtype}", s if keep else None)


def subclasses(kind: type) -> set[type]:
    """A class and all that derive from it."""
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def live_tensors(generation: int | None) -> Iterator[torch.Tensor]:
    """The strided CPU tensors of a generation of the garbage collector, or all; their gradients included."""
    kinds = subclasses(torch.Tensor)
    # Objects refer to their class. Asking for that is faster than looking at all objects.
    objects = gc.get_referrers(*kinds) if generation is None else gc.get_objects(generation)
    for o in [o for o in objects if type(o) in kinds]:
        if o.device.type == "cpu" and o.layout == torch.strided:
            yield o
            if o.is_leaf and o.grad is not None:
                yield o.grad


class Tensors:
    """Keeps the regions of a machine's memory up to date."""

    def __init__(self, memory: Memory, *, auto: bool) -> None:
        self.memory = memory
        self.registered: set[int] = set()  # starts of regions; they stay
        self.arguments: set[int] = set()  # of the launch
        self.found: dict[int, weakref.ref[torch.Tensor]] = {}  # live tensors, by start of the region
        if auto:
            memory.on_miss = self.find

    def register(self, tensor: torch.Tensor) -> None:
        """Make a tensor's storage accessible for good."""
        region = region_of(tensor, keep=True)
        if region:
            self.registered.add(region.lo)
            self.memory.drop(region.lo)
            self.memory.add(region)

    def start(self, arguments: Iterable[torch.Tensor]) -> None:
        """Make the arguments of a launch accessible, those of the last one no longer."""
        for lo in [lo for lo, ref in self.found.items() if not self.is_current(lo, ref())]:
            del self.found[lo]
            self.forget(lo)
        regions = [r for t in arguments if (r := region_of(t, keep=False))]
        now = {r.lo for r in regions if r.lo not in self.registered}
        for lo in self.arguments - now:
            if lo not in self.found:
                self.forget(lo)
        for r in regions:
            known = self.memory.regions.get(r.lo)
            if known is None or known.hi != r.hi:
                self.memory.drop(r.lo)
                self.memory.add(r)
        self.arguments = now

    def forget(self, lo: int) -> None:
        """Drop a region that is not registered."""
        if lo not in self.registered:
            self.memory.drop(lo)

    def is_current(self, lo: int, tensor: torch.Tensor | None) -> bool:
        """Whether a tensor still has the storage that it was found with."""
        known = self.memory.regions.get(lo)
        if tensor is None or known is None:
            return False
        s = tensor.untyped_storage()
        return s.data_ptr() == lo and s.nbytes() == known.hi - lo

    def find(self, address: int) -> None:
        """Make live tensors accessible: the youngest, and if none of them holds the address, all."""
        for generation in (0, 1, None):
            for t in live_tensors(generation):
                try:
                    region = region_of(t, keep=False)
                except RuntimeError:  # a subclass without storage
                    continue
                if region and region.lo not in self.memory.regions:
                    self.memory.add(region)
                    self.found[region.lo] = weakref.ref(t)
            if self.memory.known(address):
                return

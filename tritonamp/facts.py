"""What of a tensor matters to a launch, besides its address, compared for thousands of them in no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .layout import Strides, dense_strides


def _strides(tensor: Tensor) -> Strides:
    return dense_strides(tensor) if tensor.is_conj() or tensor.is_neg() else tensor.stride()


class Facts:
    """Dtype, shape, device, layout, class and strides of some tensors; whether they are lazily conjugated or negated.

    The tensors are not kept.

    Attributes:
        of_each: for each of them a tuple, dtype, shape and device first and the strides last: where a conjugation or
            negation is still to be carried out, those of the result.
        has_empty: whether one has no elements.
        has_lazy: whether one has a conj or neg bit.

    Raises:
        RuntimeError: for a tensor that says nothing of strides, as some sparse ones.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        bits = [*map(Tensor.is_conj, tensors)], [*map(Tensor.is_neg, tensors)]
        self.has_empty, self.has_lazy = 0 in map(Tensor.numel, tensors), any(map(any, bits))
        strides = map(_strides if self.has_lazy else Tensor.stride, tensors)
        named = (map(attrgetter(name), tensors) for name in ("dtype", "shape", "device", "layout"))
        self.of_each = list(zip(*named, map(type, tensors), *bits, strides, strict=True))
        self._number = len(tensors)
        self._are_alike = _guard(tensors)

    def again(self, tensors: Sequence[Tensor]) -> Facts:
        """The facts of other tensors: ``self`` where they are known to be the same, compared by one call to torch."""
        if len(tensors) == self._number and self._are_alike(*tensors):
            return self
        return Facts(tensors)


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """What says of as many other tensors whether they are like these: True is sure, False is not.

    The test that compiled functions make of their arguments. It is not public, so one that is missing, or takes
    other arguments, only means that we always look closer.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., Any] = guards.check
    except (AttributeError, TypeError):
        return lambda *_: False
    return check

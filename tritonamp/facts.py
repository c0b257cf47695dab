"""What of a tensor matters to a launch, besides its address, compared for thousands of them in no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor


class Facts:
    """Dtype, device, size, strides of some tensors, and whether torch has put off a conjugation or negation of them.

    The tensors are not kept.

    Attributes:
        of_each: for each of them a tuple, the dtype first and the strides last.
        has_empty: whether one has no elements.
        are_put_off: whether a conjugation or negation is put off.

    Raises:
        RuntimeError, NotImplementedError: for a tensor without strides, like a sparse one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        numels = list(map(Tensor.numel, tensors))
        put_off = [*map(Tensor.is_conj, tensors)], [*map(Tensor.is_neg, tensors)]
        dtypes, devices = map(attrgetter("dtype"), tensors), map(attrgetter("device"), tensors)
        self.of_each = list(zip(dtypes, devices, numels, *put_off, map(Tensor.stride, tensors), strict=True))
        self.has_empty, self.are_put_off = 0 in numels, any(map(any, put_off))
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

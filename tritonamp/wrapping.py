"""Methods that a wrapper of an optimizer may inherit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from .report import StepReport

S = TypeVar("S", bound="StepReport")
P = ParamSpec("P")
R = TypeVar("R")


def of_itself(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Call a method on the optimizer itself, though a wrapper was asked.

    Lightning's wrapper inherits from the class of the optimizer it wraps, and passes on what it does not have. So a
    method of ours would read the optimizer's attributes but set the wrapper's, and ``step()`` not see what it did.
    """

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self._itself(), *args, **kwargs)  # type: ignore[arg-type]

    return call

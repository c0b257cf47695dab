"""float64 numbers that know how far a lower precision may be off: running error analysis.

The oracle writes each update rule once, in plain operators, and evaluates it on :class:`Bounded` numbers. Their
``value`` is the float64 result. Their ``error`` bounds, to all orders, what the same formula may give when every
operation is rounded to a :class:`Format`, with ``u`` its unit roundoff (2**-24 in float32) and ``s`` its
smallest subnormal:

=============  ==========================================  ==============================================
operation      error carried over                          error of the operation itself
=============  ==========================================  ==============================================
``a + b``      ``ea + eb``                                 ``u * (|a| + |b| + ea + eb)``
``a * b``      ``|a| * eb + |b| * ea + ea * eb``           ``u`` times the largest result, and ``s``
``a / b``      ``(ea + |a / b| * eb) / (|b| - eb)``        ``u`` times the largest result, and ``s``
``sqrt(a)``    the larger of the two one-sided errors      ``2 u`` times the largest result
constant       what it was formed with                     ``u * |a|``
=============  ==========================================  ==============================================

A sum is charged for the sizes of its terms, not of its result: that is the "sum of the absolute values of the
terms added up", and it makes the bound hold for other orders of summation and for fused multiply-adds. A square
root is charged twice: torch's own on CPU is up to one ulp off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Bounded", "Format", "assert_within"]


@dataclass(frozen=True)
class Format:
    """What rounding to a floating-point dtype can do.

    Attributes:
        unit: largest relative error of one rounding, ``eps / 2``.
        smallest: the smallest subnormal, which bounds the error where a result underflows.
        limit: magnitude from which on a value rounds to infinity.
        normal: the smallest normal number.
    """

    unit: float
    smallest: float
    limit: float
    normal: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Format:
        """Return the format of a real floating-point dtype."""
        info = torch.finfo(dtype)
        limit = info.max / (2 - info.eps) * (2 - info.eps / 2)
        return cls(info.eps / 2, info.tiny * info.eps, limit, info.tiny)

    @classmethod
    def of_computation(cls, dtype: torch.dtype) -> Format:
        """Return the format of arithmetic in float32 or float64.

        The float64 values it is compared with are computed in float64 too, hence twice the roundoff there.
        """
        form = cls.of(dtype)
        return cls(2 * form.unit, form.smallest, form.limit, form.normal) if dtype == torch.float64 else form

    def half_ulp(self, magnitude: Tensor) -> Tensor:
        """Return the error of rounding numbers of at most these magnitudes (float64), to nearest."""
        _, exponent = torch.frexp(magnitude.clamp(self.normal, self.limit if self.limit < math.inf else None))
        return torch.ldexp(torch.full_like(magnitude, self.unit), exponent - 1)


class Bounded:
    """A float64 tensor and the elementwise error that computing it in ``form`` may have (see the module's text).

    An element that certainly overflows the format is infinite with error 0; one that may or may not has an
    infinite error.
    """

    def __init__(self, value: Tensor, error: Tensor, form: Format) -> None:
        size = value.abs()
        overflows = size - error >= form.limit
        error = torch.where(size + error >= form.limit, math.inf, error)
        self.value = torch.where(overflows, torch.copysign(torch.full_like(value, math.inf), value), value)
        self.error = torch.where(overflows, 0.0, error)
        self.form = form

    @classmethod
    def exact(cls, value: Tensor, form: Format) -> Bounded:
        """Return numbers that ``form`` holds exactly: what was read from memory."""
        value = value.to(torch.float64)
        return cls(value, torch.zeros_like(value), form)

    @classmethod
    def constant(cls, value: float, form: Format, error: float = 0.0) -> Bounded:
        """Return a number formed with the given error, then rounded to ``form`` once."""
        number = torch.tensor(float(value), dtype=torch.float64)
        underflow = form.smallest if 0 < abs(value) < form.normal else 0.0
        return cls(number, number.abs() * form.unit + underflow + error, form)

    def _result(self, value: Tensor, error: Tensor, *operands: Bounded) -> Bounded:
        certain = torch.stack([operand.error.expand_as(value) for operand in operands]).isfinite().all(dim=0)
        # NaN is infinity less infinity, or zero times infinity: nothing is known there. What is infinite or NaN
        # from operands that are known is so in any precision.
        error = torch.where(value.isfinite(), error.nan_to_num(nan=math.inf, posinf=math.inf), 0.0)
        return Bounded(value, torch.where(certain, error, math.inf), self.form)

    def _rounded(self, value: Tensor, carried: Tensor, *operands: Bounded) -> Bounded:
        """Add the operation's own relative rounding; a result of zero from exact operands is exact."""
        own = self.form.unit * (value.abs() + carried) + self.form.smallest
        exact = (value == 0) & (carried == 0)
        return self._result(value, torch.where(exact, 0.0, carried + own), *operands)

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error, self.form)

    def __add__(self, other: Bounded) -> Bounded:
        carried = self.error + other.error
        own = self.form.unit * (self.value.abs() + other.value.abs() + carried)
        return self._result(self.value + other.value, carried + own, self, other)

    def __sub__(self, other: Bounded) -> Bounded:
        return self + (-other)

    def __mul__(self, other: Bounded) -> Bounded:
        carried = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        product = self._rounded(self.value * other.value, carried, self, other)
        # Infinity times what may be zero: NaN can come of it.
        unknown = self.value.isinf() & other._may_vanish() | other.value.isinf() & self._may_vanish()
        return Bounded(product.value, torch.where(unknown, math.inf, product.error), self.form)

    def _may_vanish(self) -> Tensor:
        """Where a number that is not known exactly may be zero."""
        return (self.error > 0) & (self.value.abs() <= self.error)

    def __truediv__(self, other: Bounded) -> Bounded:
        value = self.value / other.value
        margin = other.value.abs() - other.error
        carried = (self.error + value.abs() * other.error) / margin
        # A divisor that may be zero, or a zero over what may be zero too: anything can come of it.
        unknown = (margin <= 0) & ((other.error > 0) | self._may_vanish())
        quotient = self._rounded(value, torch.where(unknown, math.inf, carried), self, other)
        return Bounded(quotient.value, torch.where(unknown, math.inf, quotient.error), self.form)

    def sqrt(self) -> Bounded:
        """Return the square root; negative numbers give NaN."""
        value = self.value.sqrt()
        below = value - (self.value - self.error).clamp(min=0).sqrt()
        above = (self.value + self.error).sqrt() - value
        carried = torch.maximum(below, above)
        return self._result(value, carried + 2 * self.form.unit * (value + carried), self)

    def maximum(self, other: Bounded) -> Bounded:
        """Return the elementwise maximum; NaN in either goes through."""
        value = torch.maximum(self.value, other.value)
        return self._result(value, torch.maximum(self.error, other.error), self, other)

    def stored(self, dtype: torch.dtype, ulps: float = 0.5) -> Bounded:
        """Return the numbers rounded to ``dtype``, to nearest unless ``ulps`` (of error) says otherwise."""
        form = Format.of(dtype)
        if form.unit < self.form.unit or form == self.form:
            return self
        error = self.error + 2 * ulps * form.half_ulp(self.value.abs() + self.error)
        return Bounded(self.value, torch.where(self.value.isfinite(), error, self.error), form)


def assert_within(actual: Tensor, want: Tensor, error: Tensor, what: str = "tensor") -> None:
    """Check that ``|actual - want| <= error``, element by element.

    Where ``want`` is infinite or NaN, ``actual`` has to be the same. An infinite error lets anything pass.

    Args:
        actual: any real or complex dtype; complex numbers are compared as pairs of reals.
        want: float64, of the shape of ``actual`` (with a last dimension of 2 added for complex numbers).
        error: float64, of the shape of ``want``.
        what: names the tensor in the message.

    Raises:
        AssertionError: naming the worst element, its error and its bound.
    """
    actual = actual.detach().cpu()
    actual = (torch.view_as_real(actual) if actual.is_complex() else actual).to(torch.float64)
    if actual.shape != want.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(want.shape)}")
    same = (actual == want) | (actual.isnan() & want.isnan())
    difference = (actual - want).abs()
    wrong = ~(same | (difference <= error) | (error == math.inf))
    if not wrong.any():
        return
    excess = torch.where(wrong, (difference / error).nan_to_num(nan=math.inf, posinf=math.inf), -1.0)
    worst = int(excess.argmax())
    got, wanted, bound = (float(t.flatten()[worst]) for t in (actual, want, error))
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are out of bounds; worst is element {worst} "
        f"(flat): {got!r}, expected {wanted!r}, off by {abs(got - wanted):.3g} where {bound:.3g} is permitted"
    )

"""Hypothesis strategies for what an optimizer is given: tensors, gradients, hyperparameters, overflows.

An example holds shapes, dtypes, seeds, and a few hard elements with their positions: it is drawn and shrunk quickly,
however many elements its tensors have. Tensors come from it only when they are asked for::

    @given(problems(), hyperparameters("AdamW"), sequences())
    def test_steps_equal_the_oracle(problem, options, steps):
        params = problem.params()
        optimizer = MyAdamW(params, **options)
        for step in steps:
            problem.set_grads(params, step=step)
            expected = expect(optimizer)
            optimizer.step()
            expected.check()

Needs Hypothesis; nothing else of tritonamp does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

__all__ = [
    "GradKind",
    "Hard",
    "Layout",
    "Overflow",
    "Problem",
    "StepSpec",
    "TensorSpec",
    "floats32",
    "hyperparameters",
    "loss_scales",
    "max_norms",
    "overflows",
    "problems",
    "sequences",
    "shapes",
    "step_specs",
    "tensor_specs",
    "values",
]

Layout = Literal["contiguous", "misaligned", "transposed", "sliced", "expanded"]
"""How a tensor lies in memory: in order; in order, one element past an aligned address; with its dimensions in
reverse order; every other element; or (gradients only) one row for all, with stride 0."""

GradKind = Literal["normal", "hard", "zeros", "none"]
"""What a gradient holds: normal numbers of a given magnitude; random bit patterns; zeros; or it is None."""

Hard = tuple[int, float]
"""A value put at a position, taken modulo the number of elements (flat, by logical index)."""

_GRAD_LAYOUTS: tuple[Layout, ...] = ("contiguous", "misaligned", "transposed", "sliced", "expanded")
_GRAD_KINDS: tuple[GradKind, ...] = ("normal", "hard", "zeros", "none")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Width of exponent and mantissa, and how a pattern is read; a bfloat16 is the upper half of a float32.
_FORMATS = {
    torch.float16: (5, 10, "<H", "<e"),
    torch.bfloat16: (8, 7, "<I", "<f"),
    torch.float32: (8, 23, "<I", "<f"),
    torch.float64: (11, 52, "<Q", "<d"),
}
# Around the widths of an access (8), of a block (128, 512) and multiples of it, where chunks may begin.
_SIZES = (1, 2, 3, 7, 8, 9, 0, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025)


def _from_bits(dtype: torch.dtype, sign: bool, exponent: int, mantissa: int) -> float:
    exponent_bits, mantissa_bits, unsigned, real = _FORMATS[dtype]
    bits = (int(sign) << exponent_bits | exponent) << mantissa_bits | mantissa
    if dtype == torch.bfloat16:
        bits <<= 16
    return float(struct.unpack(real, struct.pack(unsigned, bits))[0])


def values(dtype: torch.dtype = torch.float32, *, nonfinite: bool = False) -> SearchStrategy[float]:
    """Numbers that ``dtype`` holds exactly: any bit pattern, and often the remarkable ones.

    Zeros of both signs, 1, powers of two, the borders of the subnormal, normal and finite range.

    Args:
        dtype: float16, bfloat16, float32 or float64.
        nonfinite: whether infinities and NaN are among them.
    """
    exponent_bits, mantissa_bits, *_ = _FORMATS[dtype]
    info = torch.finfo(dtype)
    subnormal = info.tiny * info.eps
    remarkable = [0.0, 1.0, -1.0, -0.0, 2.0, 0.5, 1 + info.eps, info.tiny, info.tiny - subnormal, subnormal, info.max]
    remarkable += [-subnormal, -info.max]
    last = 2**exponent_bits - 2
    bits = st.tuples(st.booleans(), st.integers(0, last), st.integers(0, 2**mantissa_bits - 1))
    powers = st.tuples(st.booleans(), st.integers(1, last), st.just(0))
    drawn = st.sampled_from(remarkable) | st.one_of(powers, bits).map(lambda parts: _from_bits(dtype, *parts))
    return drawn | _nonfinite() if nonfinite else drawn


def floats32(*, nonfinite: bool = False) -> SearchStrategy[float]:
    """float32 numbers, as :func:`values`."""
    return values(torch.float32, nonfinite=nonfinite)


def _nonfinite() -> SearchStrategy[float]:
    return st.sampled_from([math.inf, -math.inf, math.nan])


@dataclass(frozen=True)
class Overflow:
    """An infinity or NaN in one element of one gradient.

    Attributes:
        tensor: which gradient: the ``tensor``-th, in turn, of those that have elements.
        position: which element, modulo their number.
        value: inf, -inf or NaN.
    """

    tensor: int
    position: int
    value: float


@dataclass(frozen=True)
class StepSpec:
    """What is particular to one step of a sequence.

    Attributes:
        seed: of the gradients' values, together with each tensor's own.
        missing: the tensors whose gradient is None in this step; others than there are do not matter.
        overflow: the one non-finite element, if any.
    """

    seed: int = 0
    missing: frozenset[int] = frozenset()
    overflow: Overflow | None = None


@dataclass(frozen=True)
class TensorSpec:
    """One parameter and its gradients.

    Attributes:
        shape: of both.
        dtype, grad_dtype: float16, bfloat16, float32 or float64.
        layout, grad_layout: see :data:`Layout`.
        grad: see :data:`GradKind`.
        exponent: the magnitude of normal gradients is two to this power.
        seed: of all values.
        hard: elements put into the parameter.
        grad_hard: elements put into each gradient; finite.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    layout: Layout = "contiguous"
    grad_layout: Layout = "contiguous"
    grad: GradKind = "normal"
    exponent: int = 0
    seed: int = 0
    hard: tuple[Hard, ...] = ()
    grad_hard: tuple[Hard, ...] = ()

    def param(self, device: torch.types.Device = None) -> Tensor:
        """Return the parameter: a leaf that requires a gradient, of ``grad_dtype``."""
        numbers = _place(_normal(self.shape, self.seed), self.hard)
        param = _laid_out(numbers, self.dtype, self.layout, device).requires_grad_()
        if self.grad_dtype != self.dtype:
            param.grad_dtype = self.grad_dtype
        return param

    def gradient(
        self, scale: float = 1.0, seed: int = 0, bad: tuple[Hard, ...] = (), device: torch.types.Device = None
    ) -> Tensor | None:
        """Return a gradient, as a loss scaled by ``scale`` would leave it, or None.

        Values beyond the range of ``grad_dtype`` are replaced by the largest finite one: only ``bad`` overflows.

        Args:
            scale: what the true gradient is multiplied by.
            seed: of this gradient, together with the tensor's own.
            bad: non-finite elements to put in.
            device: of the gradient.
        """
        if self.grad == "none":
            return None
        is_expanded = self.grad_layout == "expanded" and len(self.shape) > 0 and self.shape[0] > 1
        shape = (1, *self.shape[1:]) if is_expanded else self.shape
        mixed = self.seed * 1_000_003 + seed + 1
        if self.grad == "zeros":
            numbers = torch.zeros(shape, dtype=torch.float64, device="cpu")
        elif self.grad == "hard":
            numbers = _bit_patterns(shape, self.grad_dtype, mixed)
        else:
            numbers = _normal(shape, mixed) * 2.0**self.exponent
        limit = min(torch.finfo(self.grad_dtype).max, 2.0**400)  # of float64 gradients, squares are in range below that
        numbers = (_place(numbers, self.grad_hard) * scale).clamp(-limit, limit)
        grad = _laid_out(_place(numbers, bad), self.grad_dtype, self.grad_layout, device)
        return grad.expand(self.shape) if is_expanded else grad


@dataclass(frozen=True)
class Problem:
    """The parameters of an optimizer, and the gradients of its steps."""

    tensors: tuple[TensorSpec, ...]

    def params(self, device: torch.types.Device = None) -> list[Tensor]:
        """Return new parameters, the same ones at each call."""
        return [tensor.param(device) for tensor in self.tensors]

    def set_grads(self, params: Sequence[Tensor], scale: float = 1.0, step: StepSpec | None = None) -> None:
        """Set the gradients of one step.

        Args:
            params: what :meth:`params` has returned.
            scale: what the loss was multiplied by; see :meth:`TensorSpec.gradient`.
            step: the step; by default one with seed 0 in which nothing is missing and nothing overflows.
        """
        step = step or StepSpec()
        present = [i for i in range(len(self.tensors)) if self._has_elements(i, step)]
        bad = step.overflow
        at = present[bad.tensor % len(present)] if bad is not None and present else None
        for i, (param, tensor) in enumerate(zip(params, self.tensors, strict=True)):
            elements = ((bad.position, bad.value),) if bad is not None and i == at else ()
            is_missing = i in step.missing
            param.grad = None if is_missing else tensor.gradient(scale, step.seed, elements, param.device)

    def has_elements(self, step: StepSpec | None = None) -> bool:
        """Whether there is any element of a gradient in this step: only then can it overflow, or do anything."""
        return any(self._has_elements(i, step or StepSpec()) for i in range(len(self.tensors)))

    def _has_elements(self, i: int, step: StepSpec) -> bool:
        return i not in step.missing and self.tensors[i].grad != "none" and math.prod(self.tensors[i].shape) > 0


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=_generator(seed), dtype=torch.float64, device="cpu")


def _bit_patterns(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bit patterns of ``dtype`` as float64, those of infinities and NaN replaced by the largest number."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.iinfo(integer)
    bits = torch.randint(info.min, info.max, shape, generator=_generator(seed), dtype=integer, device="cpu")
    numbers = bits.view(dtype).double()
    return torch.where(numbers.isfinite(), numbers, torch.finfo(dtype).max)


def _place(numbers: Tensor, hard: Sequence[Hard]) -> Tensor:
    for position, value in hard:
        if numbers.numel() > 0:
            numbers.view(-1)[position % numbers.numel()] = value
    return numbers


def _laid_out(numbers: Tensor, dtype: torch.dtype, layout: Layout, device: torch.types.Device) -> Tensor:
    """Return the numbers (contiguous) in a new tensor of the dtype and layout."""
    shape, n = numbers.shape, numbers.numel()
    if layout == "misaligned":
        result = torch.zeros(n + 2, dtype=dtype, device=device)[1 : n + 1].view(shape)
    elif layout == "transposed":
        backwards = tuple(reversed(range(len(shape))))
        result = torch.zeros(tuple(reversed(shape)), dtype=dtype, device=device).permute(backwards)
    elif layout == "sliced":
        result = torch.zeros((*shape, 2), dtype=dtype, device=device)[..., 1]
    else:
        result = torch.zeros(shape, dtype=dtype, device=device)
    return result.copy_(numbers)


def shapes(max_elements: int = 1025) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of none to four dimensions: 0-dim, empty, and with sizes around those that code treats differently."""
    sizes = st.sampled_from([n for n in _SIZES if n <= max_elements])
    small = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple)
    wide = st.tuples(st.integers(1, 4), sizes)
    tall = st.tuples(sizes, st.integers(0, 4))
    drawn = st.one_of(sizes.map(lambda n: (n,)), st.just(()), small, wide, tall)
    return drawn.filter(lambda shape: math.prod(shape) <= max_elements)


@st.composite
def tensor_specs(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    grad_dtypes: Sequence[torch.dtype] | None = _DTYPES,
    layouts: bool | Sequence[Layout] = True,
    grads: Sequence[GradKind] = _GRAD_KINDS,
    exponents: tuple[int, int] = (-30, 10),
    max_elements: int = 1025,
    max_hard: int = 3,
) -> TensorSpec:
    """One parameter and its gradients.

    Args:
        draw: given by Hypothesis.
        dtypes: the parameter may have. A float64 one has float64 gradients.
        grad_dtypes: the gradient may have; None: the parameter's.
        layouts: those that are drawn; True: all, False: the contiguous one.
        grads: kinds of gradients.
        exponents: least and largest exponent of normal gradients.
        max_elements: of the tensor.
        max_hard: number of hard elements in the parameter, and in its gradient.
    """
    dtype = draw(st.sampled_from(list(dtypes)))
    is_own = grad_dtypes is None or dtype == torch.float64
    grad_dtype = dtype if is_own or grad_dtypes is None else draw(st.sampled_from(list(grad_dtypes)))
    kind = draw(st.sampled_from(list(grads)))
    allowed = (_GRAD_LAYOUTS if layouts else ("contiguous",)) if isinstance(layouts, bool) else tuple(layouts)
    positions = st.integers(0, 2 * max_elements)

    def hard(of: torch.dtype) -> tuple[Hard, ...]:
        return tuple(draw(st.lists(st.tuples(positions, values(of)), max_size=max_hard)))

    return TensorSpec(
        shape=draw(shapes(max_elements)),
        dtype=dtype,
        grad_dtype=grad_dtype,
        layout=draw(st.sampled_from([layout for layout in allowed if layout != "expanded"])),
        grad_layout=draw(st.sampled_from(allowed)),
        grad=kind,
        exponent=draw(st.integers(*exponents)) if kind == "normal" else 0,
        seed=draw(st.integers(0, 2**16)),
        hard=hard(dtype),
        grad_hard=hard(grad_dtype) if kind in ("normal", "hard") else (),
    )


def problems(
    *, max_tensors: int = 6, max_total: int = 4096, min_tensors: int = 1, **options: Any
) -> SearchStrategy[Problem]:
    """Optimization problems of a few tensors.

    Args:
        max_tensors: how many there are at most.
        max_total: how many elements they have together, at most; further tensors are left out.
        min_tensors: how many are drawn at least.
        options: of :func:`tensor_specs`.
    """

    def limited(tensors: list[TensorSpec]) -> Problem:
        kept: list[TensorSpec] = []
        total = 0
        for tensor in tensors:
            total += math.prod(tensor.shape)
            if total <= max_total:
                kept.append(tensor)
        return Problem(tuple(kept))

    options.setdefault("max_elements", min(1025, max_total))
    return st.lists(tensor_specs(**options), min_size=min_tensors, max_size=max_tensors).map(limited)


def max_norms() -> SearchStrategy[float | None]:
    """Values of ``max_norm``: none, 0, tiny, ordinary, large, infinite."""
    return st.sampled_from([None, 1.0, 0.0, 1e-3, 1e4, math.inf])


def hyperparameters(
    optimizer: str, *, extreme: bool = True, with_max_norm: bool = False
) -> SearchStrategy[dict[str, Any]]:
    """Keyword arguments for an optimizer's constructor, those of ``torch.optim``.

    Args:
        optimizer: ``"SGD"``, ``"Adam"`` or ``"AdamW"``.
        extreme: whether values at the ends of their ranges are drawn: lr 0, betas 0 and 0.9999, eps 0 and 1.
        with_max_norm: whether there is a ``max_norm``, too.

    Raises:
        ValueError: for another optimizer.
    """

    def one_of(ordinary: Sequence[Any], ends: Sequence[Any]) -> SearchStrategy[Any]:
        return st.sampled_from([*ordinary, *ends] if extreme else [*ordinary])

    options = {
        "lr": one_of([0.1, 1e-3], [0.0, 1.0, 1e-20]),
        "weight_decay": one_of([0.0, 0.1], [1.0, 1e-10]),
        "maximize": st.booleans(),
    }
    if with_max_norm:
        options["max_norm"] = max_norms() if extreme else st.sampled_from([None, 1.0, 1e4])
    if optimizer == "SGD":
        options["momentum"] = one_of([0.0, 0.9, 0.5], [0.9999, 1.0])
        options["dampening"] = one_of([0.0, 0.5], [1.0])
        options["nesterov"] = st.booleans()
        return st.fixed_dictionaries(options).map(_valid_nesterov)
    if optimizer not in ("Adam", "AdamW"):
        raise ValueError(f"optimizer must be 'SGD', 'Adam' or 'AdamW', got {optimizer!r}")
    options["betas"] = st.tuples(one_of([0.9, 0.5], [0.0, 0.9999]), one_of([0.999, 0.6], [0.0, 0.9999]))
    options["eps"] = one_of([1e-8, 1e-3], [0.0, 1.0])
    options["amsgrad"] = st.booleans()
    return st.fixed_dictionaries(options)


def _valid_nesterov(options: Mapping[str, Any]) -> dict[str, Any]:
    """Nesterov momentum needs a momentum and no dampening."""
    is_valid = options["momentum"] > 0 and options["dampening"] == 0
    return {**options, "nesterov": options["nesterov"] and is_valid}


def loss_scales(*, bounds: bool = True) -> SearchStrategy[dict[str, Any]]:
    """Settings of a dynamic loss scale, keyword arguments for ``LossScale`` or (without bounds) ``GradScaler``.

    Args:
        bounds: whether ``min_scale``, ``max_scale`` and ``hysteresis`` are drawn: torch has none of them.
    """
    exponents = st.integers(-20, 30)
    settings = {
        "init_scale": exponents.map(lambda k: 2.0**k) | st.sampled_from([65536.0, 1.0, 3.0, 0.1]),
        "growth_factor": st.sampled_from([2.0, 1.1, 16.0]),
        "backoff_factor": st.sampled_from([0.5, 0.9, 2.0**-10]),
        "growth_interval": st.integers(1, 4),
    }
    if bounds:
        # Factors that the bounds are away from the scale.
        settings["min_scale"] = st.sampled_from([2.0**-100, 2.0**-3, 1.0])
        settings["max_scale"] = st.sampled_from([2.0**80, 8.0, 1.0])
        settings["hysteresis"] = st.integers(1, 3)
    return st.fixed_dictionaries(settings).map(_with_bounds)


def _with_bounds(settings: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(settings)
    for bound in ("min_scale", "max_scale"):
        if bound in result:
            scale = torch.tensor(result["init_scale"], dtype=torch.float32).item()
            result[bound] = min(max(scale * result[bound], 2.0**-126), 2.0**127)
    return result


def overflows() -> SearchStrategy[Overflow]:
    """One inf, -inf or NaN, anywhere."""
    positions = st.integers(0, 2048) | st.just(-1)
    return st.builds(Overflow, tensor=st.integers(0, 5), position=positions, value=_nonfinite())


def step_specs(*, overflow: bool | None = None, missing: bool = True, max_tensors: int = 6) -> SearchStrategy[StepSpec]:
    """One step.

    Args:
        overflow: whether it overflows; None: either.
        missing: whether gradients may be None.
        max_tensors: how many tensors there may be.
    """
    overflow_of_step: SearchStrategy[Overflow | None] = st.none() | overflows()
    if overflow is not None:
        overflow_of_step = overflows() if overflow else st.none()
    numbers = st.frozensets(st.integers(0, max_tensors - 1), max_size=max_tensors if missing else 0)
    return st.builds(StepSpec, seed=st.integers(0, 2**16), missing=numbers, overflow=overflow_of_step)


def sequences(*, min_steps: int = 1, max_steps: int = 5, **options: Any) -> SearchStrategy[list[StepSpec]]:
    """Several steps, one after the other; ``options`` are those of :func:`step_specs`."""
    return st.lists(step_specs(**options), min_size=min_steps, max_size=max_steps)

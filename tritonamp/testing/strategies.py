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

Needs Hypothesis, as does :mod:`tritonamp.testing.check`; nothing else of tritonamp does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tritonamp.testing.problems import GradKind, Hard, Layout, Overflow, Problem, StepSpec, TensorSpec

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

_GRAD_LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_GRAD_KINDS: tuple[GradKind, ...] = get_args(GradKind)
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

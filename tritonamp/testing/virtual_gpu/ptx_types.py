"""PTX types as NumPy ones: ``f32``, ``s64``, ``pred``, and packed ones such as ``f16x2``.

bfloat16 values are kept as their bits, in uint16.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SCALARS: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    "f16": np.float16,
    "bf16": np.uint16,
    "f32": np.float32,
    "f64": np.float64,
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
}
SCALARS |= {
    f"{kind}{np.dtype(d).itemsize * 8}": d for kind in "bu" for d in (np.uint8, np.uint16, np.uint32, np.uint64)
}
REGISTER_BITS = {name: 1 if d is np.bool_ else np.dtype(d).itemsize * 8 for name, d in SCALARS.items()}
REGISTER_BITS |= {"f16x2": 32, "bf16x2": 32}


@cache
def dtype(t: str) -> tuple[type[np.generic], int]:
    """NumPy type of one lane of ``t``, and the number of lanes (1 unless packed)."""
    base, _, lanes = t.partition("x")
    return SCALARS[base], int(lanes or 1)


@cache
def size(t: str) -> int:
    """Bytes of a value of type ``t``."""
    d, lanes = dtype(t)
    return np.dtype(d).itemsize * lanes


def is_type(word: str) -> bool:
    """Whether a part of an opcode names a type."""
    return word.partition("x")[0] in SCALARS


def is_float(t: str) -> bool:
    """Whether ``t`` is a floating-point type."""
    return "f" in t


def view(row: Array, t: str) -> Array:
    """A register's storage (``uintN[n]``) seen as type ``t``: ``[n]``, or ``[n, lanes]`` if packed.

    A narrower type sees the low bits.
    """
    d, lanes = dtype(t)
    if d is np.bool_:
        return row
    seen, per_row = row.view(d), row.itemsize // np.dtype(d).itemsize
    if lanes > 1:
        return seen.reshape(len(row), per_row)
    return seen[::per_row] if per_row > 1 else seen


def immediate(text: str, t: str) -> Any:
    """The value of a literal as type ``t``: a scalar, or ``[lanes]``. Integers and 0f/0d literals give its bits."""
    d, lanes = dtype(t)
    if d is np.bool_:
        return np.bool_(int(text, 0))
    text = text.rstrip("U")
    if text[:2].lower() in ("0f", "0d"):
        bits, n_bytes = int(text[2:], 16), len(text) // 2 - 1  # noqa: FURB166 (0f and 0d are no Python literals)
    elif "." in text:
        return np.dtype(d).type(float(text))
    else:
        bits, n_bytes = int(text, 0), size(t)
    n_bytes = max(n_bytes, size(t))
    values = np.frombuffer((bits % (1 << 8 * n_bytes)).to_bytes(n_bytes, "little"), d)[:lanes]
    return values if lanes > 1 else values[0]

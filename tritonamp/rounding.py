"""Stochastic rounding of float32 to bfloat16, in torch operations: the numbers of ``kernels/rounding.py``."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
_MASK = 0xFFFFFFFF


def philox(key: int, counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Philox 4x32 (Salmon, Moraes, Dror, Shaw, SC 2011), on int64 tensors that hold 32 bits each.

    Args:
        key: 64 bits.
        counter: four tensors of one shape.
        rounds: how often they are mixed.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, key >> 32 & _MASK
    for _ in range(rounds):
        # A product of 64 bits wraps around in int64, with the right bits: the shifted sign is masked away.
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32 & _MASK) ^ c1 ^ k0, b & _MASK, (a >> 32 & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def noise(seed: int, place: int, step: int, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """The random bits of one parameter's step, in the order in which its state lies in memory.

    Args:
        seed: of the group, ``rounding_seed``.
        place: the parameter's place in the optimizer, and its shard from bit 48 on.
        step: its count of applied steps, this one included.
        numel: how many elements it has.
        device: where the result is wanted.

    Returns:
        ``[numel]`` int64, of which the lower 32 bits are random and the others zero.
    """
    block = torch.arange(-(-numel // 4), dtype=torch.int64, device=device)
    same = torch.zeros_like(block)
    words = philox(seed, (block & _MASK, (block >> 32) + (place >> 32), same + step, same + (place & _MASK)))
    return torch.stack(words, dim=1).view(-1)[:numel]


def round_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """float32 to bfloat16: down in magnitude, or up where the lower 16 of the random bits carry over.

    ``random`` is of ``x``'s shape. The mean over the bits is ``x``. Infinity and NaN stay what they are; what exceeds
    bfloat16's largest number may become infinite, as when it is rounded to nearest.
    """
    bits = x.view(torch.int32).to(torch.int64) & _MASK
    carried = (bits + (random & 0xFFFF)) >> 16 << 16
    signed = torch.where(carried > 0x7FFFFFFF, carried - (1 << 32), carried).to(torch.int32)
    return torch.where(x.isfinite(), signed.view(torch.float32), x).to(torch.bfloat16)

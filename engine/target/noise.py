"""The noise of sample and match (`engine.acceptance`) in torch: the twin of `kernels.gumbel` for choosing on a device.

A pure function of (seed, position, token), counted in 64-bit integers that wrap around; torch has signed ones only, in which
products and sums have the same bits as in unsigned ones, and a right shift needs its sign bits masked away.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def gumbel(seed: int | torch.Tensor, position: int | torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, in the shape of `tokens` (int64, any shape) broadcast with `position` (an int, or int64).

    `seed` is unsigned, 64 bits; as a tensor, shaped like the positions, int64 of the same bits. The random bits are those of
    the numba kernel; the two logarithms may round differently in their last place. To give every row of [n, V] scores its own
    position, pass positions as [n, 1] and tokens as [V].
    """
    bits = noise_bits(seed, position, tokens)
    return -torch.log(-torch.log((bits.to(torch.float64) + 0.5) * 2.0**-52))


def noise_bits(seed: int | torch.Tensor, position: int | torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The 52 random bits behind `gumbel`, int64, same shapes."""
    positions = torch.as_tensor(position, dtype=torch.int64, device=tokens.device)
    if isinstance(seed, int):
        seed = torch.tensor(_signed(seed), dtype=torch.int64, device=tokens.device)
    start = _mix(seed + _signed(_GOLDEN))
    key = _mix(start + positions * _signed(_GOLDEN))
    return _shift(_mix(key + (tokens + 1) * _signed(_GOLDEN)), 12)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The output function of SplitMix64."""
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, count: int) -> torch.Tensor:
    """z >> count, filled with zeros."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """The signed integer with the same 64 bits as `word`, modulo 2^64."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word

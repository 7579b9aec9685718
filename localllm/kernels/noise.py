"""Noise that is a hash of (seed, position, token), not of a stream of random numbers: no draw needs a state, and each
can be made anywhere, and again."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment and multipliers
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _splitmix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK64
    return value ^ (value >> 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def noise_key(seed: int, position: int) -> int:
    """Return the key, 64 bits, signed, with which the noise of every token at a position begins."""
    return _signed(_splitmix(_splitmix(seed & _MASK64) ^ (position & _MASK64)))


def gumbel_noise(key: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, fp64, one value for each of token_ids (int64, any shape): splitmix64 over the counters."""
    x = token_ids * _signed(_GOLDEN) + key
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX2)
    x = x ^ _shift_right(x, 31)
    uniform = (_shift_right(x, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))

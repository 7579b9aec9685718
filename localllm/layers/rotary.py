"""Rotary position embedding (arXiv:2104.09864) and the ways in which checkpoints stretch it.

The numbers follow Hugging Face's `modeling_rope_utils`, so that logits agree with those of the checkpoint's makers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.layers.config import QueryGrowth, RopeConfig
from localllm.layers.segment import Segment


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, length: int) -> Tensor:
    """Radians a position, fp32 [rotary_dim / 2]. `length`: tokens in the sequence, for dynamic and longrope."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    original = rope.original_max_position_embeddings or 0
    match rope.kind:
        case "linear":
            return 1.0 / rope.theta**exponent / rope.factor
        case "dynamic":  # NTK-aware: the base grows with the sequence once it passes the trained length
            stretch = rope.factor * max(length, original) / original - (rope.factor - 1)
            base = float(rope.theta * stretch ** (rotary_dim / (rotary_dim - 2)))
            return 1.0 / base**exponent
        case "llama3":
            return _llama3(rope, 1.0 / rope.theta**exponent)
        case "yarn":
            return _yarn(rope, rotary_dim, rope.theta**exponent)
        case "longrope":
            factors = rope.long_factor if length > original else rope.short_factor
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponent)
        case "proportional":  # the others keep their place among the frequencies, and do not turn
            turning = torch.arange(len(exponent)) < int(rope.share * rotary_dim / 2)
            return torch.where(turning, 1.0 / rope.theta**exponent / rope.factor, 0.0)
        case _:
            return 1.0 / rope.theta**exponent


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    original = rope.original_max_position_embeddings or 0
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > original / rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(wavelength < original / rope.high_freq_factor, plain, stretched)


def _yarn(rope: RopeConfig, rotary_dim: int, periods: Tensor) -> Tensor:
    """arXiv:2309.00071: a ramp over the dimensions from extrapolation to interpolation."""
    original = rope.original_max_position_embeddings or 0

    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * periods)) * ramp + (1.0 / periods) * (1 - ramp)


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor of cosine and sine by which attention keeps its temperature over a stretched context."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings or 1))
    if rope.kind == "yarn":
        stretch = math.log(rope.factor)
        if rope.mscale and rope.mscale_all_dim:
            return (0.1 * rope.mscale * stretch + 1.0) / (0.1 * rope.mscale_all_dim * stretch + 1.0)
        return 0.1 * stretch + 1.0
    return 1.0


def query_growth(growth: QueryGrowth, positions: Tensor) -> Tensor:
    """positions [T] -> what the queries there are multiplied by, fp32 [T]."""
    return 1.0 + growth.beta * torch.log1p(torch.floor(positions / growth.length))


class Rotary:
    """Cosine and sine of one RopeConfig for the tokens of a batch; computed once a forward, not once a layer."""

    def __init__(self, rope: RopeConfig, rotary_dim: int, device: torch.device) -> None:
        self.rope = rope
        self.rotary_dim = rotary_dim
        self.scale = attention_factor(rope)
        self.signed_scale = torch.tensor([-self.scale, self.scale], device=device).repeat_interleave(rotary_dim // 2)
        self.depends_on_length = rope.kind in ("dynamic", "longrope")
        self._inv_freq = self._of_length(0).to(device)

    def __call__(self, positions: Tensor, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin, each fp32 [T, 1, rotary_dim]; sin has the sign of the half that it turns into."""
        both_halves = self.frequencies(segments).to(positions.device).repeat(1, 2)
        angles = (positions[:, None].float() * both_halves).unsqueeze(1)
        return angles.cos() * self.scale, angles.sin() * self.signed_scale.to(positions.device)

    def frequencies(self, segments: Sequence[Segment]) -> Tensor:
        """Radians a position, fp32 [1 or T, rotary_dim / 2]."""
        if not self.depends_on_length:
            return self._inv_freq
        rows = [self._of_length(segment.rope_length).expand(segment.end - segment.begin, -1) for segment in segments]
        return torch.cat(rows)

    def _of_length(self, length: int) -> Tensor:
        return inverse_frequencies(self.rope, self.rotary_dim, length).unsqueeze(0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading features of each head: x [T, heads, D]; cos, sin fp32 [T, 1, rotary_dim] from a Rotary."""
    rotary_dim = cos.shape[-1]
    turning, half = x[..., :rotary_dim], rotary_dim // 2
    swapped = torch.cat((turning[..., half:], turning[..., :half]), dim=-1)
    rotated = torch.addcmul(turning * cos, swapped.float(), sin).to(x.dtype)
    return rotated if x.shape[-1] == rotary_dim else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)

"""The meaning of a KV page's bytes: 64 tokens of one attention block, head by head, in a coding of keys and of values.

A head's part is keys [D, 64], their scales [D / 32, 64], values [64, D], their scales [D / 32, 64]: a vector of a key
row is one feature of 16 tokens, one of a value row 16 features of a token, so that neither needs a sum over its lanes.
The latents of multi-head latent attention lie token by token, once: see `LatentLayout`.
Dense codings have no scales; coded ones are rotated in groups of 32 features before they are rounded (QuaRot,
arXiv:2404.00456), and stay so: queries are rotated once, outputs once back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from localllm.kernels.sizes import GROUP as GROUP
from localllm.kernels.sizes import LATENT_SCALES, coding_bytes
from localllm.kernels.sizes import PAGE_TOKENS as PAGE_TOKENS
from localllm.kernels.sizes import Coding as Coding
from localllm.kernels.sizes import KVShape as KVShape

INT4_ZERO = 7.5  # 16 levels lie symmetrically around zero, none on it: 12 % less error than 15 with one
# A scale is a byte: five bits of exponent, three of mantissa, rounded up. 16 bits would be 6 % of an INT4 page, and
# the steps, 6 % finer on average, lose more at the groups' largest values than they win elsewhere.
SCALE_SHIFT = 20  # from there to the bits of a float
SCALE_BIAS = (127 - 19) << 23
SCALE_LOW, SCALE_HIGH = 2.0**-19, 1.75 * 2.0**12
# The last byte stands for a group that has a NaN or an infinity: who reads it computes none either, and the engine says
# so, where a number in its place would become a wrong answer.
NOT_FINITE = 255


@dataclass(frozen=True)
class PageLayout:
    """One layer's part of a page. dtype: of dense keys and values."""

    num_kv_heads: int
    head_dim: int
    keys: Coding
    values: Coding
    dtype: torch.dtype

    def __post_init__(self) -> None:
        assert self.is_dense or self.head_dim % GROUP == 0, "such a head keeps dense pages"

    @property
    def is_dense(self) -> bool:
        return self.keys == "dense"

    @property
    def groups(self) -> int:
        return self.head_dim // GROUP

    @property
    def value_dim(self) -> int:
        """Features of a value."""
        return self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of a head's keys, their scales, its values and theirs."""
        keys, values = (coding_bytes(coding, self.head_dim, self.dtype.itemsize) for coding in (self.keys, self.values))
        return *keys, *values

    @property
    def head_bytes(self) -> int:
        return sum(self.sizes)

    @cached_property
    def layer_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    def parts(self, pages: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """pages uint8 [..., layer_bytes] -> views: keys [..., KH, rows, 64], scales, values [..., KH, 64, columns],
        scales [..., KH, D / 32, 64]. Two INT4 codes of one token share a byte; the high one is 16 features further on.
        """
        heads = pages.view(*pages.shape[:-1], self.num_kv_heads, self.head_bytes)
        keys, key_scales, values, value_scales = torch.split(heads, list(self.sizes), dim=-1)
        return (
            _shaped(self._typed(keys, self.keys), -1, PAGE_TOKENS),
            _shaped(key_scales, self.groups, PAGE_TOKENS) if key_scales.shape[-1] else key_scales,
            _shaped(self._typed(values, self.values), PAGE_TOKENS, -1),
            _shaped(value_scales, self.groups, PAGE_TOKENS) if value_scales.shape[-1] else value_scales,
        )

    def _typed(self, codes: Tensor, coding: Coding) -> Tensor:
        return codes.view({"dense": self.dtype, "int8": torch.int8, "int4": torch.uint8}[coding])


@dataclass(frozen=True)
class LatentLayout(PageLayout):
    """One layer's part of a page of latents (arXiv:2405.04434): keys [64, D], whose first `latent_dim` features are the
    values too. In a coded page, four bytes of a token lie beside four of the next one, [bytes / 4, 64, 4], as dot
    products of bytes take them; behind them are scales [2, 64], of the latent and of the features behind it.
    One head, which all heads of queries share. Layouts come in pairs: `own`, of the page of a token's own position and
    of a sequence's first page, and `coded`, of all others. Where there is no coded one, `own` is dense, else INT8."""

    latent_dim: int

    def __post_init__(self) -> None:
        assert self.values == self.keys, "keys are the values too"
        is_whole = all(features % GROUP == 0 for features in self.runs)
        assert self.is_dense or is_whole, "such a latent keeps dense pages: see KVShape.can_be_coded"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        codes, _ = coding_bytes(self.keys, self.head_dim, self.dtype.itemsize)
        return codes, 0 if self.is_dense else LATENT_SCALES * PAGE_TOKENS, 0, 0

    @property
    def value_dim(self) -> int:
        return self.latent_dim

    @property
    def runs(self) -> tuple[int, int]:
        """Features that share a scale."""
        return self.latent_dim, self.head_dim - self.latent_dim

    def parts(self, pages: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """pages uint8 [..., layer_bytes] -> views: keys [..., 1, 64, D], or codes [..., 1, 64, bytes / 4, 4] and scales
        [..., 1, 2, 64], and nothing."""
        heads = pages.view(*pages.shape[:-1], 1, self.head_bytes)
        keys, scales, values, value_scales = torch.split(heads, list(self.sizes), dim=-1)
        if self.is_dense:
            return _shaped(self._typed(keys, self.keys), PAGE_TOKENS, -1), scales, values, value_scales
        codes = self._typed(keys, self.keys).view(*keys.shape[:-1], -1, PAGE_TOKENS, 4).transpose(-3, -2)
        return codes, _shaped(scales, LATENT_SCALES, PAGE_TOKENS), values, value_scales


def layout_of(shape: KVShape, keys: Coding, values: Coding, dtype: torch.dtype) -> PageLayout:
    """Return the layout of a layer's part of a page. dtype: of dense keys and values. Of latents, the coding of keys
    counts alone."""
    if shape.latent_dim:
        return LatentLayout(shape.num_heads, shape.head_dim, keys, keys, dtype, shape.latent_dim)
    return PageLayout(shape.num_heads, shape.head_dim, keys, values, dtype)


def pages_of(num_tokens: int) -> int:
    """Return how many pages so many tokens need."""
    return -(-num_tokens // PAGE_TOKENS)


def _shaped(x: Tensor, rows: int, columns: int) -> Tensor:
    """The last dimension as two."""
    return x.view(*x.shape[:-1], rows, columns)


def _grouped(x: Tensor, size: int = GROUP) -> Tensor:
    """The last dimension in runs of `size`."""
    return x.reshape(*x.shape[:-1], -1, size)


@cache
def _hadamard(device: torch.device, size: int) -> Tensor:
    matrix: Tensor = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    scaled: Tensor = matrix * size**-0.5
    return scaled.to(device)


def rotated(x: Tensor, size: int = GROUP) -> Tensor:
    """fp32 [..., D], each group of 32 features times an orthonormal Hadamard matrix; twice is the identity. size: of a
    group, a power of two."""
    return torch.flatten(_grouped(x.float(), size) @ _hadamard(x.device, size), -2)


def _scales(codes: Tensor) -> Tensor:
    scales = ((codes.int() << SCALE_SHIFT) + SCALE_BIAS).view(torch.float32)
    return torch.where(codes == NOT_FINITE, torch.nan, scales)


def quantize(x: Tensor, coding: Coding, runs: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """x fp32 [..., D], rotated already. Returns codes, int8 [..., D] or uint8 [..., D / 2], and their scales, uint8
    [..., D / 32], or one for each run. runs: features that share a scale, where those are not groups of 32."""
    grouped = _grouped(x)
    levels = 127 if coding == "int8" else 8
    wanted = grouped.abs().amax(-1) / levels
    if runs:
        wanted = torch.stack([part.amax(-1) for part in torch.split(wanted, _groups(runs), dim=-1)], dim=-1)
    bits = wanted.float().clamp(SCALE_LOW, SCALE_HIGH).view(torch.int32) - SCALE_BIAS
    codes = (bits + (1 << SCALE_SHIFT) - 1) >> SCALE_SHIFT  # the smallest bytes whose scales are not below
    scales = torch.where(wanted.isfinite(), codes, NOT_FINITE).to(torch.uint8)
    steps = grouped / _of_groups(_scales(scales), runs).unsqueeze(-1)
    if coding == "int8":
        return steps.round().clamp(-127, 127).to(torch.int8).flatten(-2), scales
    nibbles = (steps.floor() + 8).clamp(0, 15).to(torch.uint8)
    low, high = torch.split(nibbles, GROUP // 2, dim=-1)
    return torch.flatten(low | (high << 4), -2), scales


def _groups(runs: Sequence[int]) -> list[int]:
    """Return how many groups of 32 each run has."""
    return [features // GROUP for features in runs]


def _of_groups(scales: Tensor, runs: Sequence[int]) -> Tensor:
    """Return the scale of each group of 32. scales: one of each run."""
    return scales.repeat_interleave(torch.tensor(_groups(runs), device=scales.device), -1) if runs else scales


def dequantize(codes: Tensor, scales: Tensor, coding: Coding, runs: Sequence[int] = ()) -> Tensor:
    """The inverse of `quantize`, still rotated: fp32 [..., D]."""
    if coding == "int8":
        values = _grouped(codes.float())
    else:
        packed = _grouped(codes, GROUP // 2)
        values = torch.cat((packed & 15, packed >> 4), dim=-1).float() - INT4_ZERO
    return torch.flatten(values * _of_groups(_scales(scales), runs).unsqueeze(-1), -2)


def store(layout: PageLayout, page: Tensor, first: int, k: Tensor, v: Tensor) -> None:
    """Put tokens into slots [first, first + T) of a page. page: uint8 [layer_bytes]; k, v [T, KH, D], rotated where the
    layout is coded. v is not asked where keys are latents."""
    keys, key_scales, values, value_scales = layout.parts(page)
    slots = slice(first, first + len(k))
    if isinstance(layout, LatentLayout):
        if layout.is_dense:
            keys[:, slots] = k.transpose(0, 1)
            return
        codes, scales = quantize(k.float(), layout.keys, layout.runs)
        keys[:, slots] = codes.transpose(0, 1).view(1, len(k), -1, 4)
        key_scales[..., slots] = scales.permute(1, 2, 0)
        return
    if layout.is_dense:
        keys[..., slots], values[:, slots] = k.permute(1, 2, 0), v.transpose(0, 1)
        return
    codes, scales = quantize(k.float(), layout.keys)
    keys[..., slots], key_scales[..., slots] = codes.permute(1, 2, 0), scales.permute(1, 2, 0)
    codes, scales = quantize(v.float(), layout.values)
    values[:, slots], value_scales[..., slots] = codes.transpose(0, 1), scales.permute(1, 2, 0)


def load(layout: PageLayout, pages: Tensor) -> tuple[Tensor, Tensor]:
    """pages uint8 [P, layer_bytes] -> keys and values [KH, P * 64, D]: fp32 and rotated where they are coded. Values of
    latents have `latent_dim` features."""
    keys, key_scales, values, value_scales = layout.parts(pages)
    if isinstance(layout, LatentLayout):
        if not layout.is_dense:
            keys = dequantize(keys.flatten(-2), key_scales.movedim(-1, -2), layout.keys, layout.runs)
        joined = _joined(keys)
        return joined, joined[..., : layout.latent_dim]
    keys = keys.movedim(-1, -2)  # [P, KH, 64, D]
    if not layout.is_dense:
        keys = dequantize(keys, key_scales.movedim(-1, -2), layout.keys)
        values = dequantize(values, value_scales.movedim(-1, -2), layout.values)
    return _joined(keys), _joined(values)


def _joined(pages: Tensor) -> Tensor:
    """[P, KH, 64, D] -> [KH, P * 64, D]"""
    P, KH, tokens, D = pages.shape
    return pages.transpose(0, 1).reshape(KH, P * tokens, D)


def layer_groups(windows: Sequence[int | None], shapes: Sequence[KVShape]) -> tuple[tuple[int, ...], ...]:
    """Return the layers that see equally far back and keep as much: their pages are needed, and let go, together."""
    kinds = [*zip(windows, shapes, strict=True)]
    return tuple(tuple(layer for layer, own in enumerate(kinds) if own == kind) for kind in dict.fromkeys(kinds))

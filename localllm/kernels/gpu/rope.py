"""Queries and keys normalised and rotated, keys and values written into the KV pages, on a GPU.

A program has one head of one token, as a tile [D / 32, 32]: what the Hadamard rotation and rounding mix stays
in one warp. The formulas are those of `layers.norm`, `layers.rotary` and `kv_page`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels import kv_page
from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.kv_page import PageLayout

PAGE = tl.constexpr(kv_page.PAGE_TOKENS)
GROUP = tl.constexpr(kv_page.GROUP)
HALF_GROUP = tl.constexpr(kv_page.GROUP // 2)
INT4_ZERO = tl.constexpr(kv_page.INT4_ZERO)
SCALE_SHIFT = tl.constexpr(kv_page.SCALE_SHIFT)
SCALE_ROUND = tl.constexpr((1 << kv_page.SCALE_SHIFT) - 1)  # up
SCALE_BIAS = tl.constexpr(kv_page.SCALE_BIAS)
SCALE_LOW = tl.constexpr(kv_page.SCALE_LOW)
SCALE_HIGH = tl.constexpr(kv_page.SCALE_HIGH)
NOT_FINITE = tl.constexpr(kv_page.NOT_FINITE)
ORTHONORMAL = tl.constexpr(kv_page.GROUP**-0.5)
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class TokenTables:
    """The tables of each row of a forward, on the device.

    positions int32 [M]: -1 is a padding row, for which nothing is written. Of attention: as if the pages that a row
    sees were all there are.
    own, own_stride int64 [M]: the address of its own dense page, and the bytes from one layer's part to the next's.
    coded int64 [M]: the address of its page in the coded pool, 0 where there is none.
    """

    positions: Tensor
    own: Tensor
    own_stride: Tensor
    coded: Tensor


@dataclass(frozen=True)
class Rope:
    """inv_freq fp32 [1 or M, rotary_dim / 2]; scale: of cosine and sine; q_norm, k_norm fp32 [D], both or none.

    growth, growth_length: queries are multiplied by 1 + growth * ln(1 + floor(position / length)).
    """

    inv_freq: Tensor
    scale: float = 1.0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    growth: float | None = None
    growth_length: int = 1


@triton.jit
def hadamard(x):
    """x fp32 [groups, 32] times an orthonormal Hadamard matrix: five butterflies."""
    lane = tl.arange(0, GROUP)[None, :] + tl.zeros(x.shape, tl.int32)
    for step in tl.static_range(5):
        other = tl.gather(x, lane ^ (1 << step), 1)
        x = other + tl.where((lane & (1 << step)) == 0, x, -x)
    return x * ORTHONORMAL


@triton.jit
def page_at(address, offset):
    """The bytes at address + offset. The hint stands on the pointer: 128-bit loads want it there."""
    return tl.multiple_of((address + offset).to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def scales_of(codes):
    """`kv_page._scales`: uint8 -> fp32."""
    scales = ((codes.to(tl.int32) << SCALE_SHIFT) + SCALE_BIAS).to(tl.float32, bitcast=True)
    return tl.where(codes == NOT_FINITE, float("nan"), scales)


@triton.jit
def turned(x, other, feature, partner, turns, inv_freq, position, rotary_scale):
    """x fp32 [groups, 32] rotated with `other`, the features `partner`, where it turns."""
    is_low = feature < partner
    frequency = tl.load(inv_freq + tl.where(is_low, feature, partner), mask=turns, other=0.0)
    angle = position.to(tl.float32) * frequency
    sine = tl.sin(angle) * tl.where(is_low, -rotary_scale, rotary_scale)
    return tl.where(turns, x * (tl.cos(angle) * rotary_scale) + other * sine, x)


@triton.jit
def _normalised_and_rotated(
    x, source, feature, norm, eps, inv_freq, position, rotary_scale,
    D: tl.constexpr, ROTARY: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """x fp32 [groups, 32], the head at `source`."""
    turns = feature < ROTARY
    partner = tl.where(feature < ROTARY // 2, feature + ROTARY // 2, feature - ROTARY // 2)
    other = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(x * x) / D + eps)
        x = x * inverse * tl.load(norm + feature, mask=feature < D, other=0.0)
        other = other * inverse * tl.load(norm + partner, mask=turns, other=0.0)
    return turned(x, other, feature, partner, turns, inv_freq, position, rotary_scale)


@triton.jit
def scale_code(peak, CODING: tl.constexpr):
    """The byte of the scale of groups whose largest magnitudes are these."""
    levels: tl.constexpr = 127.0 if CODING == "int8" else 8.0
    scale = tl.minimum(tl.maximum(tl.div_rn(peak, tl.full(peak.shape, levels, tl.float32)), SCALE_LOW), SCALE_HIGH)
    return (scale.to(tl.int32, bitcast=True) - SCALE_BIAS + SCALE_ROUND) >> SCALE_SHIFT


@triton.jit
def codes_of(x, code, CODING: tl.constexpr):
    """The bytes of x fp32 [groups, 32] by the scales of such bytes, [groups, 1]: of INT4, in the first 16 lanes."""
    steps = tl.div_rn(x, scales_of(code) + tl.zeros(x.shape, tl.float32))
    if CODING == "int8":
        steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
        rounded = (steps + 12582912.0) - 12582912.0  # 1.5 * 2^23, whose last bit is worth one: half to even
        return rounded.to(tl.int8).to(tl.uint8, bitcast=True)
    nibble = tl.minimum(tl.maximum(tl.floor(steps) + 8.0, 0.0), 15.0).to(tl.int32)
    lane = tl.arange(0, GROUP)[None, :] + tl.zeros(x.shape, tl.int32)
    return (nibble | (tl.gather(nibble, lane ^ HALF_GROUP, 1) << 4)).to(tl.uint8)


@triton.jit
def _store_coded(x, codes, scales, slot, mask, CODING: tl.constexpr, FEATURE: tl.constexpr, TOKEN: tl.constexpr):
    """`kv_page.quantize`. x fp32 [groups, 32]; FEATURE, TOKEN: the bytes between codes of one and of the other."""
    group = tl.arange(0, x.shape[0])[:, None]
    lane = tl.arange(0, GROUP)[None, :] + tl.zeros(x.shape, tl.int32)
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1, keep_dims=True) != 0
    x = tl.where(is_finite, x, 0.0)
    code = scale_code(tl.max(tl.abs(x), 1, keep_dims=True), CODING)
    content = codes_of(x, code, CODING)
    code = tl.where(is_finite, code, NOT_FINITE)
    tl.store(scales + group * PAGE + slot, code.to(tl.uint8), mask=tl.max(mask.to(tl.int32), 1, keep_dims=True) != 0)
    BYTES: tl.constexpr = GROUP if CODING == "int8" else HALF_GROUP
    at = codes + (group * BYTES + lane) * FEATURE + slot * TOKEN
    tl.store(at, content, mask=mask & (lane < BYTES))


@triton.jit(do_not_specialize=["growth_length", "layer", "qkv_stride", "inv_freq_stride"])
def _rope_store(
    qkv, q, positions, own, own_stride, coded, inv_freq, q_norm, k_norm, eps, rotary_scale, growth, growth_length,
    layer, qkv_stride, inv_freq_stride,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, ROTARY: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DENSE: tl.constexpr,
    KEY_SCALES: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr, CODED_HEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    feature = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = feature < D
    source = qkv + row * qkv_stride + head * D
    x = tl.load(source + feature, mask=mask, other=0.0).to(tl.float32)
    if head < H + KH:
        norm = q_norm
        if head >= H:
            norm = k_norm
        x = _normalised_and_rotated(
            x, source, feature, norm, eps, inv_freq + row * inv_freq_stride, position, rotary_scale,
            D, ROTARY, q_norm is not None,
        )  # fmt: skip
    if growth is not None:
        x *= tl.where(head < H, 1 + growth * tl.log(1 + (position // growth_length).to(tl.float32)), 1.0)
    if KEYS != "dense":
        x = hadamard(x)
    if head < H:
        tl.store(q + (row * H + head) * D + feature, x, mask=mask)
        return
    slot = position % PAGE
    is_value = (head >= H + KH).to(tl.int32)
    kv_head = head - H - is_value * KH
    dense = page_at(tl.load(own + row), layer * tl.load(own_stride + row)).to(tl.pointer_type(DENSE))
    dense += (kv_head * 2 + is_value) * D * PAGE
    place = tl.where(is_value != 0, slot * D + feature, feature * PAGE + slot)
    tl.store(dense + place, x.to(DENSE), mask=mask)
    if KEYS != "dense":
        address = tl.load(coded + row)
        if address != 0:
            page = page_at(address, (layer.to(tl.int64) * KH + kv_head) * CODED_HEAD)
            if is_value == 0:
                _store_coded(x, page, page + KEY_SCALES, slot, mask, KEYS, PAGE, 1)
            else:
                token_bytes: tl.constexpr = (VALUE_SCALES - VALUE_CODES) // PAGE
                _store_coded(x, page + VALUE_CODES, page + VALUE_SCALES, slot, mask, VALUES, 1, token_bytes)


def page_constants(dense: PageLayout, coded: PageLayout | None) -> dict[str, Any]:
    """Return what kernels know of pages when they are compiled; offsets and sizes in bytes."""
    sizes = (0, 0, 0, 0) if coded is None else coded.sizes
    return {
        "KH": dense.num_kv_heads,
        "D": dense.head_dim,
        "KEYS": "dense" if coded is None else coded.keys,
        "VALUES": "dense" if coded is None else coded.values,
        "DENSE": TYPES[dense.dtype],
        "KEY_SCALES": sizes[0],
        "VALUE_CODES": sum(sizes[:2]),
        "VALUE_SCALES": sum(sizes[:3]),
        "CODED_HEAD": sum(sizes),
    }


def rope_store(
    qkv: Tensor, q: Tensor, tokens: TokenTables, rope: Rope, dense: PageLayout, coded: PageLayout | None, layer: int
) -> KernelLaunch:
    """qkv [M, H + 2 KH, D] of any float type -> q fp32 [M, H, D], normalised, with positions, and turned as the pages
    of a coded format are; keys and values into the own pages (densely) and into the coded ones. layer: its row in the
    pools."""
    M, H, D = q.shape
    assert q.dtype is torch.float32 and q.is_contiguous()
    assert qkv.shape == (M, H + 2 * dense.num_kv_heads, D) and qkv.stride()[1:] == (D, 1)
    assert (rope.q_norm is None) == (rope.k_norm is None)
    return KernelLaunch(
        kernel=_rope_store,
        grid=(M, H + 2 * dense.num_kv_heads),
        arguments={
            "qkv": qkv,
            "q": q,
            "positions": tokens.positions,
            "own": tokens.own,
            "own_stride": tokens.own_stride,
            "coded": tokens.coded,
            "inv_freq": rope.inv_freq,
            "q_norm": rope.q_norm,
            "k_norm": rope.k_norm,
            "eps": rope.eps,
            "rotary_scale": rope.scale,
            "growth": rope.growth,
            "growth_length": rope.growth_length,
            "layer": layer,
            "qkv_stride": qkv.stride(0),
            "inv_freq_stride": rope.inv_freq.stride(0) if len(rope.inv_freq) > 1 else 0,
        },
        constants={
            "H": H,
            "GROUPS": triton.next_power_of_2(triton.cdiv(D, kv_page.GROUP)),
            "ROTARY": 2 * rope.inv_freq.shape[1],
            **page_constants(dense, coded),
        },
        num_warps=2 if D > 128 else 1,
    )

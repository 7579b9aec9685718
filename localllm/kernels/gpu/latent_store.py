"""Latents normalised, the key that all heads share and the features of queries that meet it rotated, and latents
written into their pages, on a GPU.

A program has one head's query of a token, or what the token keeps, as a tile [D / 32, 32], as in `rope`. The formulas
are those of `layers.latent_attention` and `kv_page`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels import kv_page
from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.gpu.rope import (
    GROUP,
    HALF_GROUP,
    NOT_FINITE,
    PAGE,
    TYPES,
    Rope,
    TokenTables,
    codes_of,
    hadamard,
    page_at,
    scale_code,
    turned,
)
from localllm.kernels.kv_page import LatentLayout, PageLayout


@triton.jit
def _features(
    first, behind, feature, inv_freq, position, rotary_scale,
    LATENT: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """fp32 [groups, 32]: the features at `first`, and those at `behind`, of which the leading ones are rotated."""
    shared = feature - LATENT
    is_shared = (shared >= 0) & (feature < D)
    x = tl.load(first + feature, mask=shared < 0, other=0.0).to(tl.float32)
    x += tl.load(behind + shared, mask=is_shared, other=0.0).to(tl.float32)
    turns = is_shared & (shared < ROTARY)
    partner = tl.where(shared < ROTARY // 2, shared + ROTARY // 2, shared - ROTARY // 2)
    other = tl.load(behind + partner, mask=turns, other=0.0).to(tl.float32)
    return turned(x, other, shared, partner, turns, inv_freq, position, rotary_scale)


@triton.jit
def _store_coded(x, page, slot, mask, LATENT: tl.constexpr, D: tl.constexpr, CODING: tl.constexpr):
    """`kv_page.quantize` of two runs. x fp32 [groups, 32]."""
    group = tl.arange(0, x.shape[0])[:, None]
    lane = tl.arange(0, GROUP)[None, :] + tl.zeros(x.shape, tl.int32)
    is_latent = group < LATENT // GROUP
    is_number = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1, keep_dims=True)
    of_latent = tl.min(tl.where(is_latent, is_number, 1), 0, keep_dims=True)
    of_shared = tl.min(tl.where(is_latent, 1, is_number), 0, keep_dims=True)
    is_finite = tl.where(is_latent, of_latent, of_shared) != 0
    x = tl.where(is_finite, x, 0.0)
    peak = tl.max(tl.abs(x), 1, keep_dims=True)
    latent_peak = tl.max(tl.where(is_latent, peak, 0.0), 0, keep_dims=True)
    shared_peak = tl.max(tl.where(is_latent, 0.0, peak), 0, keep_dims=True)
    code = scale_code(tl.where(is_latent, latent_peak, shared_peak), CODING)
    content = codes_of(x, code, CODING)
    code = tl.where(is_finite, code, NOT_FINITE)
    is_first = (group == 0) | (group == LATENT // GROUP)
    BYTES: tl.constexpr = GROUP if CODING == "int8" else HALF_GROUP
    scales = page + D // GROUP * BYTES * PAGE  # behind the codes
    tl.store(scales + tl.where(is_latent, 0, PAGE) + slot, code.to(tl.uint8), mask=is_first)
    byte = group * BYTES + lane
    tl.store(page + byte // 4 * (4 * PAGE) + slot * 4 + byte % 4, content, mask=mask & (lane < BYTES))


@triton.jit(do_not_specialize=["layer", "turning_stride", "kept_stride", "inv_freq_stride"])
def _latent_store(
    absorbed, turning, kept, q, positions, own, own_stride, coded, inv_freq, norm, eps, rotary_scale,
    layer, turning_stride, kept_stride, inv_freq_stride,
    H: tl.constexpr, D: tl.constexpr, LATENT: tl.constexpr, GROUPS: tl.constexpr, ROTARY: tl.constexpr,
    CODING: tl.constexpr, OWN: tl.constexpr, DENSE: tl.constexpr, CODED_BYTES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    feature = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = feature < D
    inv_freq += row * inv_freq_stride
    if head < H:
        first, behind = absorbed + (row * H + head) * LATENT, turning + row * turning_stride + head * (D - LATENT)
        x = _features(first, behind, feature, inv_freq, position, rotary_scale, LATENT, D, ROTARY)
        if CODING != "dense":
            x = hadamard(x)
        tl.store(q + (row * H + head) * D + feature, x.to(q.dtype.element_ty), mask=mask)
        return
    first = kept + row * kept_stride
    x = _features(first, first + LATENT, feature, inv_freq, position, rotary_scale, LATENT, D, ROTARY)
    latent = tl.where(feature < LATENT, x, 0.0)
    inverse = tl.rsqrt(tl.sum(latent * latent) / LATENT + eps)
    x = tl.where(feature < LATENT, x * inverse * tl.load(norm + feature, mask=feature < LATENT, other=0.0), x)
    if CODING != "dense":
        x = hadamard(x)
    slot = position % PAGE
    own_page = page_at(tl.load(own + row), layer * tl.load(own_stride + row))
    if CODING == "dense":
        tl.store(own_page.to(tl.pointer_type(DENSE)) + slot * D + feature, x.to(DENSE), mask=mask)
    else:
        _store_coded(x, own_page, slot, mask, LATENT, D, OWN)
        address = tl.load(coded + row)
        if address != 0:
            page = page_at(address, layer.to(tl.int64) * CODED_BYTES)
            _store_coded(x, page, slot, mask, LATENT, D, CODING)


def latent_constants(own: PageLayout, coded: PageLayout | None) -> dict[str, Any]:
    """Return what kernels know of pages of latents when they are compiled; sizes in bytes."""
    assert isinstance(own, LatentLayout) and own.is_dense == (coded is None)
    return {
        "D": own.head_dim,
        "LATENT": own.latent_dim,
        "CODING": "dense" if coded is None else coded.keys,
        "OWN": own.keys,
        "DENSE": TYPES[own.dtype],
        "CODED_BYTES": 0 if coded is None else coded.layer_bytes,
    }


def latent_store(
    absorbed: Tensor,
    turning: Tensor,
    kept: Tensor,
    q: Tensor,
    tokens: TokenTables,
    rope: Rope,
    own: PageLayout,
    coded: PageLayout | None,
    layer: int,
) -> KernelLaunch:
    """absorbed fp32 [M, H * latent], queries in the space of latents; turning [M, H * shared], those that meet the
    shared key; kept [M, latent + shared], the latent and the shared key; the last two of any float type, in rows of any
    stride. -> q [M, H, D] of any float type, turned as the pages of a coded format are; what is kept goes into the own
    pages, and into the coded ones. rope: its norm of keys is that of latents. layer: its row in the pools."""
    M, H, D = q.shape
    assert isinstance(own, LatentLayout) and rope.k_norm is not None
    assert absorbed.is_contiguous() and q.is_contiguous() and absorbed.shape == (M, H * own.latent_dim)
    assert turning.shape == (M, H * (D - own.latent_dim)) and kept.shape == (M, D)
    return KernelLaunch(
        kernel=_latent_store,
        grid=(M, H + 1),
        arguments={
            "absorbed": absorbed,
            "turning": turning,
            "kept": kept,
            "q": q,
            "positions": tokens.positions,
            "own": tokens.own,
            "own_stride": tokens.own_stride,
            "coded": tokens.coded,
            "inv_freq": rope.inv_freq,
            "norm": rope.k_norm,
            "eps": rope.eps,
            "rotary_scale": rope.scale,
            "layer": layer,
            "turning_stride": turning.stride(0),
            "kept_stride": kept.stride(0),
            "inv_freq_stride": rope.inv_freq.stride(0) if len(rope.inv_freq) > 1 else 0,
        },
        constants={
            "H": H,
            "GROUPS": triton.next_power_of_2(triton.cdiv(D, kv_page.GROUP)),
            "ROTARY": 2 * rope.inv_freq.shape[1],
            **latent_constants(own, coded),
        },
        num_warps=4 if D > 256 else 2,
    )

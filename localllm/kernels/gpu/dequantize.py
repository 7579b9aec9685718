"""Packed weights to floats on a GPU, one launch a slab: for so many rows that the library's matrix product pays."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.tile16 import TILE, PackedMatrix

_COLUMNS = 256  # of a program, for 16 rows


@triton.jit(do_not_specialize=["first_tile", "groups", "out_features"])
def _dequantize(
    qweight, scale, bias, out, first_tile, groups, out_features, in_features,
    GROUPS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """GROUPS: of a program. qweight: as bytes. out: the rows from first_tile * 16 on."""
    tile, first_group = (first_tile + tl.program_id(0)).to(tl.int64), tl.program_id(1) * GROUPS
    lane, own, byte = tl.arange(0, 16), tl.arange(0, GROUPS), tl.arange(0, GROUPS * WORDS * 64)
    is_group = first_group + own < groups
    at = (tile * groups + first_group) * (WORDS * 64) + byte
    packed = tl.load(qweight + at, mask=first_group + byte // (WORDS * 64) < groups, other=0)
    packed = tl.reshape(packed, (GROUPS * WORDS, 16, 4))
    if BITS == 4:
        packed = tl.permute(tl.join(packed & 15, packed >> 4), (1, 0, 3, 2))  # [16, words, 2, 4]
    else:
        packed = tl.permute(packed, (1, 0, 2))
    codes = tl.reshape(packed, (16, GROUPS, GROUP)).to(tl.float32)
    if BITS == 4:
        group_at = (tile * groups + first_group + own)[None, :] * 16 + lane[:, None]
        own_scale = tl.load(scale + group_at, mask=is_group[None, :], other=0).to(tl.float32)
        own_bias = tl.load(bias + group_at, mask=is_group[None, :], other=0).to(tl.float32)
        weights = codes * own_scale[:, :, None] + own_bias[:, :, None]
    else:
        weights = codes * tl.load(scale + tile * 16 + lane)[:, None, None]
    n = tl.program_id(0).to(tl.int64) * 16 + lane
    k = first_group * GROUP + tl.arange(0, GROUPS * GROUP)
    is_there = (tile * 16 + lane < out_features)[:, None] & (k < in_features)[None, :]
    weights = tl.reshape(weights, (16, GROUPS * GROUP)).to(out.dtype.element_ty)
    tl.store(out + n[:, None] * in_features + k[None, :], weights, mask=is_there)


def dequantize(matrix: PackedMatrix, out: Tensor, first_tile: int, tiles: int, out_features: int) -> KernelLaunch:
    """The rows of so many tiles into out [>= rows, in_features] of any float type, as `tile16.dequantize` has them."""
    groups = max(1, _COLUMNS // matrix.group)
    return KernelLaunch(
        _dequantize,
        (tiles, triton.cdiv(matrix.groups, groups)),
        {
            "qweight": matrix.qweight.view(torch.uint8 if matrix.bits == 4 else torch.int8), "scale": matrix.scale,
            "bias": matrix.bias, "out": out, "first_tile": first_tile,
            "groups": matrix.groups, "out_features": out_features, "in_features": out.shape[1],
        },
        {"GROUPS": groups, "WORDS": matrix.words, "GROUP": matrix.group, "BITS": matrix.bits},
    )  # fmt: skip


def slab_tiles(in_features: int, slab_weights: int) -> int:
    """Return how many tiles of 16 rows are in a slab of so many weights."""
    return max(1, slab_weights // (TILE * max(1, in_features)))


_COLUMNS = 1024  # of a program


@triton.jit(do_not_specialize=["words"])
def _embed(qweight, scale, token_ids, x, words, features, factor, BLOCK: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.maximum(tl.load(token_ids + row), 0).to(tl.int64)  # below 0 none was drawn: no row is read for it
    tile, lane = token // 16, token % 16
    codes = tl.load(qweight + ((tile * words + k // 4) * 16 + lane) * 4 + k % 4, mask=k < features, other=0)
    values = codes.to(tl.float32) * tl.load(scale + token) * factor
    tl.store(x + row * features + k, values, mask=k < features)


def embed(qweight: Tensor, scale: Tensor, token_ids: Tensor, x: Tensor, factor: float) -> KernelLaunch:
    """qweight, scale: of `int8`; token_ids [M] of any whole-number type, all of the vocabulary; x fp32 [M, features]:
    each token's row times `factor`."""
    features = x.shape[1]
    return KernelLaunch(
        _embed,
        (len(token_ids), triton.cdiv(features, _COLUMNS)),
        {
            "qweight": qweight, "scale": scale, "token_ids": token_ids, "x": x, "words": qweight.shape[1],
            "features": features, "factor": float(factor),
        },
        {"BLOCK": _COLUMNS},
    )  # fmt: skip

"""The rows of an embedding in packed codes, looked up on a GPU by token ids that are there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.gpu.weight_codes import value_of
from localllm.kernels.packed_matrix import PackedMatrix

_COLUMNS = 1024  # of a program


@triton.jit(do_not_specialize=["padded"])
def _embed(
    qweight, scale, bias, token_ids, x, padded, features, factor,
    FORM: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """qweight: as bytes. padded: columns of a row of it. FORM: the `Weights`."""
    after_previous(OVERLAPS)
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.maximum(tl.load(token_ids + row), 0).to(tl.int64)  # below 0 none was drawn: no row is read for it
    tile, lane, is_k = token // 16, token % 16, k < features
    in_word: tl.constexpr = 32 // FORM.bits
    at = ((tile * (padded // in_word) + k // in_word) * 16 + lane) * 4 + k % 4
    codes = tl.load(qweight + at, mask=is_k, other=0).to(tl.int32)
    if FORM.bits == 4:
        codes = value_of((codes >> (k % 8 // 4 * 4)) & 15, FORM)
    values = codes.to(tl.float32)
    if FORM.group is None:
        values = values * tl.load(scale + token)
    else:
        group = (tile * (padded // FORM.columns) + k // FORM.columns) * 16 + lane
        values = values * tl.load(scale + group, mask=is_k, other=0).to(tl.float32)
        if FORM.has_bias:
            values = values + tl.load(bias + group, mask=is_k, other=0).to(tl.float32)
    tl.store(x + row * features + k, values * factor, mask=is_k)


def embed(
    qweight: Tensor, scale: Tensor, token_ids: Tensor, x: Tensor, factor: float,
    bias: Tensor | None = None, table: tuple[int, ...] | None = None,
) -> KernelLaunch:  # fmt: skip
    """qweight, scale, bias, table: of a `PackedMatrix`; token_ids [M] of any whole-number type, all of the vocabulary;
    x fp32 [M, features]: each token's row times `factor`."""
    matrix, features = PackedMatrix(qweight, scale, bias, table), x.shape[1]
    return KernelLaunch(
        _embed,
        (len(token_ids), triton.cdiv(features, _COLUMNS)),
        {
            "qweight": qweight.view(torch.int8), "scale": scale, "bias": bias, "token_ids": token_ids, "x": x,
            "padded": matrix.in_features, "features": features, "factor": float(factor),
        },
        {"FORM": matrix.weights, "BLOCK": _COLUMNS},
    )  # fmt: skip

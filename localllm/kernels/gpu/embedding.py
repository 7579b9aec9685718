"""The rows of an INT8 embedding, looked up on a GPU by token ids that are there."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch, after_previous

_COLUMNS = 1024  # of a program


@triton.jit(do_not_specialize=["words"])
def _embed(qweight, scale, token_ids, x, words, features, factor, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    after_previous(OVERLAPS)
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

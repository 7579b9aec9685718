"""Rows of an INT8 embedding on the CPU: the first step of a tape."""

from __future__ import annotations

import math
from functools import cache

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32, I32V, I64, LANES, Kernel, Value, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.tile16 import TILE


def embed_source() -> Kernel:
    """x [T, features] fp32 = the rows `token_ids` of q * scale, rounded to bf16, times `factor`, rounded again.

    qweight, scale: see `int8`; features % 16 == 0, none of them padding. token_ids: int64 [T]; one outside the `vocab`
    gives NaNs, not what lies beyond the matrix. shape: a pointer to {T}. factor: the bits of a float. Threads share out
    16 columns of a token at a time.
    """
    k = Kernel("embed", "qweight scale token_ids x shape | vocab features factor")
    a = k.arg
    parts = a.features / LANES
    factor = a.factor.convert("trunc", "i32").convert("bitcast", F32).splat()
    begin, end = k.share(a.shape.load(I64, 8) * parts)
    with k.range(begin, end) as item:
        token, part = item / parts, item % parts
        token_id = a.token_ids.at(token * 8).load(I64, 8)
        exists = token_id.compare("ult", a.vocab)
        row = exists.choose(token_id, k.i64(0))
        tile, lane = row / TILE, row % TILE
        scale = exists.choose(a.scale.at(row * 4).load(F32), k.constant(F32, math.nan)).splat()
        words = a.qweight.at((tile * a.features + part * LANES) * TILE + lane * 4)
        quarter = k.constant(vector_of(I32, 4), 0)
        for i in range(4):
            word = words.at(64 * i).load(I32)
            quarter = k.emit(quarter.kind, f"insertelement {quarter.kind} {quarter.text}, i32 {word.text}, i32 {i}")
        codes = quarter.convert("bitcast", vector_of("i8")).convert("sitofp", F32V)
        x = _rounded(k, _rounded(k, codes * scale) * factor)
        a.x.at((token * a.features + part * LANES) * 4).store(x)
    return k


def _rounded(k: Kernel, x: Value) -> Value:
    """The nearest bf16, as fp32."""
    return (cpu_math.to_bf16(k, x).convert("zext", I32V) << 16).convert("bitcast", F32V)


@cache
def embed(isa: Isa) -> Native:
    return compile_kernel(embed_source(), isa)

"""Queries and keys normalised and rotated, keys and values written into the KV cache, on the CPU."""

from __future__ import annotations

from functools import cache

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I64, LANES, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_quantize import inverse_rms

# Of each token, as the kernels read it: where its sequence's keys and values are (bf16 [layers, KH, capacity, D]), how
# many tokens those have room for, and which of them it is.
TOKEN_WORDS = ("keys", "values", "capacity", "position")


def rope_source(head_dim: int, rotary_dim: int, *, has_norms: bool) -> Kernel:
    """qkv fp32 [T, H + 2 KH, D]: the queries are rotated and scaled in place, keys and values go to the cache.

    cos, sin: fp32 [T, rotary_dim] from a `Rotary`. q_norm, k_norm: fp32 [D]. scale, eps: the bits of a float.
    tokens: int64 [T, 4], see TOKEN_WORDS. shape: a pointer to {T}. Threads share out the heads of all tokens.
    """
    assert rotary_dim % (2 * LANES) == 0 and head_dim % (2 * LANES) == 0
    k = Kernel("rope", "qkv cos sin q_norm k_norm tokens shape | heads kv_heads layer scale eps")
    a = k.arg
    all_heads = a.heads + a.kv_heads * 2
    begin, end = k.share(a.shape.load(I64, 8) * all_heads)
    first_value = a.heads + a.kv_heads
    with k.range(begin, end) as item:
        token, head = item / all_heads, item % all_heads
        x = a.qkv.at(item * (head_dim * 4))
        row = a.tokens.at(token * (8 * len(TOKEN_WORDS)))
        keys, values = row.load("ptr", 8), row.at(8).load("ptr", 8)
        capacity, position = row.at(16).load(I64, 8), row.at(24).load(I64, 8)

        def place(base: Value, kv_head: Value) -> Value:
            at = (a.layer * a.kv_heads + kv_head) * capacity + position
            return base.at(at * (head_dim * 2))

        with k.when(head.compare("uge", first_value)):
            _store_bf16(k, _load(x, head_dim), place(values, head - first_value))
        with k.when(head.compare("ult", first_value)):
            is_query = head.compare("ult", a.heads)
            vectors = _load(x, head_dim)
            if has_norms:
                inverse = inverse_rms(k, x, k.i64(head_dim)).splat()
                weight = is_query.choose(a.q_norm, a.k_norm)
                vectors = [v * inverse * weight.at(64 * i).load(F32V) for i, v in enumerate(vectors)]
            rotated = _rotated(k, vectors, token, rotary_dim)
            with k.when(is_query):
                scale = a.scale.convert("trunc", "i32").convert("bitcast", F32).splat()
                for i, vector in enumerate(rotated):
                    x.at(64 * i).store(vector * scale)
            with k.when(head.compare("uge", a.heads)):
                _store_bf16(k, rotated, place(keys, head - a.heads))
    return k


def _load(x: Value, head_dim: int) -> list[Value]:
    return [x.at(64 * i).load(F32V) for i in range(head_dim // LANES)]


def _rotated(k: Kernel, x: list[Value], token: Value, rotary_dim: int) -> list[Value]:
    """x * cos + (the other half of the rotating features) * sin; the features beyond rotary_dim pass."""
    turning = rotary_dim // LANES
    table = token * (rotary_dim * 4)
    rotated = list(x)
    for i in range(turning):
        cos, sin = k.arg.cos.at(table).at(64 * i).load(F32V), k.arg.sin.at(table).at(64 * i).load(F32V)
        rotated[i] = k.fma(x[(i + turning // 2) % turning], sin, x[i] * cos)
    return rotated


def _store_bf16(k: Kernel, vectors: list[Value], place: Value) -> None:
    for i, vector in enumerate(vectors):
        place.at(32 * i).store(cpu_math.to_bf16(k, vector), 2)


@cache
def rope(isa: Isa, head_dim: int, rotary_dim: int, *, has_norms: bool) -> Native:
    return compile_kernel(rope_source(head_dim, rotary_dim, has_norms=has_norms), isa)

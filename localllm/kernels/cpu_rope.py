"""Queries and keys normalised and rotated, keys and values written into the KV pages, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from localllm.kernels import cpu_kv
from localllm.kernels.cpu_ir import F32, F32V, I64, LANES, PTR, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_kv import HeadPlan
from localllm.kernels.cpu_quantize import inverse_rms
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout
from localllm.kernels.sizes import TOKEN_WORDS as TOKEN_WORDS

TOKEN_BYTES = 8 * len(TOKEN_WORDS)
Store = Callable[[Kernel, HeadPlan, Value, Value, list[Value]], None]


Norms = Literal["none", "first", "last"]  # of queries and keys: before or behind the rotation
Values = Literal["plain", "normed", "keys"]  # normed by their root mean square; the keys as they come in, normed


def rope_source(
    dense: PageLayout, coded: PageLayout | None, rotary_dim: int, norms: Norms, values: Values = "plain"
) -> Kernel:
    """qkv fp32 [T, H + 2 KH, D], or [T, H + KH, D] where values are keys, a token `stride` floats behind the last: the
    queries are rotated and scaled in place, keys and values go into the pages.

    dense: of the page with a token's own position; coded: of all pages but a sequence's first, None where those are
    dense too. cos, sin: fp32 [T, rotary_dim] from a `Rotary`. q_norm, k_norm: fp32 [D]. scales: of the queries, fp32
    [T]. eps: the bits of a float. tokens: int64 [T, 4], see TOKEN_WORDS. shape: a pointer to {T}. Threads share out the
    heads of all tokens.
    """
    head_dim = dense.head_dim
    assert rotary_dim % (2 * LANES) == 0 and head_dim % LANES == 0
    k = Kernel("rope", "qkv cos sin q_norm k_norm scales tokens shape | stride heads kv_heads layer eps")
    a = k.arg
    all_heads = a.heads + a.kv_heads * 2
    begin, end = k.share(a.shape.load(I64, 8) * all_heads)
    first_value = a.heads + a.kv_heads
    turned = (lambda vectors: vectors) if coded is None else partial(cpu_kv.rotated, k)
    with k.range(begin, end) as item:
        token, head = item / all_heads, item % all_heads
        x = a.qkv.at(token * a.stride * 4).at(head * (head_dim * 4))
        place = _Place(k, dense, coded, a.tokens.at(token * TOKEN_BYTES))
        with k.when(head.compare("uge", first_value)):
            source = a.qkv.at(token * a.stride * 4).at((head - a.kv_heads) * (head_dim * 4)) if values == "keys" else x
            value = _load(source, head_dim)
            if values != "plain":
                inverse = inverse_rms(k, source, k.i64(head_dim)).splat()
                value = [vector * inverse for vector in value]
            place.store(cpu_kv.store_values, head - first_value, turned(value))
        with k.when(head.compare("ult", first_value)):
            is_query = head.compare("ult", a.heads)
            vectors = _load(x, head_dim)
            weight = is_query.choose(a.q_norm, a.k_norm)
            if norms != "none":  # the length of a head stays the same when it rotates
                inverse = inverse_rms(k, x, k.i64(head_dim)).splat()
                vectors = [vector * inverse for vector in vectors]
            if norms == "first":
                vectors = _weighted(vectors, weight)
            vectors = rotated_features(k, vectors, token, rotary_dim)
            if norms == "last":
                vectors = _weighted(vectors, weight)
            vectors = turned(vectors)
            with k.when(is_query):
                scale = a.scales.at(token * 4).load(F32).splat()
                for i, vector in enumerate(vectors):
                    x.at(64 * i).store(vector * scale)
            with k.when(head.compare("uge", a.heads)):
                place.store(cpu_kv.store_keys, head - a.heads, vectors)
    return k


@dataclass(frozen=True)
class _Place:
    """The place of a token's keys and values: its own dense page, and the coded one, if there is one."""

    kernel: Kernel
    dense: PageLayout
    coded: PageLayout | None
    token: Value

    def store(self, store: Store, kv_head: Value, vectors: list[Value]) -> None:
        k, layer = self.kernel, self.kernel.arg.layer
        own, position = self.token.at(8).load(PTR, 8), self.token.at(24).load(I64, 8)
        head = own.at(layer * self.token.at(16).load(I64, 8)).at(kv_head * self.dense.head_bytes)
        store(k, HeadPlan(self.dense), head, position % PAGE_TOKENS, vectors)
        if self.coded is None:
            return
        with k.when(position.compare("uge", PAGE_TOKENS)):  # a sequence's first page stays dense
            page = self.token.load(PTR, 8).at(position / PAGE_TOKENS * 8).load(PTR, 8)
            head = page.at((layer * k.arg.kv_heads + kv_head) * self.coded.head_bytes)
            store(k, HeadPlan(self.coded), head, position % PAGE_TOKENS, vectors)


def _load(x: Value, head_dim: int) -> list[Value]:
    return [x.at(64 * i).load(F32V) for i in range(head_dim // LANES)]


def _weighted(vectors: list[Value], weight: Value) -> list[Value]:
    return [vector * weight.at(64 * i).load(F32V) for i, vector in enumerate(vectors)]


def rotated_features(k: Kernel, x: list[Value], token: Value, rotary_dim: int) -> list[Value]:
    """x * cos + (the other half of the rotating features) * sin; the features beyond rotary_dim pass."""
    turning = rotary_dim // LANES
    table = token * (rotary_dim * 4)
    rotated = list(x)
    for i in range(turning):
        cos, sin = k.arg.cos.at(table).at(64 * i).load(F32V), k.arg.sin.at(table).at(64 * i).load(F32V)
        rotated[i] = k.fma(x[(i + turning // 2) % turning], sin, x[i] * cos)
    return rotated


@cache
def rope(
    isa: Isa, dense: PageLayout, coded: PageLayout | None, rotary_dim: int, norms: Norms, values: Values = "plain"
) -> Native:
    return compile_kernel(rope_source(dense, coded, rotary_dim, norms, values), isa)

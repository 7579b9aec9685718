"""Compiles every GPU kernel for cards that need not be there: `python -m tools.check_kernels 75 80 86 89 90 120`.

A kernel that does not compile, spills registers, wants more shared memory than the card has, or reads weights or pages
in pieces of less than 128 bits is named, and the exit code is 1. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia_compiler
from triton.compiler import ASTSource

from localllm.kernels.delta_rule import DeltaWeights
from localllm.kernels.gpu import (
    activations,
    check_cases,
    delta,
    embedding,
    low_rank,
    mamba2,
    rope,
    routing,
    rwkv,
    sample,
    shift,
    short_conv,
)
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention import (
    FEW_PREFILL_ROWS,
    PREFILL_ROWS,
    WARP_GROUPS,
    AttentionHistory,
    ChosenTables,
    attend,
    block_rows,
)
from localllm.kernels.gpu.attention_merge import can_code, new_parts
from localllm.kernels.gpu.check import BRIEF, launches_of, sizes_for
from localllm.kernels.gpu.check_attention import FORMATS, Heads
from localllm.kernels.gpu.check_cases import (
    CODED,
    CONVS,
    DELTAS,
    FP4,
    GLUS,
    GROUPS,
    INT8,
    MAMBAS,
    ROUTERS,
    RWKV7S,
    weights_of,
)
from localllm.kernels.gpu.check_latent import LatentHeads
from localllm.kernels.gpu.expert_record import ExpertTable, RecordMatrix
from localllm.kernels.gpu.experts import Inner, mixed, mixture
from localllm.kernels.gpu.latent_attention import attend_latents, new_queries
from localllm.kernels.gpu.latent_store import latent_store
from localllm.kernels.gpu.launch import KernelLaunch, is_interpreted
from localllm.kernels.gpu.layer_norm import layer_norm
from localllm.kernels.gpu.page_choice import Choices, choose, new_chosen
from localllm.kernels.gpu.page_masses import Watched, watch
from localllm.kernels.gpu.product import FEW_ROWS, Dispatch
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.gpu.rope import Rope, TokenTables
from localllm.kernels.gpu.routing import RouterWeights, Routes
from localllm.kernels.kv_page import PageLayout
from localllm.kernels.mamba2_rule import Mamba2Weights
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.rwkv7 import TimeMixWeights
from localllm.kernels.short_conv import ConvWeights
from localllm.kernels.sizes import CENTRED, INT8_GROUP, TILE, Glu, RouterConfig, Weights
from localllm.kernels.state_shapes import (
    RWKV7_MIXED,
    STATE_WORDS,
    ConvShape,
    DeltaShape,
    Mamba2Shape,
    Rwkv7Shape,
    ShiftShape,
    StatePlace,
)

# Of one block, in bytes: what a kernel may ask for beyond the 48 KiB that every card has (CUDA's programming guide,
# "technical specifications per compute capability"). Triton does not look at it before it launches.
SHARED_BYTES = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
_MEMORY = re.compile(r"\b(ld|st|red|atom)\.global|cp\.async")
_ALIGN = 16  # bytes of an address, or a number's factor, of which Triton compiles a variant of its own
_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# These read what a token costs: weights, the pages of keys and values, states.
READERS = frozenset(
    {"_gemv", "_gemm", "_attend", "_attend_latents", "_expert_gates", "_experts_mixed", "_expert_gemm", "_take_in"}
)
_WIDE_ROWS = 16  # of more rows the tensor cores are what takes time
# Bytes that a thread may put aside: anywhere, and outside of its loops, which is once. Triton 3.7 calls the assembler
# with a flag (--regAllocOptLevel=2) by which it does so here and there.
_ASIDE_BYTES, _ONCE_BYTES = 16, 128
_N, _K, _HIDDEN, _VOCAB = 4096, 4096, 4096, 32000
_HOST = torch.device("cpu")
_logs: dict[int, str] = {}  # of the last assembly, by the thread
BRIEF_FORMATS = (FORMATS[0], FORMATS[2])
BRIEF_WEIGHTS = (weights_of(GROUPS[0]), INT8, *CODED)
WEIGHTS = (
    *map(weights_of, GROUPS),
    INT8,
    *CODED,
    Weights(4, 16, False, FP4),
    Weights(4, 128, False, FP4),
    Weights(4, 128, False, CENTRED),
    Weights(8, 128),
)


def matrix(weights: Weights) -> PackedMatrix:
    """Return a matrix [_N, _K] of such codes."""
    tiles = _N // TILE
    qweight = _empty((tiles, _K // 8, TILE), torch.int32)
    if weights.bits == 8:
        qweight = _empty((tiles, _K // 4, TILE, 4), torch.int8)
    if weights.group is None:
        return PackedMatrix(qweight, _empty((tiles, TILE)), None)
    values = _empty((tiles, _K // weights.group, TILE), torch.float16)
    return PackedMatrix(qweight, values, values if weights.has_bias else None, weights.table)


def products(
    weights: Weights,
    rows: tuple[int, ...] = (1, 2, 4, 16, 32, 512),
    adding: tuple[bool, ...] = (False, True),
    dispatch: Dispatch | None = None,
) -> Iterator[KernelLaunch]:
    """Yield the launches of such a matrix with so many rows: into a new buffer, added to what is there, and with the
    gate of an MLP."""
    packed, dispatch = matrix(weights), dispatch or Dispatch(multiprocessors=64)
    for count in rows:
        codes, y = Codes.of(count, packed), _empty((count, _N))
        for adds in adding:
            yield from dispatch.product(codes, packed, y, _N, None, adds=adds)
        gate = Gate(Codes.of(count, packed), GLUS[0], _N // 2)
        yield from dispatch.product(codes, packed, gate, _N, None, adds=False)


def by_head(
    weights: Weights, rows: tuple[int, ...] = (1, 16, 512), dispatch: Dispatch | None = None
) -> Iterator[KernelLaunch]:
    """Yield the launches of such a matrix, whose rows are those of 16 heads."""
    packed, dispatch, heads = matrix(weights), dispatch or Dispatch(multiprocessors=64), 16
    for count in rows:
        codes = Codes.empty(count, heads * _K, packed.group, _HOST, packed.bits)
        yield from dispatch.product(codes, packed, _empty((count, _N)), _N, None, adds=False, heads=heads)


def routers(some: Iterable[RouterConfig], rows: tuple[int, ...] = (1, 4, 512)) -> Iterator[KernelLaunch]:
    """Yield the choice of experts for so many tokens."""
    for router, count in product(some, rows):
        E = router.num_experts
        parts = RouterWeights(_empty((E, _HIDDEN)), None, _empty((E,)), _empty((_HIDDEN,)), 1e-5)
        gate = _empty((1, _HIDDEN))
        for codes, own in ((None, parts), (Codes.empty(count, _HIDDEN, INT8_GROUP, _HOST), replace(parts, gate=gate))):
            routes = Routes.empty(count, router, _HOST, has_gate=own.gate is not None)
            yield from routing.route(_empty((count, _HIDDEN)), router, own, routes, codes=codes)


def experts(
    weights: Weights,
    sizes: tuple[tuple[int, int, int], ...] = ((1, 2, 8), (1, 8, 128), (64, 8, 128), (512, 8, 128), (512, 2, 8)),
    dispatch: Dispatch | None = None,
) -> Iterator[KernelLaunch]:
    """Yield the experts of so many tokens, for each so many of all of them, of such matrices."""
    packed, dispatch = matrix(weights), dispatch or Dispatch(multiprocessors=64)
    for tokens, top_k, of in sizes:
        is_other = of == 8  # experts with biases and another gate
        place = RecordMatrix(packed, 0, 0, linear_bias=0 if is_other else None)
        table = ExpertTable(_empty((of,), torch.int64), place, place, GLUS[is_other], _N // 2)
        routes = Routes.empty(tokens, RouterConfig("softmax", of, top_k), _HOST)
        yield from mixture(dispatch, Codes.of(tokens, packed), routes, table, _empty((tokens, _N)), adds=True)
        inner, parts = Inner.empty(dispatch, routes, table), _empty((tokens * top_k, _N))
        yield from mixed(dispatch, inner, routes, table, _empty((tokens, _N)), adds=True, elsewhere=parts)


def rows_between(group: int = INT8_GROUP, glu: Glu = GLUS[0]) -> Iterator[KernelLaunch]:
    """Yield the launches between the matrices of a model in such groups."""
    x, weight = _empty((2, 2 * _HIDDEN)), _empty((_HIDDEN,))
    floats = _empty((2, _HIDDEN), torch.bfloat16)
    for codes in (Codes.empty(2, _HIDDEN, group, _HOST, bits) for bits in (8, 4)):
        yield activations.to_codes(x, codes, _HIDDEN)
        yield activations.to_codes(x, codes, _HIDDEN, weight=weight, eps=1e-5)
        yield activations.to_codes(x, codes, _HIDDEN, glu=glu)
    yield activations.to_floats(x, floats, _HIDDEN)
    yield activations.to_floats(x, floats, _HIDDEN, weight=weight, eps=1e-5)
    yield activations.to_floats(x.bfloat16(), floats, _HIDDEN, glu=glu)


def embedded(weights: Weights) -> KernelLaunch:
    """Return the launch that looks up tokens in a matrix of such codes."""
    packed, ids, x = matrix(weights), _empty((2,), torch.int64), _empty((2, _K))
    return embedding.embed(packed.qweight, packed.scale, ids, x, 1.0, packed.bias, packed.table)


def tokens() -> Iterator[KernelLaunch]:
    """Yield the launches that draw token ids."""
    ids = _empty((2,), torch.int64)
    room = sample.SampleRoom.empty(2, _VOCAB, _HOST)
    yield from sample.sample(_empty((2, _VOCAB)), ids, _empty((2,)), _empty((2,)), ids, room)


def adapters(dtype: torch.dtype) -> Iterator[KernelLaunch]:
    """Yield the launches of adapters in this dtype, into what our kernels and what the library's products have made."""
    uses = _empty((2, 3, len(low_rank.USE_WORDS)), torch.int64)
    t = low_rank.new_ranks(uses, 2, 64)
    yield low_rank.shrink(uses, 5, _empty((2, _K)), t, dtype)
    for y in (_empty((2, _N)), _empty((2, _N), dtype)):
        yield low_rank.expand(uses, 5, t, y, dtype)


def attention(
    heads: Heads, *, is_step: bool = False, groups: tuple[int | None, ...] = GROUPS[:1], most_rows: int = PREFILL_ROWS
) -> Iterator[KernelLaunch]:
    """Yield the launches of attention for a few rows and for many, ending in floats and in codes for matrices in these
    groups; is_step: for a few. most_rows: of a program."""
    H, KH, D, dtype = heads.heads, heads.kv_heads, heads.head_dim, heads.dtype
    dense = PageLayout(KH, D, "dense", "dense", dtype)
    coded = None if heads.keys == "dense" else PageLayout(KH, D, heads.keys, heads.values, dtype)
    norms = (_empty((D,)), _empty((D,))) if heads.has_norms else (None, None)
    for rows, sections in ((16, 8),) if is_step else ((16, 8), (PREFILL_ROWS, 1)):
        tables = TokenTables(_empty((rows,), torch.int32), *(_empty((rows,), torch.int64) for _ in range(3)))
        history = AttentionHistory(_empty((rows, 4), torch.int32), _empty((rows, 32), torch.int64))
        q = _empty((rows, H, D))
        outs: list[Tensor | Codes] = [_empty((rows, H * D)), *codes_of_heads(rows, H, D, groups)]
        gate = _empty((rows, heads.gate_features)) if heads.gate_features else None
        sinks = _empty((H,)) if heads.has_sinks else None
        qkv = _empty((rows, H + 2 * KH, D))
        qkv = qkv if sections > 1 else qkv.to(dtype)  # of many rows, as the library's product gives them
        turning = Rope(_empty((1, int(D * heads.rotary) // 2)), 1.0, *norms)
        turning = replace(turning, growth=0.1) if heads.has_growth else turning
        yield rope.rope_store(qkv, q, tables, turning, dense, coded, 3)
        parts, block = new_parts(sections, rows, H, D, _HOST), block_rows(H // KH, is_prefill=sections == 1)
        options = {"scale": D**-0.5, "window": heads.window, "softcap": heads.softcap, "gate": gate, "sinks": sinks}
        for out in outs:
            yield from attend(q, out, tables, history, parts, dense, coded, 3, **options, rows=min(block, most_rows))
        if heads.chooses:
            words = _empty((rows, 4), torch.int64)
            choices, chosen = (
                Choices(_empty((rows,), torch.int32), words, words, 64),
                ChosenTables(words, new_chosen(rows, KH, 64)),
            )
            yield from choose(q, chosen.tables, tables, history, choices, dense, coded, 3, scale=D**-0.5)
            at_once = min(block, most_rows)
            yield from attend(
                q, outs[0], tables, history, parts, dense, coded, 3, **options, rows=at_once, chosen=chosen
            )
        if heads.watches:
            watched = Watched(_empty((16, 4), torch.int32), _empty((16, 2), torch.int64))
            own, scoring = parts if sections > 1 else None, {"scale": D**-0.5, "softcap": heads.softcap, "sinks": sinks}
            yield from watch(q, tables, history, watched, own, 8, dense, coded, 3, **scoring)


def latents(
    heads: LatentHeads, *, is_step: bool = False, groups: tuple[int | None, ...] = GROUPS[:1]
) -> Iterator[KernelLaunch]:
    """Yield the launches of latent attention for a few rows and for many; is_step: for a few."""
    H, D, latent, dtype = heads.heads, heads.latent_dim + heads.shared_dim, heads.latent_dim, heads.dtype
    dense, coded = heads.layouts
    for rows, sections in ((16, 8),) if is_step else ((16, 8), (PREFILL_ROWS, 1)):
        tables = TokenTables(_empty((rows,), torch.int32), *(_empty((rows,), torch.int64) for _ in range(3)))
        history = AttentionHistory(_empty((rows, 4), torch.int32), _empty((rows, 32), torch.int64))
        q, absorbed = new_queries(rows, H, dense), _empty((rows, H * latent))
        outs: list[Tensor | Codes] = [_empty((rows, H * latent)), *codes_of_heads(rows, H, latent, groups)]
        turning, kept = _empty((rows, H * heads.shared_dim)), _empty((rows, D))
        if sections == 1:  # as the library's product gives them
            turning, kept = turning.to(dtype), kept.to(dtype)
        rope = Rope(_empty((1, heads.shared_dim // 2)), 1.0, None, _empty((latent,)), 1e-5)
        yield latent_store(absorbed, turning, kept, q, tables, rope, dense, coded, 3)
        parts, block = new_parts(sections, rows, H, latent, _HOST), block_rows(H, is_prefill=sections == 1)
        for out in outs:
            yield from attend_latents(q, out, tables, history, parts, dense, coded, 3, scale=0.1, rows=block)


def codes_of_heads(rows: int, heads: int, head_dim: int, groups: tuple[int | None, ...]) -> Iterator[Codes]:
    for group in groups:
        length, bits = (INT8_GROUP, 8) if group is None else (group, 4)
        if can_code(head_dim, length):
            yield Codes.empty(rows, heads * head_dim, length, _HOST, bits)


def deltas(shape: DeltaShape, groups: tuple[int | None, ...] = (*GROUPS[:1], None)) -> Iterator[KernelLaunch]:
    """Yield the launches of a layer of Gated DeltaNet or of Kimi Delta Attention, ending in floats and in codes for
    matrices in these groups, and behind a product of the library's."""
    rows, heads = 2, shape.value_heads
    tables = SegmentTables(_empty((rows, len(STATE_WORDS)), torch.int64), _empty((rows,), torch.int32))
    rank = 0 if shape.decays == "head" else shape.key_dim
    vectors = _empty((heads,)), _empty((shape.decay_features,)), _empty((shape.value_dim,))
    weights = DeltaWeights(_empty((shape.conv_width, shape.channels)), *vectors, gate="sigmoid" if rank else "silu")
    wide = _empty((rows, shape.channels + (rank or shape.value_features)))
    gates = _empty((rows, heads + rank + shape.decay_features))
    z = _empty((rows, shape.value_features)) if rank else wide[:, shape.channels :]
    outs: list[Tensor | Codes] = [_empty((rows, shape.value_features))]
    place = StatePlace(3 * shape.state_bytes, 3 * shape.snapshot_bytes)
    outs += codes_of_heads(rows, heads, shape.value_dim, groups)
    own = heads + (rank or shape.decay_features)
    parts = RouterWeights(_empty((own, _HIDDEN)), norm=_empty((_HIDDEN,)), eps=1e-5)
    for count in (1, 4, 512):
        made = _empty((count, gates.shape[1]))
        yield routing.logits_of(_empty((count, _HIDDEN)), parts, made[:, :own])
        if rank:
            second = RouterWeights(_empty((shape.decay_features, rank)))
            yield routing.logits_of(made[:, heads:own], second, made[:, own:])
    yield from delta.mix(wide.bfloat16(), gates, z.bfloat16(), outs[0], tables, weights, shape, place)
    for out in outs:
        yield from delta.mix(wide, gates, z, out, tables, weights, shape, place)


def convs(shape: ConvShape, groups: tuple[int | None, ...] = (*GROUPS[:1], None)) -> Iterator[KernelLaunch]:
    """Yield the launches of a short convolution, with a bias and without one, as `deltas` does."""
    rows, bias = 2, _empty((shape.channels,))
    tables = SegmentTables(_empty((rows, len(STATE_WORDS)), torch.int64), _empty((rows,), torch.int32))
    weights = ConvWeights(_empty((shape.conv_width, shape.channels)))
    wide, floats = _empty((rows, 3 * shape.channels)), _empty((rows, shape.channels))
    place, block = StatePlace(3 * shape.state_bytes, 3 * shape.snapshot_bytes), short_conv.block_of(shape)
    yield short_conv.convolve(wide.bfloat16(), floats, tables, weights, shape, place)
    outs: list[Tensor | Codes] = [floats, *codes_of_heads(rows, shape.channels // block, block, groups)]
    for out in outs:
        yield short_conv.convolve(wide, out, tables, replace(weights, bias=bias), shape, place)


def mambas(shape: Mamba2Shape, has_norm: bool = True, is_gated: bool = True) -> Iterator[KernelLaunch]:
    """Yield the launches of a layer of Mamba 2, behind a product of ours and behind one of the library's."""
    rows, heads = 2, shape.num_heads
    tables = SegmentTables(_empty((rows, len(STATE_WORDS)), torch.int64), _empty((rows,), torch.int32))
    a_log, dt_bias, d = (_empty((heads,)) for _ in range(3))
    conv, conv_bias = _empty((shape.conv_width, shape.channels)), _empty((shape.channels,))
    norm = _empty((shape.features,)) if has_norm else None
    weights = Mamba2Weights(conv, conv_bias, a_log, dt_bias, d, norm, norm_is_gated=is_gated)
    wide, steps = _empty((rows, shape.features + shape.channels)), _empty((rows, heads))
    place = StatePlace(3 * shape.state_bytes, 3 * shape.snapshot_bytes)
    for each in (wide, wide.bfloat16()):
        yield from mamba2.mix(each, steps, _empty((rows, shape.features)), tables, weights, shape, place)


def rwkv7s(shape: Rwkv7Shape, groups: tuple[int | None, ...] = (*GROUPS[:1], None)) -> Iterator[KernelLaunch]:
    """Yield the launches of both blocks of a layer of RWKV-7, of its first one and another, as `deltas` does."""
    rows, size, channels = 2, shape.features, ShiftShape(shape.features)
    tables = SegmentTables(_empty((rows, len(STATE_WORDS)), torch.int64), _empty((rows,), torch.int32))
    vector, x, mixes = _empty((size,)), _empty((rows, size)), _empty((len(RWKV7_MIXED), size))
    for bias in (None, vector):
        yield layer_norm(x, x, vector, bias, 1e-5)
    place = StatePlace(3 * shape.state_bytes, 3 * shape.snapshot_bytes)
    yield shift.shift(x, mixes, _empty((len(mixes), rows, size)), tables, shape, place, keeps=False)
    yield shift.shift(x, mixes[:1], _empty((1, rows, size)), tables, channels, place, keeps=True)
    weights = TimeMixWeights(mixes, vector, vector, vector, vector, vector, 1e-5)
    outs: list[Tensor | Codes] = [x, *codes_of_heads(rows, shape.num_heads, shape.head_dim, groups)]
    for value_gate, out in product((None, x), outs):
        projected = rwkv.Projected(x, x, x, x, x, x, x, value_gate)
        yield from rwkv.mix_time(projected, x, out, tables, weights, shape, place)


OTHER_HEADS = (
    Heads(head_dim=64, window=128, has_sinks=True),
    Heads(head_dim=96, has_growth=True),
    Heads("dense", "dense", head_dim=80),
    Heads("dense", "dense", 64, dtype=torch.float32),
    Heads("int8", "int4", heads=8),
    Heads(window=300, softcap=50.0, has_norms=True),
    Heads(head_dim=256),
    Heads(head_dim=256, heads=16, kv_heads=2, has_norms=True, has_gate=True, rotary=0.25),
    Heads(heads=16, kv_heads=4, has_norms=True, gates_heads=True),
)
# Where tokens choose their pages, or what pages get is summed up.
CHOOSING = (
    Heads(watches=True, chooses=True),
    Heads("int8", "int4", heads=16, kv_heads=4, chooses=True),
    Heads("int4", "int4", chooses=True),
    Heads("dense", "dense", 80, 14, 2, softcap=5.0, has_sinks=True, watches=True, chooses=True),
)
OTHER_RWKV7S = (Rwkv7Shape(16, 128), Rwkv7Shape(3, 48), Rwkv7Shape(4, 256))
OTHER_MAMBAS = ((MAMBAS[1], True, False), (Mamba2Shape(80, 64, 1, 128), False), (Mamba2Shape(2, 16, 1, 16, 2),))
OTHER_DELTAS = (
    *DELTAS[1:],
    DeltaShape(16, 48, 256, 256),
    DeltaShape(2, 4, 16, 16, conv_width=2),
    DeltaShape(8, 8, 256, 256, decays="key"),
)


OTHER_LATENTS = (
    LatentHeads("int4", 20),
    LatentHeads("dense", 128),
    LatentHeads("int8", 40, 256, 32, 32),
    LatentHeads("int4", 40, 256, 32, 32),
    LatentHeads("dense", 40, 256, 32, 32),
)


def launches_of_steps(*, is_brief: bool = False) -> Iterator[KernelLaunch]:
    """What a card launches that takes steps of a few rows only, in fp32."""
    few = Dispatch(multiprocessors=40, gemv_rows=FEW_ROWS, most_rows=FEW_ROWS)
    for weights in BRIEF_WEIGHTS if is_brief else WEIGHTS:
        yield embedded(weights)
        yield from products(weights, (1, 2, 4, 16), dispatch=few)
        yield from experts(weights, ((1, 8, 128),) if is_brief else ((1, 8, 128), (16, 2, 8)), few)
    yield from routers(ROUTERS[:1] if is_brief else ROUTERS, (1, 16))
    for group in GROUPS[:1] if is_brief else (16, *GROUPS):
        yield from rows_between(group)
    for glu in GLUS[1:2] if is_brief else GLUS[1:]:
        yield from rows_between(glu=glu)
    yield from tokens()
    yield from adapters(torch.float32)
    for shape in DELTAS[:1] if is_brief else (*DELTAS[:1], *OTHER_DELTAS):
        yield from deltas(shape)
    for conv in CONVS[:1] if is_brief else CONVS:
        yield from convs(conv)
    for given in ((MAMBAS[0],),) if is_brief else ((MAMBAS[0],), *OTHER_MAMBAS):
        yield from mambas(*given)
    for time_mix in RWKV7S if is_brief else (*RWKV7S, *OTHER_RWKV7S):
        yield from rwkv7s(time_mix)
    for heads in map(partial(Heads, dtype=torch.float32), *zip(*(BRIEF_FORMATS if is_brief else FORMATS), strict=True)):
        yield from attention(heads, is_step=True)
    for heads in CHOOSING[:1] if is_brief else (*OTHER_HEADS, *CHOOSING):
        yield from attention(replace(heads, dtype=torch.float32), is_step=True)
    for each in (LatentHeads(), *(() if is_brief else OTHER_LATENTS)):
        yield from latents(replace(each, dtype=torch.float32), is_step=True)
    for weights in (BRIEF_WEIGHTS if is_brief else WEIGHTS)[:4]:
        yield from by_head(weights, (1, 16), few)


def launches_of_all(capability: int, *, is_brief: bool = False) -> Iterator[KernelLaunch]:
    """One of every kernel in every format; briefly, in as few as have all of its ways."""
    attending = partial(attention, most_rows=FEW_PREFILL_ROWS if capability // 10 in WARP_GROUPS else PREFILL_ROWS)
    for weights in BRIEF_WEIGHTS if is_brief else WEIGHTS:
        yield embedded(weights)
        yield from products(weights, (1, 4, 16, 32, 512), adding=(True,))
        yield from experts(weights)
    yield from routers(ROUTERS[:1] if is_brief else ROUTERS)
    for group in GROUPS[:1] if is_brief else (16, *GROUPS):
        yield from rows_between(group)
    for glu in GLUS[1:2] if is_brief else GLUS[1:]:
        yield from rows_between(glu=glu)
    yield from tokens()
    for dtype in (torch.bfloat16,) if is_brief else (torch.bfloat16, torch.float16, torch.float32):
        yield from adapters(dtype)
    for shape in DELTAS[:1] if is_brief else (*DELTAS[:1], *OTHER_DELTAS):
        yield from deltas(shape)
    for conv in CONVS[:1] if is_brief else CONVS:
        yield from convs(conv)
    for given in ((MAMBAS[0],),) if is_brief else ((MAMBAS[0],), *OTHER_MAMBAS):
        yield from mambas(*given)
    for time_mix in RWKV7S if is_brief else (*RWKV7S, *OTHER_RWKV7S):
        yield from rwkv7s(time_mix)
    for keys, values in BRIEF_FORMATS if is_brief else FORMATS:
        yield from attending(Heads(keys, values), groups=GROUPS[:1] if is_brief else (*GROUPS, None))
    for heads in CHOOSING[:1] if is_brief else (*OTHER_HEADS, *CHOOSING):
        yield from attending(heads)
    for each in (LatentHeads(), *(() if is_brief else OTHER_LATENTS)):
        yield from latents(each)
    for weights in (BRIEF_WEIGHTS if is_brief else WEIGHTS)[:4]:
        yield from by_head(weights)


def launches_of_check(dispatch: Dispatch, dtype: torch.dtype | None = None) -> list[KernelLaunch]:
    """What the check compiles where a card is new, see `check.BRIEF`."""
    with mock.patch.object(check_cases, "dispatch_for", lambda _device: dispatch):
        return launches_of(_HOST, sizes_for(BRIEF, dispatch.most_rows, dtype))[0]


def chosen_for(capability: int, which: str) -> list[KernelLaunch]:
    """Return what is compiled for a card, each variant once. which: an option's name, or "all"."""
    has_tensor_cores = capability >= 80  # that Triton multiplies with
    launches: Iterable[KernelLaunch]
    if which == "check":
        dispatch = Dispatch(28) if has_tensor_cores else Dispatch(28, gemv_rows=FEW_ROWS, most_rows=FEW_ROWS)
        launches = launches_of_check(dispatch, None if has_tensor_cores else torch.float32)
    else:
        of_card = partial(launches_of_all, capability) if has_tensor_cores else launches_of_steps
        launches = of_card(is_brief=which != "all")
    if which == "one_each":  # a prompt's attention alone would take twice as long as all others: 12 s on sm_120
        launches = (each for each in launches if each.constants.get("BLOCK_R", 0) <= _WIDE_ROWS)
    return list({each.name if which == "one_each" else variant(each): each for each in launches}.values())


def _empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def variant(launch: KernelLaunch) -> str:
    """Return what all launches have in common that Triton compiles once for."""
    types = {name: (_type(launch, name), _is_aligned(launch, name)) for name in launch.kernel.arg_names}
    return repr((launch.name, types, _constexprs(launch), launch.num_warps, launch.num_stages))


class Compiled(NamedTuple):
    """spilled_bytes: that a thread stores beside its registers. wide_loads: of 128 bits from global memory, one by one
    or to shared memory. is_early: it may be launched before the one before it has ended, and reads or writes before it
    has waited for that."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    wide_loads: int
    is_early: bool
    cubin: bytes


def compiled_for(launch: KernelLaunch, capability: int) -> Compiled:
    """Compile for sm_{capability}, with no card at hand.

    Raises triton.CompilationError, and RuntimeError where the machine code cannot be made or wants more shared memory
    than the card has.
    """
    names, constants = list(launch.kernel.arg_names), {**_constexprs(launch), **launch.constants_on(capability)}
    source = ASTSource(
        fn=launch.kernel,
        signature={name: _type(launch, name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", _ALIGN]] for name in names if _is_aligned(launch, name)},
    )
    _logs.pop(get_ident(), None)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options_on(capability))
    ptx, shared_bytes = made.asm["ptx"], made.metadata.shared
    if shared_bytes > SHARED_BYTES[capability]:
        raise RuntimeError(f"{launch.name} wants {shared_bytes} bytes of sm_{capability}'s {SHARED_BYTES[capability]}")
    wide_loads = re.findall(r"ld\.global[^;]*\.v4\.b32|ld\.global[^;]*\.v2\.b64|cp\.async\S* [^;]*, 0x10", ptx)
    said = _logs.pop(get_ident(), "") or _assembled(ptx)
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None and spilled is not None, "ptxas says what a kernel takes"
    before_wait, waits, _ = ptx.partition("griddepcontrol.wait")
    is_early = made.metadata.launch_pdl and not (waits and _MEMORY.search(before_wait) is None)
    return Compiled(int(registers[1]), int(spilled[1]), shared_bytes, len(wide_loads), is_early, made.asm["cubin"])


def _constexprs(launch: KernelLaunch) -> dict[str, Any]:
    """Triton makes a constant of every number that is one, and variants for multiples of 16, unless told not to."""
    ones = {name: 1 for name, value in launch.arguments.items() if isinstance(value, int) and value == 1}
    absent = {name: None for name, value in launch.arguments.items() if value is None}
    return {**{name: 1 for name in ones if name not in _unspecialized(launch)}, **absent, **launch.constants}


def _unspecialized(launch: KernelLaunch) -> frozenset[str]:
    if is_interpreted():
        return frozenset(launch.kernel.kwargs["do_not_specialize"] or ())
    return frozenset(parameter.name for parameter in launch.kernel.params if parameter.do_not_specialize)


def _type(launch: KernelLaunch, name: str) -> str:
    value = launch.arguments.get(name)
    if value is None or name in _constexprs(launch):
        return "constexpr"
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _is_aligned(launch: KernelLaunch, name: str) -> bool:
    value = launch.arguments.get(name)
    if value is None or isinstance(value, float) or name in _constexprs(launch) or name in _unspecialized(launch):
        return False
    return (value.data_ptr() if isinstance(value, Tensor) else value) % _ALIGN == 0


def loops_of(cubin: bytes) -> Iterator[list[str]]:
    """Yield the lines of each loop, as Triton's disassembler has them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True)
    lines, labels = done.stdout.splitlines(), dict[str, int]()
    for number, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = number
        elif (branch := re.search(r"BRA.*?(\.L_x_\d+)", line)) and branch[1] in labels:
            yield lines[labels[branch[1]] : number]


def _assembled(ptx: str) -> str:
    """Return what the assembler says of registers and spills, where Triton has not just asked it. Triton brings two:
    the older one refuses newer targets."""
    found = re.search(r"\.target (\S+)", ptx)
    assert found is not None, "every PTX names its target"
    folder, said = Path(triton.__file__).parent / "backends/nvidia/bin", ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        for assembler in (folder / "ptxas", folder / "ptxas-blackwell"):
            if not assembler.exists():
                continue
            command = [str(assembler), "-v", f"--gpu-name={found[1].rstrip(',')}", file.name, "-o", os.devnull]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stderr
            said = done.stderr
    raise RuntimeError(f"ptxas refuses it: {said[:500]}")


def faults(launch: KernelLaunch, capability: int) -> Iterator[str]:
    """The faults of one kernel for sm_{capability}."""
    named = f"sm_{capability}: {launch.name} {_shown(launch)}"
    try:
        compiled = compiled_for(launch, capability)
    except Exception as error:  # Triton raises what its compiler does
        yield f"{named}: {type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}"
        return
    if compiled.spilled_bytes > _ASIDE_BYTES and not _may_spill(launch):
        loops = chain(*loops_of(compiled.cubin))
        if compiled.spilled_bytes > _ONCE_BYTES or any(re.search(r"\b(STL|LDL)\b", line) for line in loops):
            yield f"{named}: spills {compiled.spilled_bytes} bytes a thread"
    if compiled.is_early:
        yield f"{named}: does not wait for the kernels before it"
    if _reads_wide(launch) and not compiled.wide_loads:
        yield f"{named}: no load of 128 bits"


def _may_spill(launch: KernelLaunch) -> bool:
    """A prompt's attention to heads of 256 spills in its loops, however it is cut but into 16 rows, and then takes half
    as many instructions again: 606 a row and page on sm_86, where it is 396 with those that spill."""
    return launch.name == "_attend" and launch.constants["BLOCK_R"] > _WIDE_ROWS and launch.constants["D"] > 128


def _reads_wide(launch: KernelLaunch) -> bool:
    return launch.name in READERS and launch.constants.get("ROWS", 0) <= _WIDE_ROWS


def _shown(launch: KernelLaunch) -> str:
    return ", ".join(f"{name}={value}" for name, value in launch.constants.items() if name.isupper())


def all_faults(work: Iterable[tuple[KernelLaunch, int]], threads: int) -> list[str]:
    """work: what is compiled, and for which card. Half of a compilation is an assembler, which is a process of its
    own."""
    triton.knobs.nvidia.dump_ptxas_log = True  # Triton prints it, on the thread that compiles
    log = mock.patch.object(nvidia_compiler, "print", lambda said: _logs.update({get_ident(): said}), create=True)
    with log, ThreadPoolExecutor(threads) as pool:
        try:
            return [fault for some in pool.map(lambda each: list(faults(*each)), work) for fault in some]
        except KeyboardInterrupt:
            os._exit(130)  # a compilation hears of no signal, and there is nothing to keep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", type=int, nargs="+", choices=SHARED_BYTES, help="as 86 for sm_86")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="compilations at once")
    some = parser.add_mutually_exclusive_group()
    for name, told in (
        ("--brief", "each kernel in as few formats as have all of its ways"),
        ("--one-each", "each kernel in one of them, as steps launch it"),
        ("--check", "what the check of a card compiles, and how long it takes"),
    ):
        const = name.strip("-").replace("-", "_")
        some.add_argument(name, action="store_const", dest="which", const=const, default="all", help=told)
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error(f"argument --threads: {arguments.threads} is not a number of threads")
    if is_interpreted():
        parser.error("what is interpreted is not compiled: unset TRITON_INTERPRET")
    work = [
        (launch, capability)
        for capability in arguments.capabilities
        for launch in chosen_for(capability, arguments.which)
    ]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as empty:  # what Triton has kept says nothing of spills any more
        triton.knobs.cache.dir = empty
        found = all_faults(work, arguments.threads)
    print("\n".join(found))
    wall_s, cpu_s = time.perf_counter() - started, sum(os.times()[:4])
    print(
        f"triton {triton.__version__}: {len(work)} compiled, {len(found)} faults; {wall_s:.0f} s, {cpu_s:.0f} s of CPU"
    )
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

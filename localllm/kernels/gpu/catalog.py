"""Every kernel as models launch it, on tensors of nobody: to be compiled for a card, here or elsewhere, ahead of use.

A variant is what Triton compiles once: other sizes of matrices, and other numbers of tokens, are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product as combinations

import torch
from torch import Tensor

from localllm.kernels.gpu import activations, dequantize, embed, rope, sample
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention import PREFILL_ROWS, AttentionHistory, attend, block_rows
from localllm.kernels.gpu.attention_merge import new_parts
from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.gpu.rope import Rope, TokenTables
from localllm.kernels.kv_page import Coding, PageLayout
from localllm.kernels.packed_matrix import INT8_GROUP, PackedMatrix
from localllm.kernels.tile16 import TILE

_N, _K, _HIDDEN, _VOCAB = 4096, 4096, 4096, 32000
_HOST = torch.device("cpu")
FORMATS: tuple[tuple[Coding, Coding], ...] = (("dense", "dense"), ("int8", "int8"), ("int8", "int4"), ("int4", "int4"))
BRIEF_FORMATS = (FORMATS[0], FORMATS[2])
GROUPS = (64, 32, 128)  # of INT4 weights; the first is what models are packed with


def matrix(group: int | None) -> PackedMatrix:
    """[_N, _K]: INT4 in groups, or INT8."""
    tiles = _N // TILE
    if group is None:
        return PackedMatrix(_empty((tiles, _K // 4, TILE, 4), torch.int8), _empty((tiles, TILE)), None)
    values = _empty((tiles, _K // group, TILE), torch.float16)
    return PackedMatrix(_empty((tiles, _K // 8, TILE), torch.int32), values, values)


def products(
    group: int | None, rows: tuple[int, ...] = (1, 2, 4, 16, 32, 64), adding: tuple[bool, ...] = (False, True)
) -> Iterator[KernelLaunch]:
    """Yield the launches of a matrix in such groups with so many rows: into a new buffer, and added to what is
    there."""
    weights, dispatch = matrix(group), Dispatch(multiprocessors=64)
    for count, adds, bits in combinations(rows, adding, (8, 16)):
        codes = Codes.empty(count, _K, weights.group, _HOST, bits)
        yield from dispatch.product(codes, weights, _empty((count, _N)), _N, None, adds=adds)


def dequantized(group: int | None) -> KernelLaunch:
    return dequantize.dequantize(matrix(group), _empty((_N, _K), torch.bfloat16), 0, _N // TILE, _N)


def rows_between(group: int = INT8_GROUP, activation: str = "silu") -> Iterator[KernelLaunch]:
    """Yield the launches between the matrices of a model in such groups."""
    x, weight = _empty((2, 2 * _HIDDEN)), _empty((_HIDDEN,))
    floats = _empty((2, _HIDDEN), torch.bfloat16)
    for codes in (Codes.empty(2, _HIDDEN, group, _HOST, bits) for bits in (8, 16)):
        yield activations.to_codes(x, codes, _HIDDEN)
        yield activations.to_codes(x, codes, _HIDDEN, weight=weight, eps=1e-5)
        yield activations.to_codes(x, codes, _HIDDEN, activation=activation)
    yield activations.to_floats(x, floats, _HIDDEN)
    yield activations.to_floats(x, floats, _HIDDEN, weight=weight, eps=1e-5)
    yield activations.to_floats(x.bfloat16(), floats, _HIDDEN, activation=activation)


def tokens() -> Iterator[KernelLaunch]:
    """Yield the launches from token ids, and to them."""
    ids, x = _empty((2,), torch.int64), _empty((2, _HIDDEN))
    yield embed.embed(_empty((_VOCAB // TILE, _HIDDEN // 4, TILE, 4), torch.int8), _empty((_VOCAB,)), ids, x, 1.0)
    room = sample.SampleRoom.empty(2, _VOCAB, _HOST)
    yield from sample.sample(_empty((2, _VOCAB)), ids, _empty((2,)), _empty((2,)), ids, room)


@dataclass(frozen=True)
class Heads:
    """A way of attention that models have. keys, values: how their pages are coded."""

    keys: Coding = "int8"
    values: Coding = "int8"
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    window: int | None = None
    softcap: float | None = None
    has_norms: bool = False
    rotary: float = 1.0  # of a head's features, the share that RoPE turns
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        differs = [f"{f.name} {v}" for f in fields(self)[3:] if (v := getattr(self, f.name)) != f.default]
        return ", ".join([f"{self.keys}/{self.values} pages, heads of {self.head_dim}", *differs])


def attention(heads: Heads, *, is_step: bool = False) -> Iterator[KernelLaunch]:
    """Yield the launches of attention for a few rows and for many; is_step: for a few."""
    H, KH, D, dtype = heads.heads, heads.kv_heads, heads.head_dim, heads.dtype
    dense = PageLayout(KH, D, "dense", "dense", dtype)
    coded = None if heads.keys == "dense" else PageLayout(KH, D, heads.keys, heads.values, dtype)
    norms = (_empty((D,)), _empty((D,))) if heads.has_norms else (None, None)
    whole, wide = (lambda *shape: _empty(shape, torch.int32)), (lambda *shape: _empty(shape, torch.int64))
    for rows, sections in ((16, 8),) if is_step else ((16, 8), (PREFILL_ROWS, 1)):
        tables = TokenTables(whole(rows), wide(rows), wide(rows), wide(rows))
        history = AttentionHistory(whole(rows, 4), wide(rows, 32))
        q, out = _empty((rows, H, D)), _empty((rows, H * D))
        qkv = _empty((rows, H + 2 * KH, D))
        qkv = qkv if sections > 1 else qkv.to(dtype)  # of many rows, as the library's product gives them
        yield rope.rope_store(
            qkv, q, tables, Rope(_empty((1, int(D * heads.rotary) // 2)), 1.0, *norms), dense, coded, 3
        )
        parts, block = new_parts(sections, rows, H, D, _HOST), block_rows(H // KH, is_prefill=sections == 1)
        options = {"scale": D**-0.5, "window": heads.window, "softcap": heads.softcap}
        yield from attend(q, out, tables, history, parts, dense, coded, 3, **options, rows=block)


OTHER_HEADS = (
    Heads(head_dim=64),
    Heads(head_dim=96),
    Heads("dense", "dense", head_dim=80),
    Heads("dense", "dense", 64, dtype=torch.float32),
)
# Of many rows these store 4 to 64 bytes a thread beside the registers on some cards, and of 256 features up to 516; in
# programs of 16 rows they would not, and read each page eight times as often.
STEP_HEADS = (
    Heads("int8", "int4", heads=8),
    Heads(window=300, softcap=50.0, has_norms=True),
    Heads(head_dim=256),
)


def launches(*, is_brief: bool = False) -> Iterator[KernelLaunch]:
    """One of every kernel in every format; briefly, in as few as have all of its ways."""
    for group in (GROUPS[0], None) if is_brief else (*GROUPS, None):
        yield from products(group, (1, 4, 16, 32, 64), adding=(True,))
        yield dequantized(group)
    for group in GROUPS[:1] if is_brief else GROUPS:
        yield from rows_between(group)
    yield from rows_between(activation="gelu_tanh")
    yield from tokens()
    for keys, values in BRIEF_FORMATS if is_brief else FORMATS:
        yield from attention(Heads(keys, values))
    for heads in () if is_brief else OTHER_HEADS:
        yield from attention(heads)
    for heads in () if is_brief else STEP_HEADS:
        yield from attention(heads, is_step=True)


def _empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)

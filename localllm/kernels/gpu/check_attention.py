"""Attention over pages beside its reference on random inputs, as `check_cases` tries it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from localllm.kernels import paged_attention
from localllm.kernels.gpu import activations
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention import AttentionHistory, attend, block_rows, tasks_of
from localllm.kernels.gpu.attention_merge import Parts, can_code, new_parts
from localllm.kernels.gpu.check_case import ROUNDED, SUMMED, Case, codes_for, differing, error_of, poisoned
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.page_masses import Watched, watch
from localllm.kernels.gpu.rope import Rope, TokenTables, rope_store
from localllm.kernels.kv_page import PAGE_TOKENS, Coding, PageLayout
from localllm.kernels.paged_attention import LayerPages
from localllm.kernels.sizes import Weights

LAYER = 1
EPS = 1e-5
FORMATS: tuple[tuple[Coding, Coding], ...] = (("dense", "dense"), ("int8", "int8"), ("int8", "int4"), ("int4", "int4"))


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
    has_gate: bool = False
    gates_heads: bool = False
    has_sinks: bool = False
    has_growth: bool = False
    watches: bool = False  # what its pages get is summed up
    chooses: bool = False  # the pages that it attends to
    rotary: float = 1.0  # of a head's features, the share that RoPE turns
    dtype: torch.dtype = torch.bfloat16

    @property
    def gate_features(self) -> int:
        return self.heads * (self.head_dim if self.has_gate else 1 if self.gates_heads else 0)

    def __str__(self) -> str:
        differs = [f"{f.name} {v}" for f in fields(self)[3:] if (v := getattr(self, f.name)) != f.default]
        return ", ".join([f"{self.keys}/{self.values} pages, heads of {self.head_dim}", *differs])

    @property
    def layouts(self) -> tuple[PageLayout, PageLayout | None]:
        """Of dense and of coded pages."""
        of = (self.kv_heads, self.head_dim)
        dense = PageLayout(*of, "dense", "dense", self.dtype)
        return dense, None if self.keys == "dense" else PageLayout(*of, self.keys, self.values, self.dtype)

    @property
    def masks(self) -> dict[str, Any]:
        """What becomes of scores."""
        return {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap}


ATTENTION = (
    *(Heads(keys, values, head_dim) for head_dim in (64, 128) for keys, values in FORMATS),
    Heads("int8", "int8", heads=3, kv_heads=3),
    Heads("int8", "int4", window=300),
    Heads("dense", "dense", window=300, softcap=5.0),
    Heads("int4", "int4", 256, 4, 1, softcap=5.0),
    Heads("int8", "int8", 96, 12, 2, has_growth=True),
    Heads("dense", "dense", 80, 6, 2, has_sinks=True),
    Heads("int8", "int8", 64, 16, 2, window=300, has_sinks=True),
    Heads("int8", "int8", has_norms=True, rotary=0.5),
    Heads("int8", "int8", 256, 4, 1, has_norms=True, has_gate=True, rotary=0.25),
    Heads("int8", "int8", heads=16, kv_heads=4, has_norms=True, gates_heads=True),
    Heads("dense", "dense", 64, dtype=torch.float32),
    Heads("int8", "int8", heads=8, kv_heads=2, watches=True, chooses=True),
    Heads("int4", "int4", 64, 4, 2, chooses=True),
    Heads("dense", "dense", 80, 6, 2, softcap=5.0, has_sinks=True, watches=True, chooses=True),
)


def attention_cases(device: torch.device, heads: Heads, matrices: Iterable[Weights] = ()) -> Iterator[Case]:
    """New tokens behind 700, over the border of a page, beside torch's operators over a copy of the pages. Each row of
    a prompt must have the bits that it has in a step; codes for such matrices, those of a launch of their own."""
    H, KH, D = heads.heads, heads.kv_heads, heads.head_dim
    for count, is_prefill in ((5, False), (70, True)):
        pages = Pages(device, heads.layouts, past=702, count=count)
        qkv = torch.randn((count, H + 2 * KH, D), device=device)
        inv_freq = torch.rand((1, int(D * heads.rotary) // 2), device=device) * 0.1
        q_norm, k_norm = torch.rand((2, D), device=device) if heads.has_norms else (None, None)
        q, k, v = torch.split(qkv, [H, KH, KH], dim=1)
        rope = Rope(inv_freq, 1.0, q_norm, k_norm, EPS, 0.5 if heads.has_growth else None, 100)
        positions = torch.arange(702, 702 + count, device=device)[:, None, None]
        q, k = (turned(normed(x, norm), positions * inv_freq) for x, norm in ((q, q_norm), (k, k_norm)))
        q = q if rope.growth is None else q * (1 + rope.growth * torch.log1p((positions // 100).float()))
        gate = torch.randn((count, heads.gate_features), device=device) if heads.gate_features else None
        sinks = torch.randn(H, device=device) + 6 if heads.has_sinks else None  # as much as some hundred keys
        right = pages.copied().attended(q, k, v, **heads.masks, sinks=sinks)
        if gate is not None:
            right = (right.view(count, H, D) * gate.sigmoid().view(count, H, -1)).flatten(1)
        rows, options = block_rows(H // KH, is_prefill=is_prefill), {"sinks": sinks, "gate": gate, **heads.masks}
        in_steps = pages.copied()
        found, stepwise = (poisoned(count, H * D, device=device) for _ in range(2))
        pages.by_kernels(qkv, rope, rows, found, options, is_prefill=is_prefill)
        tolerance = ROUNDED if heads.dtype is torch.bfloat16 else SUMMED
        yield Case(f"attention of {heads}, {count} rows", error_of(found, right), tolerance)
        if heads.watches:
            sums = pages.watched(qkv, rope, rows, options, is_prefill=is_prefill)
            right = pages.masses(q, heads.masks["scale"], heads.softcap, sinks)
            yield Case(f"what pages get by {heads}, {count} rows", error_of(sums.sum(1), right), ROUNDED)
        if is_prefill:
            in_steps.by_kernels(qkv, rope, block_rows(H // KH, is_prefill=False), stepwise, options, is_prefill=False)
            yield Case(f"attention of {heads}, {count} rows: bits of steps", float((found != stepwise).sum()), 0)
        for weights in {(each.columns, each.bits): each for each in matrices}.values():
            expected, codes = (codes_for(weights, count, H * D, device) for _ in range(2))
            if can_code(D, codes.group):
                activations.to_codes(found, expected, H * D).run()
                pages.by_kernels(qkv, rope, rows, codes, options, is_prefill=is_prefill)
                yield Case(
                    f"attention of {heads}, {count} rows: codes for {weights.name}", differing(codes, expected), 0
                )


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE: x [T, heads, D], angles [T, 1, half of what is turned]."""
    half, cos, sin = angles.shape[-1], angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1)


class Pages:
    """One sequence's pages of two layers, with random tokens in them and room for `count` more."""

    def __init__(
        self, device: torch.device, layouts: tuple[PageLayout, PageLayout | None], *, past: int, count: int
    ) -> None:
        self.device, self.past, self.count = device, past, count
        self.dense, self.coded = layouts
        total = -(-(past + count) // PAGE_TOKENS)
        self.pages = [self._page(layout) for layout in [self.dense] + [self.coded or self.dense] * (total - 1)]
        first = past // PAGE_TOKENS
        is_dense = self.coded is None
        self.own = self.pages[first:] if is_dense else [self._page(self.dense) for _ in range(total - first)]
        written = torch.randn((2, past, self.dense.num_kv_heads, self.dense.head_dim), device=device)
        for begin in range(0, past, PAGE_TOKENS):
            number, part = begin // PAGE_TOKENS, written[:, begin : begin + PAGE_TOKENS]
            own = self.own[0] if number == first else self._page(self.dense) if number else self.pages[0]
            own = self.pages[number] if is_dense else own
            layer = LayerPages(self.dense, self.coded, number, [self.pages[number][LAYER]], [own[LAYER]])
            paged_attention.write(layer, begin, part[0], part[1])

    def _page(self, layout: PageLayout) -> Tensor:
        return torch.zeros((2, layout.layer_bytes), dtype=torch.uint8, device=self.device)

    def copied(self) -> Pages:
        """Return pages of the same content, as tokens were written."""
        other = copy.copy(self)
        other.pages = [page.clone() for page in self.pages]
        first = self.past // PAGE_TOKENS
        other.own = other.pages[first:] if self.coded is None else [page.clone() for page in self.own]
        return other

    def attended(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attend by torch's operators, in fp32: [T, heads of queries * features of a value]. options: of
        `paged_attention`."""
        pages, own = ([page[LAYER] for page in some] for some in (self.pages, self.own))
        layer = LayerPages(self.dense, self.coded, 0, pages, own)
        paged_attention.write(layer, self.past, k, v)
        return paged_attention.paged_attention(q, layer, self.past, **options).flatten(1)

    def tables(self, task_tokens: int) -> tuple[TokenTables, AttentionHistory]:
        """Return what kernels are told of the new tokens. task_tokens: of a task at most."""
        positions = torch.arange(self.past, self.past + self.count)
        numbers = positions // PAGE_TOKENS
        first = self.past // PAGE_TOKENS
        own = torch.tensor([self.own[number - first].data_ptr() for number in numbers.tolist()])
        addresses = torch.tensor([page.data_ptr() for page in self.pages])
        coded = torch.where(numbers > 0, addresses[numbers], 0) if self.coded is not None else torch.zeros_like(own)
        strides = torch.full((self.count,), self.dense.layer_bytes)
        tokens = TokenTables(*(x.to(self.device) for x in (positions.int(), own, strides, coded)))
        tasks = torch.tensor(list(tasks_of(0, 0, self.past, self.count, task_tokens)), dtype=torch.int32)
        return tokens, AttentionHistory(tasks.to(self.device), addresses.unsqueeze(0).to(self.device))

    def by_kernels(
        self,
        qkv: Tensor,
        rope: Rope,
        rows: int,
        out: Tensor | Codes,
        options: dict[str, Any],
        *,
        is_prefill: bool,
    ) -> tuple[Tensor, Parts]:
        """options: of `attend`. Returns queries, and what its programs have left."""
        T, D, KH = self.count, qkv.shape[-1], self.dense.num_kv_heads
        H = qkv.shape[1] - 2 * KH
        tokens, history = self.tables(rows // (H // KH))
        q = poisoned(T, H, D, device=self.device)
        rope_store(qkv, q, tokens, rope, self.dense, self.coded, LAYER).run()
        parts = new_parts(1 if is_prefill else len(self.pages), T, H, D, self.device)
        run_all(attend(q, out, tokens, history, parts, self.dense, self.coded, LAYER, rows=rows, **options))
        return q, parts

    def watched(self, qkv: Tensor, rope: Rope, rows: int, options: dict[str, Any], *, is_prefill: bool) -> Tensor:
        """Return what the pages get of the last five tokens, fp32 [tokens, KH, pages]: as `by_kernels` computes it."""
        T, KH, pages = self.count, self.dense.num_kv_heads, len(self.pages)
        H = qkv.shape[1] - 2 * KH
        q, parts = self.by_kernels(
            qkv, rope, rows, poisoned(T, H * qkv.shape[-1], device=self.device), options, is_prefill=is_prefill
        )
        sums = torch.zeros((5, KH, pages), device=self.device)
        tasks = [(row, 1, 0, i if is_prefill else row) for i, row in enumerate(range(T - 5, T))]
        places = torch.tensor([(each.data_ptr(), pages) for each in sums]).to(self.device)
        counted = Watched(torch.tensor(tasks, dtype=torch.int32).to(self.device), places)
        scoring = {name: options[name] for name in ("scale", "softcap", "sinks")}
        own, (tokens, history) = None if is_prefill else parts, self.tables(rows // (H // KH))
        run_all(watch(q, tokens, history, counted, own, pages, self.dense, self.coded, LAYER, **scoring))
        return sums

    def masses(self, q: Tensor, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Return the same by torch's operators, fp32 [tokens, pages]."""
        pages, own = ([page[LAYER] for page in some] for some in (self.pages, self.own))
        layer = LayerPages(self.dense, self.coded, 0, pages, own)
        found = torch.zeros((5, len(pages)), device=self.device)
        for i, row in enumerate(range(self.count - 5, self.count)):
            position = self.past + row
            masses = paged_attention.page_masses(q[row : row + 1], layer, position, scale, softcap, sinks)
            found[i, : len(masses)] = masses
        return found

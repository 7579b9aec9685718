"""Attention to pages of latents beside its reference on random inputs, as `check_cases` tries it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.gpu import activations
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention import block_rows
from localllm.kernels.gpu.attention_merge import can_code, new_parts
from localllm.kernels.gpu.check_attention import EPS, LAYER, Pages, normed, turned
from localllm.kernels.gpu.check_case import ROUNDED, SUMMED, Case, codes_for, differing, error_of, poisoned
from localllm.kernels.gpu.latent_attention import attend_latents, new_queries
from localllm.kernels.gpu.latent_store import latent_store
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.rope import Rope
from localllm.kernels.kv_page import Coding, KVShape, PageLayout, layout_of
from localllm.kernels.sizes import Weights


@dataclass(frozen=True)
class LatentHeads:
    """A way of latent attention that models have. keys: how its pages are coded. rotary: of the shared key's features,
    those that RoPE turns."""

    keys: Coding = "int8"
    heads: int = 16
    latent_dim: int = 512
    shared_dim: int = 64
    rotary: int = 64
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.heads} heads to {self.keys} latents of {self.latent_dim} and {self.shared_dim}"

    @property
    def layouts(self) -> tuple[PageLayout, PageLayout | None]:
        """Of own pages, and of coded ones."""
        shape = KVShape(1, self.latent_dim + self.shared_dim, self.latent_dim)
        if self.keys == "dense":
            return layout_of(shape, "dense", "dense", self.dtype), None
        own, coded = (layout_of(shape, coding, coding, self.dtype) for coding in ("int8", self.keys))
        return own, coded


# GLM 4.7 Flash and DeepSeek V2 Lite, V3, MiniCPM 3.
LATENTS = (
    LatentHeads("int8", 20),
    LatentHeads("int4", 128),
    LatentHeads("dense", 16),
    LatentHeads("int8", 40, 256, 32, 32),
    LatentHeads("int4", 16, 256, 32, 32),
    LatentHeads("int8", 4, 128, 64, 0, torch.float32),
)


def latent_cases(device: torch.device, heads: LatentHeads, matrices: Iterable[Weights] = ()) -> Iterator[Case]:
    """New tokens behind 700, over the border of a page, beside torch's operators over a copy of the pages. Each row of
    a prompt must have the bits that it has in a step; codes for such matrices, those of a launch of their own."""
    H, latent, shared, D = heads.heads, heads.latent_dim, heads.shared_dim, heads.latent_dim + heads.shared_dim
    for count, is_prefill in ((5, False), (70, True)):
        pages = Pages(device, heads.layouts, past=702, count=count)
        absorbed, turning, kept = (torch.randn((count, n), device=device) for n in (H * latent, H * shared, D))
        rope = Rope(
            torch.rand((1, heads.rotary // 2), device=device) * 0.1, 1.0, None, torch.rand(latent, device=device), EPS
        )
        angles = torch.arange(702, 702 + count, device=device)[:, None, None] * rope.inv_freq
        queries = torch.cat((absorbed.view(count, H, latent), turned(turning.view(count, H, shared), angles)), -1)
        keys = torch.cat((normed(kept[:, None, :latent], rope.k_norm), turned(kept[:, None, latent:], angles)), -1)
        right = pages.copied().attended(queries, keys, keys, scale=D**-0.5)
        in_steps, parts = pages.copied(), (absorbed, turning, kept)
        found, stepwise = (poisoned(count, H * latent, device=device) for _ in range(2))
        _by_kernels(pages, parts, rope, found, H, is_prefill=is_prefill)
        tolerance = ROUNDED if heads.dtype is torch.bfloat16 else SUMMED
        yield Case(f"{heads}, {count} rows", error_of(found, right), tolerance)
        if is_prefill:
            _by_kernels(in_steps, parts, rope, stepwise, H, is_prefill=False)
            yield Case(f"{heads}, {count} rows: bits of steps", float((found != stepwise).sum()), 0)
        for weights in {(each.columns, each.bits): each for each in matrices}.values():
            expected, codes = (codes_for(weights, count, H * latent, device) for _ in range(2))
            if can_code(latent, codes.group):
                activations.to_codes(found, expected, H * latent).run()
                _by_kernels(pages, parts, rope, codes, H, is_prefill=is_prefill)
                yield Case(f"{heads}, {count} rows: codes for {weights.name}", differing(codes, expected), 0)


def _by_kernels(
    pages: Pages, parts: tuple[Tensor, Tensor, Tensor], rope: Rope, out: Tensor | Codes, heads: int, *, is_prefill: bool
) -> None:
    rows, q = block_rows(heads, is_prefill=is_prefill), new_queries(pages.count, heads, pages.dense, pages.device)
    q.fill_(torch.nan)  # what no kernel writes is found
    tokens, history = pages.tables(rows // heads)
    run_all([latent_store(*parts, q, tokens, rope, pages.dense, pages.coded, LAYER)])
    sections, latent = 1 if is_prefill else len(pages.pages), pages.dense.value_dim
    room = new_parts(sections, pages.count, heads, latent, pages.device)
    for part in (room.mixed, room.peaks, room.totals):
        part.fill_(torch.nan)
    scale = pages.dense.head_dim**-0.5
    run_all(attend_latents(q, out, tokens, history, room, pages.dense, pages.coded, LAYER, scale=scale, rows=rows))

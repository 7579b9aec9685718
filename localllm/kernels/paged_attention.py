"""Attention over KV pages by torch's operators: on a GPU without a kernel of its own, and the oracle of the CPU's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from localllm.kernels import kv_page
from localllm.kernels.attention import attention
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout


@dataclass(frozen=True)
class LayerPages:
    """One layer's part of a sequence's pages, uint8 [layer_bytes] each.

    pages: from number `first`, the lowest that any query sees, to the last one's; number 0 is dense, the others coded
    where `coded` says so. own: those that the queries stand in, as they read them, dense.
    """

    dense: PageLayout
    coded: PageLayout | None
    first: int
    pages: list[Tensor]
    own: list[Tensor]


def write(kv: LayerPages, past: int, k: Tensor, v: Tensor) -> None:
    """k, v [T, KH, D] of the tokens behind the first `past`: into their own pages, and into the coded ones. Of latents
    v is k."""
    if kv.coded is not None:
        k, v = kv_page.rotated(k), kv_page.rotated(v)
    first_own = past // PAGE_TOKENS
    for number, own in enumerate(kv.own, first_own):
        begin, end = max(past, number * PAGE_TOKENS), min(past + len(k), (number + 1) * PAGE_TOKENS)
        rows, slot = slice(begin - past, end - past), begin % PAGE_TOKENS
        kv_page.store(kv.dense, own, slot, k[rows].to(own.device), v[rows].to(own.device))
        if kv.coded is not None and number:
            page = kv.pages[number - kv.first]
            kv_page.store(kv.coded, page, slot, k[rows].to(page.device), v[rows].to(page.device))


def paged_attention(
    q: Tensor,
    kv: LayerPages,
    past: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, H, D] of the tokens behind the first `past`, whose keys and values are written. sinks: fp32 [H]. Returns
    [T, H, features of a value].

    A query reads its own page densely and all before it as they are coded, but the first: see `cpu_attention`.
    """
    attend = partial(attention, scale=scale, window=window, softcap=softcap, sinks=sinks)
    end = past + len(q)
    if kv.coded is None:
        keys, values = _loaded(kv.dense, kv.pages, q)
        held = end - kv.first * PAGE_TOKENS
        return attend(q, keys[:, :held], values[:, :held])
    turned = kv_page.rotated(q).to(q.dtype)
    keys, values = _past(kv, q)
    mixed = []
    for number, own in enumerate(kv.own, past // PAGE_TOKENS):
        begin, stop = max(past, number * PAGE_TOKENS), min(end, (number + 1) * PAGE_TOKENS)
        before, here = (number - kv.first) * PAGE_TOKENS, stop - number * PAGE_TOKENS
        own_keys, own_values = (x[:, :here] for x in _loaded(kv.dense, [own], q))
        seen = torch.cat((keys[:, :before], own_keys), 1), torch.cat((values[:, :before], own_values), 1)
        mixed.append(attend(turned[begin - past : stop - past], *seen))
    return kv_page.rotated(torch.cat(mixed)).to(q.dtype)


def _past(kv: LayerPages, q: Tensor) -> tuple[Tensor, Tensor]:
    """All pages but the last as later ones' queries read them, dequantized once: each [KH, S, D]."""
    assert kv.coded is not None
    parts = []
    coded = kv.pages[:-1]
    if kv.first == 0 and coded:
        parts.append(_loaded(kv.dense, coded[:1], q))
        coded = coded[1:]
    if coded:
        parts.append(_loaded(kv.coded, coded, q))
    if not parts:
        empty = q.new_empty((kv.dense.num_kv_heads, 0, q.shape[-1]))
        return empty, empty[..., : kv.dense.value_dim]
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, 1), torch.cat(values, 1)


def _loaded(layout: PageLayout, pages: list[Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values in q's dtype, on its device."""
    keys, values = kv_page.load(layout, torch.stack(pages).to(q.device))
    return keys.to(q.dtype), values.to(q.dtype)

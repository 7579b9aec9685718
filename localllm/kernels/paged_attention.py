"""Attention over KV pages by torch's operators: on a GPU without a kernel of its own, and the oracle of the CPU's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import kv_page, reference
from localllm.kernels.attention import attention
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout
from localllm.kernels.page_choice import PageChoice, chosen_pages, rotated_groups


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
    choice: PageChoice | None = None,
) -> Tensor:
    """q [T, H, D] of the tokens behind the first `past`, whose keys and values are written. sinks: fp32 [H]. choice: by
    which tokens choose their pages, where there is no window. Returns [T, H, features of a value].

    A query reads its own page densely and all before it as they are coded, but the first: see `cpu_attention`.
    """
    end = past + len(q)
    if choice is not None and end > choice.first_position:
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
        num_whole = max(0, choice.first_position - past)
        parts = [] if not num_whole else [paged_attention(q[:num_whole], _up_to(kv, past, num_whole), past, **options)]
        return torch.cat((*parts, _over_chosen(q[num_whole:], kv, past, past + num_whole, choice, **options)))
    attend = partial(attention, scale=scale, window=window, softcap=softcap, sinks=sinks)
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


def _up_to(kv: LayerPages, past: int, count: int) -> LayerPages:
    """Return the pages that the first `count` tokens behind `past` see."""
    last = (past + count - 1) // PAGE_TOKENS
    own = kv.own[: last + 1 - past // PAGE_TOKENS]
    return replace(kv, pages=kv.pages[: last + 1 - kv.first], own=own)


def _over_chosen(
    q: Tensor,
    kv: LayerPages,
    past: int,
    first: int,
    choice: PageChoice,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [T, H, D] of the tokens from position `first` on, each of which chooses its pages. past: where `kv.own`
    begins."""
    turned = q if kv.coded is None else kv_page.rotated(q).to(q.dtype)
    keys, values = _loaded(kv.dense, kv.pages[:-1], q) if kv.coded is None else _past(kv, q)
    sought, sketched = (rotated_groups(x) if kv.coded is None else x for x in (turned, keys))
    KH, group, mixed = len(keys), q.shape[1] // len(keys), []
    for position, query in enumerate(turned, first):
        number, slots = position // PAGE_TOKENS, position % PAGE_TOKENS + 1
        pages = chosen_pages(sought[position - first] * scale, sketched[:, : number * PAGE_TOKENS], choice)
        own_keys, own_values = (x[:, :slots] for x in _loaded(kv.dense, [kv.own[number - past // PAGE_TOKENS]], q))
        for head in range(KH):
            rows = (pages[head, :, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=q.device)).flatten()
            seen = torch.cat((keys[head, rows], own_keys[head])), torch.cat((values[head, rows], own_values[head]))
            heads = slice(head * group, (head + 1) * group)
            own_sinks = None if sinks is None else sinks[heads]
            options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": own_sinks}
            mixed.append(attention(query[None, heads], *(x[None] for x in seen), **options))
    joined = torch.cat(mixed, dim=1).view(*q.shape[:2], -1)
    return joined if kv.coded is None else kv_page.rotated(joined).to(q.dtype)


def page_masses(
    q: Tensor, kv: LayerPages, position: int, scale: float, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention that each page gets from a token, which stands in one of `kv.own`: its weights, summed up
    over heads, fp32 [pages up to its own]. q [1, H, D]; kv: from the first page on; what else is given is that of
    `paged_attention`."""
    number, KH = position // PAGE_TOKENS, kv.dense.num_kv_heads
    held = replace(kv, pages=kv.pages[: number + 1])
    own = _loaded(kv.dense, [kv.own[number - (len(kv.pages) - len(kv.own))]], q)[0]
    if kv.coded is None:
        query, before = q, _loaded(kv.dense, held.pages, q)[0]
    else:
        query, before = kv_page.rotated(q), _past(held, q)[0]
    keys = torch.cat((before[:, : number * PAGE_TOKENS], own), 1)[:, : position + 1].float()
    scores = torch.einsum("kgd,ksd->kgs", query[0].float().view(KH, -1, q.shape[-1]), keys) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = reference.softmax(scores.unsqueeze(2), sinks).sum((0, 1, 2))
    return functional.pad(weights, (0, -len(weights) % PAGE_TOKENS)).view(-1, PAGE_TOKENS).sum(-1)


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

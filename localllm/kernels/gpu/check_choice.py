"""The choice of pages, and attention to what is chosen, beside their references, as `check_cases` tries them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from localllm.kernels import kv_page, paged_attention
from localllm.kernels.gpu.attention import AttentionHistory, ChosenTables, attend, block_rows
from localllm.kernels.gpu.attention_merge import new_parts
from localllm.kernels.gpu.check_attention import LAYER, Heads, Pages
from localllm.kernels.gpu.check_case import ROUNDED, Case, error_of, poisoned
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.page_choice import Choices, choose, new_chosen
from localllm.kernels.gpu.rope import Rope
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.kernels.page_choice import FIXED_PAGES, rotated_groups, scores_of, sketch_of
from localllm.kernels.page_locked import page_locked
from localllm.kernels.paged_attention import LayerPages
from localllm.kernels.sizes import SketchLayout

_PAGES = 3  # that are chosen
_LOSS = 0.02  # of the shares of attention of the best ones, where what is alike was ranked otherwise


def choice_cases(device: torch.device, heads: Heads) -> Iterator[Case]:
    """The last five of new tokens behind 700 choose: pages whose shares of attention are hardly below the largest. What
    they attend to is compared with the operators' attention to the same pages. Steps find most of these in the host's
    memory, as they do with --kv-offload."""
    H, KH, D = heads.heads, heads.kv_heads, heads.head_dim
    sinks = torch.randn(H, device=device) + 6 if heads.has_sinks else None
    options = {"scale": D**-0.5, "softcap": heads.softcap, "sinks": sinks}
    for count, is_prefill in ((5, False), (70, True)):
        pages, rows = Pages(device, heads.layouts, past=702, count=count), block_rows(H // KH, is_prefill=is_prefill)
        qkv, rope = torch.randn((count, H + 2 * KH, D), device=device), Rope(torch.zeros((1, D // 2), device=device))
        out = poisoned(count, H * D, device=device)
        q, _ = pages.by_kernels(qkv, rope, rows, out, options, is_prefill=is_prefill)
        held_at = [page.data_ptr() for page in pages.pages]
        resting = [] if is_prefill else _at_rest(pages.pages[1:-3], device)
        held_at[1 : 1 + len(resting)] = [page.data_ptr() for page in resting]
        addresses = _by_kernels(pages, held_at, q, out, rows, options, is_prefill=is_prefill)
        loss, right = math.inf, torch.zeros_like(out[-5:])
        known = {address: number for number, address in enumerate(held_at)}
        if set(addresses[..., :-1].flatten().tolist()) <= known.keys():  # launches that are only listed write none
            numbers = [[[known[at] for at in own[:-1]] for own in by_head] for by_head in addresses.tolist()]
            loss, right = _by_operators(pages, q, numbers, options)
        yield Case(f"what is chosen by {heads}, {count} rows", loss, _LOSS)
        yield Case(f"attention to what is chosen by {heads}, {count} rows", error_of(out[-5:], right), ROUNDED)


def _at_rest(pages: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies in the host's memory; none where the system page-locks none for them."""
    resting = [page_locked(tuple(page.shape), page.dtype, device).copy_(page) for page in pages]
    return resting if all(page.is_pinned() or device.type == "cpu" for page in resting) else []


def _by_kernels(
    pages: Pages,
    held_at: Sequence[int],
    q: Tensor,
    out: Tensor,
    rows: int,
    options: dict[str, Any],
    *,
    is_prefill: bool,
) -> Tensor:
    """Return the addresses that the last five rows have chosen, int64 [5, KH, pages]; out: of these rows. held_at: the
    addresses of all pages."""
    (M, H, D), device, KH, width = q.shape, pages.device, pages.dense.num_kv_heads, len(pages.pages)
    tokens, history = pages.tables(rows // (H // KH))
    history = replace(history, tables=torch.tensor([held_at], device=device))
    room = torch.zeros((LAYER + 1, KH, width, SketchLayout(D).nbytes), dtype=torch.uint8, device=device)
    own_words = [[room.data_ptr(), width, 0, index] for index in range(5)]
    words = torch.tensor([[0, 0, 0, 0]] * (M - 5) + own_words, device=device)
    made = torch.tensor([[room.data_ptr(), width, 1, width - 2]], device=device)
    choosers = torch.tensor([*range(M - 5, M), -1], dtype=torch.int32, device=device)
    choices = Choices(choosers, words, made, _PAGES)
    chosen = ChosenTables(choices.rows, new_chosen(len(choosers), KH, _PAGES, device))
    layouts: dict[str, Any] = {"dense": pages.dense, "coded": pages.coded, "layer": LAYER}
    run_all(choose(q, chosen.tables, tokens, history, choices, **layouts, scale=options["scale"]))
    places, sections = tokens.positions.clone(), _PAGES + FIXED_PAGES
    places[-5:] = places[-5:] % PAGE_TOKENS + (sections - 1) * PAGE_TOKENS
    tasks = torch.tensor([(row, 1, 0, row) for row in range(M - 5, M)], dtype=torch.int32, device=device)
    own, parts = AttentionHistory(tasks, history.tables), new_parts(1 if is_prefill else sections, M, H, D, device)
    seen = replace(tokens, positions=places)
    run_all(attend(q, out, seen, own, parts, **layouts, rows=rows, chosen=chosen, **options))
    return chosen.tables[:5]


def _by_operators(
    pages: Pages, q: Tensor, numbers: Sequence[Sequence[list[int]]], options: dict[str, Any]
) -> tuple[float, Tensor]:
    """numbers: of the pages that each of the last rows has chosen, by key head. Return by how much their shares of
    attention are below those of the best ones, at most, and attention to them, fp32 [rows, H * D]."""
    KH, layout, mixed, loss = pages.dense.num_kv_heads, pages.coded or pages.dense, list[Tensor](), 0.0
    keys = kv_page.load(layout, torch.stack([page[LAYER] for page in pages.pages[1:]]))[0].float()
    sought = q * options["scale"]
    if pages.coded is None:
        keys, sought = rotated_groups(keys), rotated_groups(sought)
    for row, by_head in enumerate(numbers, len(q) - len(numbers)):
        number = (pages.past + row) // PAGE_TOKENS
        scores = scores_of(sought[row].view(KH, -1, q.shape[2]), sketch_of(keys[:, : (number - 2) * PAGE_TOKENS]))
        own, found = pages.own[number - pages.past // PAGE_TOKENS][LAYER], list[Tensor]()
        for head, chosen in enumerate(by_head):
            best, some = scores[head].topk(_PAGES).values.sum(), [each - 1 for each in chosen[1:-1]]
            loss = max(loss, float((best - scores[head, some].sum()) / best))
            seen = [*(pages.pages[each][LAYER] for each in chosen), own]
            query = q[row : row + 1] if pages.coded is None else kv_page.rotated(q[row : row + 1])
            place = len(chosen) * PAGE_TOKENS + (pages.past + row) % PAGE_TOKENS
            layer = LayerPages(pages.dense, pages.coded, 0, seen, [own])
            found.append(paged_attention.paged_attention(query, layer, place, **options).chunk(KH, dim=1)[head])
        mixed.append(torch.cat(found, dim=1).flatten(1))
    return loss, torch.cat(mixed)

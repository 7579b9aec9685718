"""Sequences that hold tokens, in pages of which nothing else is a number."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.cache.paged_kv import KVPages, PagedKV
from localllm.kernels.paged_attention import write

LAYERS = 2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(pages: KVPages, past: int, count: int, seed: int) -> PagedKV:
    """A sequence of `past` tokens, of both layers, that has room for more; every other byte of its pages is 255."""
    kv = pages.new(past + count)
    layout = kv.layouts[0]
    for pool in pages.groups[0].pools:
        for page in pool.free:
            for part in page.parts.values():
                part.fill_(0xFF)
    while kv.length < past:
        chunk = min(500, past - kv.length)
        kv.prepare(kv.length + chunk)
        for layer in range(LAYERS):
            k, v = random(2, chunk, layout.num_kv_heads, layout.head_dim, seed=1000 * seed + kv.length + layer)
            write(kv.layer(layer, kv.length, chunk), kv.length, k, v)
        kv.advance(chunk)
    kv.prepare(past + count)
    return kv

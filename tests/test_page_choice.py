"""Tokens that choose the pages they attend to: the CPU's kernels beside torch's operators, and both beside full
attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localllm.cache.kv_format import KV_FORMATS, KVFormat
from localllm.cache.paged_kv import KVPages, PagedKV
from localllm.cache.pages import HOST
from localllm.kernels.paged_attention import paged_attention
from localllm.kernels.sizes import KVShape
from localllm.layers.config import AttentionConfig, RopeConfig
from localllm.layers.native_attention import NativeAttention
from localllm.layers.segment import Segment
from tests.kv_support import LAYERS, filled, random
from tests.test_paged_attention import native

LAYER = 1
every_format = pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeConfig(), rotary_dim=64, scale=0.125)


def new_pages(kv_format: KVFormat, chosen_pages: int | None, config: AttentionConfig = CONFIG) -> KVPages:
    """Two layers, the first with a window where the config has one. Bytes that no token has been written to are 255."""
    shape, same = KVShape(config.num_kv_heads, config.head_dim), [HOST] * LAYERS
    windows = [config.window] * LAYERS
    options = {"windows": windows, "devices": same, "shapes": [shape] * LAYERS, "chosen_pages": chosen_pages}
    return KVPages(kv_format, dtype=torch.float32, **options)


def choosing(kv_format: KVFormat, past: int, count: int, chosen_pages: int | None, attend_from: int = 0) -> PagedKV:
    """A sequence of `past` tokens that has room for more."""
    kv = filled(new_pages(kv_format, chosen_pages), past, count, seed=past)
    kv.attend_from = attend_from
    return kv


def attended(kvs: list[PagedKV], news: list[int], config: AttentionConfig = CONFIG, layer: int = LAYER) -> Tensor:
    """What the kernels make of so many more tokens of each, [T, H, D], as one batch; they are written."""
    segments, end = [], 0
    for kv, new in zip(kvs, news, strict=True):
        segments.append(Segment(end, end + new, kv, kv.length, rope_length=0))
        end += new
    qkv = torch.cat([rows_of(kv, new, config) for kv, new in zip(kvs, news, strict=True)])
    chooses = any(segment.chooses for segment in segments)
    return NativeAttention(segments, config.num_heads, layer, chooses=chooses)(qkv, config, layer)


def rows_of(kv: PagedKV, count: int, config: AttentionConfig = CONFIG) -> Tensor:
    """Queries, keys and values of a sequence's next tokens, the same whenever they are computed."""
    rows = random(kv.capacity, config.num_heads + 2 * config.num_kv_heads, config.head_dim, seed=kv.capacity)
    return rows[kv.length : kv.length + count].clone()


def by_operators(kv: PagedKV, count: int) -> Tensor:
    """The same of tokens that were written."""
    q = rows_of(kv, count)[:, : CONFIG.num_heads]
    return paged_attention(q, kv.layer(LAYER, kv.length, count), kv.length, scale=CONFIG.scale, choice=kv.choice)


@native
@every_format
@pytest.mark.parametrize(("past", "count"), [(640, 1), (1090, 70), (1300, 3)])
def test_the_kernels_choose_as_the_operators_do(kv_format, past, count):
    kv = choosing(kv_format, past, count, 3)
    ours = attended([kv], [count])
    torch.testing.assert_close(ours, by_operators(kv, count), rtol=1e-4, atol=1e-5)
    kv.attend_from = None
    assert not torch.allclose(ours, by_operators(kv, count), atol=1e-3), "as many pages as there are were attended to"


@native
@every_format
@pytest.mark.parametrize("chosen", [8, 40])
def test_who_chooses_all_pages_attends_with_the_bits_of_full_attention(kv_format, chosen):
    """Pages 0 to 10: eight are between the first one and the last two."""
    full, ours = (choosing(kv_format, 690, 14, chosen_pages) for chosen_pages in (None, chosen))
    assert torch.equal(attended([full], [14]), attended([ours], [14]))
    seven = choosing(kv_format, 690, 14, 7)
    assert not torch.equal(attended([seven], [14]), attended([ours], [14]))

"""Norm, RoPE, Hadamard rotation and the writing of pages on a GPU, in Triton's interpreter, beside torch."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import Tensor

from localllm.cache.kv_format import KV_FORMATS
from localllm.kernels import kv_page
from localllm.kernels.gpu.rope import Rope, rope_store
from localllm.kernels.kv_page import NOT_FINITE, PAGE_TOKENS, PageLayout
from localllm.layers.config import QueryGrowth
from localllm.layers.norm import RMSNorm
from localllm.layers.rotary import query_growth, rotate
from tests.gpu.forward_support import LAYER, NAN, Forward, write_new
from tests.kv_support import random

CODED_FORMATS = list(KV_FORMATS.values())[1:]
EPS = 1e-6


def rope_of(D: int, rotary_dim: int, rows: int = 1, *, has_norms: bool = True) -> Rope:
    frequencies = 1 / 10000 ** (torch.arange(0, rotary_dim, 2).float() / max(rotary_dim, 1))
    inv_freq = frequencies * torch.arange(1, rows + 1)[:, None]
    norms = (random(D, seed=3), random(D, seed=4)) if has_norms else (None, None)
    return Rope(inv_freq.contiguous(), 1.1, *norms, EPS)


def run(forward: Forward, qkv: Tensor, H: int, rope: Rope) -> Tensor:
    """Returns q [M, H, D]."""
    q = torch.full((forward.num_rows, H, forward.D), NAN)
    rope_store(qkv, q, forward.tokens(), rope, *forward.layouts, LAYER).run()
    return q


def by_operators(forward: Forward, qkv: Tensor, H: int, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the rows that are no padding, not turned."""
    rows = len(forward.rows)
    positions = torch.tensor([slot for _, slot in forward.rows])
    angles = (positions[:, None].float() * rope.inv_freq[:rows].repeat(1, 2)).unsqueeze(1)
    signs = torch.tensor([-rope.scale, rope.scale]).repeat_interleave(rope.inv_freq.shape[1])
    q, k, v = torch.split(qkv[:rows], [H, forward.KH, forward.KH], dim=1)
    if rope.q_norm is not None and rope.k_norm is not None:
        q, k = RMSNorm(rope.q_norm, EPS)(q), RMSNorm(rope.k_norm, EPS)(k)
    q, k = (rotate(x, angles.cos() * rope.scale, angles.sin() * signs) for x in (q, k))
    if rope.growth is not None:
        q = q * query_growth(QueryGrowth(rope.growth, rope.growth_length), positions).view(-1, 1, 1)
    return q, k, v


def check(forward: Forward, H: int, rope: Rope, qkv: Tensor | None = None) -> None:
    """The same pages written by torch's operators are as good as equal, all of their bytes."""
    if qkv is None:
        qkv = random(forward.num_rows, H + 2 * forward.KH, forward.D, seed=9)
    q, k, v = by_operators(forward, qkv, H, rope)
    expected = copy.deepcopy(forward)
    write_new(expected, k, v)
    turned = run(forward, qkv, H, rope)
    dense, coded = forward.layouts
    rows = len(forward.rows)
    tolerance = 1e-5 * float(qkv.abs().amax().clamp(min=1))
    assert torch.allclose(turned[:rows], q if coded is None else kv_page.rotated(q), rtol=0, atol=tolerance)
    assert turned[rows:].isnan().all()  # of padding nothing is written
    step = 2.0**-7 if dense.dtype is torch.bfloat16 else 0.0
    for row in forward.rows:
        mine, other = (kv_page.load(dense, x.own_part(*row)[None]) for x in (forward, expected))
        for a, b in zip(mine, other, strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=step, atol=tolerance, equal_nan=True)
    if coded is not None:
        check_codes(coded, *(coded_pages(x) for x in (forward, expected)))


def coded_pages(forward: Forward) -> Tensor:
    """uint8 [pages, layer_bytes]: of those that have one."""
    numbers = sorted({(segment, slot // PAGE_TOKENS) for segment, slot in forward.rows if slot >= PAGE_TOKENS})
    return torch.stack([forward.table_page(*number) for number in numbers])


def check_codes(coded: PageLayout, mine: Tensor, expected: Tensor) -> None:
    """Where the sums before a rounding differ in their last bit, a code may be its neighbour."""
    assert (mine != expected).sum() <= (expected != 0xFF).sum() / 1000  # what nothing was written to is 255
    key_steps, value_steps = (kv_page._scales(coded.parts(expected)[part]).amax() for part in (1, 3))
    for a, b, step in zip(
        kv_page.load(coded, mine), kv_page.load(coded, expected), (key_steps, value_steps), strict=True
    ):
        assert torch.equal(a.isnan(), b.isnan())
        assert (a - b).nan_to_num().abs().max() <= 1.2 * step.nan_to_num()


@pytest.mark.parametrize(
    ("kv", "D", "rotary_dim"),
    [("bf16", 64, 64), ("int8", 128, 128), ("k8v4", 96, 48), ("int4", 32, 0), ("bf16", 80, 32), ("int4", 256, 64)],
)
def test_tokens_of_every_kind_of_page_are_written(kv, D, rotary_dim):
    """Densely alone where groups do not divide a head."""
    forward = Forward(KV_FORMATS[kv], KH=2, D=D, pasts=[0, 62, 130], counts=[1, 4, 3], padding=2)
    check(forward, 3, rope_of(D, rotary_dim))


@pytest.mark.parametrize("kv", ["bf16", "k8v4"])
def test_a_model_in_bf16_has_own_pages_in_bf16(kv):
    forward = Forward(KV_FORMATS[kv], KH=1, D=64, pasts=[100], counts=[3], dtype=torch.bfloat16)
    check(forward, 2, rope_of(64, 64, has_norms=False))


def test_each_row_may_have_frequencies_of_its_own():
    forward = Forward(KV_FORMATS["int8"], KH=1, D=64, pasts=[70, 10], counts=[2, 3])
    check(forward, 2, rope_of(64, 64, rows=5))


def test_queries_grow_with_their_position_and_keys_do_not():
    forward = Forward(KV_FORMATS["int8"], KH=1, D=64, pasts=[70, 6], counts=[3, 3])
    check(forward, 2, dataclasses.replace(rope_of(64, 64), growth=0.7, growth_length=8))


def test_qkv_may_be_a_part_of_wider_rows():
    forward = Forward(KV_FORMATS["int8"], KH=1, D=64, pasts=[70], counts=[3])
    check(forward, 2, rope_of(64, 64), random(3, 400, seed=5)[:, :256].view(3, 4, 64))


@pytest.mark.parametrize(("kv_format", "size"), list(zip(CODED_FORMATS, [0.0, 1e-9, 1e9], strict=True)))
def test_groups_of_any_size_have_the_scale_of_the_operators(kv_format, size):
    forward = Forward(kv_format, KH=1, D=64, pasts=[70], counts=[2])
    check(forward, 1, rope_of(64, 0, has_norms=False), random(2, 3, 64, seed=6) * size)


@pytest.mark.parametrize(("kv_format", "bad"), list(zip(CODED_FORMATS, [math.nan, math.inf, -math.inf], strict=True)))
def test_a_group_that_is_not_finite_is_marked(kv_format, bad):
    forward = Forward(kv_format, KH=1, D=64, pasts=[70], counts=[1])
    qkv = random(1, 3, 64, seed=6)
    qkv[0, 1, 40] = qkv[0, 2, 3] = bad
    run(forward, qkv, 1, rope_of(64, 0, has_norms=False))
    _, key_scales, _, value_scales = forward.layouts[1].parts(forward.table_page(0, 1))
    slot = 70 - PAGE_TOKENS
    assert key_scales[0, 1, slot] == value_scales[0, 0, slot] == NOT_FINITE
    assert key_scales[0, 0, slot] != NOT_FINITE and value_scales[0, 1, slot] != NOT_FINITE


@pytest.mark.parametrize("kv_format", CODED_FORMATS)
def test_nearly_every_byte_is_that_of_the_operators(kv_format):
    check(Forward(kv_format, KH=1, D=64, pasts=[64], counts=[30]), 1, rope_of(64, 64))

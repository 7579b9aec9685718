"""Latents normalised, rotated and written, and attention to them, on a GPU, in Triton's interpreter."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from localllm.cache.kv_format import KV_FORMATS, KVFormat
from localllm.kernels import kv_page
from localllm.kernels.gpu import check_latent
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.attention import PREFILL_ROWS, block_rows
from localllm.kernels.gpu.attention_merge import new_parts
from localllm.kernels.gpu.check_case import Case
from localllm.kernels.gpu.check_latent import LatentHeads
from localllm.kernels.gpu.latent_attention import attend_latents
from localllm.kernels.gpu.latent_store import latent_store
from localllm.kernels.gpu.launch import KernelLaunch, run_all
from localllm.kernels.gpu.rope import Rope
from localllm.kernels.kv_page import NOT_FINITE, PAGE_TOKENS
from localllm.kernels.sizes import Weights
from localllm.layers.norm import RMSNorm
from localllm.layers.rotary import rotate
from tests.gpu.forward_support import LAYER, NAN, Forward, write_new
from tests.kv_support import random
from tests.thinning import one_in

FORMATS = [KV_FORMATS[name] for name in ("bf16", "int8", "int4")]  # of latents k8v4 is int8
SHAPES = [
    (2, 64, 32),
    (5, 160, 64),
    (3, 256, 32),
    (20, 96, 32),
    (2, 512, 64),
]  # heads, features of a latent and of the shared key
every_case = one_in(3, itertools.product(FORMATS, SHAPES))
EPS, TOLERANCE = 1e-6, 2e-5


def forward_of(kv_format: KVFormat, shape: tuple[int, int, int], *segments: tuple[int, int], **options) -> Forward:
    _, latent, shared = shape
    pasts, counts = zip(*segments, strict=True)
    return Forward(kv_format, 1, latent + shared, pasts, counts, latent_dim=latent, **options)


def rope_of(latent: int, shared: int, rows: int = 1, share: float = 1.0) -> Rope:
    frequencies = 1 / 10000 ** (torch.arange(0, int(shared * share), 2).float() / shared)
    inv_freq = frequencies * torch.arange(1, rows + 1)[:, None]
    return Rope(inv_freq.contiguous(), 1.1, None, random(latent, seed=4), EPS)


@pytest.mark.parametrize(("kv_format", "shape"), every_case)
@pytest.mark.parametrize("dtype", one_in(2, [torch.float32, torch.bfloat16]))
def test_latents_are_written_and_queries_turned_as_torch_does(kv_format, shape, dtype):
    """Those of bf16 in wider rows."""
    H, latent, shared = shape
    forward = forward_of(kv_format, shape, (0, 2), (62, 5), (130, 3), padding=2, dtype=dtype)
    M, rope = forward.num_rows, rope_of(latent, shared, share=0.5 if latent == 160 else 1.0)
    absorbed, turning = random(M, H * latent, seed=1), random(M, H * shared + 64, seed=2).to(dtype)[:, 64:]
    kept = random(M, latent + shared + 32, seed=3).to(dtype)[:, 32:]
    q = torch.full((M, H, latent + shared), NAN)
    expected = copy.deepcopy(forward)
    latent_store(absorbed, turning, kept, q, forward.tokens(), rope, *forward.layouts, LAYER).run()
    rows = len(forward.rows)
    right, keys = expected_of(forward, shape, rope, absorbed, turning, kept)
    write_new(expected, keys, keys)
    dense, coded = forward.layouts
    assert torch.allclose(q[:rows], right if coded is None else kv_page.rotated(right), rtol=0, atol=3e-5)
    assert q[rows:].isnan().all()
    step = 2.0**-7 if dtype is torch.bfloat16 else 0.0
    for row in forward.rows:
        mine, other = (kv_page.load(dense, x.own_part(*row)[None])[0].float() for x in (forward, expected))
        is_near = torch.isclose(mine, other, rtol=step, atol=2e-5, equal_nan=True)
        assert is_near.all() if coded is None else is_near.float().mean() > 0.98  # codes beside the border of a step
    if coded is not None:
        mine, other = (x.table_page(2, 2) for x in (forward, expected))
        assert (mine != other).sum() <= max(3, 3 * (latent + shared) // 200)  # codes beside the border of a step
        mine, other = (kv_page.load(coded, page[None])[0][:, 2:5] for page in (mine, other))
        assert (mine - other).abs().max() < 0.15 * other.abs().max()


def expected_of(
    forward: Forward, shape: tuple[int, int, int], rope: Rope, absorbed: Tensor, turning: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys of the rows that are no padding, not turned."""
    H, latent, shared = shape
    rows = len(forward.rows)
    positions = torch.tensor([slot for _, slot in forward.rows])
    angles = (positions[:, None].float() * rope.inv_freq[:rows].repeat(1, 2)).unsqueeze(1)
    signs = torch.tensor([-rope.scale, rope.scale]).repeat_interleave(rope.inv_freq.shape[1])
    rotation = angles.cos() * rope.scale, angles.sin() * signs
    turned = rotate(turning[:rows].float().reshape(rows, H, shared), *rotation)
    key = rotate(kept[:rows, latent:].float().unsqueeze(1), *rotation)
    assert rope.k_norm is not None
    latents = RMSNorm(rope.k_norm, EPS)(kept[:rows, :latent].float()).unsqueeze(1)
    return torch.cat((absorbed[:rows].view(rows, H, latent), turned), -1), torch.cat((latents, key), -1)


def test_each_row_may_have_frequencies_of_its_own():
    shape = (2, 64, 32)
    forward = forward_of(FORMATS[0], shape, (70, 2), (10, 3))
    rope = rope_of(64, 32, rows=5)
    absorbed, turning, kept = random(5, 128), random(5, 64, seed=1), random(5, 96, seed=2)
    q = torch.full((5, 2, 96), NAN)
    latent_store(absorbed, turning, kept, q, forward.tokens(), rope, *forward.layouts, LAYER).run()
    assert torch.allclose(q, expected_of(forward, shape, rope, absorbed, turning, kept)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kv_format", FORMATS[1:])
@pytest.mark.parametrize(("feature", "marked"), one_in(2, [(70, [False, True]), (3, [True, False])]))
def test_a_run_that_is_not_finite_is_marked(kv_format, feature, marked):
    forward = forward_of(kv_format, (1, 64, 32), (70, 1))
    kept = random(1, 96)
    kept[0, feature] = torch.inf
    q = torch.empty(1, 1, 96)
    rope = rope_of(64, 32)
    latent_store(random(1, 64), random(1, 32), kept, q, forward.tokens(), rope, *forward.layouts, LAYER).run()
    coded = forward.layouts[1]
    assert coded is not None
    scales = coded.parts(forward.table_page(0, 1))[1][0, :, 70 - PAGE_TOKENS]
    assert (scales == NOT_FINITE).tolist() == marked


def run(forward: Forward, q: Tensor, *, sections: int | None = None, rows: int | None = None, out=None):
    """sections: as many as the longest segment has pages, where it is not said. Returns [M, H * latent]."""
    M, H, _ = q.shape
    rows = rows or block_rows(H, is_prefill=False)
    sections = sections or max(slot for _, slot in forward.rows) // PAGE_TOKENS + 1
    parts = new_parts(sections, M, H, forward.latent_dim)
    for tensor in (parts.mixed, parts.peaks, parts.totals):
        tensor.fill_(NAN)
    out = torch.full((M, H * forward.latent_dim), NAN) if out is None else out
    history = forward.history(rows // H, empty_tasks=1)
    run_all(
        attend_latents(q, out, forward.tokens(), history, parts, *forward.layouts, LAYER, scale=0.1, rows=rows)
    )  # fmt: skip
    return out


def prepared(forward: Forward, H: int) -> Tensor:
    """The new tokens are written. Returns queries [M, H, D]."""
    keys = random(forward.num_rows, 1, forward.D, seed=7)
    write_new(forward, keys, keys)
    return random(forward.num_rows, H, forward.D, seed=8)


@pytest.mark.parametrize(("kv_format", "shape"), every_case)
def test_tokens_attend_to_their_history(kv_format, shape):
    forward = forward_of(kv_format, shape, (0, 1), (62, 4), (255, 2), (200, 1), padding=2)
    q = prepared(forward, shape[0])
    mixed, expected, real = run(forward, q), forward.expected(q, scale=0.1), len(forward.rows)
    assert (mixed - expected)[:real].abs().max() < TOLERANCE
    assert mixed[real:].isnan().all()


@pytest.mark.parametrize("kv_format", one_in(2, FORMATS))
def test_dense_pages_of_bf16_are_read_as_they_are(kv_format):
    forward = forward_of(kv_format, (3, 64, 32), (130, 2), dtype=torch.bfloat16)
    q = prepared(forward, 3)
    assert (run(forward, q) - forward.expected(q, scale=0.1)).abs().max() < TOLERANCE


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.usefixtures("products_row_by_row")
def test_a_prompts_row_has_the_bits_of_a_step(kv_format):
    """One program for all pages of many rows, and one for each page of a few."""
    many = forward_of(kv_format, (5, 64, 32), (190, 30), (0, 5))
    q = prepared(many, 5)
    together = run(many, q, sections=1, rows=PREFILL_ROWS)
    for row in (0, 1, 2, 29, 33):
        segment, slot = many.rows[row]
        one = dataclasses.replace(many, pasts=[0], counts=[1])
        one.pasts, one.stores = [slot], [many.stores[segment]]
        assert torch.equal(run(one, q[row : row + 1]), together[row : row + 1])
        assert torch.equal(run(one, q[row : row + 1], sections=16), together[row : row + 1])


@pytest.mark.parametrize("group", [32, 64])
def test_codes_for_the_next_matrix_are_those_of_the_floats(group):
    forward = forward_of(FORMATS[1], (2, 64, 32), (130, 3), padding=1)
    q = prepared(forward, 2)
    expected, found = (Codes.empty(4, 128, group, q.device) for _ in range(2))
    to_codes(run(forward, q), expected, 128).run()
    run(forward, q, out=found)
    for part in (lambda codes: codes.q[:3], lambda codes: codes.scale[:, :3], lambda codes: codes.bias[:, :3]):
        assert torch.equal(part(found), part(expected))


def checked() -> Iterator[Case]:
    torch.manual_seed(0)
    heads = LatentHeads("int8", 2, 64, 32, 32, torch.float32)
    yield from check_latent.latent_cases(torch.device("cpu"), heads, (Weights(8, 32), Weights(4, 64)))


@pytest.mark.usefixtures("products_row_by_row")
def test_the_check_of_a_card_finds_kernels_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [case.line() for case in checked() if not case.is_right] == []
    run = KernelLaunch.run
    for name in ("_latent_store", "_attend_latents"):
        with monkeypatch.context() as patch:
            patch.setattr(KernelLaunch, "run", lambda launch, name=name: launch.name == name or run(launch))
            wrong = (case for case in checked() if not case.is_right)
            assert next(wrong) and next(wrong)

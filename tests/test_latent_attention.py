"""Multi-head latent attention: the CPU's kernels beside torch's operators, and models that use them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm import Engine, Request, SamplingParams
from localllm.cache.kv_format import KV_FORMATS, KVFormat
from localllm.cache.kv_pages import KVPages
from localllm.cache.paged_kv import PagedKV
from localllm.engine.step_types import Chunk
from localllm.kernels import cpu_latent_int8, kv_page, paged_attention
from localllm.kernels.cpu_amx import has_amx as cpu_has_amx
from localllm.kernels.cpu_isa import Isa, host_isas
from localllm.kernels.cpu_paged import AttentionRoom, LatentPlace, row_counts_of
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.sizes import KVShape
from localllm.layers.native_attention import attention_tables
from localllm.layers.segment import Segment
from localllm.models.cpu_program import CpuProgram
from localllm.models.layout import EMBED, HEAD
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.engine_support import answered
from tests.kv_support import filled, random
from tests.software_amx import SoftwareAmx
from tests.thinning import thinned

HOST = torch.device("cpu")
SCALE = 0.05
SHAPES = [(5, 64, 32), (20, 96, 64), (40, 32, 32)]  # heads, features of a latent and of the shared key
SEGMENTS = [[(0, 5)], [(300, 1)], [(1030, 3), (40, 1)], [(0, 200)], [(10, 1), (2100, 1), (64, 64)]]
every_isa = pytest.mark.parametrize("isa", host_isas(), ids=lambda isa: isa.name)
native_isa = pytest.mark.parametrize("isa", host_isas()[:1], ids=lambda isa: isa.name)
every_format = pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=lambda each: each.name)


def placed(kv_format: KVFormat, shape: tuple[int, int, int], parts: list[tuple[int, int]]) -> list[Segment]:
    """Sequences of which so many tokens are there, and so many are to be computed; the second of two layers is used.
    What no token has been written to is NaN."""
    _, latent, shared = shape
    kept = KVShape(1, latent + shared, latent)
    pages = KVPages(kv_format, windows=[None] * 2, devices=[HOST] * 2, shapes=[kept] * 2, dtype=torch.float32)
    segments: list[Segment] = []
    for index, (past, new) in enumerate(parts):
        kv, begin = filled(pages, past, new, seed=index), segments[-1].end if segments else 0
        segments.append(Segment(begin, begin + new, kv, past, rope_length=0))
    return segments


def native(
    isa: Isa,
    segments: list[Segment],
    queries: Tensor,
    keys: Tensor,
    latent: int,
    threads: int = 1,
    window: int | None = None,
) -> Tensor:
    """[T, H, latent_dim] by the kernels, which write the keys."""
    T, H, D = queries.shape
    layouts = segments[0].kv.layouts
    tables = attention_tables(segments, H, 1, 1, threads, row_counts_of(layouts[0]))
    room = AttentionRoom(len(tables.tasks), len(tables.merges), tables.num_parts, 1, latent)
    room.place(tables)
    absorbed, turning = queries[..., :latent].flatten(1), queries[..., latent:].flatten(1)
    out, tokens = torch.full((T, H * latent), float("nan")), torch.tensor(tables.tokens[0])
    place = LatentPlace(absorbed, H, turning, turning.shape[1], keys, D, out, tokens, 1, window)
    steps = room.latent_steps(isa, layouts, place, SCALE, rows=tables.rows, is_split=tables.is_split)
    Tape([place.step(isa, layouts, torch.tensor([T])), *steps]).run()
    return out.view(T, H, latent)


@pytest.mark.parametrize(
    ("isa", "kv_format", "case"),
    thinned(
        [*product(host_isas(), KV_FORMATS.values(), zip(SHAPES * 2, SEGMENTS, strict=False))],
        # Another set of instructions is compiled for ten seconds a case.
        lambda case: case[0] == host_isas()[0] or case[2][1] in SEGMENTS[:2],
    ),
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_the_kernels_write_and_attend_as_torch_does(isa: Isa, kv_format: KVFormat, case: Any) -> None:
    shape, parts = case
    H, latent, shared = shape
    segments, T = placed(kv_format, shape, parts), sum(new for _, new in parts)
    queries, keys = random(T, H, latent + shared), random(T, 1, latent + shared, seed=1)
    window = 70 if H == 5 else None
    found = native(isa, segments, queries, keys, latent, window=window)
    for segment in segments:
        rows = slice(segment.begin, segment.end)
        pages = segment.kv.layer(1, segment.past, segment.end - segment.begin)
        expected = paged_attention.paged_attention(queries[rows], pages, segment.past, scale=SCALE, window=window)
        if kv_format.keys == "dense" or not isa.multiplies_whole_bytes:
            torch.testing.assert_close(found[rows], expected, rtol=1e-4, atol=1e-5)
        assert (found[rows] - expected).norm() < 0.015 * expected.norm()  # of queries and weights in bytes
        written = [page.clone() for page in pages.pages]
        paged_attention.write(pages, segment.past, keys[rows], keys[rows])
        for number, both in enumerate(zip(written, pages.pages, strict=True)):
            layout = pages.coded if pages.coded is not None and number else pages.dense
            one, other = (kv_page.load(layout, page[None])[0].nan_to_num() for page in both)
            assert ((one - other).abs() > 1e-5).float().mean() < 0.02  # of codes beside a step's border


@every_isa
@every_format
def test_neither_threads_nor_what_is_beside_it_change_a_bit(isa: Isa, kv_format: KVFormat) -> None:
    shape = (20, 96, 64)
    parts = [(2050, 3), (70, 1), (0, 90)]
    segments, T = placed(kv_format, shape, parts), sum(new for _, new in parts)
    queries, keys = random(T, 20, 160), random(T, 1, 160, seed=1)
    whole = native(isa, segments, queries, keys, 96)
    for segment in segments:
        for first in range(segment.begin, segment.end, 40):
            rows, count = slice(first, min(first + 40, segment.end)), min(40, segment.end - first)
            one = replace(segment, begin=0, end=count, past=segment.past + first - segment.begin)
            for threads in (1, 8):
                assert torch.equal(native(isa, [one], queries[rows], keys[rows], 96, threads), whole[rows])


@pytest.fixture(params=["software", "amx"])
def amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What has tiles takes the CPU's, or those that other instructions make, which every CPU with AVX-512 has."""
    if request.param == "amx" and not cpu_has_amx():
        pytest.skip("this CPU has no AMX")
    if not host_isas()[0].can_have_amx:
        pytest.skip("this CPU has no AVX-512 with products of bytes")
    if request.param == "software":
        monkeypatch.setattr(SoftwareAmx, "isa", host_isas()[0], raising=False)
        monkeypatch.setattr(cpu_latent_int8, "AmxTiles", SoftwareAmx)
    cpu_latent_int8.attention.cache_clear()
    yield
    cpu_latent_int8.attention.cache_clear()


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_give_the_bits_of_dot_products(
    name: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    H, latent, shared = shape
    segments = placed(KV_FORMATS[name], shape, [(1100, 5), (70, 1)])
    queries, keys = random(6, H, latent + shared), random(6, 1, latent + shared, seed=1)
    found = []
    for has_amx in (True, False):
        monkeypatch.setattr("localllm.kernels.cpu_paged.has_amx", lambda has_amx=has_amx: has_amx)
        found.append(native(host_isas()[0], segments, queries, keys, latent))
    assert torch.equal(*found)


@every_isa
def test_what_others_get_beside_a_token_that_takes_half_is_not_rounded_away(isa: Isa) -> None:
    latent, past = 64, 250
    segments = placed(KV_FORMATS["int8"], (1, latent, 32), [(past, 1)])
    pages = segments[0].kv.layer(1, past, 1)
    first = kv_page.load(pages.dense, pages.pages[0][None])[0][0, 0]  # rotated, as it is kept
    sink = kv_page.rotated(first)
    queries = (sink * (math.log(past) / (SCALE * sink @ sink)))[None, None]
    keys = random(1, 1, latent + 32, seed=1)
    found = native(isa, segments, queries, keys, latent)
    expected = paged_attention.paged_attention(queries, pages, past, scale=SCALE)
    others = expected - 0.5 * sink[:latent]
    assert others.norm() < 0.5 * expected.norm()
    assert (found - expected).norm() < 0.02 * others.norm()


@native_isa
def test_scores_whose_rounding_is_large_do_not_wrap_a_weight(isa: Isa) -> None:
    segments = placed(KV_FORMATS["int8"], (64, 64, 32), [(255, 1)])
    pages = segments[0].kv.layer(1, 255, 1)
    rows = torch.cat([kv_page.load(pages.dense, page[None])[0][0] for page in pages.pages])[:64]
    queries = kv_page.rotated(rows)[None]  # each of which finds itself
    queries = queries * (1e6 / (SCALE * queries.square().sum(-1, keepdim=True)))
    keys = random(1, 1, 96, seed=1)
    found = native(isa, segments, queries, keys, 64)
    expected = paged_attention.paged_attention(queries, pages, 255, scale=SCALE)
    assert (found - expected).norm(dim=-1).max() < 0.05 * expected.norm(dim=-1).min()


@native_isa
def test_what_is_not_finite_stays_so(isa: Isa) -> None:
    segments = placed(KV_FORMATS["int8"], SHAPES[0], [(100, 2)])
    queries, keys = random(2, 5, 96), random(2, 1, 96, seed=1)
    queries[0, 3, 5] = float("inf")
    keys[1, 0, 40] = float("nan")
    found = native(isa, segments, queries, keys, 64)
    assert found[0, 3].isnan().any() and found[1].isnan().any(-1).all()
    assert found[0, [0, 1, 2, 4]].isfinite().all()


SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "q_lora_rank": 128,
    "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "max_position_embeddings": 4096,
}  # fmt: skip
MODELS = {"glm4_moe_lite": ("int4", "int8"), "deepseek_v2": ("int8", "int4"), "minicpm3": ("int4", "bf16")}


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder, (weights, kv) = tmp_path_factory.mktemp("latent"), MODELS[request.param]
    sizes = SIZES | ({"q_lora_rank": None} if request.param == "deepseek_v2" else {})
    write_checkpoint(folder, request.param, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        config = EngineConfig(device="cpu", weights=weights, kv=kv, speculate="off", ctx=2048)
        engine = Engine.load(folder, config)
        yield engine
        engine.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def said(engine: Engine, *prompts: list[int], max_tokens: int = 20) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=max_tokens, ignore_eos=True)
    return [heard.token_ids for heard in answered(engine, *(Request(tuple(ids), sampling) for ids in prompts))]


def logits(engine: Engine, ids: list[int], *sizes: int) -> Tensor:
    kv: PagedKV = engine.residency.new_kv(len(ids))
    return torch.cat([engine.runner.forward([Chunk(ids, kv, size, all_logits=True)]) for size in sizes])


def test_native_steps_compute_what_operators_do(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.runner.cpu_program is not None and CpuProgram.supports(engine.model)
    ids = prompt(150)
    found = logits(engine, ids, 150)
    assert torch.equal(logits(engine, ids, 1, 88, *[1] * 60, 1), found)
    monkeypatch.setattr(engine.runner, "cpu_program", None)
    errors = (logits(engine, ids, 150) - found).norm(dim=-1) / found.norm(dim=-1)
    # Of bf16 beside INT8 activations. The mean would count tokens for which these choose another expert: half of it.
    assert errors.median() < 0.13


def test_a_batch_is_each_alone_whatever_is_cached(engine: Engine) -> None:
    prompts = [prompt(length, seed=length) for length in (3, 64, 130, 1250)]
    alone = [said(engine, ids)[0] for ids in prompts]
    assert said(engine, *prompts) == alone  # all but the last tokens of each are found
    follow = [*prompts[2], *alone[2][:15]]
    assert said(engine, follow, max_tokens=5) == said(engine, follow, max_tokens=5)


def test_no_placement_changes_a_token(engine: Engine) -> None:
    prompts = [prompt(length, seed=length) for length in (5, 70)]
    expected, before = said(engine, *prompts), engine.residency.blocks
    for ending in ("attention", "mlp"):
        streamed = [replace(b, tier="disk" if b.name.endswith(ending) else "ram") for b in before]
        engine.residency.move([b if b.name in (EMBED, HEAD) else s for b, s in zip(before, streamed, strict=True)])
        assert said(engine, *prompts) == expected
    engine.residency.move(before)


@pytest.mark.parametrize("kv", ["bf16", "int8", "k8v4", "int4"])
def test_a_token_takes_its_latent_and_the_shared_key_once(kv: str) -> None:
    """GLM 4.7 Flash: 47 layers of 512 and 64 features."""
    shapes = [KVShape(1, 512 + 64, 512)] * 47
    features = {"bf16": 2 * 576, "int8": 576 + 2, "k8v4": 576 + 2, "int4": 576 // 2 + 2}
    assert KV_FORMATS[kv].sizes(shapes, 2).per_token == 47 * features[kv]


def test_a_latent_that_groups_do_not_divide_has_dense_pages_alone() -> None:
    shape = KVShape(1, 48 + 16, 48)
    assert not shape.can_be_coded and kv_page.layout_of(shape, "dense", "dense", torch.float32).is_dense
    with pytest.raises(AssertionError, match="keeps dense pages"):
        kv_page.layout_of(shape, "int8", "int8", torch.float32)

"""Tokens that choose the pages they attend to: the CPU's kernels beside torch's operators, and both beside full
attention."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.bench.random_model import word_tokenizer
from localllm.cache.kv_format import KV_FORMATS, KVFormat
from localllm.cache.kv_pages import KVPages
from localllm.cache.paged_kv import PagedKV
from localllm.cache.pages import HOST
from localllm.engine.engine import Engine
from localllm.engine.events import ignore
from localllm.engine.loader import LoadedModel
from localllm.engine.planner import ModelPlanner
from localllm.engine.request import Request, SamplingParams
from localllm.engine.residency import new_pages as new_kv_pages
from localllm.engine.runner import ModelRunner
from localllm.engine.speculative.choice import Speculate
from localllm.engine.step_types import Chunk
from localllm.kernels.cpu_jit import host_isas
from localllm.kernels.cpu_paged import AttentionPlace, AttentionRoom, ChoiceRoom
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.kv_page import NOT_FINITE, rotated
from localllm.kernels.page_choice import PageSketches
from localllm.kernels.paged_attention import paged_attention, write
from localllm.kernels.sizes import KVShape
from localllm.layers.config import AttentionConfig, RopeConfig
from localllm.layers.native_attention import NativeAttention, attention_tables
from localllm.layers.segment import Segment
from localllm.models.shapes import find_shape
from localllm.offload.planner.costs import Costs, Work
from localllm.offload.planner.machine import CardRates, Rates
from localllm.offload.planner.model_shape import ModelShape
from localllm.settings import EngineConfig
from tests.engine_support import answered, generated
from tests.kv_support import LAYERS, filled
from tests.kv_support import random as random_numbers
from tests.test_paged_attention import native
from tests.test_prefix_cache import VOCAB, decoder
from tests.thinning import examples

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
    rows = random_numbers(kv.capacity, config.num_heads + 2 * config.num_kv_heads, config.head_dim, seed=kv.capacity)
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
@pytest.mark.parametrize("isa", host_isas(), ids=lambda isa: isa.name)
@pytest.mark.parametrize(
    ("name", "heads"), [("bf16", (6, 2, 80)), ("int8", (40, 2, 32)), ("k8v4", (3, 1, 256)), ("int4", (4, 4, 96))]
)
def test_heads_of_any_shape_choose_alike_on_every_cpu(isa, name, heads):
    """More query heads than a vector has lanes, and features of which groups of 32 leave some."""
    H, KH, D = heads
    config = replace(CONFIG, num_heads=H, num_kv_heads=KH, head_dim=D, rotary_dim=D)
    kv = filled(new_pages(KV_FORMATS[name], 4, config), 1500, 1, seed=7)
    kv.attend_from = 0
    q, keys, values = rows_of(kv, 1, config).split((H, KH, KH), dim=1)
    held = kv.layer(LAYER, kv.length, 1)
    write(held, kv.length, keys, values)
    expected = paged_attention(q, held, kv.length, scale=config.scale, choice=kv.choice)
    tables = attention_tables([Segment(0, 1, kv, kv.length, rope_length=0)], H, KH, 1, 2, choosing=0)
    assert tables.chosen is not None
    room = AttentionRoom(len(tables.tasks), len(tables.merges), 50, KH, D, ChoiceRoom(tables.chosen, 1, KH))
    room.place(tables)
    turned, out = (rotated(q) if held.coded else q) * config.scale, torch.zeros(1, H * D)
    place = AttentionPlace(turned, H * D, out, torch.tensor(tables.tokens[0]), LAYER, H, None, None)
    Tape([*room.steps(isa, kv.layouts, place, rows=tables.rows, is_split=tables.is_split)]).run()
    torch.testing.assert_close(out.view(1, H, D), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_dim", [8, 24, 120])
def test_heads_choose_of_which_vectors_and_groups_leave_some(head_dim):
    """By operators: all 21 pages in between, and a few."""
    config, found = replace(CONFIG, head_dim=head_dim, rotary_dim=head_dim), []
    for chosen in (None, 21, 4):
        kv = filled(new_pages(KV_FORMATS["bf16"], chosen, config), 1500, 1, seed=7)
        kv.attend_from = 0
        q, keys, values = rows_of(kv, 1, config).split((4, 2, 2), dim=1)
        held = kv.layer(LAYER, kv.length, 1)
        write(held, kv.length, keys, values)
        found.append(paged_attention(q, held, kv.length, scale=config.scale, choice=kv.choice))
    torch.testing.assert_close(found[1], found[0])
    assert found[2].isfinite().all() and not torch.allclose(found[2], found[0], atol=1e-3)


@native
@every_format
def test_a_page_that_is_not_finite_is_passed_over_by_no_query(kv_format):
    """Of the first key head, in page 5 of 17: whose answer would else be a number."""
    kv = choosing(kv_format, 1090, 1, 1)
    held = kv.layer(LAYER, 1090, 1)
    layout = held.coded or held.dense
    keys, scales, *_ = layout.parts(held.pages[5])
    if layout.is_dense:
        keys[0, 3, 7] = float("inf")
    else:
        scales[0, 0, 7] = NOT_FINITE
    for out in (attended([kv], [1]), by_operators(kv, 1)):
        assert out[0, :2].isnan().all(1).all() and out[0, 2:].isfinite().all()


@native
@every_format
def test_pages_that_are_written_again_are_judged_by_what_they_have_then(kv_format):
    """Pages 10 to 17, once with sketches of what was there before, once without."""
    found = []
    for attend_from in (0, 5000):
        kv = choosing(kv_format, 1090, 200, 1, attend_from)
        attended([kv], [200])
        kv.advance(200)
        assert kv.trim(640) == 640
        kv.prepare(1240)
        kv.attend_from = 0
        found.append(attended([kv], [600]))
    assert torch.equal(*found)


@native
@every_format
@pytest.mark.parametrize("chosen", [8, 40])
def test_who_chooses_all_pages_attends_with_the_bits_of_full_attention(kv_format, chosen):
    """Pages 0 to 10: eight are between the first one and the last two."""
    full, ours = (choosing(kv_format, 690, 14, chosen_pages) for chosen_pages in (None, chosen))
    assert torch.equal(attended([full], [14]), attended([ours], [14]))
    seven = choosing(kv_format, 690, 14, 7)
    assert not torch.equal(attended([seven], [14]), attended([ours], [14]))


IDS = random.Random(3).choices(range(3, VOCAB), k=460)  # eight pages
FROM = 200  # in the fourth page, from where on tokens choose; one of those between the first and the last two


def sequence(model: str, kv: str) -> PagedKV:
    made = PagedKV(new_kv_pages(decoder(model), KV_FORMATS[kv], chosen_pages=1), len(IDS))
    made.attend_from = FROM
    return made


@cache
def behind_a_prompt(model: str, kv: str) -> Tensor:
    """The logits of all tokens behind FROM, the last ten each computed by itself."""
    runner, store = ModelRunner(decoder(model)), sequence(model, kv)
    ends = [FROM, len(IDS) - 10, *range(len(IDS) - 9, len(IDS) + 1)]
    chunks = (Chunk(IDS[:end], store, end - store.length, all_logits=True) for end in ends)
    return torch.cat([runner.forward([chunk]) for chunk in chunks])[FROM:]


@pytest.mark.parametrize(
    ("model", "kv"), [("llama", "int8"), ("windowed", "int4"), ("hybrid", "k8v4"), ("odd", "bf16")]
)
@given(st.data())
@settings(max_examples=examples(6), deadline=None)
def test_what_a_token_chooses_depends_on_nothing_that_is_computed_beside_it(model, kv, data):
    """Chunks of any size, tokens that are taken back, branches, and another sequence in the batch."""
    runner = ModelRunner(decoder(model), batch_rows=data.draw(st.sampled_from([7, 64, 512])))
    mine, other, expected = sequence(model, kv), sequence(model, kv), behind_a_prompt(model, kv)
    while mine.length < len(IDS):
        begin = mine.length
        ends = [begin + data.draw(st.integers(1, 130)), other.length + data.draw(st.integers(1, 90))]
        if begin < FROM:
            ends[0] = FROM
        kvs = [mine] if other.length == len(IDS) else [mine, other]
        chunks = [
            Chunk(IDS[:end], kv, end - kv.length, all_logits=True)
            for kv, end in zip(kvs, (min(end, len(IDS)) for end in ends), strict=False)
        ]
        logits = runner.forward(chunks)[: chunks[0].num_tokens]
        if begin >= FROM:
            assert torch.equal(logits, expected[begin - FROM : mine.length - FROM])
        if mine.length > FROM and mine.state is None and data.draw(st.booleans()):
            mine.trim(max(FROM, mine.length - data.draw(st.integers(1, 100))))
        if mine.state is None and data.draw(st.booleans()):
            mine = mine.branch(len(IDS))


def chosen_engine(pages: int | None, **options: Any) -> Engine:
    loaded = LoadedModel(decoder(), len(IDS) + 60)
    return Engine(loaded, word_tokenizer(VOCAB), kv="int8", chosen_pages=pages, **options)


def test_drafts_and_what_was_cached_change_no_token_and_no_answer_is_taken_for_a_prompt():
    prompt = IDS[:380]
    engine = chosen_engine(1)
    plain = generated(engine, prompt, 100)
    assert plain != generated(chosen_engine(None), prompt, 100), "every page was attended to"
    assert generated(engine, prompt, 100) == plain, "behind a prompt that is cached"
    drafting = chosen_engine(1, speculate=Speculate("ngram", 6))
    assert generated(drafting, prompt, 100) == plain
    first, second = answered(engine, *[Request((*prompt, *plain[:90]), params(3))] * 2)
    assert first.token_ids == second.token_ids and first.finished.usage.cached_tokens == 320, "five pages of the prompt"


def test_beams_choose_as_answers_do():
    (wide,) = answered(chosen_engine(400), Request(tuple(IDS[:380]), params(20), beams=2))
    (all_pages,) = answered(chosen_engine(None), Request(tuple(IDS[:380]), params(20), beams=2))
    (narrow,) = answered(chosen_engine(1), Request(tuple(IDS[:380]), params(20), beams=2))
    assert wide.token_ids == all_pages.token_ids != narrow.token_ids


def test_pages_on_the_disk_are_chosen_alike():
    found = []
    for offload in ("off", "keep:256"):
        config = EngineConfig(attend="top:2", kv_offload=offload, ctx=1024, weights="int8", speculate="off")
        with closing(Engine.load("tiny", config)) as engine:
            found.append(generated(engine, [each + 50 for each in IDS * 2][:700], 80))
            assert (engine.residency.stream_clock.bytes_read > 0) == (offload != "off")
    assert found[0] == found[1]


def test_a_draft_over_the_border_behind_which_tokens_choose_reads_all_pages_from_the_disk():
    """Also where it has been rejected once, and sketches of what is on the disk are there."""
    found = []
    for offload in ("off", "keep:256"):
        config = EngineConfig(attend="top:2", kv_offload=offload, ctx=1024, weights="int8", speculate="off")
        with closing(Engine.load("tiny", config)) as engine:
            kv, text = engine.residency.new_kv(700), tuple(IDS[:400])
            kv.attend_from = 0  # five pages are attended to in any case: 320 tokens
            engine.runner.forward([Chunk(text, kv, 318)])
            for _ in range(2):
                found.append(engine.runner.forward([Chunk(text, kv, 5, all_logits=True)]))
                assert kv.num_sketched > kv.num_spilled == (3 if offload != "off" else 0)
                kv.trim(318)
            kv.close()
    assert all(torch.equal(each, found[0]) for each in found)


def test_perplexity_is_that_of_tokens_which_choose():
    losses = [chosen_engine(pages).perplexity(IDS, ctx=len(IDS)).nll for pages in (None, 50, 2, 1)]
    assert losses[0] == losses[1] and len({*losses}) == 3


def test_the_sketches_of_pages_are_counted():
    """Of two layers and two key heads, for 16 pages: 32 signs and a scale a token, and the mean."""
    pages = chosen_engine(1).residency.kv_pages
    before = pages.nbytes
    kv = PagedKV(pages, 900)
    assert pages.nbytes - before - sum(pool.nbytes for group in pages.groups for pool in group.pools) == 16 * 4 * 384
    kv.close()
    assert PagedKV(pages, 250).choice is None, "four pages are attended to in any case"


def test_a_plan_knows_the_sketches_and_what_is_read():
    shapes = [planned_shape(attend) for attend in ("all", "top:16", "top:900")]
    full, few, many = (each.attended_bytes(32_768) for each in shapes)
    assert (
        few < full / 7 and many > few and shapes[0].kv_bytes(64) < shapes[1].kv_bytes(64) < 1.1 * shapes[0].kv_bytes(64)
    )


def test_a_plan_knows_what_a_step_brings_from_elsewhere():
    whole = planned_shape("top:16")
    all_pages, few_pages = (replace(planned_shape(attend), resident_tokens=1024) for attend in ("all", "top:16"))
    token_bytes = all_pages.kv_bytes_per_token
    chosen_bytes = 19 * 64 * token_bytes
    of_all, of_few = (planned_costs(each) for each in (all_pages, few_pages))
    assert of_few.brought_bytes(32_768, 2) == 2 * chosen_bytes < of_all.brought_bytes(32_768, 2) / 20
    assert of_few.brought_bytes(1_100) == of_all.brought_bytes(1_100) == 76 * token_bytes
    # All pages come while others are computed, and what is chosen is waited for.
    assert of_all.decode_s(32_768) == pytest.approx(31 * 1024 * token_bytes / 1e9)
    assert of_few.decode_s(32_768) == pytest.approx(planned_costs(whole).decode_s(32_768) + chosen_bytes / 1e9)
    # A step of a card brings all where the host attends in some layers.
    for share, brought in ((1.0, chosen_bytes), (0.5, 31 * 1024 * token_bytes)):
        assert (
            planned_costs(few_pages, CardRates(400.0, 40_000.0, 1.0, 0.0, 0.0), share).brought_bytes(32_768) == brought
        )


def planned_costs(shape: ModelShape, card: CardRates | None = None, kv_share: float = 0.0) -> Costs:
    """Where pages come at 1 GB/s."""
    rates = Rates(matrix_gbs=400.0, compute_gops=1e6, disk_gbs=1.0, cached_share=0.0)
    return Costs(shape, rates, card, Work(0, 0, 0, kv_share=kv_share), 512)


def planned_shape(attend: str) -> ModelShape:
    found, wanted = find_shape("tinyllama-1.1b"), EngineConfig(attend=attend)
    planner = ModelPlanner.of(found.name, None, found.config, replace(wanted, device="cpu"), None, ignore)
    return planner.search(found.config).shape


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def test_what_has_sketches_on_one_device_may_have_none_on_another() -> None:
    meta = torch.device("meta")
    sketches = PageSketches([HOST, meta, HOST], KVShape(2, 64), 9)
    sketches.made(HOST)[:] = 7
    assert (len(sketches.made(HOST)), sketches.made(meta).tolist(), sketches.num_made) == (2, [0], 0)
    sketches.made(meta)[:] = 5
    sketches.trim(6)
    assert (sketches.made(HOST).tolist(), sketches.num_made) == ([6, 6], 5)
    sketches.move([meta] * 3)
    assert (len(sketches.made(meta)), sketches.num_made) == (3, 0)

"""`--kv-evict`: keys and values of a long text's middle leave, and what is left is attended to as the rule says."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.bench.random_model import RandomBlocks, word_tokenizer
from localllm.cache.kv_eviction import FORWARD_TOKENS, Eviction
from localllm.cache.kv_format import KV_FORMATS
from localllm.cache.kv_pages import KVPages
from localllm.cache.paged_kv import PagedKV
from localllm.cache.pages import HOST
from localllm.engine.engine import Engine
from localllm.engine.loader import LoadedModel
from localllm.engine.placement import held_tokens, model_shape
from localllm.engine.prefix_config import IN_POOLS, NO_REUSE, Computed, KVReuse
from localllm.engine.request import Request, SamplingParams
from localllm.engine.speculative.choice import Speculate
from localllm.engine.step_types import Limits
from localllm.kernels import cpu_linear, kv_page
from localllm.kernels.cpu_jit import host_isas
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout
from localllm.kernels.paged_attention import page_masses, paged_attention, write
from localllm.kernels.sizes import KVShape
from localllm.layers.segment import Segment
from localllm.models.decoder import Decoder
from localllm.models.families import parse_config
from localllm.models.load import load_decoder
from localllm.models.shapes import shipped_shapes
from localllm.quant.layouts import SIZES
from localllm.quant.recipe import recipe
from tests.cli_support import run_cli
from tests.engine_support import Heard, answered
from tests.kv_support import check_pages
from tests.test_paged_attention import Heads, run_native
from tests.thinning import every_other, one_in, thinned

native = pytest.mark.skipif(not cpu_linear.is_available(), reason="no CPU kernel runs on this machine")
VOCAB, CTX = 160, 1024
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CTX,
    "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "llama": LLAMA,
    "operators": LLAMA | {"head_dim": 40},  # of heads that fill no vectors
    "windowed": LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": 32, "sliding_window": 70},
    "latent": LLAMA | {
        "model_type": "deepseek_v2", "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    },
}  # fmt: skip


@cache
def decoder(model: str) -> Decoder:
    config, chosen = parse_config(SHAPES[model], "a test's config"), recipe("int4")
    dtype = torch.float32 if model == "operators" else torch.bfloat16
    return load_decoder(RandomBlocks(chosen), config, chosen, dtype=dtype, device=torch.device("cpu"))


def engine(rule: str, *, model: str = "llama", kv: str = "int8", reuse: KVReuse = NO_REUSE, **options: Any) -> Engine:
    loaded, computed = LoadedModel(decoder(model), CTX, eviction=Eviction.of(rule)), Computed(f"test:{model}", "int4")
    return Engine(loaded, word_tokenizer(VOCAB), kv=kv, reuse=reuse, computed=computed, **options)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    choose = random.Random(seed)
    return tuple(choose.randrange(3, VOCAB) for _ in range(length))


def ask(of: Engine, *prompts: Sequence[int], max_tokens: int = 8) -> list[Heard]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    heard = answered(of, *(Request(tuple(ids), params, is_scored=True) for ids in prompts))
    assert all(each.finished.error is None for each in heard)
    check_pages(of.residency.kv_pages)
    return heard


def said(heard: Sequence[Heard]) -> list[tuple[list[int], float | None]]:
    """Of each answer the tokens, and how likely they were: other logits are seen in it."""
    return [(each.token_ids, each.finished.mean_logprob) for each in heard]


@pytest.mark.parametrize(
    ("rule", "model"),
    [("sinks:832", "latent"), ("sinks:832", "operators"), ("heavy:896", "llama"), ("heavy:896", "windowed")],
)
def test_a_window_or_budget_as_long_as_the_text_changes_no_bit(model, rule):
    text = prompt(850)
    (plain,), (found,) = (ask(engine(each, model=model), text, max_tokens=4) for each in ("off", rule))
    assert said([found]) == said([plain]) and found.finished.usage.evicted_tokens == 0


# What a token sees


def sees(position: int, window: int) -> Tensor:
    """bool [position + 1]: its own page up to itself, the first page, and the pages that the window reaches."""
    pages, own = torch.arange(position + 1) // PAGE_TOKENS, position // PAGE_TOKENS
    return (pages == 0) | (pages >= own - -(-window // PAGE_TOKENS))


def as_read(layout: PageLayout | None, x: Tensor, *, is_key: bool) -> Tensor:
    """x [T, KH, D] as later pages' queries read it."""
    if layout is None:
        return x
    turned, page = kv_page.rotated(x), torch.zeros(-(-len(x) // 64), layout.layer_bytes, dtype=torch.uint8)
    for number, part in enumerate(torch.split(turned, PAGE_TOKENS)):
        kv_page.store(layout, page[number], 0, part, part)
    stored = kv_page.load(layout, page)[0 if is_key else 1].transpose(0, 1)[: len(x)]
    return torch.cat((x[:PAGE_TOKENS], kv_page.rotated(stored[PAGE_TOKENS:])))


def oracle(layout: PageLayout | None, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q [T, H, D], k, v [T, KH, D] of a text from its first token on: every token by itself, with an explicit mask."""
    T, H, D = q.shape
    coded = as_read(layout, k, is_key=True), as_read(layout, v, is_key=False)
    mixed = []
    for t in range(T):
        own = t // PAGE_TOKENS * PAGE_TOKENS
        keys, values = (torch.cat((c[:own], x[own : t + 1])) for c, x in zip(coded, (k, v), strict=True))
        keys, values = (x.repeat_interleave(H // k.shape[1], dim=1) for x in (keys, values))
        scores = torch.einsum("hd,shd->hs", q[t], keys) * D**-0.5
        weights = scores.masked_fill(~sees(t, window), float("-inf")).softmax(-1)
        mixed.append(torch.einsum("hs,shd->hd", weights, values))
    return torch.stack(mixed)


def new_pages(kv: str, rule: str, shape: Heads) -> KVPages:
    each = {"windows": [None] * 2, "devices": [HOST] * 2, "shapes": [KVShape(shape.KH, shape.D)] * 2}
    return KVPages(KV_FORMATS[kv], dtype=torch.float32, eviction=Eviction.of(rule), **each)  # type: ignore[arg-type]


def chunks(kv: PagedKV, sizes: Sequence[int]) -> Iterator[Segment]:
    """The segment of each forward in turn, prepared; the one before has advanced."""
    for size in sizes:
        kv.prepare(kv.length + size)
        yield Segment(0, size, kv, kv.length, rope_length=0)
        kv.advance(size)


def by_operators(shape: Heads, qkv: Tensor, segment: Segment) -> Tensor:
    mixed, begin = [], 0
    for count, past, pages in segment.kv.runs(1, segment.past, len(qkv)):
        q, k, v = torch.split(qkv[begin : begin + count], [shape.H, shape.KH, shape.KH], dim=1)
        write(pages, past, k, v)
        mixed.append(paged_attention(q, pages, past, scale=shape.D**-0.5))
        masses, first = segment.kv.masses, segment.past + begin
        for position in () if masses is None else masses.watched(first, first + count):
            row = page_masses(q[position - first : position - first + 1], pages, past + position - first, shape.D**-0.5)
            masses.row(position)[0, : len(row)] += row
        begin += count
    return torch.cat(mixed)


@native
@pytest.mark.parametrize(
    ("how", "kv", "window", "sizes"),
    [
        (how, kv, *((64, (400, 1, 5, 70, 1)) if (i + j) % 2 else (130, (60, 300, 64, 64, 1))))
        for i, how in enumerate(["kernels", "operators"])
        for j, kv in enumerate(KV_FORMATS)
    ],
)
def test_a_token_sees_the_first_page_the_window_and_its_own(kv, how, window, sizes):
    shape = Heads(4, 2, 64, 0)
    qkv = torch.randn(sum(sizes), shape.H + 2 * shape.KH, shape.D, generator=torch.Generator().manual_seed(1))
    pages = new_pages(kv, f"sinks:{window}", shape)
    sequence, found = PagedKV(pages, len(qkv)), []
    for segment in chunks(sequence, sizes):
        own = qkv[segment.past : segment.past + segment.end].clone()
        if how == "kernels":
            found.append(run_native(host_isas()[0], shape, own, [segment], threads=segment.past % 4 + 1))
        else:
            found.append(by_operators(shape, own, segment))
    layout, parts = sequence.layouts[1], torch.split(qkv, [shape.H, shape.KH, shape.KH], dim=1)
    torch.testing.assert_close(torch.cat(found), oracle(layout, *parts, window), rtol=0, atol=2e-5)
    check_pages(pages)


# Texts


@cache
def alone(model: str, kv: str, text: tuple[int, ...]) -> tuple[list[int], float | None]:
    """What is said by an engine that reuses nothing."""
    (answer,) = said(ask(engine("sinks:128", model=model, kv=kv), text))
    return answer


@native
@pytest.mark.parametrize(
    ("model", "kv", "tier"),
    thinned(
        [
            (model, kv, tier)
            for model, kv in (("llama", "int4"), ("windowed", "int8"), ("latent", "bf16"))
            for tier in ("pool", "ram", "restarted")
        ],
        [("llama", "int4", "restarted"), ("windowed", "int8", "ram"), ("latent", "bf16", "pool")].__contains__,
    ),
)
def test_a_prefix_that_is_found_gives_the_bits_of_computing_it(model, kv, tier, tmp_path: Path):
    reuse = {
        "pool": IN_POOLS,
        "ram": KVReuse(ram_bytes=64 << 20),
        "restarted": KVReuse(ram_bytes=0, directory=tmp_path),
    }
    of, text = engine("sinks:128", model=model, kv=kv, reuse=reuse[tier]), prompt(700)
    first = ask(of, text)
    if tier == "ram":  # its pages leave the pool
        ask(of, prompt(900, seed=1))
    if tier == "restarted":
        of.close()
        of = engine("sinks:128", model=model, kv=kv, reuse=reuse[tier])
    (again,) = ask(of, text)
    assert said([*first, again]) == [alone(model, kv, text)] * 2
    assert again.finished.usage.cached_tokens == 640
    of.close()


def test_pages_of_another_rule_are_not_found(tmp_path):
    found = []
    for rule in ("off", "sinks:64", "sinks:128", "sinks:65"):
        of = engine(rule, reuse=KVReuse(ram_bytes=0, directory=tmp_path))
        found += [heard.finished.usage.cached_tokens for heard in ask(of, prompt(700))]
        of.close()
    assert found == [0, 0, 0, 640], "a window is as many pages as hold it"


CHUNKS = [{"limits": Limits(chunk_tokens=37)}, {"limits": Limits(chunk_tokens=200)}]
DRAFTS = {"speculate": Speculate("ngram")}


@native
@pytest.mark.parametrize(
    ("model", "options"), one_in(2, product(["llama", "windowed", "operators"], [*CHUNKS, DRAFTS]))
)
def test_neither_chunks_nor_drafts_nor_others_beside_it_change_a_text(model, options):
    texts = [prompt(700), (5, 6, 7, 8) * 60, prompt(300, seed=1)]
    found = said(ask(engine("sinks:128", model=model, **options), *texts))
    plain = [alone(model, "int8", text) for text in texts]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
    if model != "operators":  # whose sums depend on the number of rows
        assert found == plain


@native
@pytest.mark.parametrize("model", every_other(["llama", "operators", "windowed"]))
def test_by_attention_neither_drafts_nor_others_beside_it_change_a_text(model):
    """Long enough for pages to leave in the answer, too."""
    texts = [(5, 6, 7, 8) * 90, prompt(330), prompt(700, seed=1)]
    together = ask(engine("heavy:256", model=model, **DRAFTS), *texts, max_tokens=140)
    plain = [ask(engine("heavy:256", model=model), text, max_tokens=140)[0] for text in texts]
    assert [heard.token_ids for heard in together] == [heard.token_ids for heard in plain]
    left = [heard.finished.usage.evicted_tokens for heard in together]
    assert left == [64 * ((len(text) + 138) // 64 - 4) for text in texts]


@native
def test_what_follows_an_eviction_by_attention_is_found_by_no_other():
    of = engine("heavy:512", reuse=IN_POOLS, limits=Limits(chunk_tokens=100))
    ask(of, prompt(900))
    for length, found in ((900, 512), (600, 512), (450, 448)):
        (again,) = ask(of, prompt(length))
        assert again.finished.usage.cached_tokens == found


def test_no_more_is_found_than_the_budget_however_much_was_computed_without_one(tmp_path):
    reuse = KVReuse(ram_bytes=0, directory=tmp_path)
    exact = engine("off", reuse=reuse)
    ask(exact, prompt(900))
    exact.close()
    of = engine("heavy:256", reuse=reuse, limits=Limits(chunk_tokens=64))
    (heard,) = ask(of, prompt(900))
    assert heard.finished.usage.cached_tokens == 256
    (group,) = of.residency.kv_pages.groups
    ever_used = sum(bool(part.any()) for page in group.sealed.pages for part in page.parts.values())
    assert ever_used <= 2 * (4 + 2), "of the budget, the page that is written, and one that is let go next"
    of.close()


@native
@pytest.mark.parametrize(("rule", "model"), [("sinks:64", "windowed"), ("heavy:192", "llama")])
def test_branches_beams_and_requests_that_are_given_up_leave_every_page_whole(model, rule):
    """The second one branches off when the prompt of the first is computed; a third is given up in its middle."""
    of = engine(rule, model=model, reuse=IN_POOLS, limits=Limits(chunk_tokens=90))
    params, text = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True), prompt(400)
    plain, beams = Request(text, params, is_scored=True), Request(prompt(260, seed=1), params, beams=3)
    heard = {of.submit(request): Heard() for request in (plain, plain, beams)}
    given_up = of.submit(Request(prompt(500, seed=2), params))
    for number in itertools.count():
        if number == 9:
            of.abort(given_up)
        if not of.has_work:
            break
        for event in of.step():
            if event.request_id in heard:
                heard[event.request_id].take(event)
        check_pages(of.residency.kv_pages)
    one, other, best = heard.values()
    assert said([one]) == said([other]) and len(best.token_ids) == 70
    assert all(each.finished.usage.evicted_tokens > 0 for each in heard.values())
    assert not any(pool.reserved for group in of.residency.kv_pages.groups for pool in group.pools)


@native
def test_the_memory_of_a_long_text_is_that_of_its_window_and_a_forward():
    of = engine("sinks:64", limits=Limits(chunk_tokens=64))
    (found,) = ask(of, prompt(900), max_tokens=70)
    (group,) = of.residency.kv_pages.groups
    ever_used = sum(bool(part.any()) for page in group.sealed.pages for part in page.parts.values())
    assert ever_used <= 3, "the window's, the page that is written, and one before it that is let go next"
    assert found.finished.usage.evicted_tokens == (900 + 69) // 64 * 64 - 2 * 64
    assert Eviction("sinks", 1024).pages * 64 + FORWARD_TOKENS + 2 * 64 >= 64 * group.num_pages(1 << 20)


# The attention that pages get


MASS_CASES = [
    ("bf16", Heads(7, 1, 64, 0, softcap=3.0)),
    ("int8", Heads(16, 1, 32, 0)),
    ("k8v4", Heads(4, 2, 64, 0)),
    ("int4", Heads(4, 4, 32, 0, has_sinks=True)),
]


@native
@pytest.mark.parametrize(("kv", "shape"), MASS_CASES, ids=["capped", "one key head", "grouped", "with a sink"])
def test_the_kernel_sums_up_the_weights_that_pages_get(kv, shape):
    sizes = (300, 200, 1, 100, 3)
    pages = new_pages(kv, "heavy:256", shape)
    sequence = PagedKV(pages, sum(sizes))
    qkv = torch.randn(sum(sizes), shape.H + 2 * shape.KH, shape.D, generator=torch.Generator().manual_seed(2))
    for segment in chunks(sequence, sizes):
        begin, end = segment.past, segment.past + segment.end
        run_native(host_isas()[0], shape, qkv[begin:end].clone(), [segment], threads=3)
        assert [*sequence.masses.watched(begin, end)] == [*range(max(begin, end - 16), end)]
        for count, past, part in sequence.runs(1, begin, segment.end):
            for position in sequence.masses.watched(begin, begin + count):
                q, at = qkv[position : position + 1, : shape.H], past + position - begin
                expected = page_masses(q, part, at, shape.D**-0.5, shape.softcap, shape.sinks)
                found = sequence.masses.row(position).sum(0)
                torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-4, atol=1e-5)
                assert shape.has_sinks or found.sum() == pytest.approx(shape.H, rel=1e-4)
            begin += count
    check_pages(pages)


@native
@pytest.mark.parametrize("how", ["kernels", "operators"])
def test_pages_that_get_the_attention_stay(how):
    """Every query looks for what the keys of pages 2 and 5 have."""
    shape, length = Heads(2, 1, 32, 0), 64 * 12
    qkv = torch.randn(length, 4, 32, generator=torch.Generator().manual_seed(3)) * 0.1
    qkv[:, :2, 0] = 8
    for number in (2, 5):
        qkv[64 * number : 64 * (number + 1), 2, 0] = 8
    pages = new_pages("int8", "heavy:384", shape)
    sequence = PagedKV(pages, length + 1)
    for segment in chunks(sequence, (100, 400, 140, 64, 64)):
        own = qkv[segment.past : segment.past + segment.end].clone()
        if how == "kernels":
            run_native(host_isas()[0], shape, own, [segment])
        else:
            by_operators(shape, own, segment)
    sequence.prepare(length + 1)
    assert [n for n, page in enumerate(sequence.tables[0]) if page is not None] == [0, 2, 5, 9, 10, 11, 12]
    assert sequence.num_evicted == 6 * 64
    assert sequence.exact_tokens == 500, "the first one left when these had been computed"
    check_pages(pages)


# What is said of it, and what is refused


def test_a_run_says_how_many_tokens_left(model):
    line = ("run", model, "-p", "the fox " * 100, "--max-tokens", "4", "--kv-evict", "sinks:64", "--raw")
    told, stats = run_cli(*line, "--json"), run_cli(*line, "--stats")
    usage = json.loads(told.out)["usage"]
    num_tokens = usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["evicted_tokens"] == 64 * ((num_tokens - 1) // 64 - 2) > 0
    assert f"keys and values of {usage['evicted_tokens']} tokens left memory" in stats.err


def test_tokens_of_a_chat_says_what_left(talk):
    said = talk("the fox " * 100, "/tokens", flags=("--kv-evict", "sinks:64"))
    assert "tokens left memory before the last answer ended (--kv-evict)" in said.err
    assert "left memory" not in talk("the fox", "/tokens", flags=("--kv-evict", "sinks:64")).err


def test_a_plan_counts_the_tokens_that_stay():
    config = parse_config(shipped_shapes()["llama-3.1-8b"], "a shape")
    whole = model_shape(config, SIZES["int4-g64"], "bf16", "it")
    found = replace(whole, held_tokens=held_tokens(config, "sinks:1024"))
    assert found.held_tokens == 64 + 1024 + FORWARD_TOKENS + 64
    assert found.kv_bytes(32768) == whole.kv_bytes(found.held_tokens) < whole.kv_bytes(32768) / 8
    assert found.kv_bytes(2 * 32768, 2) == 2 * found.kv_bytes(32768)
    assert found.kv_bytes(500) == whole.kv_bytes(500)


@pytest.mark.parametrize(
    ("rule", "meant"),
    [("sinks:10", "sinks:64"), ("hevy:512", "heavy:512"), ("sinks", "sinks:4096"), ("512", "sinks:512")],
)
def test_a_rule_that_is_none_is_refused(rule, meant):
    told = run_cli("plan", "tiny", "--kv-evict", rule)
    assert told.code == 2 and f"--kv-evict {meant}" in told.err

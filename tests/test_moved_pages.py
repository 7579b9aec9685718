"""Documents that stand elsewhere in earlier prompts: found, turned to their new positions, and nobody else's."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from localllm.bench.random_model import RandomBlocks, word_tokenizer
from localllm.cache.disk import DiskTier
from localllm.cache.page_file import PageKey
from localllm.cache.prefix import moved_key, page_digest
from localllm.cache.spans import Span, SpanIndex
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, TokenEvent
from localllm.engine.loader import LoadedModel
from localllm.engine.prefix_config import IN_POOLS, NO_REUSE, UNKNOWN_SOURCE, KVReuse
from localllm.engine.request import Request, SamplingParams
from localllm.errors import UsageError
from localllm.kernels.kv_page import load, rotated
from localllm.models.families import parse_config
from localllm.models.load import load_decoder
from localllm.quant.recipe import recipe
from localllm.settings import EngineConfig
from tests.kv_support import check_pages, check_prefix
from tests.test_prefix_cache import COMMON, CTX, SHAPE, VOCAB, computed, engine, greedy, tokens
from tests.thinning import examples

ROOT = bytes(32)
A, B, C = tokens(150, seed=1), tokens(160, seed=2), tokens(130, seed=3)
HEAD, QUESTION = tokens(30, seed=8), tokens(5, seed=9)
EARLIER = [*tokens(37, seed=7), *A, *B, *C, 5]
PROMPT = [*HEAD, *C, *A, *B, *QUESTION]
DOCUMENTS = [tokens(length, seed=20 + length) for length in (141, 150, 163, 192)]
LONG = [*HEAD, *itertools.chain(*(DOCUMENTS[n] for n in (2, 0, 3, 1))), *QUESTION]


def ask(of: Engine, prompt: Sequence[int], reuse: Any = "chunks") -> tuple[tuple[tuple[int, float], ...], int]:
    """The answer, with logprobs, and how many tokens were taken from another position."""
    of.submit(Request(tuple(prompt), greedy(), reuse=reuse))
    events = [event for _ in range(200) if of.has_work for event in of.step()]
    finished = next(event for event in events if isinstance(event, FinishedEvent))
    assert finished.error is None, finished.error
    check_pages(of.residency.kv_pages)
    assert of.prefix is not None
    check_prefix(of.prefix)
    answer = [(e.token_id, e.logprob.logprob) for e in events if isinstance(e, TokenEvent) and e.logprob is not None]
    return tuple(answer), finished.usage.reused_tokens


def chain(token_ids: Sequence[int], variant: bytes = b"", moved: Sequence[int] = ()) -> list[PageKey]:
    keys: list[PageKey] = []
    for begin in range(0, len(token_ids) - 63, 64):
        parent, own = keys[-1].digest if keys else ROOT, tuple(token_ids[begin : begin + 64])
        key = PageKey(page_digest(parent + (b"" if keys else variant), own), parent, own)
        keys.append(moved_key(key) if len(keys) in moved else key)
    return keys


def index(*chains: Sequence[PageKey]) -> SpanIndex:
    found = SpanIndex(ROOT, lambda _key: True)
    found.add(key for keys in chains for key in reversed(keys))
    return found


# What is found


@pytest.mark.parametrize("offset", range(64))
def test_a_document_is_found_token_by_token_at_every_offset(offset):
    keys = chain([*tokens(100, seed=4), *A, *B, *tokens(100, seed=5)])
    prompt = [*[1] * offset, *B, *[2] * 20, *A]
    assert index(keys).find(prompt, 0, b"") == [
        Span(offset, offset + 160, 250, tuple(keys[3:7])),
        Span(offset + 180, offset + 330, 100, tuple(keys[1:4])),
    ]


def test_a_piece_that_begins_sooner_does_not_hide_the_whole_document():
    """As where a prompt before had its first tokens computed, and the rest of it moved."""
    whole, piece = chain([*tokens(80, seed=4), *A, *B]), chain([*tokens(60, seed=5), *A], moved=[2, 3])
    prompt = [*[1] * 10, *A, *B]
    (found,) = index(whole, piece).find(prompt, 0, b"")
    assert (found.begin, found.end, found.source) == (10, 314, 80)


def test_spans_that_overlap_are_cut_behind_the_longest():
    one, other = tokens(300, seed=14), tokens(300, seed=15)
    shared = [*one[100:], *other[:200]]
    keys = (
        chain([*tokens(64, seed=4), *one]),
        chain([*tokens(64, seed=5), *shared]),
        chain([*tokens(64, seed=6), *other]),
    )
    prompt = [*one, *other]
    found = index(*keys).find(prompt, 0, b"")
    assert all(before.end <= behind.begin for before, behind in itertools.pairwise(found))
    for span in found:
        held = [token for key in span.pages for token in key.token_ids]
        at = span.source % 64
        assert held[at : at + len(span)] == prompt[span.begin : span.end]
    assert sum(map(len, found)) > 500


def test_first_pages_moved_ones_and_those_of_other_adapters_are_no_source():
    assert index(chain([*A, *B], moved=[3])).find([1, *A, *B], 0, b"") == [
        Span(65, 193, 64, tuple(chain([*A, *B])[1:3]))
    ]
    assert index(chain([*A, *B], variant=b"adapter")).find([1, *A, *B], 0, b"") == []


@pytest.mark.parametrize(
    ("span", "end", "share", "pages"),
    [
        (Span(64, 640, 0, ()), 20, 0.0, range(1, 10)),
        (Span(64, 640, 0, ()), 20, 0.1, range(2, 10)),
        (Span(0, 640, 0, ()), 20, 0.0, range(1, 10)),  # never a prompt's first
        (Span(100, 640, 0, ()), 20, 0.05, range(2, 10)),  # 28 of 540 tokens stand in front of it
        (Span(100, 640, 0, ()), 8, 0.3, range(5, 8)),
        (Span(100, 250, 0, ()), 20, 0.0, range(0)),  # a single one is not worth it
    ],
)
def test_of_a_span_whole_pages_are_filled_behind_the_share_that_is_computed(span, end, share, pages):
    assert span.whole_pages(end, share) == pages


# What is taken


def keys_of(of: Engine, layer: int) -> Tensor:
    """The keys of the prompt that runs, as they were before a coded page's Hadamard: fp32 [KH, tokens, D]."""
    (sequence,) = of.scheduler.running
    kv = sequence.kv
    assert kv is not None
    index, row = kv.places[layer]
    coded = kv.pages.groups[index].sealed.layout
    tables = kv.tables[index]
    found = []
    for number in range(1, kv.length // 64):
        page = tables[number]
        assert page is not None
        keys = load(coded, page.layer(row).unsqueeze(0))[0]
        found.append(keys.float() if coded.is_dense else rotated(keys))
    return torch.cat(found, dim=1)


def prefilled(of: Engine, reuse: Any) -> Engine:
    request_id = of.submit(Request(tuple(PROMPT), greedy(), reuse=reuse))
    while not any(isinstance(event, TokenEvent) and event.request_id == request_id for event in of.step()):
        pass
    return of


@pytest.mark.parametrize(("kv", "bound"), [("bf16", 0.004), ("int8", 0.012), ("k8v4", 0.012), ("int4", 0.16)])
def test_keys_of_the_first_layer_are_those_that_would_be_computed_there(kv, bound):
    """In front of the first layer nothing has attended: its keys depend on the token and its position alone."""
    of = engine(kv)
    ask(of, EARLIER)
    moved, right = keys_of(prefilled(of, "chunks"), 0), keys_of(prefilled(engine(kv), "prefix"), 0)
    (sequence,) = of.scheduler.running
    assert sequence.num_moved_tokens == 192  # pages 4 to 6
    assert (moved - right).norm() < bound * right.norm()


LATENT = SHAPE | {
    "model_type": "minicpm3", "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "scale_depth": None, "dim_model_base": None,
}  # fmt: skip
YARN = SHAPE | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}
PARTIAL = SHAPE | {"model_type": "stablelm", "partial_rotary_factor": 0.5}


def other_engine(shape: dict[str, Any], kv: str) -> Engine:
    config, chosen = parse_config(shape, "a test's config"), recipe("int4")
    of = load_decoder(RandomBlocks(chosen), config, chosen, dtype=torch.bfloat16, device=torch.device("cpu"))
    return Engine(LoadedModel(of, CTX), word_tokenizer(VOCAB), kv=kv, reuse=IN_POOLS, computed=UNKNOWN_SOURCE)


@pytest.mark.parametrize(
    ("shape", "kv"), [(LATENT, "bf16"), (LATENT, "int8"), (LATENT, "int4"), (YARN, "int8"), (PARTIAL, "bf16")],
    ids=["latent-bf16", "latent-int8", "latent-int4", "yarn-int8", "partial-bf16"],
)  # fmt: skip
def test_what_turns_is_turned_once_and_nothing_else(shape, kv):
    of = other_engine(shape, kv)
    ask(of, EARLIER)
    moved, right = keys_of(prefilled(of, "chunks"), 0), keys_of(prefilled(other_engine(shape, kv), "prefix"), 0)
    assert (moved - right).norm() < (0.16 if kv == "int4" else 0.012) * right.norm()


@pytest.mark.parametrize(
    ("model", "kv"), [("llama", "bf16"), ("llama", "int8"), ("llama", "k8v4"), ("llama", "int4"), ("windowed", "int8"),
                      ("odd", "int8")],
)  # fmt: skip
def test_an_answer_is_near_the_computed_one_and_no_exact_prompt_sees_what_it_rests_on(model, kv):
    of = engine(kv, model=model)
    ask(of, EARLIER)
    answer, moved = ask(of, PROMPT)
    right = computed(kv, tuple(PROMPT), model)
    assert moved == 192
    first, its_first = answer[0], right[0]
    assert first[0] == its_first[0] and abs(first[1] - its_first[1]) < 0.06  # 0.01 to 0.03 as measured
    assert ask(of, PROMPT, "prefix") == (right, 0)
    assert ask(of, PROMPT) == (right, 0)  # now that they are there, the exact pages are taken


def test_the_next_turn_goes_on_with_all_of_it():
    of = engine()
    ask(of, EARLIER)
    answer, _ = ask(of, PROMPT)
    chat = [*PROMPT, *(token for token, _ in answer), *tokens(20, seed=11)]
    of.submit(Request(tuple(chat), greedy(), reuse="chunks"))
    of.step()
    assert of.scheduler.running[0].num_cached_tokens == 448


@pytest.mark.parametrize("tier", ["ram", "disk", "restarted"])
@pytest.mark.parametrize("model", ["llama", "windowed"])
def test_documents_come_from_every_tier(tier, model, tmp_path):
    reuse = KVReuse(ram_bytes=(64 << 20) * (tier == "ram"), directory=None if tier == "ram" else tmp_path / "kv")
    of = engine(reuse=reuse, model=model)
    ask(of, EARLIER)
    if tier == "restarted":
        of.close()
        of = engine(reuse=reuse, model=model)
    else:
        for seed in range(2):
            ask(of, tokens(CTX - 10, seed=10_000 + seed), "prefix")
    answer, moved = ask(of, PROMPT)
    assert moved == 192 and answer == moved_answer(model)
    of.close()


def moved_answer(model: str) -> Any:
    of = engine(model=model)
    ask(of, EARLIER)
    return ask(of, PROMPT)[0]


def test_what_is_computed_behind_moved_pages_is_a_source_after_a_restart_and_they_are_not(tmp_path):
    reuse, D = KVReuse(directory=tmp_path / "kv"), tokens(150, seed=12)
    of = engine(reuse=reuse)
    ask(of, EARLIER)
    assert ask(of, [*HEAD, *B, *C, *D, 5])[1] == 192
    of.close()
    of = engine(reuse=reuse)
    assert of.prefix is not None
    index = SpanIndex(of.prefix.root, of.prefix.knows)
    index.add(of.prefix.unlisted(index.digests))
    spans = index.find([*tokens(7, seed=13), *D, *B], 0, b"")
    assert [(span.begin, span.end, span.source) for span in spans] == [(7, 135, 320), (157, 317, 187)]
    of.close()


def test_pages_that_the_disk_does_not_give_are_computed(tmp_path, monkeypatch):
    reuse = KVReuse(directory=tmp_path / "kv")
    of = engine(reuse=reuse)
    ask(of, EARLIER)
    of.close()
    of = engine(reuse=reuse)
    monkeypatch.setattr(DiskTier, "read", lambda *_: 0)
    assert ask(of, PROMPT) == (computed("int8", tuple(PROMPT)), 0)
    of.close()


# Beside others


def test_exact_and_approximate_requests_of_one_prompt_do_not_wait_for_each_other():
    of = engine()
    ask(of, EARLIER)
    ids = {of.submit(Request(tuple(PROMPT), greedy(), reuse=reuse)): reuse for reuse in ("chunks", "prefix", "chunks")}
    answers: dict[int, list[tuple[int, float]]] = {request_id: [] for request_id in ids}
    moved = {}
    while of.has_work:
        for each in of.step():
            if isinstance(each, TokenEvent) and each.logprob is not None:
                answers[each.request_id].append((each.token_id, each.logprob.logprob))
            if isinstance(each, FinishedEvent):
                moved[ids[each.request_id]] = each.usage.reused_tokens
    first, exact, third = (tuple(answer) for answer in answers.values())
    assert exact == computed("int8", tuple(PROMPT)) and first == third == moved_answer("llama")
    assert moved["prefix"] == 0


@pytest.mark.parametrize(
    ("is_usual", "wanted", "moved"),
    [(True, None, 192), (True, "prefix", 0), (False, None, 0), (False, "chunks", 192)],
)
def test_a_request_says_otherwise_than_the_engine(is_usual, wanted, moved):
    of = engine(reuse=KVReuse(ram_bytes=0, moves=is_usual))
    ask(of, EARLIER, None)
    assert ask(of, PROMPT, wanted)[1] == moved


def test_beams_go_on_behind_documents():
    of = engine()
    ask(of, EARLIER)
    of.submit(Request(tuple(PROMPT), SamplingParams(temperature=0, max_tokens=4), beams=3, reuse="chunks"))
    ends = [event for _ in range(50) if of.has_work for event in of.step() if isinstance(event, FinishedEvent)]
    assert [end.usage.reused_tokens for end in ends] == [192] and ends[0].error is None
    check_pages(of.residency.kv_pages)
    assert ask(of, PROMPT, "prefix")[0] == computed("int8", tuple(PROMPT))


@cache
def behind_documents(attend: str, offload: str) -> tuple[Any, Any, int]:
    """What tiny says behind documents that were moved, and exactly, after such a prompt was given up halfway; and the
    bytes that were read from where pages rest."""
    config = EngineConfig(ctx=1024, weights="int8", speculate="off", attend=attend, kv_offload=offload)
    with closing(Engine.load("tiny", config, reuse=KVReuse(ram_bytes=64 << 20))) as of:
        ask(of, [*tokens(37, seed=7), *itertools.chain(*DOCUMENTS)], "prefix")
        usual = of.scheduler.limits
        of.scheduler.limits = replace(usual, chunk_tokens=100)
        request_id = of.submit(Request(tuple(LONG), greedy(), reuse="chunks"))
        while not (running := of.scheduler.running) or running[0].kv is None or running[0].kv.length < 500:
            of.step()
        assert running[0].kv.moved and running[0].kv.length < len(LONG)
        of.abort(request_id)
        of.step()
        pages = of.residency.kv_pages
        assert not pages.sequences and not any(store.nbytes for store in pages.stores.values())
        of.scheduler.limits = usual
        near, moved = ask(of, LONG)
        assert moved >= 128 and not pages.sequences and not any(store.nbytes for store in pages.stores.values())
        return near, ask(of, LONG, "prefix"), of.residency.stream_clock.bytes_read


@pytest.mark.parametrize("attend", ["all", "top:2"])
def test_where_pages_rest_changes_no_token_behind_documents_nor_of_an_exact_prompt_after_them(attend):
    config = EngineConfig(ctx=1024, weights="int8", speculate="off", attend=attend)
    with closing(Engine.load("tiny", config, reuse=KVReuse(ram_bytes=64 << 20))) as of:
        right = ask(of, LONG, "prefix")
    near, exact, _ = behind_documents(attend, "off")
    assert near != right[0] and exact == right
    *found, read_bytes = behind_documents(attend, "keep:256")
    assert found == [near, exact] and read_bytes > 0


def test_what_chooses_pages_behind_documents_begins_as_what_attends_to_all():
    """A prompt attends to all of its pages, moved ones too."""
    (whole, *_), (chosen, *_) = (behind_documents(attend, "off") for attend in ("all", "top:2"))
    assert whole[0] == chosen[0] and whole != chosen


class Questions(RuleBasedStateMachine):
    """Prompts of documents in any order, at any offset, exact or not, some given up: an exact answer is what an engine
    computes that reuses nothing."""

    @initialize(kv=st.sampled_from(["bf16", "int8", "int4"]), model=st.sampled_from(["llama", "windowed"]))
    def begin(self, kv: str, model: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.kv, self.model, self.moved = kv, model, 0
        self.engine = self._engine()

    def _engine(self) -> Engine:
        return engine(self.kv, KVReuse(ram_bytes=60_000, directory=Path(self.folder.name) / "kv"), self.model)

    @rule(offset=st.integers(0, 63), order=st.permutations(range(4)), is_exact=st.booleans(), end=st.integers(3, 6))
    def ask(self, offset: int, order: list[int], is_exact: bool, end: int) -> None:
        prompt = prompt_of(offset, order, end)
        answer, moved = ask(self.engine, prompt, "prefix" if is_exact else "chunks")
        self.moved += moved
        assert not is_exact or (answer, moved) == (computed(self.kv, tuple(prompt), self.model), 0)

    @rule(offset=st.integers(0, 63), order=st.permutations(range(4)), steps=st.integers(0, 3))
    def give_up(self, offset: int, order: list[int], steps: int) -> None:
        self.engine.scheduler.limits = replace(self.engine.scheduler.limits, chunk_tokens=100)
        request_id = self.engine.submit(Request(tuple(prompt_of(offset, order, 7)), greedy(), reuse="chunks"))
        for _ in range(steps):
            self.engine.step()
        self.engine.abort(request_id)
        self.engine.step()
        self.engine.scheduler.limits = replace(self.engine.scheduler.limits, chunk_tokens=512)

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.engine = self._engine()

    @invariant()
    def pages_are_owned_as_often_as_counted(self) -> None:
        if hasattr(self, "engine"):
            check_pages(self.engine.residency.kv_pages)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            event("moved some" if self.moved else "moved none")
            self.engine.close()
            self.folder.cleanup()


def prompt_of(offset: int, order: Sequence[int], end: int) -> list[int]:
    documents = (token for number in order[:2] for token in DOCUMENTS[number])
    return [*tokens(offset, seed=offset), *documents, *tokens(20, seed=30), end]


TestQuestions = Questions.TestCase
TestQuestions.settings = settings(max_examples=examples(20), stateful_step_count=12, **COMMON)


# What cannot be


def test_requests_that_need_every_token_or_an_engine_without_a_cache_are_refused():
    with pytest.raises(UsageError, match="prompt_logprobs and reuse chunks"):
        Request((3,), prompt_logprobs=0, reuse="chunks")
    with pytest.raises(UsageError, match="an embedding and reuse chunks"):
        Request((3,), pooling="mean", reuse="chunks")
    with pytest.raises(UsageError, match="cannot be reused"):
        engine(reuse=NO_REUSE).submit(Request((3,), reuse="chunks"))
    with pytest.raises(UsageError, match="reuse chunks is not possible"):
        engine(model="hybrid").submit(Request((3,), reuse="chunks"))

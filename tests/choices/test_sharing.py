"""Prompts that begin alike: read once, kept once, and each answered as if it had been alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.cache.paged_kv import PagedKV
from localllm.engine.engine import Engine
from localllm.engine.prefix_config import IN_POOLS, NO_REUSE
from localllm.engine.request import Request
from localllm.engine.step_types import Limits
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint as write_family
from tests.choices.support import drawn, held_pages, require_whole, searched, words
from tests.cli_support import write_checkpoint
from tests.engine_support import Heard, answered, finish_reasons, steps
from tests.kv_support import check_pages
from tests.thinning import examples, one_in

CHUNK = 128
PAGE = 64

Opened = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), context=4608)


@pytest.fixture
def opened(folder: Path) -> Iterator[Opened]:
    """Engines that end with the test."""
    engines: list[Engine] = []

    def open_engine(**options: Any) -> Engine:
        engines.append(load(folder, **options))
        return engines[-1]

    yield open_engine
    for engine in engines:
        require_whole(engine)
        engine.close()


def load(folder: Path, reuse: Any = IN_POOLS, kv_tokens: int | None = None, **limits: Any) -> Engine:
    """kv_tokens: that there is memory for, instead of what there is."""
    step_limits = Limits(**{"chunk_tokens": CHUNK, **limits})
    engine = Engine.load(folder, EngineConfig(ctx=4608), limits=step_limits, reuse=reuse)
    if kv_tokens is not None:
        engine.scheduler.limits = replace(engine.scheduler.limits, kv_tokens=kv_tokens, sequence_tokens=0)
    return engine


def most_at_once(engine: Engine) -> int:
    """How many requests ran beside each other, until all have ended."""
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    return most


def until_all_answer(engine: Engine, count: int) -> None:
    while sum(sequence.num_completion_tokens > 0 for sequence in engine.scheduler.running) < count:
        assert engine.has_work
        engine.step()


@pytest.mark.parametrize("length", [20, 64, 150, 700])
@pytest.mark.parametrize("reuse", [IN_POOLS, NO_REUSE], ids=["cache", "no cache"])
def test_a_prompt_is_read_once_for_all_of_its_answers(opened: Opened, length: int, reuse: Any) -> None:
    engine = opened(reuse=reuse)
    heard = answered(engine, *(drawn(words(length), seed) for seed in range(5)))
    assert engine.scheduler.num_chunks == -(-length // CHUNK)
    assert [each.finished.usage.cached_tokens for each in heard] == [0] + [length] * 4
    assert len({tuple(each.token_ids) for each in heard}) == 5


@pytest.mark.parametrize("length", one_in(3, [700, 20, 64]))
def test_each_answer_is_the_one_that_its_request_has_alone(opened: Opened, length: int) -> None:
    requests = [drawn(words(length), seed, max_tokens=70) for seed in range(4)]
    alone = opened(reuse=NO_REUSE)
    expected = [answered(alone, request)[0].token_ids for request in requests]
    assert [each.token_ids for each in answered(opened(), *requests)] == expected


@pytest.mark.parametrize("family", ["mistral-windowed", "phi3-longrope", "llama-dynamic-rope", "gemma3"])
def test_whatever_the_model_does_with_positions_each_answer_is_its_own(tmp_path: Path, family: str) -> None:
    write_family(tmp_path, family)
    length = 30 if family == "llama-dynamic-rope" else 48  # of LongRoPE, where its factors change
    requests = [drawn(words(length), seed, max_tokens=9) for seed in range(3)]
    engine = Engine.load(tmp_path, EngineConfig(dtype="fp32"), reuse=NO_REUSE)
    expected = [answered(engine, request)[0].token_ids for request in requests]
    assert [each.token_ids for each in answered(engine, *requests)] == expected
    require_whole(engine)


def test_the_pages_of_a_long_prompt_are_there_once(opened: Opened) -> None:
    engine, prompt = opened(chunk_tokens=512), words(4096)
    for seed in range(8):
        engine.submit(drawn(prompt, seed, max_tokens=16))
    until_all_answer(engine, 8)
    num_answer_pages = sum(1 + group.num_dense for group in engine.residency.kv_pages.groups) * 8
    assert held_pages(engine) <= 4096 // PAGE + num_answer_pages
    pools = [pool for group in engine.residency.kv_pages.groups for pool in {group.dense, group.sealed}]
    assert sum(len(pool.pages) for pool in pools) < 1.5 * (4096 // PAGE)
    list(steps(engine))


def test_memory_for_one_prompt_is_enough_for_several_answers_at_once(opened: Opened) -> None:
    engine = opened(kv_tokens=1024 + 4 * PAGE)
    for seed in range(4):
        engine.submit(drawn(words(1024), seed, max_tokens=PAGE))
    until_all_answer(engine, 4)
    list(steps(engine))


def test_what_the_answers_need_beside_the_prompt_has_to_be_there(opened: Opened) -> None:
    engine = opened(kv_tokens=1024 + 2 * PAGE)
    for seed in range(4):
        engine.submit(drawn(words(1024), seed, max_tokens=PAGE))
    assert most_at_once(engine) == 2


def test_prompts_that_begin_alike_share_what_they_begin_with(opened: Opened) -> None:
    engine, system = opened(), words(640)
    heard = answered(engine, *(drawn(system + words(30, seed), seed) for seed in range(1, 5)))
    assert [each.finished.usage.cached_tokens for each in heard] == [0, 640, 640, 640]


def test_a_short_prompt_does_not_wait_for_the_rest_of_a_long_one(opened: Opened) -> None:
    engine, system = opened(), words(128)
    long = engine.submit(drawn(system + words(2000, 1), max_tokens=1))
    engine.step()
    short = engine.submit(drawn(system + words(10, 2), max_tokens=1))
    assert list(finish_reasons(engine)) == [short, long]


def test_who_is_waited_for_is_as_urgent_as_who_waits(opened: Opened) -> None:
    engine, prompt = opened(), words(1000)
    slow = engine.submit(drawn(prompt, max_tokens=1, priority=-1))
    engine.step()
    others = [engine.submit(drawn(words(600, seed), max_tokens=1)) for seed in (1, 2)]
    urgent = engine.submit(drawn(prompt, 1, max_tokens=1, priority=1))
    assert list(finish_reasons(engine)) == [slow, urgent, *others]


def test_more_answers_than_run_at_once_share_it_too(opened: Opened) -> None:
    engine = opened(max_sequences=3)
    heard = answered(engine, *(drawn(words(500), seed) for seed in range(7)))
    assert [each.finished.usage.cached_tokens for each in heard] == [0, 500, 500, 448, 500, 500, 448]


def test_others_that_came_before_are_not_passed_for_want_of_a_place(opened: Opened) -> None:
    engine = opened(max_sequences=2)
    first = engine.submit(drawn(words(300), max_tokens=4))
    engine.step()
    other = engine.submit(drawn(words(300, 9), max_tokens=1))
    same = engine.submit(drawn(words(300), 1, max_tokens=1))
    ended = list(finish_reasons(engine))
    assert sorted(ended) == [first, other, same] and ended.index(other) < ended.index(same)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_when_the_first_one_is_stopped_the_next_one_reads_on(opened: Opened, num_steps: int) -> None:
    engine, prompt = opened(), words(600)
    expected = answered(opened(reuse=NO_REUSE), drawn(prompt, 1))[0].token_ids
    first = engine.submit(drawn(prompt))
    heard = {engine.submit(drawn(prompt, seed)): Heard() for seed in (1, 2)}
    for _ in range(num_steps):
        engine.step()
    engine.abort(first)
    for event in steps(engine):
        if event.request_id != first:
            heard[event.request_id].take(event)
    assert next(iter(heard.values())).token_ids == expected
    assert all(each.finished.finish_reason == "length" for each in heard.values())


def test_when_the_first_one_fails_the_others_are_answered(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened()
    failing = engine.submit(drawn(words(300)))
    others = [engine.submit(drawn(words(300), seed)) for seed in (1, 2)]
    forward = engine.runner.forward

    def fail_once(*arguments: Any, **keywords: Any) -> Any:
        monkeypatch.setattr(engine.runner, "forward", forward)
        raise RuntimeError("an operator has failed")

    monkeypatch.setattr(engine.runner, "forward", fail_once)
    assert finish_reasons(engine) == {failing: "error", others[0]: "length", others[1]: "length"}


def test_where_memory_has_no_room_for_a_branch_the_prompt_is_found_page_by_page(opened: Opened) -> None:
    with mock.patch.object(PagedKV, "branch", side_effect=MemoryError):
        heard = answered(opened(), *(drawn(words(300), seed) for seed in range(3)))
    assert [each.finished.usage.cached_tokens for each in heard] == [0, 256, 256]


def test_an_embedding_of_the_same_text_waits_for_nobody(opened: Opened) -> None:
    engine = opened()
    expected = answered(engine, drawn(words(300), pooling="mean"))[0].finished.embedding
    answer, embedded = answered(engine, drawn(words(300)), drawn(words(300), pooling="mean"))
    assert embedded.finished.embedding == expected and answer.finished.finish_reason == "length"


def test_an_answer_of_one_token_leaves_the_prompt_to_the_others(opened: Opened) -> None:
    engine = opened()
    lengths = [1, 40, 1, 12]
    heard = answered(engine, *(drawn(words(200), seed, length) for seed, length in enumerate(lengths)))
    assert [len(each.token_ids) for each in heard] == lengths
    assert engine.scheduler.num_chunks == 2


def test_answers_that_need_a_longer_context_have_it_together(folder: Path) -> None:
    engine = Engine.load(folder, EngineConfig(ctx=512))
    for seed in range(3):
        engine.submit(drawn(words(600), seed, grows=True))
    assert most_at_once(engine) == 3 and engine.ctx >= 600 + 8
    engine.close()


PROMPTS = (words(20), words(130), words(130)[:100] + words(30, 4), words(300), words(300, 5))
ASKS = st.one_of(
    st.builds(drawn, st.sampled_from(PROMPTS), st.integers(0, 3), st.integers(1, 40), priority=st.integers(-1, 1)),
    st.builds(searched, st.sampled_from(PROMPTS), st.integers(2, 3), st.integers(1, 12)),
    st.builds(drawn, st.sampled_from(PROMPTS), pooling=st.just("mean")),
)
MOVES = st.lists(st.one_of(ASKS, st.integers(0, 9), st.none()), max_size=40)


@pytest.fixture(scope="module", params=["plenty", "little", "streamed"])
def busy(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One with room for whoever comes, one where some have to wait, and one where prompts share a step."""
    room: Any = {
        "plenty": {},
        "little": {"kv_tokens": 1400, "max_sequences": 3},
        "streamed": {"shares_steps": True},
    }[request.param]
    engine = load(folder, **room)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Callable[[Request], Heard]]:
    """What a request gets that nobody is beside."""
    engine, known = load(folder, NO_REUSE), {}

    def answer(request: Request) -> Heard:
        key = repr(request)
        if key not in known:
            known[key] = answered(engine, request)[0]
        return known[key]

    yield answer
    engine.close()


@settings(max_examples=examples(15), deadline=None)
@given(moves=MOVES)
def test_whoever_comes_and_goes_every_answer_is_its_own_and_no_page_is_lost(
    busy: Engine, alone: Callable[[Request], Heard], moves: list[Request | int | None]
) -> None:
    asked: dict[int, tuple[Request, Heard]] = {}

    def step() -> None:
        for event in busy.step():
            asked[event.request_id][1].take(event)
        check_pages(busy.residency.kv_pages)

    for move in moves:
        if isinstance(move, Request):
            asked[busy.submit(move)] = move, Heard()
        elif isinstance(move, int) and move < len(asked):
            busy.abort(list(asked)[move])
        else:
            step()
    while busy.has_work:
        step()
    for request, heard in asked.values():
        assert heard.finished.finish_reason in ("cancelled", alone(request).finished.finish_reason)
        if heard.finished.finish_reason != "cancelled":
            assert heard.token_ids == alone(request).token_ids
            assert heard.finished.embedding == alone(request).finished.embedding
    require_whole(busy)

"""Beam search beside transformers', and beside whatever else the engine does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from localllm.cache.paged_kv import PagedKV
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, PrefillEvent, TokenEvent
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.request import Request, SamplingParams
from localllm.engine.step_types import Limits
from localllm.errors import LocalLLMError, UsageError
from localllm.settings import EngineConfig
from localllm.text.grammar.grammar import Grammar
from tests.checkpoints import write_checkpoint
from tests.choices.support import drawn, held_pages, require_whole, searched, words
from tests.engine_support import Heard, answered, finish_reasons, steps
from tests.thinning import every_other, thinned

ENDS = frozenset({257, *range(7, 14)})  # of a model that knows nothing a single end comes too seldom


@dataclass
class Pair:
    """The same model twice."""

    engine: Engine
    peer: Any

    def expected(self, request: Request) -> list[int]:
        """What transformers answers."""
        return self.all_expected(request, 1)[0]

    def all_expected(self, request: Request, count: int) -> list[list[int]]:
        """Its best answers, so many."""
        ids, sampling = list(request.prompt_ids), request.sampling

        def has_stop(input_ids: Tensor, _scores: Any, **_: Any) -> Tensor:
            texts = [self.engine.tokenizer.decode(row[len(ids) :].tolist()) for row in input_ids]
            return torch.tensor([any(stop in text for stop in sampling.stop) for text in texts])

        def masked(input_ids: Tensor, scores: Tensor) -> Tensor:
            assert request.mask is not None
            allowed = torch.stack([request.mask(row[len(ids) :].tolist()) for row in input_ids])
            return scores.masked_fill(~allowed, -torch.inf)

        with torch.inference_mode():
            self.peer(torch.tensor([[0]]), use_cache=False)  # RoPE that depends on the length forgets the last one
            found = self.peer.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                num_beams=request.beams,
                num_return_sequences=count,
                do_sample=False,
                length_penalty=request.length_penalty,
                early_stopping=request.early_stopping,
                max_new_tokens=sampling.max_tokens,
                repetition_penalty=sampling.repetition_penalty,
                eos_token_id=sorted(self.engine.eos_ids),
                pad_token_id=257,
                stopping_criteria=[has_stop] if sampling.stop else [],
                logits_processor=[] if request.mask is None else [masked],
            )
        return [[token for token in row if token not in self.engine.eos_ids] for row in found[:, len(ids) :].tolist()]


def pair_of(folder: Path, family: str) -> Pair:
    peer = write_checkpoint(folder, family)
    engine = Engine.load(folder, EngineConfig(device="cpu", dtype="fp32"), limits=Limits(chunk_tokens=64))
    engine.eos_ids = ENDS
    return Pair(engine, peer)


def allowing(*token_ids: int) -> Tensor:
    """The mask that lets these through."""
    return torch.zeros(272, dtype=torch.bool).index_fill(0, torch.tensor(token_ids, dtype=torch.long), True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = pair_of(tmp_path_factory.mktemp("llama"), "llama")
    yield pair
    pair.engine.close()


@pytest.fixture
def engine(pair: Pair) -> Iterator[Engine]:
    yield pair.engine
    require_whole(pair.engine)


LENGTHS = [3, 64, 100]
HOW = [
    {"beams": 2},
    {"beams": 4, "max_tokens": 24},
    {"beams": 3, "length_penalty": 0.0, "early_stopping": True},
    {"beams": 5, "length_penalty": 2.0, "early_stopping": "never"},
    {"beams": 16, "length_penalty": -1.0, "max_tokens": 5},
]


# Each way once, and each length.
OFTEN = list(zip(HOW, itertools.cycle(LENGTHS), strict=False))


@pytest.mark.parametrize(("how", "length"), thinned(itertools.product(HOW, LENGTHS), OFTEN.__contains__), ids=str)
def test_the_answer_is_that_of_transformers(pair: Pair, engine: Engine, how: dict[str, Any], length: int) -> None:
    request = searched(words(length, length), **{"max_tokens": 16, **how})
    assert answered(engine, request)[0].token_ids == pair.expected(request)


def test_penalties_change_what_is_searched_as_in_transformers(pair: Pair, engine: Engine) -> None:
    request = searched(words(40), max_tokens=20)
    plain = answered(engine, request)[0].token_ids
    request = replace(request, sampling=replace(request.sampling, repetition_penalty=1.5))
    assert plain != answered(engine, request)[0].token_ids == pair.expected(request)


@pytest.mark.parametrize("family", every_other(["mistral-windowed", "phi3-longrope", "gemma3", "llama-dynamic-rope"]))
def test_of_other_families_too(tmp_path: Path, family: str) -> None:
    pair = pair_of(tmp_path, family)
    request = searched(words(28), beams=3, max_tokens=12 if family == "llama-dynamic-rope" else 30)
    assert answered(pair.engine, request)[0].token_ids == pair.expected(request)
    require_whole(pair.engine)


@pytest.mark.parametrize("count", [2, 4])
def test_the_next_best_answers_are_told_too(pair: Pair, engine: Engine, count: int) -> None:
    best, *others = pair.all_expected(searched(words(50), max_tokens=14), count)
    heard = answered(engine, searched(words(50), max_tokens=14, num_answers=count, is_scored=True))[0]
    told = [Heard() for _ in heard.finished.others]
    for each, events in zip(told, heard.finished.others, strict=True):
        for event in events:
            each.take(event)
    assert [heard.token_ids, *(each.token_ids for each in told)] == [best, *others]
    assert all(each.text == engine.tokenizer.decode(each.token_ids) for each in (heard, *told))
    scores = [each.finished.mean_logprob or 0 for each in (heard, *told)]
    assert scores == sorted(scores, reverse=True)


def test_with_one_beam_nothing_is_searched(engine: Engine) -> None:
    one, greedy = answered(engine, searched(words(30), beams=1), replace(drawn(words(30)), sampling=GREEDY))
    assert one.token_ids == greedy.token_ids


GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_others_go_on_beside_a_search_as_they_would_alone(engine: Engine) -> None:
    requests = [searched(words(70)), drawn(words(20), 1, 20), searched(words(70), beams=2), drawn(words(70), 2, 20)]
    expected = [answered(engine, request)[0].token_ids for request in requests]
    assert [each.token_ids for each in answered(engine, *requests)] == expected


def test_nothing_is_said_before_the_search_ends(engine: Engine) -> None:
    engine.submit(searched(words(20), max_tokens=6, early_stopping="never"))
    batches = []
    while engine.has_work:
        batches.append(engine.step())
    assert not any(isinstance(event, TokenEvent) for events in batches[:-1] for event in events)
    assert isinstance(batches[-1][-1], FinishedEvent)


def test_while_it_searches_nothing_is_told_of_the_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.engine.step._REPORT_S", 0)
    told: list[Any] = []
    engine.submit(searched(words(100), beams=16, max_tokens=6, early_stopping="never"))
    while engine.has_work:
        engine.step(told.append)
    read = [event.done for event in told if isinstance(event, PrefillEvent)]
    assert read and max(read) <= 100 and read == sorted(read)


def test_beams_share_the_pages_of_their_prompt(engine: Engine) -> None:
    num_groups = len(engine.residency.kv_pages.groups)
    most = 0
    engine.submit(searched(words(192), beams=8, max_tokens=12))
    while engine.has_work:
        engine.step()
        most = max(most, held_pages(engine))
    # The prompt's, and for each beam its open one, dense and coded.
    assert most <= num_groups * (3 + 1 + 8 * 2)


def test_a_stop_string_makes_an_answer_whole(pair: Pair, engine: Engine) -> None:
    letters = allowing(*range(97, 123))
    request = searched(words(40), max_tokens=20, length_penalty=0.0, mask=lambda _token_ids: letters)
    plain = answered(engine, request)[0]
    stop = plain.text[9:11]
    request = replace(request, sampling=replace(request.sampling, stop=(stop, "never said")))
    stopped = answered(engine, request)[0]
    assert stopped.finished.stop_text == stop and stopped.finished.finish_reason == "stop"
    assert stop not in stopped.text and stopped.token_ids == pair.expected(request)


def test_a_mask_holds_for_each_beam(engine: Engine) -> None:
    def letters_in_turn(token_ids: Any) -> Tensor:
        """Every letter once, in any order, and then the end."""
        return allowing(*([each for each in range(97, 101) if each not in token_ids] or [257]))

    heard = answered(engine, searched(words(20), beams=6, max_tokens=12, mask=letters_in_turn))[0]
    assert sorted(heard.text) == list("abcd") and heard.finished.finish_reason == "stop"


def test_a_grammar_holds_for_each_beam_and_ends_it(tiny: Engine) -> None:
    prompt = tiny.encode("Once upon a time")
    heard = answered(tiny, searched(prompt, max_tokens=40, grammar=Grammar("regex", "[a-z]{3,9}( [a-z]{3,9}){2}")))[0]
    assert re.fullmatch("[a-z]{3,9}( [a-z]{3,9}){2}", heard.text) and heard.finished.meets_grammar
    greedy = replace(drawn(prompt, grammar=Grammar("regex", "(yes|no)")), sampling=GREEDY)
    assert answered(tiny, searched(prompt, grammar=greedy.grammar), greedy)[0].text in ("yes", "no")


@pytest.mark.parametrize(
    ("beams", "how"),
    [
        (2, {"max_tokens": 1}),
        (4, {"max_tokens": 3}),
        (4, {"max_tokens": 6, "length_penalty": 2.0}),
        (4, {"max_tokens": 6, "early_stopping": "never"}),
    ],
)
def test_an_answer_that_meets_its_grammar_goes_before_likelier_ones_that_were_cut(
    tiny: Engine, beams: int, how: dict[str, Any]
) -> None:
    prompt, grammar = tiny.encode("Once upon a time"), Grammar("regex", "(a|b)z{9}|q")
    heard = answered(tiny, searched(prompt, beams, grammar=grammar, num_answers=2, **how))[0]
    assert heard.text == "q" and heard.finished.meets_grammar
    (end,) = (event for event in heard.finished.others[0] if isinstance(event, FinishedEvent))
    assert end.meets_grammar is False


def test_a_search_waits_for_an_answer_that_meets_its_grammar_where_a_stop_string_cut_the_others(tiny: Engine) -> None:
    prompt, grammar = tiny.encode("Once upon a time"), Grammar("regex", "bz{9}|c(az{9}|y{3})")
    request = searched(prompt, beams=2, max_tokens=9, grammar=grammar, length_penalty=0.0)
    heard = answered(tiny, replace(request, sampling=replace(request.sampling, stop=("a", "b"))))[0]
    assert heard.text == "cyyy" and heard.finished.meets_grammar


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    engine = Engine.load("tiny")
    yield engine
    require_whole(engine)
    engine.close()


def test_the_likeliest_of_all_that_a_mask_allows_is_found(engine: Engine) -> None:
    def two_letters(token_ids: Any) -> Tensor:
        return allowing(*((97, 98) if len(token_ids) < 2 else (257,)))

    def likelihood(text: str) -> float:
        def only(token_ids: Any) -> Tensor:
            return allowing([*text.encode(), 257][len(token_ids)])

        request = replace(drawn(words(20), mask=only, is_scored=True), sampling=GREEDY)
        score = answered(engine, request)[0].finished.mean_logprob
        assert score is not None
        return score

    best = max(("aa", "ab", "ba", "bb"), key=likelihood)
    found = answered(engine, searched(words(20), beams=4, mask=two_letters, is_scored=True))[0]
    assert found.text == best and found.finished.mean_logprob == pytest.approx(likelihood(best), abs=1e-4)


def test_where_no_beam_may_go_on_the_request_fails(engine: Engine) -> None:
    def nothing(token_ids: Any) -> Tensor:
        return allowing(*range(0 if len(token_ids) == 2 else 272))

    error = answered(engine, searched(words(20), max_tokens=9, mask=nothing))[0].finished.error
    assert isinstance(error, LocalLLMError) and "cannot go on" in error.what


def test_logprobs_are_told_of_the_best_answer(engine: Engine) -> None:
    request = searched(words(20), max_tokens=6)
    engine.submit(replace(request, sampling=replace(request.sampling, logprobs=2)))
    events = [event for event in steps(engine) if isinstance(event, TokenEvent)]
    told = [event.logprob and (event.logprob.token_id, len(event.logprob.top)) for event in events]
    assert events and told == [(event.token_id, 2) for event in events]


@pytest.mark.parametrize("num_steps", [0, 1, 6])
def test_a_search_that_is_stopped_gives_everything_back(engine: Engine, num_steps: int) -> None:
    stopped, other = engine.submit(searched(words(100), max_tokens=60)), engine.submit(drawn(words(100)))
    for _ in range(num_steps):
        engine.step()
    engine.abort(stopped)
    reasons = finish_reasons(engine)
    assert reasons[stopped] == "cancelled" and reasons[other] in ("length", "stop")


@pytest.mark.parametrize("num_branches", [0, 1, 5])
def test_where_memory_runs_out_the_search_ends_with_one_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_branches: int
) -> None:
    branch, left = PagedKV.branch, [None] * num_branches

    def failing(kv: PagedKV, capacity: int) -> PagedKV:
        if not left:
            raise MemoryError
        left.pop()
        return branch(kv, capacity)

    monkeypatch.setattr(PagedKV, "branch", failing)
    searching, other = answered(engine, searched(words(40)), drawn(words(20)))
    assert searching.finished.finish_reason == "error" and isinstance(searching.finished.error, LocalLLMError)
    assert other.finished.finish_reason in ("length", "stop")


def test_a_forward_that_fails_ends_a_search_once(engine: Engine) -> None:
    searching = engine.submit(searched(words(40)))
    engine.step()
    with mock.patch.object(engine.runner, "forward", side_effect=RuntimeError("an operator has failed")):
        events = engine.step()
    assert [event.request_id for event in events] == [searching] and not engine.has_work


def test_the_end_of_the_context_ends_every_beam(engine: Engine) -> None:
    prompt = words(250)
    heard = answered(engine, searched(prompt, max_tokens=100, length_penalty=5.0, early_stopping="never"))[0]
    assert len(prompt) + len(heard.token_ids) == engine.ctx and heard.finished.finish_reason == "length"


def test_beams_that_have_no_room_are_refused_with_what_would_have(engine: Engine) -> None:
    limits = engine.scheduler.limits
    engine.scheduler.limits = replace(limits, kv_tokens=700, sequence_tokens=0)
    try:
        with pytest.raises(UsageError, match="no room") as refused:
            engine.submit(searched(words(20), beams=4, max_tokens=200))
        assert refused.value.fix == "at most 106 tokens of answer (max_tokens)"
        answered(engine, searched(words(20), beams=4, max_tokens=106))
    finally:
        engine.scheduler.limits = limits


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"beams": 0}, "beams"),
        ({"beams": 17}, "beams"),
        ({"beams": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beams": 2, "early_stopping": "soon"}, "early_stopping"),
        ({"beams": 1, "length_penalty": 2.0}, "length_penalty"),
        ({"beams": 2, "pooling": "mean"}, "pooling"),
        ({"beams": 2, "sampling": SamplingParams(temperature=0.8)}, "temperature"),  # a search draws nothing
    ],
)
def test_what_no_search_can_have_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Request((1,), **{"sampling": SamplingParams(temperature=0), **wrong})


def test_without_a_prefix_cache_a_search_is_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    found = []
    for how in ({}, {"reuse": NO_REUSE}):
        engine = Engine.load(tmp_path, EngineConfig(dtype="fp32"), **how)  # type: ignore[arg-type]
        found.append([each.token_ids for each in answered(engine, *[searched(words(90), max_tokens=70)] * 2)])
        require_whole(engine)
        engine.close()
    assert found[0] == found[1] and found[0][0] == found[0][1]

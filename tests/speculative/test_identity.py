"""Drafting changes no token: whoever drafts, however tokens are drawn, wherever the blocks rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.oracle import FixedCount
from localllm import Engine, FinishedEvent, Request, SamplingParams, TokenEvent
from localllm.engine.events import Event
from localllm.engine.prefix_config import KVReuse
from localllm.engine.runner import ModelRunner
from localllm.engine.speculative.choice import Speculate
from localllm.engine.speculative.drafter import ModelDrafter, SkipDrafter
from localllm.engine.speculative.ngram import NgramLookup
from localllm.engine.speculative.speculator import Speculation, speculation
from tests.engine_support import steps, token_ids
from tests.kv_support import check_pages
from tests.speculative.support import (
    DRAFTERS,
    PLACEMENTS,
    QUOTING,
    SAMPLERS,
    TALE,
    Said,
    answers,
    draft_by_oracle,
    draft_with,
    grammar_like,
    loaded,
    loaded_in_fp32,
    place,
    plainly,
    request,
    said,
    stats,
)

# One of each sampler, drafter and placement, so that every two of them meet, with either model; each time another one
# of each sampler in INT4 and in fp32, which have all drafters and placements.
PAIRWISE = [
    pytest.param(
        *(model, sampler, DRAFTERS[(row + column) % 4], list(PLACEMENTS)[(row + 2 * column + row // 4) % 4], row),
        marks=[] if column == often else pytest.mark.slow,
    )
    for model, often in (("int4", 0), ("fp32", 2))
    for row, sampler in enumerate(SAMPLERS)
    for column in range(4)
]


@pytest.fixture(scope="module", params=["int4", "fp32"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = loaded() if request.param == "int4" else loaded_in_fp32()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def int4() -> Iterator[Engine]:
    engine = loaded()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, Said]:
    """What the engine says without drafts, by the wish: each is asked for once."""
    return {}


def check(
    engine: Engine,
    plain: dict[str, Said],
    sampler: str,
    drafter: str,
    placement: str,
    seed: int,
    draft_tokens: int = 5,
    **wishes: Any,
) -> int:
    """Returns how many drafts were right."""
    wish = request(engine, seed=seed, **SAMPLERS[sampler], **wishes)
    if str(wish) not in plain:
        place(engine, "whole")
        draft_with(engine, "", 0)
        (plain[str(wish)],) = said(engine, wish)
    expected = plain[str(wish)]
    place(engine, placement)
    draft_with(engine, drafter, draft_tokens)
    (events,) = answers(engine, [wish])
    assert tuple(token_ids(events)) == expected.token_ids
    return stats(events).accepted


@pytest.mark.parametrize(("engine", "sampler", "drafter", "placement", "seed"), PAIRWISE, indirect=["engine"])
def test_the_text_is_that_of_plain_decoding(
    engine: Engine, plain: dict[str, Said], sampler: str, drafter: str, placement: str, seed: int
) -> None:
    check(engine, plain, sampler, drafter, placement, seed)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_text_is_that_of_plain_decoding_for_every_seed(
    engine: Engine, plain: dict[str, Said], sampler: str, drafter: str, placement: str
) -> None:
    for seed in range(8):
        check(engine, plain, sampler, drafter, placement, seed, draft_tokens=1 + 2 * seed)


def test_each_drafter_is_right_sometimes(int4: Engine) -> None:
    plain: dict[str, Said] = {}
    for drafter, placement in itertools.product(DRAFTERS, ("whole", "some")):
        accepted = check(int4, plain, "greedy", drafter, placement, 0, prompt=QUOTING, max_tokens=100)
        assert accepted > 10, (drafter, placement)


@pytest.mark.parametrize("placement", ["some", pytest.param("whole", marks=pytest.mark.slow)])
def test_a_batch_is_that_of_each_request_alone(int4: Engine, placement: str) -> None:
    names = [*SAMPLERS, "greedy", "plain"]
    wishes = [request(int4, TALE[: 40 + 9 * i], seed=i, **SAMPLERS[name]) for i, name in enumerate(names)]
    alone = plainly(int4, *wishes)
    for drafter in DRAFTERS:
        place(int4, placement)
        draft_with(int4, drafter, 4)
        assert said(int4, *wishes) == alone, drafter


def test_as_many_requests_as_a_job_has_at_once(int4: Engine) -> None:
    """Where each has one draft, a step has 64 rows."""
    wishes = [request(int4, TALE[: 30 + 3 * i], seed=i, temperature=0.8, max_tokens=8) for i in range(32)]
    alone = plainly(int4, *wishes)
    for drafter, draft_tokens in (("ngram", 15), ("skip", 1)):
        draft_with(int4, drafter, draft_tokens)
        assert said(int4, *wishes) == alone, drafter


def test_a_grammar_like_mask_holds(int4: Engine) -> None:
    mask = grammar_like(int4.config.vocab_size)
    wishes = [request(int4, mask=mask, seed=3, **SAMPLERS[name]) for name in ("greedy", "plain", "penalties")]
    expected = plainly(int4, *wishes, placement="some")
    for text in expected:
        for end, token in enumerate(text.token_ids):
            assert bool(mask(text.token_ids[:end])[token])
    for drafter in DRAFTERS:
        draft_with(int4, drafter, 6)
        assert [said(int4, wish)[0] for wish in wishes] == expected


def test_a_prompt_in_chunks_and_one_that_is_known_already(int4: Engine) -> None:
    """A request that comes while another one drafts, and one whose pages are found again."""
    long = request(int4, TALE * 6, temperature=0, max_tokens=20)
    short = request(int4, seed=4, **SAMPLERS["plain"])
    place(int4, "some")
    draft_with(int4, "", 0)
    expected = said(int4, short, long)
    draft_with(int4, "ngram+skip", 5)
    assert said(int4, short, long) == expected
    int4.submit(short)
    for _ in range(4):
        int4.step()
    second = int4.submit(long)
    told = [event for event in steps(int4) if isinstance(event, TokenEvent) and event.request_id == second]
    assert tuple(event.token_id for event in told) == expected[1].token_ids


def test_after_a_cancelled_answer_the_next_is_the_same(int4: Engine) -> None:
    wish = request(int4, temperature=0)
    (expected,) = plainly(int4, wish, placement="some")
    for drafter in DRAFTERS:
        draft_with(int4, drafter, 6)
        for num_steps in (1, 2, 4):
            request_id = int4.submit(wish)
            for _ in range(num_steps):
                int4.step()
            int4.abort(request_id)
            assert reasons(int4.step()) == ["cancelled"]
            check_pages(int4.residency.kv_pages)
            assert not int4.residency.kv_pages.sequences - _of_drafters(int4)
        assert said(int4, wish) == [expected]


def _of_drafters(engine: Engine) -> set[object]:
    """Sequences that a second model has: none, once the requests are gone."""
    return {kv for drafter in engine.speculation._drafters for kv in getattr(drafter, "_kvs", {}).values()}


def to_the_end(engine: Engine) -> list[Event]:
    """What the last step says."""
    while engine.has_work:
        events = engine.step()
    return events


def reasons(events: list[Event]) -> list[str]:
    return [event.finish_reason for event in events if isinstance(event, FinishedEvent)]


def test_a_cancel_between_draft_and_verification_leaves_nothing(int4: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = request(int4, temperature=0)
    (expected,) = plainly(int4, wish)
    for drafter in DRAFTERS:
        draft_with(int4, drafter, 6)
        request_id, drafted = int4.submit(wish), int4.speculation.drafted

        def abort_after(*arguments: object, _id: int = request_id, _drafted: object = drafted) -> object:
            found = _drafted(*arguments)  # type: ignore[operator]
            if any(chunk.num_drafted for _, chunk in found):
                int4.abort(_id)
            return found

        monkeypatch.setattr(int4.speculation, "drafted", abort_after)
        assert reasons(to_the_end(int4)) == ["cancelled"] and not int4.residency.kv_pages.sequences
        monkeypatch.undo()
        assert said(int4, wish) == [expected]


def test_a_cancel_while_a_second_model_reads_the_prompt(int4: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = request(int4, TALE * 8, temperature=0)
    (expected,) = plainly(int4, wish)
    draft_with(int4, "model", 5)
    forward, read = ModelRunner.forward, list[int]()
    request_id = int4.submit(wish)

    def cancelled_in(runner: ModelRunner, chunks: Any, **options: Any) -> Tensor:
        if runner is not int4.runner:
            read.append(chunks[0].num_tokens)
            int4.abort(request_id)
        return forward(runner, chunks, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", cancelled_in)
        assert reasons(to_the_end(int4)) == ["cancelled"]
    assert len(read) == 1 and read[0] > 50
    assert not int4.residency.kv_pages.sequences and said(int4, wish) == [expected]


@pytest.mark.parametrize("draft_tokens", [1, 4, 15])
def test_what_ends_an_answer_ends_it_inside_a_draft(int4: Engine, draft_tokens: int) -> None:
    """The oracle is always right: a stop string, the limit, the end of text and the context all come inside drafts."""
    whole = request(int4, temperature=0, max_tokens=60)
    (long,) = plainly(int4, whole)
    middle = int4.tokenizer.decode(long.token_ids[17:20])
    wishes = [
        request(int4, temperature=0, max_tokens=60, stop=(middle,)),
        *(request(int4, temperature=0, max_tokens=n) for n in (1, 2, 7, 23)),
    ]
    expected = [said(int4, wish)[0] for wish in wishes]
    assert [text.finish_reason for text in expected] == ["stop", *["length"] * 4]
    draft_by_oracle(int4, whole, long, 1.0, draft_tokens)
    assert [said(int4, wish)[0] for wish in wishes] == expected
    eos = long.token_ids[13]
    int4.eos_ids, before = frozenset({eos}), int4.eos_ids
    ended = request(int4, temperature=0, max_tokens=60, ignore_eos=False)
    (events,) = answers(int4, [ended])
    by_draft, finished = Said.of(events), events[-1]
    assert isinstance(finished, FinishedEvent) and finished.speculation is not None
    drawn = finished.usage.completion_tokens  # behind the prompt's own: the token that ended it is one of them
    assert finished.speculation.tokens_per_pass == drawn / math.ceil(drawn / (1 + draft_tokens))
    draft_with(int4, "", 0)
    assert said(int4, ended) == [by_draft] and by_draft.finish_reason == "stop"
    int4.eos_ids = before


def test_the_end_of_the_context_inside_a_draft(int4: Engine) -> None:
    place(int4, "whole")
    prompt = request(int4, temperature=0, max_tokens=None).prompt_ids
    int4.ctx, before = len(prompt) + 9, int4.ctx
    wish = request(int4, temperature=0, max_tokens=None)
    draft_with(int4, "", 0)
    (expected,) = said(int4, wish)
    assert len(expected.token_ids) == 9
    for drafter in DRAFTERS:
        draft_with(int4, drafter, 15)
        assert said(int4, wish) == [expected]
    int4.ctx = before


def test_logprobs_are_those_of_plain_decoding(int4: Engine) -> None:
    wish = request(int4, temperature=0, logprobs=2)
    place(int4, "whole")
    draft_with(int4, "", 0)
    plain = answers(int4, [wish])[0]
    draft_with(int4, "ngram+skip", 5)
    drafted = answers(int4, [wish])[0]
    told = [[event.logprob for event in events if isinstance(event, TokenEvent)] for events in (plain, drafted)]
    assert told[0] == told[1] and told[0][0] is not None


def test_no_drafts_at_all(int4: Engine) -> None:
    """--draft-tokens 0."""
    wish = request(int4, temperature=0)
    (expected,) = plainly(int4, wish)
    int4.speculation = speculation(Speculate("auto", 0), int4.residency, int4.plan)
    assert said(int4, wish) == [expected] and not int4.speculation.is_on


def test_a_model_that_is_moved_meanwhile(int4: Engine) -> None:
    wish = request(int4, temperature=0, max_tokens=40)
    (expected,) = plainly(int4, wish)
    int4.speculation = Speculation(int4.residency, NgramLookup(), [SkipDrafter(lambda: int4.runner)], 5, FixedCount)
    int4.submit(wish)
    step, found = 0, []
    while int4.has_work:
        if step % 5 == 4:
            place(int4, ("some", "whole", "mlps", "all")[step // 5 % 4])
        found += [event.token_id for event in int4.step() if isinstance(event, TokenEvent)]
        step += 1
    assert tuple(found) == expected.token_ids


@pytest.mark.parametrize("drafter", ["skip", "model"])
def test_a_drafter_without_memory_is_let_go_of(int4: Engine, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = request(int4, temperature=0)
    (expected,) = plainly(int4, wish)
    draft_with(int4, drafter, 5)
    forward, calls = ModelRunner.forward, []

    def without_memory(runner: ModelRunner, *arguments: Any, **options: Any) -> Tensor:
        if runner is not int4.runner:
            calls.append(runner)
            if len(calls) == 7:
                raise MemoryError
        return forward(runner, *arguments, **options)

    monkeypatch.setattr(ModelRunner, "forward", without_memory)
    assert said(int4, wish) == [expected] and len(calls) == 7 and not int4.speculation.is_on
    assert not int4.residency.kv_pages.sequences


def test_a_chat_goes_on_after_a_restart_from_pages_that_drafts_filled(tmp_path: Path) -> None:
    """What was drafted wrong stands in no page that outlives the process."""
    first_turn, rest = TALE * 2, " And then the owl said:"
    plain = loaded(ctx=512)
    expected = said(plain, request(plain, first_turn, temperature=0, max_tokens=80))[0]
    prompt = (*plain.encode(first_turn), *expected.token_ids, *plain.encode(rest))
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    second = said(plain, Request(prompt, sampling))[0]
    plain.close()
    drafting = loaded(ctx=512, reuse=KVReuse(directory=tmp_path))
    draft_with(drafting, "ngram+skip", 7)
    assert said(drafting, request(drafting, first_turn, temperature=0, max_tokens=80)) == [expected]
    assert drafting.prefix is not None and drafting.prefix.disk is not None and drafting.prefix.disk.flush(20)
    drafting.close()
    for drafter in ("", "ngram+skip"):
        resumed = loaded(ctx=512, reuse=KVReuse(directory=tmp_path))
        draft_with(resumed, drafter, 7)
        (events,) = answers(resumed, [Request(prompt, sampling)])
        finished = events[-1]
        assert isinstance(finished, FinishedEvent) and finished.usage.cached_tokens >= 128
        assert tuple(token_ids(events)) == second.token_ids
        resumed.close()


def ending(length: int, vocab_size: int) -> Callable[[Sequence[int]], Tensor]:
    """A grammar that has no answer for what cannot be: behind two even tokens in a row, and none behind its end."""

    def mask(token_ids: Sequence[int]) -> Tensor:
        if any(not a % 2 and not b % 2 for a, b in itertools.pairwise(token_ids)) or len(token_ids) > length:
            raise KeyError("no such state")
        allowed = torch.ones(vocab_size, dtype=torch.bool)
        if token_ids and not token_ids[-1] % 2:
            allowed[::2] = False
        return allowed

    return mask


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_mask_that_fails_behind_wrong_drafts_fails_no_answer(int4: Engine, drafter: str) -> None:
    mask = ending(24, int4.config.vocab_size)
    wish = request(int4, QUOTING, mask=mask, temperature=0.8, max_tokens=24)
    (expected,) = plainly(int4, wish)
    draft_with(int4, drafter, 9)
    assert said(int4, wish) == [expected]


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("drafter", ["skip", "model"])
def test_a_draft_that_is_no_number_ends_the_draft_alone(
    int4: Engine, drafter: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = request(int4, temperature=temperature)
    (expected,) = plainly(int4, wish)
    draft_with(int4, drafter, 5)
    forward, count = ModelRunner.forward, itertools.count()

    def damaged(runner: ModelRunner, *arguments: Any, **options: Any) -> Tensor:
        logits = forward(runner, *arguments, **options)
        return logits if runner is int4.runner or next(count) % 3 else logits * math.nan

    monkeypatch.setattr(ModelRunner, "forward", damaged)
    assert said(int4, wish) == [expected]
    assert next(count) > 5


def test_memory_that_ends_in_a_verification_ends_the_drafts(int4: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = request(int4, QUOTING, temperature=0, max_tokens=60)
    (expected,) = plainly(int4, wish)
    draft_with(int4, "ngram+skip", 5)
    forward, rows = ModelRunner.forward, int4.runner.batch_rows

    def without_memory(runner: ModelRunner, chunks: Any, **options: Any) -> Tensor:
        if runner is int4.runner and any(chunk.num_drafted for chunk in chunks):
            raise MemoryError
        return forward(runner, chunks, **options)

    monkeypatch.setattr(ModelRunner, "forward", without_memory)
    assert said(int4, wish) == [expected]
    assert not int4.speculation.is_on and int4.runner.batch_rows == rows


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_draft_has_the_noise_and_the_mask_of_its_places(int4: Engine, sampler: str, is_masked: bool) -> None:
    """The same model as its own drafter is never wrong, however tokens are drawn."""
    mask = grammar_like(int4.config.vocab_size) if is_masked else None
    place(int4, "whole")
    drafter = ModelDrafter("model:itself", lambda: int4.runner, int4.residency.new_kv)
    int4.speculation.close()
    int4.speculation = Speculation(int4.residency, None, [drafter], 5, FixedCount)
    (events,) = answers(int4, [request(int4, mask=mask, **SAMPLERS[sampler])])
    assert stats(events).drafted == stats(events).accepted > 15

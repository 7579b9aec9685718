"""Who is served when: short prompts before long ones, nobody left behind, and what is being said goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, TokenEvent
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.request import Request, SamplingParams
from localllm.engine.scheduler import PRIORITY_CHUNKS
from localllm.engine.sequence import Sequence
from localllm.engine.step_types import Limits
from tests.cli_support import write_checkpoint
from tests.engine_support import finish_reasons
from tests.thinning import examples

CHUNK = 16


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), context=1024)
    limits = Limits(chunk_tokens=CHUNK, max_sequences=4)
    loaded = Engine.load(folder, limits=limits, reuse=NO_REUSE)
    yield loaded
    loaded.close()


def ask(engine: Engine, num_chunks: int, *, tokens: int = 1, priority: int = 0) -> int:
    """A prompt of so many chunks."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    return engine.submit(Request((7,) * (CHUNK * num_chunks), sampling, priority=priority))


def test_a_short_prompt_passes_a_long_one_that_is_being_read(engine: Engine) -> None:
    long = ask(engine, 20)
    for _ in range(3):
        engine.step()
    short = ask(engine, 1)
    assert list(finish_reasons(engine)) == [short, long]


def test_a_short_prompt_that_waits_passes_a_long_one_that_waits(engine: Engine) -> None:
    running = [ask(engine, 1, tokens=30) for _ in range(4)]
    long, short = ask(engine, 10), ask(engine, 1)
    assert [each for each in list(finish_reasons(engine)) if each not in running] == [short, long]


def test_a_long_prompt_is_passed_for_as_long_as_it_is_and_no_longer(engine: Engine) -> None:
    long, shorts = ask(engine, 8), []
    num_before = 0
    for _ in range(60):
        if len(shorts) < 40:
            shorts.append(ask(engine, 1))
        ended = [event.request_id for event in engine.step() if isinstance(event, FinishedEvent)]
        if long in ended:
            break
        num_before += len(ended)
    else:
        pytest.fail("the long prompt was never read")
    assert num_before <= 8 + 1
    list(finish_reasons(engine))


def test_equal_prompts_are_read_in_the_order_in_which_they_came(engine: Engine) -> None:
    asked = [ask(engine, 2) for _ in range(7)]
    assert list(finish_reasons(engine)) == asked


def test_a_higher_priority_is_served_sooner(engine: Engine) -> None:
    running = [ask(engine, 1, tokens=30) for _ in range(4)]
    low, plain, high = ask(engine, 1, priority=-1), ask(engine, 1), ask(engine, 3, priority=1)
    assert [each for each in list(finish_reasons(engine)) if each not in running] == [high, plain, low]


def test_a_low_priority_is_served_in_the_end(engine: Engine) -> None:
    low = ask(engine, 1, priority=-1)
    for _ in range(PRIORITY_CHUNKS + 8):
        ask(engine, 1)
        if low in [event.request_id for event in engine.step() if isinstance(event, FinishedEvent)]:
            break
    else:
        pytest.fail("it was never served")
    list(finish_reasons(engine))


def test_a_long_prompt_stalls_an_answer_by_one_chunk_at_a_time(engine: Engine) -> None:
    answer = ask(engine, 1, tokens=40)
    while not any(isinstance(event, TokenEvent) for event in engine.step()):
        pass
    ask(engine, 12)
    ask(engine, 12)
    since, gaps = 0, []
    events = engine.step()
    while any(sequence.num_completion_tokens == 0 for sequence in engine.scheduler.sequences):
        events = engine.step()
        since += 1
        if any(isinstance(event, TokenEvent) and event.request_id == answer for event in events):
            gaps.append(since)
            since = 0
    assert gaps and max(gaps) <= 2  # a chunk, and its own step
    engine.abort(answer)
    list(finish_reasons(engine))


def test_a_prompt_that_comes_while_another_is_admitted_waits_for_its_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, came = engine.scheduler.allocator, []
    allocate = allocator.allocate

    def slowly(sequence: Sequence, is_cancelled: Callable[[], bool]) -> None:
        if not came:
            came.append(ask(engine, 1))  # it is due before the one whose pages are being made
        allocate(sequence, is_cancelled)

    monkeypatch.setattr(allocator, "allocate", slowly)
    long = ask(engine, 20)
    assert sorted(finish_reasons(engine)) == sorted([long, *came])


def test_what_is_aborted_before_it_was_taken_in_is_not_computed(engine: Engine) -> None:
    engine.abort(ask(engine, 20))
    (event,) = engine.step()
    assert isinstance(event, FinishedEvent) and event.finish_reason == "cancelled" and not engine.has_work


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(-1, 1), st.integers(0, 4)), min_size=1, max_size=12))
def test_whatever_comes_is_served_and_nothing_is_left(engine: Engine, asked: list[tuple[int, int, int]]) -> None:
    ids, ended = [], []
    for num_chunks, priority, steps in asked:
        ids.append(ask(engine, num_chunks, priority=priority, tokens=3))
        for _ in range(steps):
            ended += [event.request_id for event in engine.step() if isinstance(event, FinishedEvent)]
    ended += list(finish_reasons(engine))
    assert sorted(ended) == ids and not engine.scheduler.sequences

"""What engines and front ends say to each other: whatever is plain data arrives as it was, and nothing else crosses."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.cache.miss_reason import CacheMiss
from localllm.chat.text_file import ExistsError
from localllm.engine.engine_info import EngineFacts, EngineStatus, SlotFacts
from localllm.engine.events import (
    FinishedEvent,
    GrownEvent,
    PrefillEvent,
    SpeculationStats,
    StepSplit,
    Timings,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from localllm.engine.request import Request, SamplingParams
from localllm.errors import BugError, ContextOverflowError, DoesNotFitError, LocalLLMError, NonFiniteError, UsageError
from localllm.runtime import protocol
from localllm.text.grammar.grammar import Grammar

NUMBERS = st.integers(0, 2**31)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(max_size=8)
LOGPROBS = st.builds(
    TokenLogprob,
    NUMBERS,
    TEXTS,
    FLOATS,
    st.lists(st.builds(TokenLogprob, NUMBERS, TEXTS, FLOATS), max_size=2).map(tuple),
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=NUMBERS,
    logit_bias=st.dictionaries(NUMBERS, st.floats(-100, 100), max_size=3),
    seed=st.none() | NUMBERS,
    logprobs=st.none() | st.integers(0, 20),
    max_tokens=st.none() | st.integers(1, 99),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    dry_breakers=st.just(("\n", '"')),
)
GRAMMARS = st.builds(
    Grammar, st.sampled_from(["json_schema", "regex"]), TEXTS, st.just((("<think>", "</think>"),)), st.booleans()
)
REQUESTS = st.builds(
    Request,
    st.lists(NUMBERS, max_size=5).map(tuple),
    SAMPLING,
    grows=st.booleans(),
    explains_miss=st.booleans(),
    grammar=st.none() | GRAMMARS,
    priority=st.integers(-3, 3),
    pooling=st.none() | st.sampled_from(["mean", "last"]),
)
OTHERS = st.lists(
    st.tuples(
        st.builds(TokenEvent, NUMBERS, NUMBERS, TEXTS),
        st.builds(FinishedEvent, NUMBERS, st.just("length"), st.just(Usage(1, 2, 3)), st.just(Timings())),
    ),
    max_size=2,
).map(tuple)
EVENTS = st.one_of(
    st.builds(TokenEvent, NUMBERS, NUMBERS, TEXTS, st.none() | LOGPROBS),
    st.builds(PrefillEvent, NUMBERS, NUMBERS, NUMBERS),
    st.builds(GrownEvent, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.none() | FLOATS),
    st.builds(
        FinishedEvent,
        NUMBERS,
        st.sampled_from(["stop", "length", "error", "cancelled"]),
        st.builds(Usage, NUMBERS, NUMBERS, NUMBERS),
        st.builds(Timings, FLOATS, st.none() | FLOATS, split=st.builds(StepSplit, FLOATS, copied_bytes=NUMBERS)),
        text=TEXTS,
        miss=st.none() | st.builds(CacheMiss, NUMBERS, st.lists(NUMBERS, max_size=3).map(tuple)),
        ctx=st.none() | NUMBERS,
        speculation=st.none() | st.builds(SpeculationStats, TEXTS, NUMBERS, tokens_per_pass=st.none() | FLOATS),
        embedding=st.none() | st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(lambda v: array("f", v)),
        stop_text=st.none() | TEXTS,
    ),
)
ENDS = st.builds(FinishedEvent, NUMBERS, st.just("stop"), st.just(Usage()), st.just(Timings()), others=OTHERS)
FACTS = st.builds(
    EngineFacts,
    NUMBERS,
    TEXTS,
    TEXTS,
    ledger=st.dictionaries(TEXTS, st.dictionaries(TEXTS, NUMBERS, max_size=2), max_size=2),
    limits=st.dictionaries(TEXTS, NUMBERS, max_size=2),
)
STATUS = st.builds(
    EngineStatus, st.lists(st.builds(SlotFacts, NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=2).map(tuple), NUMBERS
)


def sent(value: Any) -> Any:
    """As it arrives at the other end."""
    return protocol.read(type(value), protocol.message(protocol.line({"value": protocol.plain(value)}))["value"])


@given(st.one_of(REQUESTS, EVENTS, ENDS, FACTS, STATUS))
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    assert sent(value) == value


@pytest.mark.parametrize("error", [NonFiniteError, DoesNotFitError, ContextOverflowError, LocalLLMError])
def test_an_error_arrives_as_the_class_that_it_was(error: type[LocalLLMError]) -> None:
    given_error = error("what", why="why", fix="fix")
    if isinstance(given_error, ContextOverflowError):
        given_error.num_tokens, given_error.ctx = 9412, 8192
    arrived = sent(FinishedEvent(1, "error", Usage(), Timings(), error=given_error)).error
    assert type(arrived) is error and vars(arrived) == vars(given_error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("nobody foresaw it"), BugError),
        (MemoryError("no room"), DoesNotFitError),
        (ExistsError("it is there already"), UsageError),
    ],
)
def test_an_error_of_another_kind_arrives_as_the_nearest_of_ours(error: Exception, kind: type[LocalLLMError]) -> None:
    assert type(sent(FinishedEvent(1, "error", Usage(), Timings(), error=error)).error) is kind


def test_what_computes_cannot_cross() -> None:
    with pytest.raises(TypeError, match="function cannot cross"):
        protocol.plain(Request((1,), mask=lambda _ids: None))  # type: ignore[arg-type, return-value]


@given(st.one_of(st.binary(max_size=20), st.text(max_size=20).map(str.encode), st.just(b"[1]"), st.just(b"7")))
def test_what_is_no_message_is_refused(data: bytes) -> None:
    try:
        is_message = isinstance(json.loads(data), dict)
    except ValueError:
        is_message = False
    if not is_message:
        with pytest.raises(protocol.WireError):
            protocol.message(data)


@pytest.mark.parametrize(
    "value",
    [
        {"prompt_ids": 7},
        {"prompt_ids": [1], "unheard_of": 1},
        {"sampling": {"top_p": 7}, "prompt_ids": []},
        [],
        7,
        None,
    ],
)
def test_what_is_no_request_is_refused(value: Any) -> None:
    with pytest.raises(protocol.WireError):
        protocol.read(Request, value)

"""A prompt that was not found whole says where it left what was computed before, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.cache.miss_reason import CacheMiss
from localllm.chat.miss_report import Explanation, explain
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent
from localllm.engine.prefix_config import KVReuse
from localllm.engine.request import Request, SamplingParams
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.settings import EngineConfig
from localllm.text.chat_template import ChatInput, encode_chat
from tests.checkpoints import write_byte_tokenizer, write_checkpoint
from tests.cli_support import run_cli

TALE = "Once upon a time a fox found a lantern in the dark wood and asked an owl what it might be. " * 6
OTHER_TALE = "Far away a bear sat by the river and waited for the winter, which was late in that year. " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine.load("tiny", EngineConfig(device="cpu", ctx=1024), reuse=KVReuse(directory=folder))
    yield engine
    engine.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def asked(engine: Engine, messages: list[dict[str, Any]]) -> tuple[CacheMiss | None, Explanation | None]:
    chat = ChatInput(messages)
    ids = tuple(encode_chat(engine.template, engine.tokenizer, chat))
    engine.submit(Request(ids, SamplingParams(temperature=0, max_tokens=1), explains_miss=True))
    events = [event for _ in iter(lambda: engine.has_work, False) for event in engine.step()]
    (finished,) = (event for event in events if isinstance(event, FinishedEvent))
    assert finished.error is None
    return finished.miss, None if finished.miss is None else explain(engine, chat, ids, finished.miss)


def test_a_prompt_that_goes_on_where_another_ended_misses_nothing(engine: Engine) -> None:
    chat = [user("first " + TALE), assistant(TALE), user("And then?")]
    asked(engine, chat[:1])
    assert asked(engine, chat[:1])[0] is None


@pytest.mark.parametrize(
    ("before", "now", "message", "role", "cause"),
    [
        ([user("A " + TALE)], [user("A " + OTHER_TALE)], 1, "user", "a new conversation"),
        ([user("A2 " + TALE)], [user("A2 " + TALE[:400] + OTHER_TALE)], 1, "user", "an edited message"),
        (
            [user("B"), assistant(TALE), user("go on " + TALE)],
            [user("B"), assistant(OTHER_TALE), user("go on " + TALE)],
            2,
            "assistant",
            "another answer",
        ),
        (
            [user("C"), assistant("<think>" + TALE + "</think> Yes."), user(TALE)],
            [user("C"), assistant("Yes."), user(TALE)],
            2,
            "assistant",
            "the template leaves out what the model thought before its answer",
        ),
        (
            [user("D " + TALE), assistant("Well."), user("And then? " + TALE)],
            [user("D " + TALE), assistant("Well."), user("Who? " + TALE)],
            3,
            "user",
            "an edited message",
        ),
    ],
)
def test_the_first_message_that_differs_is_named_with_the_cause(
    engine: Engine, before: list[dict[str, Any]], now: list[dict[str, Any]], message: int, role: str, cause: str
) -> None:
    asked(engine, before)
    miss, explanation = asked(engine, now)
    assert miss is not None and explanation is not None
    first, second = (encode_chat(engine.template, engine.tokenizer, ChatInput(chat)) for chat in (before, now))
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert (miss.position, explanation.token) == (common, common)
    assert (explanation.message, explanation.role, explanation.cause) == (message, role, cause)


@pytest.mark.usefixtures("empty_cache")
def test_a_hybrid_tells_what_differs_and_from_where_it_is_computed(tmp_path: Path) -> None:
    """Keys and values are there up to what differs, its states only where a snapshot was kept."""
    write_checkpoint(tmp_path, "qwen3_5", max_position_embeddings=4096)
    write_byte_tokenizer(tmp_path)
    hybrid = Engine.load(tmp_path, EngineConfig(device="cpu", weights="int4", ctx=1024))
    asked(hybrid, [user(TALE)])
    _, edited = asked(hybrid, [user(TALE[:300] + OTHER_TALE[:200])])
    assert edited is not None
    assert (edited.message, edited.role, edited.cause, edited.snapshot) == (1, "user", "an edited message", 0)
    assert 300 <= edited.token < 350 and "computed from token 0 on, behind the last snapshot" in str(edited)
    assert hybrid.prefix is not None and hybrid.prefix.snapshots is not None
    hybrid.prefix.snapshots.limit_ram(0)
    miss, again = asked(hybrid, [user(TALE)])
    assert miss is not None and again is not None
    assert (again.message, again.cause, again.snapshot) == (None, "no more is cached", 0)
    assert miss.position % PAGE_TOKENS == 0 and miss.position >= 448
    hybrid.close()


def test_another_system_message_is_named(engine: Engine) -> None:
    asked(engine, [system("Be kind. " + TALE), user("E")])
    _, explanation = asked(engine, [system("Be strict. " + TALE), user("E")])
    assert explanation is not None and explanation.cause == "another system message"
    assert "Be strict" in explanation.now or "strict" in explanation.now


def test_run_tells_it_in_its_statistics_and_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    common = ["run", "--max-tokens", "1", "--temperature", "0", "--kv", "int8"]
    run_cli(*common, "-p", "G " + TALE)
    told = run_cli(*common, "--stats", "-p", "G " + TALE[:300] + OTHER_TALE)
    assert "(user): an edited message" in told.err and "cached)" in told.err
    fields = json.loads(run_cli(*common, "--json", "-p", "G " + TALE[:200] + OTHER_TALE).out)
    assert fields["cache_miss"]["message"] == 1 and fields["usage"]["cached_tokens"] >= 0

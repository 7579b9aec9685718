"""What is said behind a text or a begun answer has the blank at the seam, with tokenizers whose decoder drops one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli_support import write_chain
from tests.server.support import Running, running

CHAIN = ("]", "▁Once", "▁upon", "▁a", "▁time", "</s>")
ASKED = {"role": "user", "content": "Tell me"}
BEGUN = [ASKED, {"role": "assistant", "content": "Once upon"}]


@pytest.fixture(scope="module")
def teller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Says " Once upon a time" behind the end of a question, and the rest of it behind each of its words."""
    folder = write_chain(tmp_path_factory.mktemp("teller"), *CHAIN, eos_token_id=2)
    with running(folder, aliases=("teller",)) as server:
        yield server


def completed(teller: Running, **more: Any) -> str:
    asked = {"prompt": "Once upon", "temperature": 0, "max_tokens": 8, **more}
    return str(teller.answer("/v1/completions", asked)["choices"][0]["text"])


def test_a_completion_has_its_blank(teller: Running) -> None:
    assert completed(teller) == completed(teller, best_of=2, n=1) == " a time"
    ids = teller.answer("/tokenize", {"content": "Once upon"})["tokens"]
    assert completed(teller, echo=True) == completed(teller, prompt=ids, echo=True) == "Once upon a time"
    assert completed(teller, stop=" a") == ""


@pytest.mark.parametrize("echo", [True, False])
def test_a_streamed_completion_has_its_blank(teller: Running, echo: bool) -> None:
    body = {"prompt": "Once upon", "temperature": 0, "max_tokens": 8, "stream": True, "echo": echo}
    events = teller.events("/v1/completions", body)
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == ("Once upon a time" if echo else " a time")


def test_a_raw_prompt_of_ollama_goes_on_with_its_blank(teller: Running) -> None:
    body = {"prompt": "Once upon", "raw": True, "options": {"temperature": 0}}
    assert teller.post("/api/generate", {**body, "stream": False}).json()["response"] == " a time"
    assert "".join(json.loads(line)["response"] for line in teller.stream_lines("/api/generate", body)) == " a time"
    del body["raw"]
    assert teller.post("/api/generate", {**body, "stream": False}).json()["response"] == "Once upon a time"


def test_a_begun_answer_goes_on_with_its_blank_and_a_whole_one_begins_without(teller: Running) -> None:
    for messages, text in ((BEGUN, " a time"), ([ASKED], "Once upon a time")):
        said = teller.post("/api/chat", {"messages": messages, "stream": False, "options": {"temperature": 0}})
        assert said.json()["message"]["content"] == text
        body = {"model": "teller", "messages": messages, "temperature": 0, "max_tokens": 8}
        assert teller.post("/v1/messages", body).json()["content"][0]["text"] == text
        events = teller.events("/v1/messages", {**body, "stream": True})
        assert "".join(event.get("delta", {}).get("text", "") for event in events) == text
    told = teller.post("/v1/chat/completions", {"messages": [ASKED], "temperature": 0})
    assert told.json()["choices"][0]["message"]["content"] == "Once upon a time"

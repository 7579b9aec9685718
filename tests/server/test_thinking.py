"""What a model thought before it answered: told apart token by token, in whatever pieces it is taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from localllm import hub
from localllm.engine.events import FinishedEvent, Timings, TokenEvent, TokenLogprob, Usage
from localllm.server.openai.response_object import ResponseWriter
from localllm.server.openai.responses import ResponsesBody, head_of
from localllm.server.stream import Delta, EventMailbox
from localllm.server.tools.deltas import ThoughtParser
from localllm.text.tokenizer import Tokenizer

SAID = ("Hm", ", ", "an owl.", "</think>", "\n\n", "Once", " upon", " a time.")
NUM_THOUGHT = 4  # with the mark that ends it


def token(request_id: int, count: int, text: str) -> TokenEvent:
    return TokenEvent(request_id, count, text, TokenLogprob(count, text, -0.5, ()))


def end(request_id: int, num_tokens: int) -> FinishedEvent:
    return FinishedEvent(request_id, "stop", Usage(1, 0, num_tokens), Timings())


async def pieces_of(every: int, said: Sequence[str] = SAID, *, is_thinking: bool = True) -> list[Delta]:
    """What a reader gets who takes what has come after every so many tokens."""
    mail, found = EventMailbox(lambda: ThoughtParser(is_thinking=is_thinking), lambda _event: None), []
    for count, text in enumerate(said, 1):
        mail.put(token(3, count, text))
        if count % every == 0:
            found.append((await mail.take(None))[3])
    mail.put(end(3, len(said)))
    found.append((await mail.take(None))[3])
    return found


def whole_of(pieces: Iterable[Delta]) -> Delta:
    whole = Delta()
    for piece in pieces:
        whole.add(piece)
    return whole


@pytest.mark.parametrize("opens", [True, False], ids=["by the model", "by its template"])
@pytest.mark.parametrize("every", [1, 3, 5, 100])
def test_each_token_is_of_the_thought_or_of_the_answer(every: int, opens: bool) -> None:
    """opens: the token that opens the thought is of it."""
    said = ("<think>", *SAID) if opens else SAID
    whole = whole_of(asyncio.run(pieces_of(every, said, is_thinking=not opens)))
    assert (whole.thought, whole.text) == ("Hm, an owl.", "Once upon a time.")
    assert whole.num_thought_tokens == NUM_THOUGHT + opens
    assert [each.token for each in whole.logprobs] == list(SAID[NUM_THOUGHT:])


@pytest.mark.parametrize("every", [1, 100])
def test_what_begins_like_a_mark_at_the_very_end_is_said(every: int) -> None:
    thought = whole_of(asyncio.run(pieces_of(every, ("Hm", "</thi"))))
    said = whole_of(asyncio.run(pieces_of(every, ("<thi",), is_thinking=False)))
    assert (thought.thought, thought.text, said.thought, said.text) == ("Hm</thi", "", "", "<thi")


def test_each_of_several_answers_has_thoughts_of_its_own() -> None:
    async def taken() -> dict[int, Delta]:
        mail = EventMailbox(lambda: ThoughtParser(is_thinking=True), lambda _event: None)
        for request_id, texts in ((3, SAID), (4, SAID[:2])):
            for count, text in enumerate(texts):
                mail.put(token(request_id, count, text))
            mail.put(end(request_id, len(texts)))
        return await mail.take(None)

    found = asyncio.run(taken())
    assert (found[3].thought, found[3].text) == ("Hm, an owl.", "Once upon a time.")
    assert (found[4].thought, found[4].text) == ("Hm, ", "")


@pytest.mark.parametrize("every", [1, 3, 5, 100])
def test_a_streamed_response_has_one_thought_and_one_message(every: int) -> None:
    tokenizer = Tokenizer.load(hub.locate("tiny").directory)

    async def events() -> list[Any]:
        pieces = await pieces_of(every)

        head = head_of(ResponsesBody(input="A tale."), "tiny", "auto", 1.0, 1.0)
        writer = ResponseWriter(head, tokenizer, 0)
        told = [*writer.begin(), *(each for piece in pieces for each in writer.write(0, piece)), *writer.end()]
        return [json.loads(each.partition(b"data: ")[2]) for each in told]

    found = asyncio.run(events())
    added = [(each["output_index"], each["item"]["type"]) for each in found if each["type"].endswith("item.added")]
    assert added == [(0, "reasoning"), (1, "message")]
    last = found[-1]["response"]
    assert [item["content"][0]["text"] for item in last["output"]] == ["Hm, an owl.", "Once upon a time."]
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    assert len(last["output"][1]["content"][0]["logprobs"]) == len(SAID) - NUM_THOUGHT
    deltas = [each for each in found if each["type"] == "response.output_text.delta"]
    assert sum(len(each["logprobs"]) for each in deltas) == len(SAID) - NUM_THOUGHT

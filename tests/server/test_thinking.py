"""What a model thought before it answered: told apart token by token, in whatever pieces it is taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from localllm import hub
from localllm.engine.events import FinishedEvent, Timings, TokenEvent, TokenLogprob, Usage
from localllm.engine.tokenizer import Tokenizer
from localllm.frontend.thinking import Splitter
from localllm.server.answering import Mail, Piece
from localllm.server.openai.response_object import Said, Speech

SAID = ("Hm", ", ", "an owl.", "</think>", "\n\n", "Once", " upon", " a time.")
NUM_THOUGHT = 4  # with the mark that ends it


async def pieces_of(every: int) -> list[Piece]:
    """What a reader gets who takes what has come after every so many tokens."""
    mail, found = Mail(lambda: Splitter(is_thinking=True), lambda _event: None), []
    for count, text in enumerate(SAID, 1):
        mail.put(TokenEvent(3, count, text, TokenLogprob(count, text, -0.5, ())))
        if count % every == 0:
            found.append((await mail.take(None))[3])
    mail.put(FinishedEvent(3, "stop", Usage(1, 0, len(SAID)), Timings()))
    found.append((await mail.take(None))[3])
    return found


@pytest.mark.parametrize("every", [1, 3, 5, 100])
def test_each_token_is_of_the_thought_or_of_the_answer(every: int) -> None:
    whole = Piece()
    for piece in asyncio.run(pieces_of(every)):
        whole.add(piece)
    assert (whole.thought, whole.text) == ("Hm, an owl.", "Once upon a time.")
    assert whole.num_thought_tokens == NUM_THOUGHT
    assert [each.token for each in whole.logprobs] == list(SAID[NUM_THOUGHT:])


@pytest.mark.parametrize("every", [1, 3, 5, 100])
def test_a_streamed_response_has_one_thought_and_one_message(every: int) -> None:
    tokenizer = Tokenizer.load(hub.locate("tiny").directory)

    async def events() -> list[Any]:
        pieces = await pieces_of(every)

        async def news() -> AsyncIterator[tuple[int, Piece]]:
            for piece in pieces:
                yield 0, piece

        speech = Speech(Said({}, tokenizer, 0))
        told = [each async for each in speech.events(news())]
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

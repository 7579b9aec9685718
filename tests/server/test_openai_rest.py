"""/v1/completions, /v1/responses and /v1/embeddings, by OpenAI's own library and by hand."""

from __future__ import annotations

import base64
import json
import math
from array import array
from typing import Any

import openai
import pytest

from tests.server.support import Json, Running, Says

STORY = "Once upon a time"
GREEDY: Json = {"model": "tiny", "prompt": STORY, "temperature": 0, "max_tokens": 20}
ASKED: Json = {"model": "tiny", "input": "A tale about an owl, please.", "temperature": 0}


@pytest.mark.supports("openai", "/v1/completions", "text", "text, streamed", "token usage")
def test_a_text_goes_on_the_same_streamed_or_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY)
    chunks = list(client.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text != ""
    assert chunks[-1].usage == whole.usage


@pytest.mark.supports("openai", "/v1/completions", "prompts as token ids", "several prompts", "several answers")
def test_a_prompt_may_come_as_ids_and_several_at_once(client: openai.OpenAI, server: Running) -> None:
    ids = server.engine.encode(STORY)
    one = client.completions.create(**GREEDY).choices[0].text
    assert client.completions.create(**{**GREEDY, "prompt": ids}).choices[0].text == one
    several = client.completions.create(**{**GREEDY, "prompt": [STORY, "The fox", STORY]}, n=2)
    assert [choice.index for choice in several.choices] == list(range(6))
    assert several.choices[0].text == several.choices[4].text == one != several.choices[2].text
    fox = server.engine.encode("The fox")
    assert several.usage is not None and several.usage.prompt_tokens == 2 * len(ids) + len(fox)


@pytest.mark.supports("openai", "/v1/completions", "echo")
def test_an_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, echo=True).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**GREEDY, echo=True, stream=True))
    assert whole == streamed and whole.startswith(STORY)


@pytest.mark.supports("openai", "/v1/completions", "log-probabilities")
def test_logprobs_have_the_place_of_each_token_in_the_text(client: openai.OpenAI) -> None:
    choice = client.completions.create(**GREEDY, logprobs=2).choices[0]
    told = choice.logprobs
    assert told is not None and told.tokens is not None and told.text_offset is not None
    assert "".join(told.tokens) == choice.text
    assert all(choice.text[at:].startswith(token) for at, token in zip(told.text_offset, told.tokens, strict=True))
    assert all(len(top) == 2 for top in told.top_logprobs or ())


def test_a_completion_has_sixteen_tokens_where_nobody_asks_for_more(client: openai.OpenAI) -> None:
    usage = client.completions.create(model="tiny", prompt=STORY).usage
    assert usage is not None and usage.completion_tokens == 16


@pytest.mark.supports("openai", "/v1/completions", "refused: unsupported fields, by name")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"), ("best_of", 17), ("best_of", -1), ("max_tokens", -1), ("beam_width", 17), ("prompt", ""),
        ("prompt", [10**6]), ("logprobs", 10**6), ("echo", "yes"),
    ],
)  # fmt: skip
def test_a_completion_that_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**GREEDY, "extra_body": {field: value}})
    assert field in str(caught.value.param) or "token id 1000000" in caught.value.message


@pytest.mark.supports("openai", "/v1/responses", "answer")
def test_a_response_has_one_message(client: openai.OpenAI) -> None:
    reply = client.responses.create(**ASKED, instructions="Be brief.", metadata={"who": "me"})
    assert reply.status == "completed" and reply.output_text and reply.metadata == {"who": "me"}
    assert [item.type for item in reply.output] == ["message"]
    assert reply.usage is not None and reply.usage.input_tokens > 0


@pytest.mark.supports("openai", "/v1/responses", "answer, streamed")
def test_a_streamed_response_is_the_whole_one(client: openai.OpenAI, says: Says) -> None:
    says("There was an owl. It slept all day, and at night it flew. The end.")
    whole = client.responses.create(**ASKED).output_text
    with client.responses.stream(**ASKED) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole
    assert (names[0], names[1], names[-1]) == ("response.created", "response.in_progress", "response.completed")


@pytest.mark.supports("openai", "/v1/responses", "truncated answer")
def test_a_response_that_was_cut_says_so(client: openai.OpenAI) -> None:
    reply = client.responses.create(**ASKED, max_output_tokens=4)
    assert reply.status == "incomplete" and reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(**ASKED, max_output_tokens=4, stream=True)
    assert last.type == "response.incomplete"


def test_events_of_a_response_are_numbered_and_named(server: Running) -> None:
    lines = server.stream_lines("/v1/responses", {**ASKED, "max_output_tokens": 4, "stream": True})
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert [each["type"] for each in events] == names


@pytest.mark.supports("openai", "/v1/responses", "earlier answer sent back")
def test_what_was_said_before_comes_with_the_request(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, max_output_tokens=8)
    said: Any = [{"role": "user", "content": ASKED["input"]}, *[item.model_dump() for item in first.output]]
    said.append({"role": "user", "content": [{"type": "input_text", "text": "Go on."}]})
    reply = client.responses.create(**{**ASKED, "input": said}, max_output_tokens=8)
    assert reply.usage is not None and first.usage is not None
    assert reply.usage.input_tokens > first.usage.total_tokens


@pytest.mark.supports("openai", "/v1/responses", "refused: unsupported fields, by name")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("background", True),
        ("text", {"format": {"type": "grammar"}}), ("include", ["reasoning.frobnicated_content"]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]),
    ], ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_response_that_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**ASKED, "extra_body": {field: value}})
    assert str(caught.value.param).startswith(field)


def length(vector: Any) -> float:
    return math.sqrt(math.fsum(value * value for value in vector))


@pytest.mark.supports("openai", "/v1/embeddings", "several texts")
def test_embeddings_are_of_length_1_and_alone_as_among_others(client: openai.OpenAI) -> None:
    texts = ["An owl in the barn.", "A lantern.", "An owl in the barn."]
    many = client.embeddings.create(model="tiny", input=texts)
    one = client.embeddings.create(model="tiny", input=texts[0])
    assert [row.index for row in many.data] == [0, 1, 2]
    assert many.data[0].embedding == many.data[2].embedding == one.data[0].embedding != many.data[1].embedding
    assert length(one.data[0].embedding) == pytest.approx(1, abs=1e-6)


def test_an_embedding_is_the_same_in_base64_and_as_numbers(server: Running) -> None:
    body = {"model": "tiny", "input": "An owl."}
    numbers = server.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    coded = server.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert array("f", base64.b64decode(coded)).tolist() == numbers


@pytest.mark.supports("openai", "/v1/embeddings", "token ids", "fewer dimensions")
def test_an_embedding_is_made_of_ids_and_cut_to_fewer_dimensions(client: openai.OpenAI, server: Running) -> None:
    ids = server.engine.encode("An owl.")
    whole = client.embeddings.create(model="tiny", input="An owl.").data[0].embedding
    cut = client.embeddings.create(model="tiny", input=[ids], dimensions=16).data[0].embedding
    assert len(cut) == 16 and length(cut) == pytest.approx(1, abs=1e-6)
    assert cut[3] / cut[0] == pytest.approx(whole[3] / whole[0], rel=1e-5)


@pytest.mark.supports("openai", "/v1/embeddings", "refused: prompt too long")
@pytest.mark.parametrize(("field", "value"), [("dimensions", 10**6), ("input", []), ("input", "owl " * 3000)])
def test_an_embedding_that_cannot_be_had_is_refused(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(**{"model": "tiny", "input": "An owl.", field: value})


@pytest.mark.supports("openai", "/v1/responses/input_tokens", "token count")
def test_the_tokens_of_a_response_are_counted_as_they_are_read(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]
    asked: Json = {"model": "tiny", "input": "A tale, please."}
    counts = []
    for more in ({}, {"instructions": "Be brief."}, {"instructions": "Be brief.", "tools": tools}):
        counted = client.responses.input_tokens.count(**asked, **more)
        reply = client.responses.create(**asked, **more, max_output_tokens=1)
        assert counted.object == "response.input_tokens"
        assert reply.usage is not None and counted.input_tokens == reply.usage.input_tokens
        counts.append(counted.input_tokens)
    assert counts == sorted(set(counts))
    assert client.responses.input_tokens.count(model="tiny", input="owl " * 3000).input_tokens > 3000


def test_a_count_of_tokens_refuses_what_a_response_does(server: Running) -> None:
    for field, value in (("previous_response_id", "resp_1"), ("personality", "friendly"), ("frobnicate", 1)):
        assert server.error("/v1/responses/input_tokens", {"input": "Once", field: value})["param"] == field

"""/v1/messages, by Anthropic's own library and by hand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from localllm.server.errors import RequestError
from localllm.server.stream import Delta, GenerationStream
from tests.server.support import OWL, Json, Patch, Running, Says

PATH = "/v1/messages"
ASKED: Json = {"model": "tiny", "messages": OWL}
GREEDY: Json = {**ASKED, "max_tokens": 12, "extra_body": {"temperature": 0, "top_k": 1}}
RAW: Json = {**ASKED, "max_tokens": 12, "temperature": 0}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0a1b2;"
SHORT = "Tell tales."
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "7"}


@pytest.fixture
def thinker(server: Running, speaks: Says) -> Running:
    """The model's template opens a thought, which goes on to the end of the answer unless it is told not to think."""
    opened = "{% if add_generation_prompt and enable_thinking is not false %}{{ '<think>\\n' }}{% endif %}"
    speaks(server.engine.template.sources["default"] + opened)
    return server


def said(text: str) -> Json:
    return {"role": "assistant", "content": text}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def blocks(*texts: str) -> list[Any]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


def user(*contents: Any) -> list[Any]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.supports("anthropic", "/v1/messages", "answer")
def test_the_library_gets_a_whole_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**GREEDY)
    assert message.id.startswith("msg_") and message.model == "tiny"
    assert (message.type, message.role) == ("message", "assistant")
    assert [block.type for block in message.content] == ["text"] and text_of(message)
    assert (message.stop_reason, message.stop_sequence, message.usage.output_tokens) == ("max_tokens", None, 12)


def nulls(value: Any) -> set[str]:
    """The names of what is null in it."""
    if isinstance(value, list):
        return set().union(*map(nulls, value))
    if not isinstance(value, dict):
        return set()
    return {name for name, each in value.items() if each is None}.union(*map(nulls, value.values()))


def test_what_there_is_nothing_of_is_left_out(server: Running) -> None:
    """Some clients take a list or nothing, and no null; originally these two are null until an answer has ended."""
    replies = [server.post(PATH, RAW).json(), *server.events(PATH, {**RAW, "stream": True})]
    assert set().union(*map(nulls, replies)) == {"stop_reason", "stop_sequence"}
    assert replies[0]["content"][0].keys() == {"type", "text"}


def test_an_answer_that_ends_by_itself_has_ended_its_turn(client: anthropic.Anthropic) -> None:
    begun = [*OWL, said("The end.")]
    message = client.messages.create(**{**GREEDY, "messages": begun}, stop_sequences=["never said"])
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert [block.type for block in message.content] == ["text"]


@pytest.mark.supports("anthropic", "/v1/messages", "answer, streamed", "stream accumulated by the client")
def test_the_librarys_stream_helper_accumulates_the_same_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    assert total_input(final) == total_input(whole)


def total_input(message: anthropic.types.Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_the_events_of_a_stream_come_in_the_originals_order_each_named_by_its_type(server: Running) -> None:
    lines = server.stream_lines(PATH, {**RAW, "stream": True})
    kinds = [line.removeprefix("event: ") for line in lines[::2]]
    assert kinds == [json.loads(line.removeprefix("data: "))["type"] for line in lines[1::2]]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_message_starts_with_nothing_said_and_the_tokens_of_its_prompt(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(**ASKED).input_tokens
    with client.messages.create(**GREEDY, stream=True) as stream:
        first = next(iter(stream))
    assert first.type == "message_start" and first.message.content == []
    assert first.message.stop_reason is None and first.message.usage.input_tokens == counted


@pytest.mark.supports("anthropic", "/v1/messages", "cached tokens in the usage")
def test_the_tokens_of_a_prompt_are_computed_or_cached(client: anthropic.Anthropic) -> None:
    asked = {**GREEDY, "messages": user("A tale about a fox, an owl and a hen, please. " * 8)}  # no other test's
    first, again = (client.messages.create(**asked).usage for _ in range(2))
    assert again.cache_read_input_tokens and again.cache_creation_input_tokens == 0
    assert again.input_tokens + again.cache_read_input_tokens == first.input_tokens


@pytest.mark.supports("anthropic", "/v1/messages", "stop sequences")
@pytest.mark.parametrize("streams", [False, True])
def test_the_stop_sequence_that_ended_an_answer_is_told(client: anthropic.Anthropic, streams: bool) -> None:
    whole = text_of(client.messages.create(**GREEDY))
    word = whole.split()[3]
    asked = {**GREEDY, "stop_sequences": ["never said", word]}
    message = final_of(client, asked) if streams else client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert text_of(message) == whole[: whole.index(word)]


def shown(message: anthropic.types.Message) -> list[str]:
    return [getattr(block, block.type) for block in message.content]


def final_of(client: anthropic.Anthropic, asked: Json) -> anthropic.types.Message:
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


@pytest.mark.supports("anthropic", "/v1/messages", "system prompt")
@pytest.mark.parametrize(
    "asked",
    [
        {"system": blocks(SHORT)},
        {"system": [*blocks(BILLING), *blocks(SHORT)]},
        {"system": f"{BILLING}\n{SHORT}"},
        {"system": f"{BILLING}\n{BILLING}\n{SHORT}"},
        {"messages": [{"role": "system", "content": SHORT}, *OWL]},
    ],
    ids=["blocks", "billing block", "billing line", "billing lines", "message"],
)
def test_a_system_prompt_is_the_same_however_it_comes(client: anthropic.Anthropic, asked: Json) -> None:
    plain = client.messages.create(**GREEDY, system=SHORT)
    message = client.messages.create(**{**GREEDY, **asked})
    assert (total_input(message), text_of(message)) == (total_input(plain), text_of(plain))


def test_a_system_prompt_of_billing_alone_is_none(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(**ASKED, system=BILLING).input_tokens
    assert counted == client.messages.count_tokens(**ASKED).input_tokens


def test_messages_of_one_role_behind_each_other_are_one_turn(server: Running) -> None:
    parts = [*user("one", "two", blocks("three")), said("four"), *user("five")]
    one = [*user("one\ntwo\nthree"), said("four"), *user("five")]
    counted = [server.post(f"{PATH}/count_tokens", {"messages": each}).json() for each in (parts, one)]
    assert counted[0] == counted[1] and counted[0]["input_tokens"] > 0


@pytest.mark.supports("anthropic", "/v1/messages", "continuing a begun answer")
def test_an_answer_that_was_begun_goes_on(client: anthropic.Anthropic) -> None:
    whole = text_of(client.messages.create(**GREEDY))
    begun = " ".join(whole.split(" ")[:5])
    message = client.messages.create(**{**GREEDY, "messages": [*OWL, said(begun)]})
    assert (begun + text_of(message)).startswith(whole)


@pytest.mark.supports("anthropic", "/v1/messages/count_tokens", "token count")
@pytest.mark.parametrize(
    "more",
    [{}, {"system": SHORT}, {"thinking": {"type": "disabled"}}, {"messages": [*OWL, said("Once upon")]}],
    ids=str,
)
def test_tokens_are_counted_as_an_answer_has_them(client: anthropic.Anthropic, more: Json) -> None:
    counted = client.messages.count_tokens(**{**ASKED, **more}).input_tokens
    assert counted == total_input(client.messages.create(**{**GREEDY, "max_tokens": 1, **more}))


@pytest.mark.supports("anthropic", "/v1/messages", "refused: prompt too long")
def test_a_prompt_that_is_too_long_is_counted_and_refused_in_the_originals_words(client: anthropic.Anthropic) -> None:
    asked = {**GREEDY, "messages": user("owl " * 3000)}
    counted = client.messages.count_tokens(model="tiny", messages=asked["messages"]).input_tokens
    assert counted > 3000
    with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {counted} tokens > 1024 maximum"):
        client.messages.create(**asked)


@pytest.mark.supports("anthropic", "/v1/messages", "thinking")
def test_a_thought_is_a_block_of_its_own(thinker: Running, client: anthropic.Anthropic) -> None:
    thought, text = client.messages.create(**GREEDY).content
    assert thought.type == "thinking" and thought.thinking and thought.signature == ""
    assert text.type == "text" and text.text == ""


@pytest.mark.supports("anthropic", "/v1/messages", "thinking, streamed")
def test_a_thought_is_streamed_with_a_signature_at_its_end(thinker: Running, client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**GREEDY)
    events = thinker.events(PATH, {**RAW, "stream": True})
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert set(deltas[:-1]) == {"thinking_delta"} and deltas[-1] == "signature_delta"
    assert shown(final_of(client, GREEDY)) == shown(whole)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.usefixtures("thinker")
def test_a_thought_is_not_shown_where_it_is_to_be_omitted(client: anthropic.Anthropic, streams: bool) -> None:
    asked = {**GREEDY, "thinking": {"type": "adaptive", "display": "omitted"}}
    message = final_of(client, asked) if streams else client.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text"] and shown(message) == ["", ""]


@pytest.mark.supports("anthropic", "/v1/messages", "thinking turned off")
def test_disabled_thinking_is_told_to_the_template(thinker: Running, client: anthropic.Anthropic) -> None:
    message = client.messages.create(**GREEDY, thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["text"] and text_of(message)


@pytest.mark.supports("anthropic", "/v1/messages", "earlier answer sent back")
def test_a_message_with_its_thought_can_be_sent_back(thinker: Running, client: anthropic.Anthropic) -> None:
    thought = client.messages.create(**GREEDY).content
    history: list[Any] = [*OWL, {"role": "assistant", "content": thought}, *user("And then?")]
    assert client.messages.create(**{**GREEDY, "messages": history}).content


@pytest.mark.supports("anthropic", "/v1/messages", "refused: unsupported fields, by name")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mcp_servers", [{"type": "url", "url": "http://localhost", "name": "x"}]), ("container", "container_1"),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015"}]}),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("diagnostics", {"previous_message_id": None}), ("inference_geo", "us"), ("speed", "fast"),
        ("output_config.format", {"format": {"type": "json_object"}}), ("output_config.effort", {"effort": "utmost"}),
        ("output_config.effort", {"effort": "low"}), ("messages.0.content.0", user([IMAGE])),
        ("messages.0.content.0", user([RESULT])),
        ("messages.0", user([{"type": "thinking", "thinking": "hm", "signature": ""}])), ("messages", []),
        ("system.0", [IMAGE]), ("metadata.team", {"team": "x"}), ("service_tier", "flex"),
        ("stop_sequences", ["x"] * 1000), ("temperature", -1), ("top_k", -2), ("max_tokens", 0), ("frobnicate", 1),
    ], ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_cannot_be_honoured_is_a_400_that_names_it(client: anthropic.Anthropic, field: str, value: object) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**GREEDY, "extra_body": {field.partition(".")[0]: value}})
    error: Any = caught.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert field in error["error"]["message"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"messages": [said("Once")]}, "nothing to answer"),
        ({"messages": [*OWL, said("Once ")]}, "cannot end with trailing whitespace"),
        ({"messages": [*OWL, said("Once\n")]}, "cannot end with trailing whitespace"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking budget cannot be enforced"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, r"output_config\.effort"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_has_the_reason(client: anthropic.Anthropic, more: Json, why: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=why):
        client.messages.create(**{**GREEDY, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"output_config": {"effort": "high"}},
        {"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"context_management": {"edits": []}},
    ],
)
def test_what_asks_for_no_more_than_is_done_anyway_changes_nothing(server: Running, more: Json) -> None:
    plain, asked = (server.answer(PATH, {**RAW, "max_tokens": 8, **fields}) for fields in ({}, more))
    assert plain["content"] == asked["content"]


def test_a_request_without_max_tokens_is_refused_in_the_originals_words(server: Running) -> None:
    assert server.error(PATH, ASKED)["message"] == "max_tokens: Field required"


def test_what_has_no_effect_is_accepted(client: anthropic.Anthropic) -> None:
    inert: Json = {"metadata": {"user_id": "u"}, "service_tier": "auto", "tools": [], "tool_choice": {"type": "auto"}}
    inert |= {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "thinking": {"type": "adaptive"}}
    inert |= {"speed": "standard", "container": None}
    assert client.messages.create(**GREEDY, **inert).usage.service_tier == "standard"


def test_silence_is_told_by_pings_and_a_failure_ends_the_stream(server: Running, monkeypatch: Patch) -> None:
    break_answers(monkeypatch)
    lines = server.stream_lines(PATH, {**RAW, "stream": True})
    assert lines[lines.index("event: ping") + 1] == 'data: {"type":"ping"}'
    assert lines[-2] == "event: error"
    assert lines[-1].startswith('data: {"type":"error","error":{"type":"overloaded_error"')


def test_the_library_raises_what_ends_a_stream(client: anthropic.Anthropic, monkeypatch: Patch) -> None:
    break_answers(monkeypatch)
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        list(client.messages.create(**GREEDY, stream=True))


def break_answers(monkeypatch: Patch) -> None:
    """They begin, are silent, and fail."""

    async def deltas(*_: Any, **__: Any) -> AsyncIterator[tuple[int, Delta] | None]:
        yield 0, Delta("Once")
        yield None
        raise RequestError(503, "the server is shutting down", name="overloaded")

    monkeypatch.setattr(GenerationStream, "deltas", deltas)


@pytest.mark.supports("anthropic", "/v1/messages", "refused: unknown model")
def test_an_unknown_model_is_a_404_with_the_nearest_name(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'tiny'"):
        client.messages.create(**{**GREEDY, "model": "tinny"})


@pytest.mark.supports("anthropic", "/v1/models", "list of models")
@pytest.mark.supports("anthropic", "/v1/models/{model:path}", "one model")
def test_the_models_are_listed(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "teller"]
    assert client.models.retrieve("tiny").display_name == "tiny"

"""Tools and forms of answers of /v1/messages, by Anthropic's own library and by hand."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import pytest
from jsonschema import validate

from tests.server.support import OWL, Json, Running, Says
from tests.server.tools_support import ANSWER, ANTHROPIC_TOOLS, BROKEN, CALLED_TWICE, ROOM, WEATHER, Animal

PATH = "/v1/messages"
GREEDY: Json = {"model": "tiny", "messages": OWL, "max_tokens": ROOM, "extra_body": {"temperature": 0}}
RAW: Json = {"model": "tiny", "messages": OWL, "max_tokens": ROOM, "temperature": 0}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"unit": "C"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "21"}
FORM = {"type": "json_schema", "schema": ANSWER}
CLOCK: Any = {"type": "tool", "name": "clock"}


def conversation(*blocks: Any) -> list[Any]:
    """A question, a call, and what the user says to it."""
    return [*OWL, {"role": "assistant", "content": [USE]}, {"role": "user", "content": list(blocks)}]


def refused(server: Running, **fields: Any) -> str:
    """What is told of a request that says that too."""
    error = server.error(PATH, {**RAW, **fields})
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


def final_of(client: anthropic.Anthropic, streams: bool = False, **more: Any) -> anthropic.types.Message:
    """The message that the library gets; what more is asked takes the place of `GREEDY`'s."""
    asked = {**GREEDY, **more}
    if not streams:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


def total_input(message: Any) -> int:
    return int(message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0))


@pytest.mark.supports("anthropic", "/v1/messages", "tools: required call")
@pytest.mark.parametrize("streams", [False, True])
def test_any_tool_is_called_where_one_has_to_be(client: anthropic.Anthropic, streams: bool) -> None:
    message = final_of(client, streams, tools=ANTHROPIC_TOOLS[:1], tool_choice={"type": "any"})
    assert message.stop_reason == "tool_use" and message.content
    for block in message.content:
        assert block.type == "tool_use" and block.name == "weather" and block.id.startswith("toolu_")
        validate(block.input, WEATHER)


@pytest.mark.supports("anthropic", "/v1/messages", "tools: named tool")
@pytest.mark.parametrize("streams", [False, True])
def test_the_tool_that_is_named_is_called_once(client: anthropic.Anthropic, streams: bool) -> None:
    message = final_of(client, streams, tools=ANTHROPIC_TOOLS, tool_choice=CLOCK)
    [block] = message.content
    assert block.type == "tool_use" and (block.name, block.input) == ("clock", {})
    assert message.stop_reason == "tool_use"


@pytest.mark.supports("anthropic", "/v1/messages", "tools: at most one call")
def test_one_call_is_made_where_several_are_not_wanted(client: anthropic.Anthropic) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = final_of(client, tools=ANTHROPIC_TOOLS, tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]


@pytest.mark.supports("anthropic", "/v1/messages", "tools: call, streamed")
def test_a_streamed_call_is_a_block_of_json_in_pieces(client: anthropic.Anthropic) -> None:
    with client.messages.create(**GREEDY, tools=ANTHROPIC_TOOLS, tool_choice=CLOCK, stream=True) as stream:
        events: list[Any] = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[1].content_block.type == "tool_use" and events[1].content_block.input == {}
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta.partial_json for delta in deltas)) == {}
    assert events[-2].delta.stop_reason == "tool_use"


@pytest.mark.supports("anthropic", "/v1/messages", "tools: optional calls")
@pytest.mark.parametrize("streams", [False, True])
def test_text_and_calls_are_blocks_in_their_order(client: anthropic.Anthropic, says: Says, streams: bool) -> None:
    says(f"Let me look.\n{CALLED_TWICE}")
    message = final_of(client, streams, tools=ANTHROPIC_TOOLS)
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.content[0].type == "text" and message.content[0].text == "Let me look."
    calls = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert calls == [("weather", {"unit": "C"}), ("clock", {})] and message.stop_reason == "tool_use"


@pytest.mark.parametrize("streams", [False, True])
def test_a_broken_call_stays_text(client: anthropic.Anthropic, says: Says, streams: bool) -> None:
    says(BROKEN)
    message = final_of(client, streams, tools=ANTHROPIC_TOOLS)
    assert [block.text for block in message.content if block.type == "text"] == [BROKEN]
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("most", [2, 40])
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_is_cut_within_a_call_has_what_there_is_of_it(
    client: anthropic.Anthropic, streams: bool, most: int
) -> None:
    message = final_of(client, streams, max_tokens=most, tools=ANTHROPIC_TOOLS[:1], tool_choice={"type": "any"})
    last: Any = message.content[-1]
    assert message.stop_reason == "max_tokens" and last.type == ("text" if most == 2 else "tool_use")
    assert most == 40 or last.text == ""


@pytest.mark.supports("anthropic", "/v1/messages", "tools: `none`")
def test_no_tool_is_called_where_none_is_wanted(client: anthropic.Anthropic) -> None:
    message = final_of(client, max_tokens=8, tools=ANTHROPIC_TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]


@pytest.mark.supports("anthropic", "/v1/messages", "tools: strict")
def test_a_strict_tool_is_one_whose_schema_can_be_held_to(client: anthropic.Anthropic, server: Running) -> None:
    strict = [{**ANTHROPIC_TOOLS[0], "strict": True}]
    assert final_of(client, max_tokens=8, tools=strict).content
    told = refused(server, tools=[{**strict[0], "input_schema": {"type": "object", "not": {}}}])
    assert "weather" in told and "'not'" in told


@pytest.mark.supports("anthropic", "/v1/messages", "tools: result sent back")
def test_a_call_and_its_result_go_back(client: anthropic.Anthropic) -> None:
    uses: Any = final_of(client, tools=ANTHROPIC_TOOLS, tool_choice=CLOCK).content
    result = {"type": "tool_result", "tool_use_id": uses[0].id, "content": [{"type": "text", "text": "noon"}]}
    goes_on = {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}
    messages = [*OWL, {"role": "assistant", "content": uses}, goes_on]
    assert final_of(client, messages=messages, max_tokens=6, tools=ANTHROPIC_TOOLS).content


@anthropic.beta_tool
def weather(unit: Literal["C", "F"]) -> str:
    """Of today.

    Args:
        unit: In what it is told.
    """
    return f"21 {unit}"


@pytest.mark.supports("anthropic", "/v1/messages", "tools: run by the client library")
def test_the_library_runs_tools_and_sends_their_results(client: anthropic.Anthropic, says: Says) -> None:
    says(CALLED_TWICE.partition('\n<tool_call>\n{"name": "clock"')[0])
    asked: Json = {"model": "tiny", "messages": OWL, "max_tokens": ROOM, "tools": [weather]}
    replies = []
    for reply in client.beta.messages.tool_runner(**asked, max_iterations=2):
        replies.append(reply)
        says("It is warm.")
    assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"]
    assert total_input(replies[1]) > replies[0].usage.input_tokens


@pytest.mark.parametrize("nothing", [{"input": None}, {"input": ""}, {}], ids=str)
def test_a_call_without_arguments_goes_back_as_one_with_none_in_it(server: Running, nothing: Any) -> None:
    def num_tokens(given: Json) -> int:
        use = {"type": "tool_use", "id": "toolu_1", "name": "clock", **given}
        said = [*OWL, {"role": "assistant", "content": [use]}, {"role": "user", "content": [RESULT]}]
        return int(server.answer(f"{PATH}/count_tokens", {"messages": said})["input_tokens"])

    assert num_tokens(nothing) == num_tokens({"input": {}})


def test_a_result_that_is_an_error_is_told_as_one(server: Running) -> None:
    def num_tokens(**more: bool) -> int:
        asked = {"messages": conversation({**RESULT, **more}), "tools": ANTHROPIC_TOOLS}
        return int(server.answer(f"{PATH}/count_tokens", asked)["input_tokens"])

    assert num_tokens() == num_tokens(is_error=False) < num_tokens(is_error=True)


@pytest.mark.supports("anthropic", "/v1/messages", "tools: refused: result of an unknown call")
@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([{"role": "user", "content": [RESULT]}], "messages.0.content.0"),
        (conversation({**RESULT, "tool_use_id": "toolu_2"}), "messages.2.content.0"),
        (conversation(RESULT, RESULT), "messages.2.content.1"),
        (conversation({"type": "text", "text": "hi"}), "messages.2"),
        ([*OWL, {"role": "assistant", "content": [USE]}], "messages.1"),
        ([*conversation(RESULT), {"role": "assistant", "content": [USE]}], "messages.3.content.0"),
        ([{"role": "user", "content": [USE]}], "messages.0"),
        ([*OWL, {"role": "assistant", "content": [RESULT]}], "messages.1"),
        (conversation({**RESULT, "content": [{"type": "image", "source": {}}]}), "messages.2.content.0.content.0"),
    ],
)
def test_results_are_of_calls_and_calls_have_results(server: Running, messages: Any, where: str) -> None:
    assert refused(server, messages=messages, tools=ANTHROPIC_TOOLS).startswith(where)


@pytest.mark.supports("anthropic", "/v1/messages", "tools: refused: invalid tools, by name")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [*ANTHROPIC_TOOLS, *ANTHROPIC_TOOLS]}, "'weather'"),
        ({"tools": [{**ANTHROPIC_TOOLS[0], "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{**ANTHROPIC_TOOLS[0], "name": "f" * 129}]}, "tools.0.name"),
        ({"tools": [{**ANTHROPIC_TOOLS[0], "input_schema": {"type": "string"}}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"type": "frobnicate_20250305", "name": "f"}]}, "a tool is a function"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {**FORM, "schema": {"not": {}}}}}, "'not'"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_format": FORM, "structured_outputs": {"regex": "a"}}, "together"),
    ],
)
def test_what_is_no_tool_or_no_form_is_refused_by_name(server: Running, fields: Any, words: str) -> None:
    assert words in refused(server, **fields)


@pytest.mark.supports("anthropic", "/v1/messages/count_tokens", "tools in the token count")
def test_the_tokens_of_tools_are_counted(client: anthropic.Anthropic) -> None:
    asked: Json = {"model": "tiny", "messages": OWL}
    counted = client.messages.count_tokens(**asked, tools=ANTHROPIC_TOOLS).input_tokens
    assert counted > client.messages.count_tokens(**asked).input_tokens
    assert counted == total_input(final_of(client, max_tokens=1, tools=ANTHROPIC_TOOLS))


@pytest.mark.supports("anthropic", "/v1/messages", "structured output: JSON Schema")
@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_answer_fits_the_schema_that_it_has_to(client: anthropic.Anthropic, field: str) -> None:
    more = {"temperature": 0, field: {"format": FORM} if field == "output_config" else FORM}
    message = final_of(client, extra_body=more)
    [block] = message.content
    assert block.type == "text" and validate(json.loads(block.text), ANSWER) is None
    assert message.stop_reason == "end_turn"


@pytest.mark.supports("anthropic", "/v1/messages", "structured output: parsed")
def test_an_answer_is_parsed_into_the_librarys_type(client: anthropic.Anthropic) -> None:
    assert isinstance(client.messages.parse(**GREEDY, output_format=Animal).parsed_output, Animal)


@pytest.mark.supports("anthropic", "/v1/messages", "`structured_outputs`")
@pytest.mark.parametrize(
    ("form", "said"),
    [({"regex": "owl|fox"}, {"owl", "fox"}), ({"choice": ["a", "b"]}, {"a", "b"}),
     ({"grammar": 'root ::= "x" | "y"'}, {"x", "y"}), ({"grammar": 'start: "p"'}, {"p"})],
)  # fmt: skip
def test_an_answer_is_of_the_form_that_it_has_to_have(client: anthropic.Anthropic, form: Json, said: set[str]) -> None:
    message = final_of(client, extra_body={"structured_outputs": form})
    assert [block.text in said for block in message.content if block.type == "text"] == [True]


@pytest.mark.supports("anthropic", "/v1/messages", "structured output: refused: for a begun answer")
@pytest.mark.parametrize(
    ("field", "form"),
    [
        ("output_config.format", {"output_config": {"format": FORM}}),
        ("output_format", {"output_format": FORM}),
        ("structured_outputs", {"structured_outputs": {"regex": "a+"}}),
        ("tool_choice", {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}}),
        ("tool_choice", {"tools": ANTHROPIC_TOOLS, "tool_choice": CLOCK}),
    ],
)
def test_an_answer_that_was_begun_has_no_form(server: Running, field: str, form: Json) -> None:
    told = refused(server, messages=[*OWL, {"role": "assistant", "content": "{"}], **form)
    assert f"{field!r}" in told and "begun" in told and "leave out" in told


def test_an_answer_that_was_begun_may_call_where_it_need_not(server: Running) -> None:
    begun = [*OWL, {"role": "assistant", "content": "Let me"}]
    server.answer(PATH, {**RAW, "messages": begun, "tools": ANTHROPIC_TOOLS, "max_tokens": 4})

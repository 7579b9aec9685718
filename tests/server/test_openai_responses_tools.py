"""Tools and forms of answers of /v1/responses, by OpenAI's own library and by hand."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from jsonschema import validate

from tests.server.support import Json, Running, Says
from tests.server.tools_support import ANSWER, BROKEN, CALLED_TWICE, FUNCTIONS, ROOM, WEATHER, Animal

PATH = "/v1/responses"
ASKED: Json = {"model": "tiny", "input": "A tale, please.", "temperature": 0, "max_output_tokens": ROOM}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"unit": "C"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "21"}
USER = {"role": "user", "content": "How warm is it?"}
CLOCK: Any = {"type": "function", "name": "clock"}


def final_of(client: openai.OpenAI, streams: bool, **more: Any) -> Any:
    if not streams:
        ask: Any = client.responses.parse if "text_format" in more else client.responses.create
        return ask(**ASKED, **more)
    with client.responses.stream(**ASKED, **more) as stream:
        return stream.get_final_response()


@pytest.mark.supports("openai", "/v1/responses", "tools: required call")
def test_a_call_that_is_required_is_an_item(client: openai.OpenAI) -> None:
    reply = client.responses.create(**ASKED, tools=FUNCTIONS[:1], tool_choice="required")
    assert reply.status == "completed" and {item.type for item in reply.output} == {"function_call"}
    for item in reply.output:
        assert item.type == "function_call" and item.name == "weather" and item.status == "completed"
        validate(json.loads(item.arguments), WEATHER)
        assert item.call_id.startswith("call_") and (item.id or "").startswith("fc_")
    assert reply.tools[0].type == "function" and reply.tool_choice == "required"


@pytest.mark.supports("openai", "/v1/responses", "tools: named tool")
@pytest.mark.parametrize(
    "choice", [CLOCK, {"type": "allowed_tools", "mode": "required", "tools": [CLOCK]}], ids=["named", "allowed"]
)
def test_the_tool_that_is_named_is_called(client: openai.OpenAI, choice: Any) -> None:
    reply = client.responses.create(**ASKED, tools=FUNCTIONS, tool_choice=choice, parallel_tool_calls=False)
    [item] = reply.output
    assert item.type == "function_call" and (item.name, item.arguments) == ("clock", "{}")


@pytest.mark.supports("openai", "/v1/responses", "tools: call, streamed")
def test_the_librarys_stream_helper_accumulates_a_call(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASKED, tools=FUNCTIONS, tool_choice=CLOCK) as stream:
        kinds = [event.type for event in stream]
        [item] = stream.get_final_response().output
    assert item.type == "function_call" and (item.name, item.arguments) == ("clock", "{}")
    assert kinds[2] == "response.output_item.added" and "response.function_call_arguments.delta" in kinds
    ends = ("function_call_arguments.done", "output_item.done", "completed")
    assert kinds[-3:] == [f"response.{end}" for end in ends]


@pytest.mark.supports("openai", "/v1/responses", "tools: optional calls")
@pytest.mark.parametrize("streams", [False, True])
def test_text_and_calls_are_items_in_their_order(client: openai.OpenAI, says: Says, streams: bool) -> None:
    says(f"Let me look.\n{CALLED_TWICE}")
    reply = final_of(client, streams, tools=FUNCTIONS)
    assert [item.type for item in reply.output] == ["message", "function_call", "function_call"]
    assert reply.output_text == "Let me look." and [item.name for item in reply.output[1:]] == ["weather", "clock"]
    assert len({item.call_id for item in reply.output[1:]}) == 2


def test_a_broken_call_stays_text(client: openai.OpenAI, says: Says) -> None:
    says(BROKEN)
    assert client.responses.create(**ASKED, tools=FUNCTIONS).output_text == BROKEN


def test_an_answer_that_is_cut_within_a_call_is_incomplete(client: openai.OpenAI) -> None:
    asked = {**ASKED, "max_output_tokens": 40}
    reply = client.responses.create(**asked, tools=FUNCTIONS[:1], tool_choice="required")
    assert reply.status == "incomplete" and reply.output[-1].type == "function_call"
    assert reply.output[-1].status == "incomplete"


@pytest.mark.supports("openai", "/v1/responses", "tools: result sent back")
def test_calls_and_results_go_back_as_items(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, tools=FUNCTIONS, tool_choice=CLOCK)
    [call] = first.output
    assert call.type == "function_call"
    said: Any = [USER, call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}]
    reply = client.responses.create(**{**ASKED, "input": said, "max_output_tokens": 6}, tools=FUNCTIONS)
    assert reply.output_text and reply.usage and first.usage and reply.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("nothing", [{"arguments": ""}, {"arguments": "null"}, {"arguments": None}, {}], ids=str)
def test_a_call_without_arguments_goes_back_as_one_with_none_in_it(server: Running, nothing: Any) -> None:
    def num_tokens(arguments: Json) -> int:
        call = {"type": "function_call", "call_id": "call_1", "name": "clock", **arguments}
        asked = {"input": [USER, call, RESULT], "tools": FUNCTIONS, "max_output_tokens": 1}
        return int(server.answer(PATH, asked)["usage"]["input_tokens"])

    assert num_tokens(nothing) == num_tokens({"arguments": "{}"})


@pytest.mark.supports("openai", "/v1/responses", "tools: refused: result of an unknown call")
@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([USER, RESULT], "input[1]"),
        ([USER, CALL, {**RESULT, "call_id": "call_2"}], "input[2]"),
        ([USER, CALL, RESULT, RESULT], "input[3]"),
        ([USER, CALL, USER], "input[2]"),
        ([USER, CALL], "input"),
        ([USER, CALL, CALL, RESULT], "input[2]"),
        ([USER, {"type": "web_search_call"}], "input.1"),
        ([USER, {**CALL, "name": ""}], "input.1.name"),
    ],
)
def test_results_are_of_calls_and_calls_have_results(server: Running, items: Any, param: str) -> None:
    assert server.error(PATH, {**ASKED, "input": items})["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [*FUNCTIONS, *FUNCTIONS]}, "tools"),
        ({"tools": [{**FUNCTIONS[0], "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"type": "frobnicate"}]}, "tools.0"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ],
)
def test_what_is_no_tool_or_no_form_is_refused_by_name(server: Running, fields: Any, param: str) -> None:
    assert server.error(PATH, {**ASKED, **fields})["param"] == param


@pytest.mark.supports("openai", "/v1/responses", "structured output: parsed")
@pytest.mark.parametrize("streams", [False, True])
def test_a_response_is_parsed_into_the_librarys_type(client: openai.OpenAI, streams: bool) -> None:
    assert isinstance(final_of(client, streams, text_format=Animal).output_parsed, Animal)


@pytest.mark.supports("openai", "/v1/responses", "structured output: JSON Schema")
def test_a_response_says_again_to_what_form_it_was_held(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "animal", "schema": ANSWER, "strict": True}
    reply = client.responses.create(**ASKED, text={"format": form})
    validate(json.loads(reply.output_text), ANSWER)
    assert reply.text is not None and reply.text.format is not None and reply.text.format.type == "json_schema"
    asked = {**ASKED, "max_output_tokens": 16}
    any_object = client.responses.create(**asked, text={"format": {"type": "json_object"}})
    assert any_object.output_text.lstrip().startswith("{")


def test_a_response_may_be_held_to_a_grammar(client: openai.OpenAI) -> None:
    reply = client.responses.create(**ASKED, extra_body={"structured_outputs": {"regex": "owl|fox"}})
    assert reply.output_text in ("owl", "fox") and reply.status == "completed"

"""Tools and forms of answers of /v1/chat/completions and /v1/completions, by OpenAI's own library and by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from jsonschema import validate

from tests.server.support import OWL, Json, Running, Says
from tests.server.tools_support import ANSWER, BROKEN, CALLED, CALLED_TWICE, OPENAI_TOOLS, ROOM, WEATHER, Animal
from tests.thinning import every_other

PATH = "/v1/chat/completions"
GREEDY: Json = {"model": "tiny", "messages": OWL, "temperature": 0, "max_tokens": ROOM}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"unit": "C"}'}}
ASKED_FOR = [*OWL, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANSWER, "strict": True}}
NAMED: Any = {"type": "function", "function": {"name": "clock"}}
ONE_TOOL: Json = {"tools": OPENAI_TOOLS[:1], "tool_choice": "required"}


def refused(server: Running, **fields: Any) -> Any:
    """The error of a request that says that too."""
    return server.error(PATH, {**GREEDY, **fields})


def answered(client: openai.OpenAI, *, streams: bool = False, **more: Any) -> Any:
    """The choice that the library gets; what more is asked takes the place of `GREEDY`'s."""
    asked: Any = {**GREEDY, **more}
    if not streams:
        return client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        return stream.get_final_completion().choices[0]


def called(choice: Any) -> list[tuple[str, str]]:
    """The names and arguments of its calls."""
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def function(name: str, **more: Any) -> Json:
    return {"type": "function", "function": {"name": name, **more}}


# Calls that have to be made


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: required call")
def test_a_call_that_is_required_is_made(client: openai.OpenAI) -> None:
    reply = answered(client, **ONE_TOOL)
    assert reply.finish_reason == "tool_calls" and reply.message.content is None and reply.message.tool_calls
    for call in reply.message.tool_calls:
        assert call.type == "function" and call.function.name == "weather" and call.id.startswith("call_")
        validate(json.loads(call.function.arguments), WEATHER)


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: named tool")
def test_the_tool_that_is_named_is_called_once(client: openai.OpenAI) -> None:
    reply = answered(client, tools=OPENAI_TOOLS, tool_choice=NAMED)
    assert called(reply) == [("clock", "{}")] and reply.finish_reason == "tool_calls"


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: at most one call")
def test_one_call_is_made_where_several_are_not_wanted(client: openai.OpenAI) -> None:
    asked: Json = {"tools": OPENAI_TOOLS, "parallel_tool_calls": False}
    reply = answered(client, **asked, tool_choice="required")
    assert len(called(reply)) == 1 and reply.finish_reason == "tool_calls"
    assert answered(client, **asked, max_tokens=8).message.tool_calls is None  # it may, and does not


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: allowed subset")
def test_a_choice_among_some_of_the_tools_is_held_to(client: openai.OpenAI) -> None:
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    reply = answered(client, tools=OPENAI_TOOLS, tool_choice=allowed)
    assert {name for name, _ in called(reply)} == {"clock"}


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: call, streamed")
def test_the_librarys_stream_helper_accumulates_a_call(client: openai.OpenAI) -> None:
    for _ in range(20):  # a busy machine may have several tokens for one piece
        with client.chat.completions.stream(**GREEDY, **ONE_TOOL) as stream:
            events = [event.type for event in stream]
            choice = stream.get_final_completion().choices[0]
        if events.count("tool_calls.function.arguments.delta") > 2:
            break
    else:
        pytest.fail(f"the arguments came in one piece 20 times: {events}")
    assert "tool_calls.function.arguments.done" in events
    assert choice.finish_reason == "tool_calls" and called(choice) == called(answered(client, **ONE_TOOL))


def test_a_streamed_call_begins_with_its_name_and_goes_on_by_its_index(server: Running) -> None:
    asked = {**GREEDY, "tools": OPENAI_TOOLS, "tool_choice": NAMED, "stream": True}
    chunks = [chunk["choices"][0] for chunk in server.events(PATH, asked)]
    deltas = [delta for chunk in chunks for delta in chunk["delta"].get("tool_calls", ())]
    assert deltas[0]["id"].startswith("call_") and deltas[0]["function"]["name"] == "clock"
    assert {delta["index"] for delta in deltas} == {0} and all("id" not in delta for delta in deltas[1:])
    assert "".join(delta["function"]["arguments"] for delta in deltas) == "{}"
    assert chunks[-1]["delta"] == {} and chunks[-1]["finish_reason"] == "tool_calls"


def test_each_of_several_answers_calls_for_itself(client: openai.OpenAI) -> None:
    asked: Json = {**GREEDY, "temperature": 1, "seed": 1, "n": 3, "tools": OPENAI_TOOLS, "tool_choice": NAMED}
    whole = client.chat.completions.create(**asked).choices
    ids = [call.id for choice in whole for call in choice.message.tool_calls or ()]
    said: list[str] = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or ():
                said[choice.index] += (delta.function and delta.function.arguments) or ""
    assert len(ids) == len(set(ids)) == 3 and said == ["{}"] * 3


def test_an_answer_that_is_cut_within_a_call_says_so(client: openai.OpenAI) -> None:
    lengths = [answered(client, **ONE_TOOL, max_tokens=most) for most in (1, 2, 3, 5, 40)]
    assert {(choice.finish_reason, choice.message.content or None) for choice in lengths} == {("length", None)}
    assert lengths[0].message.tool_calls is None
    [(_, arguments)] = called(lengths[-1])
    assert '{"unit": "C"}'.startswith(arguments[:9])


def test_log_probabilities_are_told_of_calls_too(client: openai.OpenAI) -> None:
    asked: Json = {**GREEDY, "tools": OPENAI_TOOLS, "tool_choice": NAMED, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None and whole.choices[0].logprobs is not None
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**asked, stream=True)]
    told = sum(len(each.content or ()) for each in streamed if each is not None)
    assert len(whole.choices[0].logprobs.content or ()) == told
    assert 0 <= whole.usage.completion_tokens - told <= 1  # the one that ends the answer says nothing


# Calls that a model makes by itself


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: optional calls")
@pytest.mark.parametrize("streams", [False, True])
def test_calls_that_a_model_makes_by_itself_are_calls(client: openai.OpenAI, says: Says, streams: bool) -> None:
    says(f"Let me look.\n{CALLED_TWICE}")
    choice = answered(client, streams=streams, tools=OPENAI_TOOLS)
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    calls = [(name, json.loads(arguments)) for name, arguments in called(choice)]
    assert calls == [("weather", {"unit": "C"}), ("clock", {})]
    assert len({call.id for call in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("text", [BROKEN, CALLED.replace("weather", "nobody"), CALLED.replace("}}", "}")])
@pytest.mark.parametrize("streams", [False, True])
def test_a_broken_call_stays_text(client: openai.OpenAI, says: Says, text: str, streams: bool) -> None:
    says(text)
    choice = answered(client, streams=streams, tools=OPENAI_TOOLS)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: `none`")
def test_without_tools_to_call_what_looks_like_a_call_is_text(client: openai.OpenAI, says: Says) -> None:
    says(CALLED)
    none: Json = {"tools": OPENAI_TOOLS, "tool_choice": "none"}
    told: list[Any] = [client.chat.completions.create(**GREEDY, **more) for more in (none, {})]
    assert [reply.choices[0].message.content for reply in told] == [CALLED] * 2
    assert told[0].usage.prompt_tokens == told[1].usage.prompt_tokens


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: strict")
def test_a_strict_tool_may_be_called_or_not(client: openai.OpenAI, server: Running) -> None:
    strict = {**OPENAI_TOOLS[0]["function"], "strict": True}
    plain, free = (answered(client, tools=tools, max_tokens=12) for tools in (OPENAI_TOOLS[:1], [function(**strict)]))
    assert free.message.content == plain.message.content
    error = refused(server, tools=[function(**{**strict, "parameters": {"type": "object", "not": {}}})])
    assert error["param"] == "tools" and "weather" in error["message"] and "'not'" in error["message"]


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: result sent back")
def test_the_result_of_a_call_goes_back(client: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "max_tokens": 6, "tools": OPENAI_TOOLS}
    before = client.chat.completions.create(**asked).usage
    after = client.chat.completions.create(**{**asked, "messages": [*ASKED_FOR, RESULT]}).usage
    more = client.chat.completions.create(**{**asked, "messages": [*ASKED_FOR, RESULT, *OWL]})
    assert before and after and after.prompt_tokens > before.prompt_tokens and more.choices[0].message.content


@pytest.mark.parametrize("nothing", [{"arguments": ""}, {"arguments": "null"}, {"arguments": None}, {}], ids=str)
def test_a_call_without_arguments_goes_back_as_one_with_none_in_it(server: Running, nothing: Any) -> None:
    def num_tokens(arguments: Json) -> int:
        said = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "clock", **arguments}}]}
        asked = {"messages": [*OWL, said, RESULT], "tools": OPENAI_TOOLS, "max_tokens": 1}
        return int(server.answer(PATH, asked)["usage"]["prompt_tokens"])

    assert num_tokens(nothing) == num_tokens({"arguments": "{}"})


def test_an_answer_with_calls_goes_back_as_the_library_has_it(client: openai.OpenAI) -> None:
    plain, parsed = (
        answered(client, streams=streams, tools=OPENAI_TOOLS, tool_choice=NAMED).message for streams in (False, True)
    )
    for said, call in ((plain, plain.tool_calls[0]), (parsed.model_dump(), parsed.tool_calls[0])):
        result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "noon"}]}
        reply = answered(client, messages=[*OWL, said, result], tools=OPENAI_TOOLS, tool_choice="none")
        assert reply.message.content


# What is refused at the door


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: refused: result of an unknown call")
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([*OWL, RESULT], "messages[1]"),
        ([*ASKED_FOR, {**RESULT, "tool_call_id": "call_2"}], "messages[2]"),
        ([*ASKED_FOR, RESULT, RESULT], "messages[3]"),
        (ASKED_FOR, "messages[1]"),
        ([*ASKED_FOR, *OWL], "messages[2]"),
        ([*ASKED_FOR, RESULT, *ASKED_FOR[1:], RESULT], "messages[3].tool_calls[0]"),
        ([*OWL, {"role": "tool", "content": "21"}], "messages.1"),
        ([{"role": "user", "content": "hi", "tool_calls": [CALL]}], "messages.0"),
        ([{"role": "user", "content": "hi", "tool_call_id": "call_1"}], "messages.0"),
    ],
)
def test_results_are_of_calls_and_calls_have_results(server: Running, messages: Any, param: str) -> None:
    error = refused(server, messages=messages, tools=OPENAI_TOOLS)
    assert error["param"] == param and error["type"] == "invalid_request_error"


def test_a_call_that_never_was_is_named(server: Running) -> None:
    error = refused(server, messages=[*ASKED_FOR, {**RESULT, "tool_call_id": "call_2"}])
    assert "'call_2'" in error["message"] and "does not exist" in error["message"] and "'call_1'" in error["message"]


@pytest.mark.supports("openai", "/v1/chat/completions", "tools: refused: invalid tools, by name")
@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tools": [function("f"), function("f")]}, "tools", "'f'"),
        ({"tools": [function("get weather")]}, "tools.0.function.name", "pattern"),
        ({"tools": [function("f" * 65)]}, "tools.0.function.name", "pattern"),
        ({"tools": [function("")]}, "tools.0.function.name", "pattern"),
        ({"tools": [function("f", parameters={"type": "array"})]}, "tools.0.function.parameters", "object"),
        ({"tools": [function("f", parameters=[])]}, "tools.0.function.parameters", "object"),
        ({"tools": [{"type": "frobnicate"}]}, "tools.0", "a tool is a function"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [function(f"f{i}") for i in range(129)]}, "tools", "128"),
        ({"tools": [function("f", frobnicate=1)]}, "tools.0.function.frobnicate", "frobnicate"),
        ({"tools": [function("f")], "tool_choice": function("g")}, "tool_choice", "'g'"),
        ({"tools": [function("f")], "tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": function("g")}, "tool_choice", "'g'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"functions": [{"name": "f"}]}, "functions", "'tools'"),
    ],
)
def test_what_is_no_tool_or_no_choice_is_refused_by_name(server: Running, fields: Json, param: str, word: str) -> None:
    error = refused(server, **fields)
    assert error["param"] == param and word in error["message"] + str(fields.get("tool_choice")), error


def test_a_schema_that_is_nested_too_deeply_is_refused(server: Running) -> None:
    schema: Any = {"type": "object", "properties": {}}
    for _ in range(150):
        schema = {"type": "object", "properties": {"a": schema}}
    for choice in ("auto", "required"):
        assert refused(server, tools=[function("f", parameters=schema)], tool_choice=choice)["message"]


# Forms of answers


@pytest.mark.supports("openai", "/v1/chat/completions", "structured output: parsed")
@pytest.mark.supports("openai", "/v1/chat/completions", "structured output: parsed, streamed")
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_is_parsed_into_the_librarys_type(client: openai.OpenAI, streams: bool) -> None:
    if streams:
        with client.chat.completions.stream(**GREEDY, response_format=Animal) as stream:
            parsed = stream.get_final_completion().choices[0].message.parsed
    else:
        parsed = client.chat.completions.parse(**GREEDY, response_format=Animal).choices[0].message.parsed
    assert isinstance(parsed, Animal)


@pytest.mark.supports("openai", "/v1/chat/completions", "structured output: JSON Schema")
@pytest.mark.parametrize("strict", [False, *(pytest.param(each, marks=pytest.mark.slow) for each in (True, None))])
def test_a_schema_is_held_to_whether_or_not_it_is_strict(client: openai.OpenAI, strict: bool | None) -> None:
    form: Any = {"type": "json_schema", "json_schema": {**FORM["json_schema"], "strict": strict}}
    reply = answered(client, response_format=form)
    validate(json.loads(reply.message.content), ANSWER)
    assert reply.finish_reason == "stop"


@pytest.mark.supports("openai", "/v1/chat/completions", "structured output: any object")
def test_an_answer_is_an_object_where_json_is_wanted(client: openai.OpenAI) -> None:
    reply = answered(client, max_tokens=16, response_format={"type": "json_object"})
    assert reply.message.content.lstrip().startswith("{")
    assert reply.finish_reason != "stop" or isinstance(json.loads(reply.message.content), dict)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": ANSWER},
        {"type": "json_schema", "schema": ANSWER},
        {"type": "json_schema", "name": "answer", "strict": True, "schema": ANSWER},
        {"type": "json_schema", "json_schema": {"schema": ANSWER}},
    ],
    ids=["any object with a schema", "without the wrapper", "flat", "without a name"],
)
def test_a_schema_may_stand_where_llama_cpps_clients_write_it(server: Running, form: Json) -> None:
    reply = server.answer(PATH, {**GREEDY, "response_format": form})
    validate(json.loads(reply["choices"][0]["message"]["content"]), ANSWER)


def test_text_is_what_an_answer_is_anyway(client: openai.OpenAI) -> None:
    plain, text = (answered(client, max_tokens=6, **more) for more in ({}, {"response_format": {"type": "text"}}))
    assert plain.message.content == text.message.content


@pytest.mark.supports("openai", "/v1/chat/completions", "`structured_outputs`, `grammar`")
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{2,4}c"}}, "[ab]{2,4}c"),
        ({"structured_outputs": {"choice": ["yes", 'no "x"', "a\nb"]}}, 'yes|no "x"|a\nb'),
        ({"structured_outputs": {"grammar": 'start: "p" ("q" | "r")'}}, "p[qr]"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
        ({"structured_outputs": {"grammar": 'start: "a::=" /[0-9]/'}}, "a::=[0-9]"),
        ({"structured_outputs": {"choice": ["x\x7f", "x\x1b\n"]}}, "x\x7f|x\x1b\n"),
        pytest.param({"structured_outputs": {"json": {"enum": [7]}}}, "7", marks=pytest.mark.slow),
        ({"grammar": 'root ::= ("a" | "b") "c"'}, "[ab]c"),
        pytest.param({"grammar": '%llguidance {}\nstart: "owl"'}, "owl", marks=pytest.mark.slow),
    ],
)
def test_an_answer_is_of_the_form_that_it_has_to_have(client: openai.OpenAI, form: Json, pattern: str) -> None:
    asked = {**GREEDY, "temperature": 1, "seed": 2, "extra_body": form}
    reply = client.chat.completions.create(**asked, n=2)
    assert all(re.fullmatch(pattern, choice.message.content or "") for choice in reply.choices), reply
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}


@pytest.mark.supports("openai", "/v1/completions", "`structured_outputs`, `grammar`")
@pytest.mark.parametrize("form", [{"structured_outputs": {"regex": "[ab]{3}"}}, {"grammar": 'root ::= [ab] [ab] "a"'}])
def test_a_text_goes_on_in_the_form_that_it_has_to_have(client: openai.OpenAI, form: Json) -> None:
    reply = client.completions.create(model="tiny", prompt=["Once", "The"], max_tokens=8, extra_body=form)
    assert all(re.fullmatch("[ab]{3}", choice.text) for choice in reply.choices)


@pytest.mark.supports("openai", "/v1/chat/completions", "structured output: with tools")
def test_an_answer_that_is_no_call_has_the_form_that_it_has_to_have(client: openai.OpenAI, server: Running) -> None:
    asked: Json = {"tools": OPENAI_TOOLS, "response_format": FORM}
    said = answered(client, **asked).message
    assert said.tool_calls or validate(json.loads(said.content), ANSWER) is None
    call = answered(client, **asked, tool_choice=NAMED).message
    assert call.tool_calls and call.content is None
    blank, mark = server.engine.tokenizer.encode("\n<")
    said = answered(client, **asked, logit_bias={str(blank): 50, str(mark): -100}).message
    assert said.content.startswith("{")
    error = refused(server, tools=OPENAI_TOOLS, structured_outputs={"regex": "a+"})
    assert error["param"] == "structured_outputs" and "tools" in error["message"]


UNHELD: Mapping[str, Any] = {
    "a word's end": {"type": "string", "pattern": r"\bfoo\b"},
    "an open group": {"type": "string", "pattern": "(a"},
    "a large multiple": {"type": "integer", "multipleOf": 5_000_000_000},
    "nothing between": {"type": "integer", "minimum": 3, "maximum": 2},
}


@pytest.mark.parametrize("name", every_other(UNHELD))
def test_a_tool_to_which_no_call_can_be_held_fails_no_request_for_the_others(server: Running, name: str) -> None:
    """Also where only the attempt to compile it tells."""
    parameters = {"type": "object", "properties": {"a": UNHELD[name]}, "required": ["a"]}
    tools = [*OPENAI_TOOLS, function("bad", parameters=parameters)]
    for asked in ({"tool_choice": "required"}, {"parallel_tool_calls": False}, {"tool_choice": NAMED}):
        server.answer(PATH, {**GREEDY, "tools": tools, **asked})
    error = refused(server, tools=tools, tool_choice=function("bad"))
    assert error["param"] == "tools" and f"tools[{len(tools) - 1}], 'bad'" in error["message"]
    assert "$defs" not in error["message"]  # of which the client knows none


@pytest.mark.supports("openai", "/v1/chat/completions", "structured output: refused: unsupported form")
@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
         "response_format", "'not'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
         "response_format.json_schema.name", "pattern"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format", "'not'"),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema", ""),
        ({"response_format": {"type": "json_schema", "schema": {}, "colour": "red"}},
         "response_format.json_schema.colour", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Field required"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "grammar", "together"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", ""),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", ""),
        ({"grammar": "root ::= nothing"}, "grammar", ""),
        ({"guided_json": {}}, "guided_json", "structured_outputs.json"),
        ({"json_schema": {}}, "json_schema", "response_format"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_held_to_is_refused_by_name(server: Running, fields: Json, param: str, word: str) -> None:
    error = refused(server, **fields)
    assert error["param"] == param and word in error["message"], error


def test_the_text_of_a_prompt_has_tools_calls_and_results(server: Running) -> None:
    body = {"messages": [*ASKED_FOR, RESULT], "tools": OPENAI_TOOLS}
    text = server.post("/apply-template", body).json()["prompt"]
    assert '"name": "clock"' in text and CALLED in text and "<tool_response>\n21 degrees\n</tool_response>" in text

"""Tools and forms of answers of /api/chat and /api/generate, by Ollama's own library and by hand."""

from __future__ import annotations

import json
from typing import Any

import ollama
import pytest
from jsonschema import validate

from localllm.errors import TemplateError
from tests.server.support import OWL, Json, Patch, Running, Says
from tests.server.tools_support import ANSWER, BROKEN, CALLED_TWICE, OPENAI_TOOLS, ROOM

CHAT: Json = {"model": "tiny", "messages": OWL, "options": {"temperature": 0, "num_predict": ROOM}}
PROMPT: Json = {"model": "tiny", "prompt": "A tale.", "options": {"temperature": 0, "num_predict": ROOM}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [
    {"function": {"name": "weather", "arguments": {"unit": "C"}}}, {"function": {"name": "clock", "arguments": {}}},
]}  # fmt: skip
WARM = {"role": "tool", "tool_name": "weather", "content": "21"}
NOON = {"role": "tool", "tool_name": "clock", "content": "noon"}
QWEN_LIKE = (
    "{% if tools %}<tool_call>{{ tools | tojson }} arguments{% endif %}{% for message in messages %}"
    "{{ message.content }}{% for call in message.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}"
)


def weather(unit: str) -> str:
    """The weather of today.

    Args:
        unit: C or F
    """
    return unit


def refused(server: Running, path: str = "/api/chat", **fields: Any) -> str:
    """What is told of a request that says that too."""
    return str(server.error(path, {**(CHAT if path == "/api/chat" else PROMPT), **fields}))


@pytest.mark.supports("ollama", "/api/chat", "tools: optional calls")
@pytest.mark.parametrize("streams", [False, True])
def test_calls_are_whole_and_their_arguments_objects(client: ollama.Client, says: Says, streams: bool) -> None:
    says(f"Let me look.\n{CALLED_TWICE}")
    replies: Any = client.chat(**CHAT, tools=OPENAI_TOOLS, stream=streams)
    replies = list(replies) if streams else [replies]
    calls = [call.function for reply in replies for call in reply.message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == [("weather", {"unit": "C"}), ("clock", {})]
    assert "".join(reply.message.content or "" for reply in replies) == "Let me look."
    assert replies[-1].done and replies[-1].done_reason == "stop"


@pytest.mark.supports("ollama", "/api/chat", "tools: Python functions")
def test_a_python_function_is_a_tool(client: ollama.Client, says: Says) -> None:
    says('<tool_call>\n{"name": "weather", "arguments": {"unit": "F"}}\n</tool_call>')
    [call] = client.chat(**CHAT, tools=[weather]).message.tool_calls or ()
    assert weather(**call.function.arguments) == "F"


def test_a_broken_call_stays_text(client: ollama.Client, says: Says) -> None:
    says(BROKEN)
    message = client.chat(**CHAT, tools=OPENAI_TOOLS).message
    assert (message.content, message.tool_calls) == (BROKEN, None)


@pytest.mark.supports("ollama", "/api/chat", "tools: result sent back")
def test_calls_and_results_go_back(client: ollama.Client, says: Says, server: Running) -> None:
    says(CALLED_TWICE)
    said = client.chat(**CHAT, tools=OPENAI_TOOLS).message
    asked = {**CHAT, "messages": [*OWL, said, WARM, NOON]}
    assert client.chat(**asked, tools=OPENAI_TOOLS).message.content is not None


NAMELESS = [{"role": "tool", "content": "21"}, {"role": "tool", "content": "noon"}]


@pytest.mark.parametrize("results", [[WARM, NOON], [NOON, WARM], NAMELESS])
def test_a_result_is_of_the_call_of_its_tool_or_of_the_next_one(server: Running, results: list[Any]) -> None:
    body = {"messages": [*OWL, CALLING, *results], "stream": False, "tools": OPENAI_TOOLS}
    server.answer("/api/chat", {**body, "options": {"num_predict": 1}})


@pytest.mark.parametrize("nothing", [{"arguments": ""}, {"arguments": None}, {}], ids=str)
def test_a_call_without_arguments_goes_back_as_one_with_none_in_it(server: Running, nothing: Any) -> None:
    def num_tokens(arguments: Json) -> int:
        called = {"role": "assistant", "tool_calls": [{"function": {"name": "clock", **arguments}}]}
        body = {**CHAT, "messages": [*OWL, called, NOON], "stream": False, "options": {"num_predict": 1}}
        return int(server.answer("/api/chat", body)["prompt_eval_count"])

    assert num_tokens(nothing) == num_tokens({"arguments": {}})


@pytest.mark.supports("ollama", "/api/chat", "tools: refused: result of an unknown call")
@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([*OWL, WARM], "messages[1]"),
        ([*OWL, {"role": "tool", "content": "21"}], "messages[1]"),
        ([*OWL, CALLING, {**WARM, "tool_name": "nobody"}], "messages[2]"),
        ([*OWL, CALLING, WARM, WARM], "messages[3]"),
        ([*OWL, CALLING, WARM, *OWL], "messages[3]"),
        ([*OWL, CALLING, WARM], "messages[2]"),
        ([{**OWL[0], "tool_calls": CALLING["tool_calls"]}], "messages.0"),
        ([{**OWL[0], "tool_name": "weather"}], "messages.0"),
        ([*OWL, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}], "messages.1"),
    ],
)
def test_results_are_of_calls_and_calls_have_results(server: Running, messages: Any, where: str) -> None:
    assert refused(server, messages=messages).startswith(where)


@pytest.mark.supports("ollama", "/api/chat", "tools: refused: invalid tools, by name")
@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([*OPENAI_TOOLS, *OPENAI_TOOLS], "'weather'"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools.0.function.name"),
        ([{"type": "web_search"}], "tools.0"),
        ([{"function": {"name": "f", "parameters": {"type": "string"}}}], "tools.0.function.parameters"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(server: Running, tools: Any, words: str) -> None:
    assert words in refused(server, tools=tools)


@pytest.mark.supports("ollama", "/api/show", "tool support of a model")
@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ messages[0].content }}", ["completion", "tools"]),
        (QWEN_LIKE, ["completion", "tools"]),
        ("{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}", ["completion", "tools", "thinking"]),
        (None, ["completion"]),
    ],
)
def test_what_a_model_can_do_is_one_answer_in_every_dialect(
    client: ollama.Client, server: Running, monkeypatch: Patch, source: str | None, wanted: list[str]
) -> None:
    from localllm.text.chat_template import ChatTemplate

    def load(*_: object) -> ChatTemplate:
        if source is None:
            raise TemplateError("there is none")
        return ChatTemplate(source)

    monkeypatch.setattr(ChatTemplate, "load", load)
    listed = {row["id"]: row["meta"]["capabilities"] for row in server.get("/v1/models").json()["data"]}
    one = server.get("/v1/models/tiny").json()["meta"]["capabilities"]
    assert client.show("tiny").capabilities == listed["tiny"] == one == wanted


# Forms of answers


@pytest.mark.supports("ollama", "/api/chat", "structured output: JSON Schema")
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_fits_the_schema_that_it_has_to(client: ollama.Client, streams: bool) -> None:
    replies: Any = client.chat(**CHAT, format=ANSWER, stream=streams)
    replies = list(replies) if streams else [replies]
    validate(json.loads("".join(reply.message.content or "" for reply in replies)), ANSWER)
    assert replies[-1].done_reason == "stop"


@pytest.mark.supports("ollama", "/api/chat", "structured output: any object")
def test_an_answer_is_an_object_where_json_is_wanted(client: ollama.Client) -> None:
    reply = client.chat(**{**CHAT, "options": {"temperature": 0, "num_predict": 16}}, format="json")
    assert (reply.message.content or "").lstrip().startswith("{")


@pytest.mark.supports("ollama", "/api/generate", "structured output: JSON Schema")
@pytest.mark.parametrize("raw", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_prompts_answer_fits_the_schema_that_it_has_to(client: ollama.Client, raw: bool) -> None:
    validate(json.loads(client.generate(**PROMPT, format=ANSWER, raw=raw).response), ANSWER)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_answer_is_of_the_form_that_it_has_to_have(server: Running, path: str) -> None:
    asked = {**(CHAT if path == "/api/chat" else PROMPT), "stream": False, "structured_outputs": {"regex": "owl|fox"}}
    reply = server.answer(path, asked)
    assert (reply["message"]["content"] if path == "/api/chat" else reply["response"]) in ("owl", "fox")


@pytest.mark.supports("ollama", "/api/chat", "structured output: refused: unsupported form")
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_form_that_cannot_be_held_to_is_refused_by_name(server: Running, path: str) -> None:
    assert "'not'" in refused(server, path, format={"type": "object", "not": {}})
    assert "format" in refused(server, path, format="yaml")
    assert "together" in refused(server, path, format="json", structured_outputs={"regex": "a"})


@pytest.mark.supports("ollama", "/api/chat", "structured output: refused: for a begun answer")
@pytest.mark.parametrize(
    ("field", "form"), [("format", "json"), ("format", ANSWER), ("structured_outputs", {"regex": "a+"})]
)
def test_an_answer_that_was_begun_has_no_form(server: Running, field: str, form: Any) -> None:
    told = refused(server, messages=[*OWL, {"role": "assistant", "content": "{"}], **{field: form})
    assert f"{field!r}" in told and "begun" in told and "leave out" in told

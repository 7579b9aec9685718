"""Conversations with tools as chat templates of every syntax render them, and calls as the clients' own libraries get
them: small templates of ours here, real ones where there are any."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from jsonschema import validate

from localllm import hub
from localllm.chat.template_traits import traits_of, with_thoughts
from localllm.server.tools.output_format import output_format_of, prompt_of
from localllm.server.tools.tool_formats import tool_format_of
from localllm.server.tools.toolset import Tool, Toolset, call_of, toolset
from localllm.text.chat_template import ChatInput, ChatTemplate, encode_chat
from localllm.text.tokenizer import Tokenizer
from tests.server.support import OWL, Json, Running, Says
from tests.server.test_tool_syntaxes import BY_NAME
from tests.server.tool_templates import TEMPLATES, WITHOUT_CALLS
from tests.thinning import every_other

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS: Json = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Wo – 東京?"},
        "days": {"type": "integer"},
        "sure": {"type": "boolean"},
        "share": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
}
TOOLS = (Tool("weather", "Of today, in °C.", PARAMETERS), Tool("clock"))
# Not every template knows lists of types.
RENDERED = (replace(TOOLS[0], parameters={**PARAMETERS, "properties": {"city": {"type": "string"}}}), TOOLS[1])
ARGUMENTS: Json = {
    "city": "42", "days": 3, "sure": True, "share": 0.5, "tags": ["a", "b"], "deep": {"a": {"b": [1, None]}},
    "note": None,
}  # fmt: skip
CITIES = ("Köln", "New\nYork", '"42"', "<b> & 東京 🙂")


def offered() -> Toolset:
    tools = toolset(RENDERED)
    assert tools is not None
    return tools


def conversation(choose: random.Random) -> list[Json]:
    """Of system, questions, thoughts, calls, results and answers; as a template is given them in transformers."""
    system = [{"role": "system", "content": choose.choice(["Be brief.", "Sei kürzer – 簡潔に 🙂"])}]
    found: list[Json] = system if choose.random() < 0.5 else []
    ids = (f"abcdef{number:03}" for number in range(100))

    def thought() -> Json:
        return {"reasoning_content": choose.choice(["Hm.", "Naïve – 東京?"])} if choose.random() < 0.5 else {}

    for turn in range(choose.randint(1, 3)):
        found.append({"role": "user", "content": choose.choice(["How warm?", "Wie warm ist's in <Köln>?\nUnd 東京?"])})
        if turn == 2:
            break
        for _ in range(choose.randint(0, 2)):
            calls = [called(next(ids), choose) for _ in range(choose.randint(1, 2))]
            said = choose.choice(["", "Let me look."])
            found.append({"role": "assistant", "content": said, "tool_calls": calls, **thought()})
            for call in calls:
                name = call["function"]["name"]
                found.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": '{"t": "21 °C"}'})
        found.append({"role": "assistant", "content": "It is 21 °C.", **thought()})
    return found


def called(call_id: str, choose: random.Random) -> Json:
    arguments = {**ARGUMENTS, "city": choose.choice(CITIES)} if choose.random() < 0.7 else {}
    return call_of(call_id, "weather" if arguments else "clock", arguments)


def with_text_arguments(messages: list[Json]) -> list[Json]:
    """As OpenAI's clients send them."""

    def told(call: Json) -> Json:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [{**each, "tool_calls": list(map(told, each["tool_calls"]))} if "tool_calls" in each else each
            for each in messages]  # fmt: skip


def as_the_server_has_them(messages: list[Json]) -> list[Json]:
    """The same behind a dialect."""

    def read(call: Json) -> Json:
        return call_of(call["id"], call["function"]["name"], call["function"]["arguments"])

    return [{**each, "tool_calls": list(map(read, each["tool_calls"]))} if "tool_calls" in each else each
            for each in with_text_arguments(messages)]  # fmt: skip


def assert_rendered_alike(source: str, name: str) -> None:
    """As the template itself has them under jinja2 as transformers sets it up."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template, choose = ChatTemplate(source, special_tokens=SPECIAL), random.Random(name)
    form, traits = tool_format_of(template), traits_of(template)
    given = {"chat_template": source, "tools": [tool.template_input for tool in RENDERED], **SPECIAL}
    num_compared = 0
    for _ in range(30):
        messages, opens = conversation(choose), choose.random() < 0.8
        theirs = with_thoughts(traits, with_text_arguments(messages) if traits.has_text_arguments else messages)
        try:
            expected = utils.render_jinja_template([theirs], add_generation_prompt=opens, **given)[0][0]
        except (jinja2.TemplateError, RecursionError):
            continue  # it refuses several calls, a system message, or a type
        ours, tools = prompt_of(as_the_server_has_them(messages), offered(), form, traits)
        assert template.render(with_thoughts(traits, ours), tools=tools, add_generation_prompt=opens) == expected
        num_compared += 1
    assert num_compared


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_syntax_by_how_it_renders_a_call(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL)
    assert tool_format_of(template).name == name
    assert traits_of(template).has_text_arguments == (name == "deepseek-function")


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_rendered_as_in_transformers(name: str) -> None:
    assert_rendered_alike(TEMPLATES[name], name)


def test_conversations_are_rendered_by_real_templates_as_in_transformers(shared_data: Callable[[str], Path]) -> None:
    for path in sorted(shared_data("chat_templates/jinja").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate(source, special_tokens=SPECIAL)
        form = tool_format_of(template)
        if form.is_in_template and traits_of(template).called and not form.one_at_a_time:
            assert_rendered_alike(source, path.stem)


# Calls that a template does not render


def test_calls_that_a_template_leaves_out_are_written_behind_the_text() -> None:
    backend = tokenizers.Tokenizer.from_file(str(hub.locate("tiny").directory / "tokenizer.json"))
    marks = ["<|tool_call_start|>", "<|tool_call_end|>"]
    backend.add_special_tokens([*marks, "<s>", "</s>"])
    tokenizer, template = Tokenizer(backend, SPECIAL), ChatTemplate(WITHOUT_CALLS, special_tokens=SPECIAL)
    call = call_of("call_1", "weather", {"city": "a <|tool_call_end|> b", "sure": True})
    messages = [*OWL, {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}]
    output = output_format_of(template, tokenizer, messages, offered(), is_begun=False)
    ids = encode_chat(template, tokenizer, output.template_input(ChatInput(messages)))
    text = 'Let me look.<|tool_call_start|>[weather(city="a <|tool_call_end|> b", sure=True)]<|tool_call_end|></s>'
    assert text in tokenizer.decode(ids, skip_special=False)
    assert [tokenizer.token_text(each) for each in ids if tokenizer.token_text(each) in marks] == marks


def test_the_ids_of_kimis_calls_are_their_names_and_numbers() -> None:
    template = ChatTemplate(TEMPLATES["kimi"], special_tokens=SPECIAL)
    own, theirs = f"call_{'0a' * 12}", "call_of_a_client"
    calls = [call_of(own, "weather", {}), call_of(theirs, "clock", {})]
    results = [{"role": "tool", "content": "21", "tool_call_id": call_id} for call_id in (own, theirs)]
    messages = [*OWL, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    given, _ = prompt_of(messages, None, tool_format_of(template), traits_of(template))
    assert [message.get("tool_call_id") for message in given[2:]] == ["functions.weather:0", theirs]


def test_a_template_that_tells_of_calls_and_not_of_tools_has_its_calls_read() -> None:
    template = ChatTemplate(TEMPLATES["deepseek"].replace("tools", "no_tools"), special_tokens=SPECIAL)
    tokenizer = Tokenizer.load(hub.locate("tiny").directory)
    output = output_format_of(template, tokenizer, OWL, offered(), is_begun=False)
    for name in ("deepseek", "generic"):
        parser = output.parser(is_thinking=False, has_form=False)
        assert parser is not None
        text = BY_NAME[name].written([("weather", {"city": "Rome"}), ("clock", {})])
        parts = [part for char in text for part in parser.feed(char)] + parser.end(is_cut=False)
        assert parts == [("call", "weather"), ("arguments", '{"city": "Rome"}'), ("call", "clock"), ("arguments", "{}")]
    assert "<tools>" in template.render_chat(output.template_input(ChatInput(OWL)))


# Thoughts


@pytest.mark.parametrize(
    ("source", "name", "keeps"),
    [
        (TEMPLATES["hermes"], "reasoning_content", True),
        (TEMPLATES["hermes"].replace("reasoning_content", "thinking"), "thinking", True),
        (TEMPLATES["minicpm"].replace("reasoning_content", "thought"), "thought", True),
        (TEMPLATES["hermes"].replace("m.reasoning_content %", "m.reasoning and loop.last %")
         .replace("reasoning_content", "reasoning"), "reasoning", False),
        ("{% for m in messages %}{% for part in m.content if part is mapping %}[THINK]{{ part.thinking }}{% endfor %}"
         "{% endfor %}", "parts", True),
        (TEMPLATES["hermes"].replace("reasoning_content", "afterthought"), "", False),
        ("{{ messages }}", "", False),
    ],
)  # fmt: skip
def test_a_template_shows_where_it_has_a_thought(source: str, name: str, keeps: bool) -> None:
    traits = traits_of(ChatTemplate(source, special_tokens=SPECIAL))
    assert (traits.thought, traits.keeps_thoughts) == (name, keeps)
    [message] = with_thoughts(traits, [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}])
    if name == "parts":
        assert message["content"] == [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]
    elif name:
        assert message == {"role": "assistant", "content": "Yes.", name: "Hm."}


# As the clients' own libraries get them


CALLED: list[tuple[str, Json]] = [("weather", ARGUMENTS), ("clock", {})]


def by_openai(client: Any, streams: bool) -> list[Any]:
    tools = [tool.template_input for tool in TOOLS]
    asked = {"model": "tiny", "messages": OWL, "max_tokens": 900, "tools": tools}
    if streams:
        with client.chat.completions.stream(**asked) as stream:
            reply = stream.get_final_completion()
    else:
        reply = client.chat.completions.create(**asked)
    calls = [call.function for call in reply.choices[0].message.tool_calls]
    return [(call.name, json.loads(call.arguments)) for call in calls]


def by_anthropic(client: Any, streams: bool) -> list[Any]:
    tools = [{"name": tool.name, "description": tool.description, "input_schema": tool.schema} for tool in TOOLS]
    asked = {"model": "tiny", "messages": OWL, "max_tokens": 900, "tools": tools}
    if streams:
        with client.messages.stream(**asked) as stream:
            reply = stream.get_final_message()
    else:
        reply = client.messages.create(**asked)
    return [(block.name, block.input) for block in reply.content if block.type == "tool_use"]


def by_ollama(client: Any, streams: bool) -> list[Any]:
    tools = [tool.template_input for tool in TOOLS]
    replies = client.chat(model="tiny", messages=OWL, options={"num_predict": 900}, tools=tools, stream=streams)
    calls = [call for reply in (replies if streams else [replies]) for call in reply.message.tool_calls or ()]
    return [(call.function.name, call.function.arguments) for call in calls]


LIBRARIES = {"openai": by_openai, "anthropic": by_anthropic, "ollama": by_ollama}


@pytest.mark.parametrize(("name", "streams"), every_other([(name, way) for name in TEMPLATES for way in (True, False)]))
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_libraries_get_arguments_of_the_right_types(
    server: Running, libraries: Mapping[str, Any], speaks: Says, says: Says, library: str, name: str, streams: bool
) -> None:
    speaks(TEMPLATES[name])
    says(f"<think>Hm.</think>{BY_NAME[name].written(CALLED)}")
    assert LIBRARIES[library](libraries[library], streams) == CALLED


@pytest.mark.parametrize("name", every_other(TEMPLATES))
def test_a_required_call_fits_its_schema_in_every_syntax(server: Running, speaks: Says, name: str) -> None:
    speaks(TEMPLATES[name].replace("think>", "b>"))  # it could think on for ever
    schema = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "sure": {"type": "boolean"}},
              "required": ["unit", "sure"]}  # fmt: skip
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}
    asked = {"messages": OWL, "temperature": 0, "max_tokens": 200, "tools": [tool], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    for streams in (False, True):
        if streams:
            chunks = server.events("/v1/chat/completions", {**asked, "stream": True})
            deltas = [delta for chunk in chunks for delta in chunk["choices"][0]["delta"].get("tool_calls", ())]
            arguments = "".join(delta["function"].get("arguments", "") for delta in deltas)
        else:
            [call] = server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["tool_calls"]
            arguments = call["function"]["arguments"]
        validate(json.loads(arguments), schema)

"""What a model is told of tools, calls and results: by its own template where that knows them, else in our words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm import hub
from localllm.chat.harmony import is_harmony
from localllm.chat.template_traits import traits_of, with_thoughts
from localllm.server.tools.output_format import output_format_of, prompt_of
from localllm.server.tools.tool_formats import tool_format_of
from localllm.server.tools.toolset import Tool, call_of, toolset
from localllm.text.chat_template import ChatInput, ChatTemplate
from localllm.text.tokenizer import Tokenizer
from tests.server.support import Json

FAMILIES = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-list",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "openai-gpt-oss-120b": "harmony",
    "google-gemma-2-2b-it": "generic",
    "microsoft-Phi-3.5-mini-instruct": "generic",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "generic",
    "HuggingFaceTB-SmolLM3-3B": "generic",
}
CASES = {
    "mistralai/Mistral-7B-Instruct-v0.3 (JSON Schema)": "mistral-list",
    "NousResearch/Hermes-2-Pro-Llama-3-8B (JSON Schema)": "hermes",
    "meta-llama/Llama-3.1-8B-Instruct": "llama",
    "meta-llama/Llama-3.2-11B-Vision-Instruct": "llama",
    "Qwen/Qwen3.5-4B": "qwen-xml",
    "zai-org/GLM-5.1": "glm-line",
    "moonshotai/Kimi-K2-Thinking": "kimi",
    "openbmb/MiniCPM3-4B": "minicpm",
}
Find = Callable[[str], ChatTemplate]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = toolset([
    Tool("weather", "The weather of today.", {"properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}),
    Tool("clock"),
])  # fmt: skip
USER = {"role": "user", "content": "How warm is it?"}


def called(*names: str) -> list[Json]:
    """A turn with calls, and their results."""
    calls = [call_of(f"call_{name}", name, '{"unit": "C"}' if name == "weather" else "") for name in names]
    result = {"role": "tool"}
    results = [{**result, "content": f"{name}: 21", "tool_call_id": f"call_{name}", "name": name} for name in names]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


@pytest.fixture
def template_of(shared_data: Callable[[str], Path]) -> Find:
    def find(name: str) -> ChatTemplate:
        if name in FAMILIES:
            source = (shared_data("chat_templates/jinja") / f"{name}.jinja").read_text(encoding="utf-8")
        else:
            cases = json.loads(shared_data("chat_templates/cases.json").read_text(encoding="utf-8"))
            source = cases["custom"][name]["chat_template"]
        return ChatTemplate(source, special_tokens=SPECIAL)

    return find


def prompt(template: ChatTemplate, messages: list[Json], tools: Any = TOOLS) -> str:
    told_messages, told_tools = prompt_of(messages, tools, tool_format_of(template), traits_of(template))
    return template.render(with_thoughts(traits_of(template), told_messages), tools=told_tools)


@pytest.mark.parametrize(("name", "family"), [*FAMILIES.items(), *CASES.items()])
def test_a_template_shows_of_which_family_its_model_is(template_of: Find, name: str, family: str) -> None:
    template = template_of(name)
    assert tool_format_of(template).name == family
    assert is_harmony(template) == (family == "harmony")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_model_is_told_of_tools_calls_and_results(template_of: Find, name: str) -> None:
    template, asked = template_of(name), prompt(template_of(name), [USER])
    unit = "unit" if FAMILIES[name] == "harmony" else '"unit"'
    assert all(word in asked for word in ("weather", "The weather of today.", "clock", unit))
    text = prompt(template, [USER, *called("weather"), USER])
    assert text.count("weather: 21") == 1 and text.count("How warm is it?") == 2
    assert '"unit": "C"' in text
    several = prompt(template, [USER, *called("weather", "clock")])
    assert several.index("weather: 21") < several.index("clock: 21")


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("NousResearch")])
def test_calls_that_were_made_are_told_where_there_are_no_tools_any_more(template_of: Find, name: str) -> None:
    text = prompt(template_of(name), [USER, *called("weather")], tools=None)
    assert "weather: 21" in text and "clock" not in text


def test_of_several_templates_the_one_that_knows_calls_tells_them(template_of: Find) -> None:
    [source] = template_of("NousResearch-Hermes-3-Llama-3.1-8B-tool_use").sources.values()
    template = ChatTemplate({"default": "no calls", "tool_use": source}, special_tokens=SPECIAL)
    tokenizer = Tokenizer.load(hub.locate("tiny").directory)
    for tools in (TOOLS, None):
        messages = [USER, *called("weather")]
        manner = output_format_of(template, tokenizer, messages, tools, is_begun=False)
        assert "weather: 21" in template.render_chat(manner.template_input(ChatInput(messages)))


def test_a_turn_of_several_calls_is_several_turns_where_a_template_has_one_a_turn(template_of: Find) -> None:
    template = template_of("meta-llama-Llama-3.1-8B-Instruct")
    messages, _ = prompt_of([USER, *called("weather", "clock"), USER], TOOLS, tool_format_of(template))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [len(message["tool_calls"]) for message in messages if "tool_calls" in message] == [1, 1]


def test_the_ids_of_mistrals_calls_are_short_and_always_the_same(template_of: Find) -> None:
    syntax = tool_format_of(template_of("mistralai-Mistral-Nemo-Instruct-2407"))
    first, again = (prompt_of([USER, *called("weather")], TOOLS, syntax)[0] for _ in range(2))
    call_id = first[1]["tool_calls"][0]["id"]
    assert first == again and len(call_id) == 9 and call_id.isalnum() and first[2]["tool_call_id"] == call_id
    own = [{**call_of("abcDEF123", "clock", {}), "id": "abcDEF123"}]
    messages, _ = prompt_of([USER, {"role": "assistant", "content": "", "tool_calls": own}], TOOLS, syntax)
    assert messages[1]["tool_calls"][0]["id"] == "abcDEF123"


def test_harmony_calls_what_was_thought_by_another_name(template_of: Find) -> None:
    call, result = called("weather")
    thought = {**call, "content": "Hm.", "reasoning_content": "Hot?"}
    text = prompt(template_of("openai-gpt-oss-120b"), [USER, thought, result])
    assert "<|channel|>analysis<|message|>Hot?<|end|>" in text
    assert "to=functions.weather" in text


def test_a_template_without_a_system_is_told_in_the_first_question(template_of: Find) -> None:
    text = prompt(template_of("google-gemma-2-2b-it"), [USER, *called("weather"), USER])
    assert text.count("<start_of_turn>user") == 2 and text.index("<tools>") < text.index("How warm is it?")
    assert "<tool_response>\nweather: 21\n</tool_response>\nHow warm is it?" in text


def test_a_system_message_goes_on_with_what_there_is_to_call(template_of: Find) -> None:
    template = template_of("microsoft-Phi-3.5-mini-instruct")
    messages, tools = prompt_of([{"role": "system", "content": "Be brief."}, USER], TOOLS, tool_format_of(template))
    assert tools is None and messages[0]["content"].startswith("Be brief.\n\nYou can call these functions")
    assert messages[1] == USER


@pytest.mark.parametrize(
    ("arguments", "is_told"), [("", {}), ('{"a": 1}', {"a": 1}), ("{", "{"), ("[1]", "[1]"), ("[" * 9999, "[" * 9999)]
)
def test_arguments_are_an_object_where_they_are_one(arguments: str, is_told: Any) -> None:
    assert call_of("call_1", "f", arguments)["function"]["arguments"] == is_told

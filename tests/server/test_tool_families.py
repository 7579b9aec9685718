"""Calls, thoughts and forms of every family of models, as a client of the server gets them: its own chat template, and
what a model of it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.engine import Engine
from localllm.engine.request import Request
from localllm.server.tools.output_format import output_format_of
from localllm.server.tools.toolset import Tool, toolset
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer
from tests.server.support import OWL, Json, Patch, Running, Says
from tests.server.tools_support import CALLED, OPENAI_TOOLS

PATH = "/v1/chat/completions"
ASKED: Json = {"messages": OWL, "max_tokens": 300, "tools": OPENAI_TOOLS}
DEVSTRAL = "unsloth-mistral-Devstral-Small-2507"
BRIEF = {"role": "system", "content": "Be brief."}  # in place of its own 2,000 tokens
CALL = [("weather", {"unit": "C"})]

# its template, what it says, what it thought, what it said, what it called
SAID = [
    ("Qwen-Qwen3-0.6B", f"<think>\nHm.\n</think>\n\n{CALLED}", "Hm.\n", None, CALL),
    ("Qwen-Qwen3-0.6B", "<think>\nHm.\n</think>\n\nWarm.", "Hm.\n", "Warm.", []),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", f"Let me look.\n{CALLED}",
     None, "Let me look.", CALL),
    ("meta-llama-Llama-3.1-8B-Instruct", '{"name": "weather", "parameters": {"unit": "C"}}', None, None, CALL),
    ("mistralai-Mistral-Nemo-Instruct-2407", '[TOOL_CALLS][{"name": "weather", "arguments": {"unit": "C"}}]',
     None, None, CALL),
    (DEVSTRAL, '[TOOL_CALLS]weather[ARGS]{"unit": "C"}', None, None, CALL),
    ("openai-gpt-oss-120b", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.weather <|constrain|>json<|message|>{"unit": "C"}', "Hm.", None, CALL),
    ("openai-gpt-oss-120b", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
     "Warm.", "Hm.", "Warm.", []),
    ("google-gemma-2-2b-it", CALLED, None, None, CALL),
]  # fmt: skip


def turns_for(name: str) -> list[Json]:
    return [*([BRIEF] if name == DEVSTRAL else []), *OWL]


@pytest.fixture
def speaks_as(speaks: Says, shared_data: Callable[[str], Path]) -> Says:
    return lambda name: speaks((shared_data("chat_templates/jinja") / f"{name}.jinja").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "text", "thought", "content", "calls"), SAID)
@pytest.mark.parametrize("streams", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_model_says_is_thought_said_and_called(
    server: Running, speaks_as: Says, says: Says, name: str, text: str, thought: str | None, content: str | None,
    calls: list[Any], streams: bool,
) -> None:  # fmt: skip
    speaks_as(name)
    says(text)
    asked = {**ASKED, "messages": turns_for(name)}
    found = streamed(server, asked) if streams else server.post(PATH, asked).json()["choices"][0]
    message = found["message"]
    assert message.get("reasoning_content") == thought and (message["content"] or None) == content
    functions = [call["function"] for call in message.get("tool_calls", ())]
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
    assert found["finish_reason"] == ("tool_calls" if calls else "stop")


def streamed(server: Running, asked: Json) -> Json:
    """The same, put together of its pieces."""
    message: Json = {"content": ""}
    reason = None
    for chunk in server.events(PATH, {**asked, "stream": True}):
        [choice] = chunk["choices"]
        reason = choice["finish_reason"] or reason
        for name in ("content", "reasoning_content"):
            if name in choice["delta"]:
                message[name] = message.get(name, "") + choice["delta"][name]
        for call in choice["delta"].get("tool_calls", ()):
            known = message.setdefault("tool_calls", [])
            known += [{"function": {"name": "", "arguments": ""}}] * (call["index"] + 1 - len(known))
            for field, value in call["function"].items():
                known[call["index"]]["function"][field] += value
    return {"message": message, "finish_reason": reason}


# Without harmony's, whose marks are no tokens of this model, which could think on for ever.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, *_ in SAID if not name.startswith("openai")}))
def test_a_call_that_is_required_is_made_in_the_way_of_the_family(server: Running, speaks_as: Says, name: str) -> None:
    speaks_as(name)
    more = {"chat_template_kwargs": {"enable_thinking": False}} if "Qwen3" in name else {}
    choice = {"type": "function", "function": {"name": "weather"}}
    reply = server.post(PATH, {**ASKED, **more, "messages": turns_for(name), "temperature": 0, "tool_choice": choice})
    [call] = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"])["unit"] in ("C", "F")


def test_a_form_is_of_what_is_said_not_of_what_is_thought(server: Running, speaks_as: Says, monkeypatch: Patch) -> None:
    seen: list[Request] = []
    check = Engine.check

    def noting(engine: Engine, request: Request) -> None:
        seen.append(request)
        check(engine, request)

    monkeypatch.setattr(Engine, "check", noting)
    form = {"structured_outputs": {"regex": "owl|fox"}, "messages": OWL, "max_tokens": 40, "temperature": 0}
    speaks_as("Qwen-Qwen3-0.6B")
    server.answer(PATH, form)
    plain = server.answer(PATH, {**form, "reasoning_effort": "none"})
    assert plain["choices"][0]["message"]["content"] in ("owl", "fox")
    first, last = (request.grammar for request in (seen[0], seen[-1]))
    assert first is not None and ("<think>", "</think>") in first.thoughts and not first.is_thinking
    assert last is not None and last.thoughts == ()
    speaks_as("openai-gpt-oss-120b")
    assert server.post(PATH, form).json()["choices"][0]["message"]["content"] in ("owl", "fox")
    assert server.engine.tokenizer.decode(list(seen[-1].prompt_ids[-40:])).endswith("<|channel|>final<|message|>")


# Special tokens


@pytest.mark.parametrize(
    ("source", "marks", "shown"),
    [
        ("{{ messages }}", (), ()),
        ("{{ messages }}<think>", ("<think>", "</think>"), ("<think>", "</think>")),
        ("{{ tools }}[TOOL_CALLS][ARGS]", ("[TOOL_CALLS]", "[ARGS]", "</s>"), ("[TOOL_CALLS]", "[ARGS]")),
    ],
)
def test_the_special_tokens_that_tell_an_answer_apart_are_shown(
    shared_data: Callable[[str], Path], source: str, marks: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    backend = Tokenizer.load(shared_data("tokenizers/phi-3-mini"))._backend
    backend.add_special_tokens(list(marks))
    tokenizer = Tokenizer(backend)
    tools = toolset([Tool("weather")]) if "TOOL" in source else None
    manner = output_format_of(ChatTemplate(source), tokenizer, OWL, tools, is_begun=False)
    assert {tokenizer.token_text(index) for index in manner.shown_ids} == set(shown)

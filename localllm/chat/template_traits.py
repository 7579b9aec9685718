"""What a chat template makes of tools, calls and thoughts, as far as renderings of it show. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from localllm.errors import TemplateError, UsageError

if TYPE_CHECKING:
    from localllm.text.chat_template import ChatTemplate

Message = dict[str, Any]
ThoughtName = Literal["reasoning_content", "thinking", "reasoning", "thought", "parts", ""]

NAME, ARGUMENTS = "a_tool_that_nobody_has", {"an_argument": 7}
_ID, _THOUGHT = "id0nobody", "A thought of nobody."
_TOOL = {"type": "function", "function": {"name": NAME, "description": "Does nothing.", "parameters": {
    "type": "object", "properties": {}}}}  # fmt: skip
_USER: Message = {"role": "user", "content": "?"}
_RESULT: Message = {"role": "tool", "name": NAME, "tool_call_id": _ID, "content": "."}
_THOUGHT_NAMES: tuple[ThoughtName, ...] = ("reasoning_content", "thinking", "reasoning", "thought", "parts")


@dataclass(frozen=True)
class TemplateTraits:
    """tells_tools: the model is told of tools
    called: how it is told of a call of `NAME` with `ARGUMENTS`, in a prompt; "" where it is not
    tells_ids: with the call's id
    has_text_arguments: the arguments of a call are JSON's text, not an object
    thought: the name under which a message has its thought; "parts": it is a part of the content; "": it has none
    keeps_thoughts: those in front of earlier answers, too
    """

    tells_tools: bool = False
    called: str = ""
    tells_ids: bool = False
    has_text_arguments: bool = False
    thought: ThoughtName = ""
    keeps_thoughts: bool = False


USUAL = TemplateTraits(tells_tools=True, called=NAME, thought="reasoning_content")


@lru_cache(maxsize=8)
def traits_of(template: ChatTemplate) -> TemplateTraits:
    """Return the traits of a template. Asking it takes a few milliseconds, the first time."""
    with_object, with_text = (_called(template, each) for each in (ARGUMENTS, json.dumps(ARGUMENTS)))
    called = with_object or with_text
    thought: ThoughtName = next((name for name in _THOUGHT_NAMES if _tells_thought(template, name)), "")
    return TemplateTraits(
        tells_tools=NAME in _rendered(template, [_USER], tools=[_TOOL]),
        called=called,
        tells_ids=_ID in called,
        has_text_arguments=bool(with_text) and not with_object,
        thought=thought,
        keeps_thoughts=thought != "" and _tells_thought(template, thought, is_earlier=True),
    )


def with_thoughts(traits: TemplateTraits, messages: Sequence[Message]) -> list[Message]:
    """Return messages with thoughts, which are their `reasoning_content`, as the template has them."""
    return [_with_thought(traits.thought, message) for message in messages]


def _with_thought(name: ThoughtName, message: Message) -> Message:
    thought = message.get("reasoning_content")
    if not thought or message["role"] != "assistant" or name in ("reasoning_content", "") or name in message:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    if name != "parts":
        return {**rest, name: thought}
    said = message.get("content")
    parts = said if isinstance(said, list) else [{"type": "text", "text": said}] if said else []
    return {**rest, "content": [{"type": "thinking", "thinking": thought}, *parts]}


def _called(template: ChatTemplate, arguments: object) -> str:
    """Return a prompt with a call; "" where that does not show in it, or only as Python's text of an object."""
    function = {"name": NAME, "arguments": arguments}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": _ID, "type": "function", "function": function}]}
    ways = (_rendered(template, [_USER, call], tools=tools) for tools in (None, [_TOOL]))
    [name] = ARGUMENTS
    return next((text for text in ways if name in text and f"{{'{name}'" not in text), "")


def _tells_thought(template: ChatTemplate, name: ThoughtName, *, is_earlier: bool = False) -> bool:
    answer = _with_thought(name, {"role": "assistant", "content": "!", "reasoning_content": _THOUGHT})
    call = {"id": _ID, "type": "function", "function": {"name": NAME, "arguments": {}}}
    behind = [_USER] if is_earlier else []
    for turn in ([answer], [{**answer, "tool_calls": [call]}, _RESULT]):
        text = _rendered(template, [_USER, *turn, *behind], enable_thinking=True, thinking=True)
        before, found, _ = text.partition(_THOUGHT)
        if found and not before.endswith(("'", '"')):  # Python's or JSON's text of parts that it does not know
            return True
    return False


def _rendered(template: ChatTemplate, messages: list[Message], **variables: Any) -> str:
    with suppress(TemplateError, UsageError):
        return template.render(messages, add_generation_prompt=False, **variables)
    return ""

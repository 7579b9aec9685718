"""Tools, calls and results as text, for a model whose chat template knows none of them. Knows no dialect of HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from localllm.chat.context import text_of
from localllm.chat.template_traits import TemplateTraits, traits_of, with_thoughts
from localllm.errors import TemplateError, UsageError

if TYPE_CHECKING:
    from localllm.text.chat_template import ChatInput, ChatTemplate

Message = dict[str, Any]


def has_calls(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def adapted(template: ChatTemplate, chat: ChatInput) -> ChatInput:
    """The same chat as the template has it: thoughts under its name for them, arguments of calls as an object or as a
    text, and tools in words where it knows none. Raises UsageError for calls that are none."""
    traits = traits_of(template)
    messages = with_thoughts(traits, chat.messages)
    chat = replace(chat, messages=[with_arguments(traits, message) for message in messages])
    if not (chat.tools or has_calls(chat.messages)) or traits.tells_tools:
        return chat
    with_tools = _rendered(template, chat)
    if with_tools is not None and with_tools != _rendered(template, replace(chat, tools=None)):
        return chat  # the template tells of these tools in a form of its own
    functions = [tool.get("function", tool) for tool in chat.tools or ()]
    return replace(chat, messages=in_words(chat.messages, functions), tools=None)


def with_arguments(traits: TemplateTraits, message: Message) -> Message:
    """Return a message with the arguments of its calls as the template has them. Calls that are none stay."""

    def told(call: object) -> object:
        if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
            return call
        if "arguments" not in function:
            return call
        arguments = told_arguments(function["arguments"])
        if traits.has_text_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(told, calls))} if traits.called and isinstance(calls, list) else message


def _rendered(template: ChatTemplate, chat: ChatInput) -> str | None:
    with suppress(TemplateError):
        return template.render_chat(chat)
    return None


def in_words(messages: Sequence[Message], functions: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages as texts of alternating turns. functions: name, description and parameters of each tool."""
    found: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{text_of(message)}\n</tool_response>"}
        elif "tool_calls" in message:
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            calls = map(_call_text, message["tool_calls"] or ())
            message = {**rest, "content": "\n".join([*filter(None, [text_of(message)]), *calls])}
        if found and message["role"] == found[-1]["role"] == "user":
            message = {**message, "content": f"{text_of(found.pop())}\n{text_of(message)}"}
        found.append(message)
    return _with_instructions(found, functions) if functions else found


def loaded(text: str) -> Any:
    """Return JSON's value; None for other text, too deep JSON, and numbers that JSON cannot hold."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return value


def arguments_of(value: Any) -> dict[str, Any] | None:
    """Return a call's arguments from an object or its text, {} for null or nothing; None for anything else."""
    if isinstance(value, str):
        said = loaded(value) if value.strip() not in ("", "null") else {}
        return arguments_of(said) if isinstance(said, str) else said if isinstance(said, dict) else None
    return {} if value is None else value if isinstance(value, dict) else None


def told_arguments(arguments: object) -> Any:
    """Return a call's arguments as an object where they are one or nothing; others stay as they are."""
    found = arguments_of(arguments)
    return arguments if found is None else found


def _call_text(call: object) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        why = 'a call has a name and arguments: {"function": {"name": "clock", "arguments": {}}}'
        raise UsageError("the tool_calls of a message are malformed", why=why)
    said = {"name": function["name"], "arguments": told_arguments(function.get("arguments"))}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"


def _with_instructions(messages: list[Message], functions: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Add instructions to the system message, or to the first question: not every template knows a system message."""
    at = next((index for index, each in enumerate(messages) if each["role"] in ("system", "developer", "user")), None)
    text = _instructions(functions)
    if at is None:
        return [{"role": "user", "content": text}, *messages]
    message = messages[at]
    texts = (text, text_of(message)) if message["role"] == "user" else (text_of(message), text)
    return [*messages[:at], {**message, "content": "\n\n".join(texts)}, *messages[at + 1 :]]


def _instructions(functions: Sequence[Mapping[str, Any]]) -> str:
    known = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return (
        "You can call these functions, each described by a JSON Schema of its arguments:\n"
        f"<tools>\n{known}\n</tools>\n"
        "To call one, answer with its name and its arguments, in this form and with nothing else:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>\n'
        "Its result comes back as <tool_response>...</tool_response>."
    )


def _refuse(constant: str) -> None:
    raise ValueError(constant)

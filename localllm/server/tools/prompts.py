"""The messages and tools that a chat template is given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from localllm.chat.tool_words import in_words
from localllm.server.tools.tool_formats import ToolFormat
from localllm.server.tools.toolset import Toolset

Message = dict[str, Any]

_SHORT_ID = 9  # letters and digits, as Mistral's templates demand


def prompt_of(messages: Sequence[Message], tools: Toolset | None, form: ToolFormat) -> tuple[list[Message], Any]:
    """Return (messages, the template's `tools`)."""
    if not form.is_in_template:
        return in_words(messages, [tool.template_input["function"] for tool in tools.tools] if tools else ()), None
    found = list(messages)
    if form.one_at_a_time:
        found = list(_one_at_a_time(found))
    if form.answers_results:
        found = list(_answered(found))
    if form.has_short_ids:
        found = [_with_short_ids(message) for message in found]
    if form.is_harmony:
        found = [_with_thinking(message) for message in found]
    return found, [tool.template_input for tool in tools.tools] if tools else None


def _one_at_a_time(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield each call of a turn as a turn of its own, with its result behind it."""
    results = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    for message in messages:
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            if message["role"] != "tool" or message["tool_call_id"] in results:
                yield message
            continue
        for index, call in enumerate(calls):
            said = message if not index else {"role": message["role"], "content": ""}
            yield {**said, "tool_calls": [call]}
            if (result := results.pop(call["id"], None)) is not None:
                yield result


def _answered(messages: Sequence[Message]) -> Iterator[Message]:
    """Put an empty answer between a result and a question."""
    before = ""
    for message in messages:
        if before == "tool" and message["role"] == "user":
            yield {"role": "assistant", "content": ""}
        before = message["role"]
        yield message


def _with_short_ids(message: Message) -> Message:
    if "tool_calls" in message:
        calls = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if message["role"] == "tool":
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _short_id(call_id: str) -> str:
    """Return the same short id each time, so that the prefix cache finds the prompt."""
    if len(call_id) == _SHORT_ID and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:_SHORT_ID]


def _with_thinking(message: Message) -> Message:
    """Rename the thought as harmony's template has it; beside a call the template takes no other text."""
    if "tool_calls" not in message or "reasoning_content" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**rest, "content": "", "thinking": message["reasoning_content"]}

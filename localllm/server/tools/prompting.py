"""What a chat template is given where tools are told, were called or have given results."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from localllm.chat.tool_words import in_words
from localllm.server.tools.calling import Toolset
from localllm.server.tools.syntaxes import Syntax

Message = dict[str, Any]

_SHORT_ID = 9  # letters and digits, as Mistral's templates demand


def told(messages: Sequence[Message], tools: Toolset | None, syntax: Syntax) -> tuple[list[Message], Any]:
    """(messages, the template's `tools`)."""
    if not syntax.is_told:
        return in_words(messages, [tool.told["function"] for tool in tools.tools] if tools else ()), None
    found = list(messages)
    if syntax.one_at_a_time:
        found = list(_one_at_a_time(found))
    if syntax.answers_results:
        found = list(_answered(found))
    if syntax.has_short_ids:
        found = [_with_short_ids(message) for message in found]
    if syntax.marks is None:
        found = [_with_thinking(message) for message in found]
    return found, [tool.told for tool in tools.tools] if tools else None


def _one_at_a_time(messages: Sequence[Message]) -> Iterator[Message]:
    """Each call of a turn as a turn of its own, with its result behind it."""
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
    """With an answer that says nothing between a result and a question."""
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
    """Always the same one, so that the prefix cache knows the prompt again."""
    if len(call_id) == _SHORT_ID and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:_SHORT_ID]


def _with_thinking(message: Message) -> Message:
    """As harmony's template calls it; beside a call it takes no text but that."""
    if "tool_calls" not in message or "reasoning_content" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**rest, "content": "", "thinking": message["reasoning_content"]}

"""The reason in words why a prompt was not found whole in the cache. Knows messages; needs no torch itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localllm.cache.miss_reason import CacheMiss
from localllm.cache.page_folder import PAGE_TOKENS
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.text.chat_template import ChatInput

NEW = "a new conversation"
_SHOWN_TOKENS = 12  # of each side: enough to recognise the place
_LAST_SNAPSHOT = "behind the last snapshot of the model's states, which cannot be cut back"
_REASONING = ("<think", "</think", "<|channel|>analysis", "[THINK]", "<reasoning")


@dataclass(frozen=True)
class Explanation:
    """The place where a prompt differs from the cached ones, and the cause.

    token: the first that differs, from 0.
    message: its number, from 1; None where the template's own words differ, or the prompt is not a chat.
    before, now: the texts there.
    snapshot: of a hybrid, the token from which it is computed: the last one before which its states were kept. None
        where that is the first that differs.
    """

    token: int
    message: int | None
    role: str | None
    cause: str
    before: str = ""
    now: str = ""
    snapshot: int | None = None

    def __str__(self) -> str:
        where = "" if self.message is None else f", in message {self.message} ({self.role})"
        shown = f": {self.now!r} in place of {self.before!r}" if self.before or self.now else ""
        kept = "" if self.snapshot is None else f"; computed from token {self.snapshot} on, {_LAST_SNAPSHOT}"
        return f"what was computed before ends at token {self.token}{where}: {self.cause}{shown}{kept}"


def explain(
    engine: LoadedEngine, chat: ChatInput | None, prompt_ids: Sequence[int], miss: CacheMiss, *, num_out: int = 0
) -> Explanation:
    """Explain a miss. chat: the messages of the prompt, if it has any. num_out: messages that have left the context."""
    return replace(_difference(engine, chat, prompt_ids, miss, num_out), snapshot=miss.snapshot)


def _difference(
    engine: LoadedEngine, chat: ChatInput | None, prompt_ids: Sequence[int], miss: CacheMiss, num_out: int
) -> Explanation:
    if not miss.now:
        return Explanation(miss.position, None, None, "no more is cached")
    before, now = (engine.tokenizer.decode(list(ids)) for ids in (miss.before, miss.now))
    shown_before, shown_now = (engine.tokenizer.decode(list(ids[:_SHOWN_TOKENS])) for ids in (miss.before, miss.now))
    index = None if chat is None else _message_at(engine, chat, prompt_ids, miss.position)
    if chat is None:
        return Explanation(miss.position, None, None, "another text", shown_before, shown_now)
    if index is None:
        had_or_has = "system" in (before.strip()[:6].lower(), now.strip()[:6].lower())
        cause = "another system message" if had_or_has else "the template's own words are others"
        return Explanation(miss.position, None, None, cause, shown_before, shown_now)
    role = str(chat.messages[index].get("role"))
    first_asked = next((i for i, message in enumerate(chat.messages) if message.get("role") != "system"), 0)
    cause = _cause(role, before, now)
    if index == first_asked and num_out:
        cause = "the oldest turns have left the context"
    elif index == first_asked and miss.position < PAGE_TOKENS:
        cause = NEW
    return Explanation(miss.position, index + 1, role, cause, shown_before, shown_now)


def _cause(role: str, before: str, now: str) -> str:
    if any(mark in before for mark in _REASONING) and not any(mark in now for mark in _REASONING):
        return "the template leaves out what the model thought before its answer"
    length = min(len(before), len(now))
    if length > 0 and before[:length] == now[:length]:
        return "the same text in other tokens"
    return {
        "system": "another system message",
        "user": "an edited message",
        "assistant": "another answer",
        "tool": "another result of a tool",
    }.get(role, "another message")


def _message_at(engine: LoadedEngine, chat: ChatInput, prompt_ids: Sequence[int], position: int) -> int | None:
    """Return the index of the message that holds a token, or None."""
    from localllm.text.chat_template import encode_chat

    for count in range(1, len(chat.messages) + 1):
        part = replace(chat, messages=chat.messages[:count], add_generation_prompt=False)
        ids: Sequence[int] = ()
        with suppress(LocalLLMError):  # a template may refuse a conversation that is cut there
            ids = encode_chat(engine.template, engine.tokenizer, part)
        if _num_common(ids, prompt_ids) > position:
            return None if count == 1 and position < _first_content(engine, chat, prompt_ids) else count - 1
    return None


def _first_content(engine: LoadedEngine, chat: ChatInput, prompt_ids: Sequence[int]) -> int:
    """Return where the first message's own text begins: the template's words stand before it."""
    from localllm.text.chat_template import encode_chat

    first = {**chat.messages[0], "content": ""}
    with suppress(LocalLLMError):
        empty = replace(chat, messages=[first], add_generation_prompt=False)
        return _num_common(encode_chat(engine.template, engine.tokenizer, empty), prompt_ids)
    return 0


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def miss_fields(explanation: Explanation | None) -> dict[str, Any] | None:
    """Return the explanation's fields in the JSON forms."""
    return None if explanation is None else dict(vars(explanation))

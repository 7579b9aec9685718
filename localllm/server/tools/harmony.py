"""Harmony, the format of gpt-oss, where a call is one of an answer's messages.

    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}

Source: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from localllm.chat.harmony import Messages, Step, is_thought
from localllm.chat.tool_words import arguments_of
from localllm.server.tools.deltas import Kind, Part
from localllm.server.tools.json_text import NAME, dumped

_CALLED = re.compile(rf"to=(?:functions\.)?({NAME})")


class HarmonyParser:
    """Parses an answer that begins in the header of its first message."""

    def __init__(self, names: Collection[str], *, streams: bool, is_final: bool = False) -> None:
        """names, streams: as `ToolCallParser` has them. is_final: the prompt ends within the final message."""
        self._names = names
        self._streams = streams
        self._messages = Messages(is_open=is_final)
        self._kind: Kind | None = "text" if is_final else None  # of the message that is open; None: it has only begun
        self._arguments: list[str] = []  # of a call that may still prove to be none
        self._said: set[Kind] = set()  # of which there was a message before

    @property
    def is_thinking(self) -> bool:
        return self._kind == "thought"

    def feed(self, text: str) -> list[Part]:
        return self._read(self._messages.feed(text), is_cut=False)

    def end(self, *, is_cut: bool) -> list[Part]:
        return self._read(self._messages.end(), is_cut=is_cut)

    def _read(self, steps: Iterable[Step], *, is_cut: bool) -> list[Part]:
        parts: list[Part] = []
        for step, text in steps:
            if step == "header":
                self._open(parts, text)
            elif step == "text":
                self._say(parts, text)
            else:
                self._close(parts, is_cut=is_cut)
        return parts

    def _open(self, parts: list[Part], header: str) -> None:
        called = _CALLED.search(header)
        if called is not None and called[1] in self._names:
            self._kind, self._arguments = "call", []
            self._name = called[1]
            if self._streams:
                parts.append(("call", self._name))
            return
        self._kind = "thought" if is_thought(header) else "text"
        if header and self._kind in self._said:
            parts.append((self._kind, "\n\n"))
        if header:
            self._said.add(self._kind)

    def _say(self, parts: list[Part], text: str) -> None:
        if not text or self._kind is None:
            return
        if self._kind != "call":
            parts.append((self._kind, text))
        elif self._streams:
            parts.append(("arguments", text))
        else:
            self._arguments.append(text)

    def _close(self, parts: list[Part], *, is_cut: bool) -> None:
        """Emit what was held back of the open message."""
        if self._kind == "call" and not self._streams:
            text = "".join(self._arguments)
            arguments = arguments_of(text)
            if arguments is not None or is_cut:
                written = text if arguments is None else dumped(arguments)
                parts += [("call", self._name), ("arguments", written)]
            else:
                parts.append(("text", text))
        self._kind = None

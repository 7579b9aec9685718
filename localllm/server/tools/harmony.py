"""Harmony, the format of gpt-oss: an answer is several messages, each with a channel, and a call is one of them.

    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>what is said
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}

Source: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from localllm.server.tools.json_text import NAME, arguments_of, dumped
from localllm.server.tools.parts import Kind, Part

CHANNEL, MESSAGE, END, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"
MARKS = (CHANNEL, MESSAGE, END, START, CONSTRAIN)

_ENDS = (END, START, CHANNEL)  # of a message; a model that forgets one begins the next
_HEADER_BEGINS = (CHANNEL, MESSAGE, START, CONSTRAIN, "assistant", "to=")
_MOST_HEADER = 512  # characters
_CALLED = re.compile(rf"to=(?:functions\.)?({NAME})")
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyReader:
    """Of an answer that begins in the header of its first message."""

    def __init__(self, names: Collection[str], *, streams: bool, is_final: bool = False) -> None:
        """names, streams: as `CallReader` has them. is_final: the prompt ends within a message that is said."""
        self._names = names
        self._streams = streams
        self._pending = ""
        self._kind: Kind | None = "text" if is_final else None  # of the message that is open; None: it has only begun
        self._arguments: list[str] = []  # of a call that may still prove to be none
        self._said: set[Kind] = set()  # of which there was a message before

    @property
    def is_thinking(self) -> bool:
        return self._kind == "thought"

    def feed(self, text: str) -> list[Part]:
        self._pending += text
        parts: list[Part] = []
        while self._pending and self._step(parts):
            pass
        return parts

    def end(self, *, is_cut: bool) -> list[Part]:
        rest, self._pending = self._pending, ""
        parts: list[Part] = []
        if self._kind is None:
            return parts
        self._say(parts, rest)
        self._close(parts, is_cut=is_cut)
        return parts

    def _step(self, parts: list[Part]) -> bool:
        return self._read_header(parts) if self._kind is None else self._read_message(parts)

    def _read_header(self, parts: list[Part]) -> bool:
        text = self._pending.lstrip()
        header, found, rest = text.partition(MESSAGE)
        is_header = any(text.startswith(each) or each.startswith(text) for each in _HEADER_BEGINS)
        if not is_header or len(header) > _MOST_HEADER:
            self._kind = "text"
        elif found:
            self._open(parts, header)
            self._pending = rest
        else:
            return False
        return True

    def _open(self, parts: list[Part], header: str) -> None:
        called, channel = _CALLED.search(header), _NAMED_CHANNEL.search(header)
        if called is not None and called[1] in self._names:
            self._kind, self._arguments = "call", []
            self._name = called[1]
            if self._streams:
                parts.append(("call", self._name))
            return
        self._kind = "thought" if channel is not None and channel[1] == "analysis" else "text"
        if self._kind in self._said:
            parts.append((self._kind, "\n\n"))
        self._said.add(self._kind)

    def _read_message(self, parts: list[Part]) -> bool:
        text = self._pending
        at = min((text.find(mark) for mark in _ENDS if mark in text), default=-1)
        if at < 0:
            held = max(n for mark in _ENDS for n in range(len(mark)) if text.endswith(mark[:n]))
            self._say(parts, text[: len(text) - held])
            self._pending = text[len(text) - held :]
            return False
        self._say(parts, text[:at])
        self._close(parts, is_cut=False)
        self._pending = text[at:].removeprefix(END)
        return True

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
        """Of the open message: what was held back."""
        if self._kind == "call" and not self._streams:
            text = "".join(self._arguments)
            arguments = arguments_of(text)
            if arguments is not None or is_cut:
                told = text if arguments is None else dumped(arguments)
                parts += [("call", self._name), ("arguments", told)]
            else:
                parts.append(("text", text))
        self._kind = None

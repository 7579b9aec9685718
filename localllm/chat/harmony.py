"""Harmony, the format of gpt-oss: an answer is several messages, each with a channel.

    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>what is said

Source: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from localllm.text.chat_template import ChatTemplate

CHANNEL, MESSAGE, END, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"
MARKS = (CHANNEL, MESSAGE, END, START, CONSTRAIN)
SIGNS = (CHANNEL, MESSAGE)  # that a chat template of the format has
FINAL = f"{CHANNEL}final{MESSAGE}"  # behind a prompt, where the answer begins within the message that is said
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
BEHIND_THOUGHT = f"{END}{START}assistant{FINAL}"

_ENDS = (END, START, CHANNEL)  # of a message; a model that forgets one begins the next
_HEADER_BEGINS = (CHANNEL, MESSAGE, START, CONSTRAIN, "assistant", "to=")
_MOST_HEADER = 512  # characters
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

# A message begins with its header, "" where the model wrote none; more of its text; it ends.
Step = tuple[Literal["header", "text", "end"], str]


def is_harmony(template: ChatTemplate) -> bool:
    """Return whether answers are messages with channels, also of a model that is given no tools."""
    return any(all(sign in source for sign in SIGNS) for source in template.sources.values())


def is_thought(header: str) -> bool:
    """Return whether the message behind this header is a thought."""
    channel = _NAMED_CHANNEL.search(header)
    return channel is not None and channel[1] == "analysis"


class Messages:
    """Parses an answer, which begins in the header of its first message. The texts add up to the same for any cut into
    pieces."""

    def __init__(self, *, is_open: bool = False) -> None:
        """is_open: the answer begins in the text of a message, whose header the prompt has."""
        self._is_open = is_open
        self._pending = ""

    def feed(self, text: str) -> list[Step]:
        self._pending += text
        steps: list[Step] = []
        while self._pending and (self._read_text(steps) if self._is_open else self._read_header(steps)):
            pass
        return steps

    def end(self) -> list[Step]:
        """Return the text that still waited."""
        rest, self._pending = self._pending, ""
        if self._is_open:
            return [("text", rest), ("end", "")]
        begun = rest.lstrip()
        if any(begun.startswith(mark) or mark.startswith(begun) for mark in MARKS):
            return []  # a header that was cut, or nothing
        return [("header", ""), ("text", rest), ("end", "")]

    def _read_header(self, steps: list[Step]) -> bool:
        text = self._pending.lstrip()
        header, found, rest = text.partition(MESSAGE)
        is_header = any(text.startswith(each) or each.startswith(text) for each in _HEADER_BEGINS)
        if not is_header or len(header) > _MOST_HEADER:
            steps.append(("header", ""))
        elif found:
            steps.append(("header", header))
            self._pending = rest
        else:
            return False
        self._is_open = True
        return True

    def _read_text(self, steps: list[Step]) -> bool:
        text = self._pending
        at = min((text.find(mark) for mark in _ENDS if mark in text), default=-1)
        if at < 0:
            held = max(n for mark in _ENDS for n in range(len(mark)) if text.endswith(mark[:n]))
            steps.append(("text", text[: len(text) - held]))
            self._pending = text[len(text) - held :]
            return False
        steps += [("text", text[:at]), ("end", "")]
        self._pending = text[at:].removeprefix(END)
        self._is_open = False
        return True


class HarmonySplitter:
    """Separates thoughts and answer as the text comes, as `thoughts.Splitter` does."""

    def __init__(self, *, is_thinking: bool | None = None) -> None:
        """is_thinking: the prompt has opened a thought; False: the final message; None: no message."""
        self._messages = Messages(is_open=is_thinking is not None)
        self.is_thinking = bool(is_thinking)
        self._begun = {False: is_thinking is False, True: is_thinking is True}

    def feed(self, text: str) -> list[tuple[bool, str]]:
        return self._split(self._messages.feed(text))

    def end(self) -> list[tuple[bool, str]]:
        return self._split(self._messages.end())

    def _split(self, steps: Iterable[Step]) -> list[tuple[bool, str]]:
        parts: list[tuple[bool, str]] = []
        for step, text in steps:
            if step == "header":
                self.is_thinking = is_thought(text)
                if text and self._begun[self.is_thinking]:
                    parts.append((self.is_thinking, "\n\n"))
                self._begun[self.is_thinking] |= bool(text)
            elif text:
                parts.append((self.is_thinking, text))
        return parts

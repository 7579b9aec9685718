"""What a model thought before it answered, told apart from the answer. Knows the marks, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.engine.tokenizer import Tokenizer

_ENDING_IDS = 12  # of a prompt, in which a template opens a thought
THOUGHT_MARKS = {
    "<think>": "</think>", "<thinking>": "</thinking>", "<reasoning>": "</reasoning>", "[THINK]": "[/THINK]",
}  # fmt: skip


def begins_in_thought(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the answer to a prompt does, as its template has opened one."""
    return opens_thought(tokenizer.decode(list(prompt_ids[-_ENDING_IDS:]), skip_special=False))


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends where its template has opened a thought: the answer then begins inside of it."""
    return prompt.rstrip().endswith(tuple(THOUGHT_MARKS))


def split(text: str, *, is_thinking: bool = False) -> tuple[str, str]:
    """(thought, answer) of a whole answer, also of one whose opening mark stood in the prompt. is_thinking: it is known
    that it did, which cannot be seen where the thought was interrupted."""
    splitter = Splitter(is_thinking=is_thinking or _is_closed_only(text))
    parts = [*splitter.feed(text), *splitter.end()]
    return tuple("".join(part for is_thought, part in parts if is_thought is which) for which in (True, False))  # type: ignore[return-value]


def _is_closed_only(text: str) -> bool:
    return any(
        0 <= text.find(close) and opened not in text[: text.find(close)] for opened, close in THOUGHT_MARKS.items()
    )


def may_think(template: str) -> bool:
    """Whether a chat template knows of thoughts."""
    return any(mark in template for mark in (*THOUGHT_MARKS, "enable_thinking"))


class Splitter:
    """Tells them apart while the text is being written; at most a mark's length waits until it is known to be none.

    A thought is one that begins before anything else was said: an answer may speak of such marks.
    """

    def __init__(self, *, is_thinking: bool = False) -> None:
        self._closing: str | None = None  # of the thought that is open; "": any
        self._is_settled = False  # the answer has begun
        self._pending = ""
        self._is_at_start = True  # of a thought or the answer, where blank lines say nothing
        if is_thinking:
            self._closing = ""

    @property
    def is_thinking(self) -> bool:
        return self._closing is not None

    def feed(self, text: str) -> list[tuple[bool, str]]:
        """The next piece of text, as (is it a thought, text)."""
        if self._is_settled and not self._pending:
            return [(False, text)] if text else []
        self._pending += text
        found: list[tuple[bool, str]] = []
        while self._pending and self._step(found):
            pass
        return found

    def end(self) -> list[tuple[bool, str]]:
        """What still waited."""
        rest, self._pending = self._pending if self._is_settled else self._pending.lstrip("\n"), ""
        return [(self.is_thinking, rest)] if rest else []

    def _step(self, found: list[tuple[bool, str]]) -> bool:
        """Takes as much as is certain off what is pending; False where more has to come."""
        if self._closing is not None:
            return self._think(found, tuple(THOUGHT_MARKS.values()) if not self._closing else (self._closing,))
        if self._is_settled:
            found.append((False, self._pending))
            self._pending = ""
            return False
        text = self._pending.lstrip()
        for opened, close in THOUGHT_MARKS.items():
            if text.startswith(opened):
                self._closing, self._is_at_start = close, True
                self._pending = text.removeprefix(opened)
                return True
        if text and not any(opened.startswith(text) for opened in THOUGHT_MARKS):
            self._is_settled, self._pending = True, self._pending.lstrip("\n")
            return True
        return False

    def _think(self, found: list[tuple[bool, str]], closings: tuple[str, ...]) -> bool:
        text = self._pending.lstrip("\n") if self._is_at_start else self._pending
        at, close = min(((text.find(close), close) for close in closings if close in text), default=(-1, ""))
        if at >= 0:
            if text[:at]:
                found.append((True, text[:at]))
            self._pending, self._closing, self._is_at_start = text[at + len(close) :].lstrip("\n"), None, True
            return True
        held = max((n for close in closings for n in range(len(close)) if text.endswith(close[:n])), default=0)
        if text[: len(text) - held]:
            self._is_at_start = False
            found.append((True, text[: len(text) - held]))
        self._pending = text[len(text) - held :]
        return False

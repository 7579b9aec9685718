"""What a reader tells an answer's text apart into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from localllm.chat.thoughts import Splitter

# call: one begins, of the tool that is named; arguments: more of the JSON of the call that began last.
Kind = Literal["text", "thought", "call", "arguments"]
Part = tuple[Kind, str]
# What a grammar lets an answer have beside calls.
Says = Literal["anything", "json", "nothing"]


class Reader(Protocol):
    """Of one answer, while it is being written. However it is cut into pieces, the parts add up to the same."""

    @property
    def is_thinking(self) -> bool: ...

    def feed(self, text: str) -> list[Part]: ...

    def end(self, *, is_cut: bool) -> list[Part]:
        """What still waited. is_cut: more would have been said."""
        ...


class ThoughtReader:
    """Tells a thought apart from what is said behind it, which another one may read."""

    def __init__(self, *, is_thinking: bool, said: Reader | None = None) -> None:
        self._splitter = Splitter(is_thinking=is_thinking)
        self._said = said

    @property
    def is_thinking(self) -> bool:
        return self._splitter.is_thinking

    def feed(self, text: str) -> list[Part]:
        return self._read(self._splitter.feed(text))

    def end(self, *, is_cut: bool) -> list[Part]:
        parts = self._read(self._splitter.end())
        return parts + (self._said.end(is_cut=is_cut) if self._said is not None else [])

    def _read(self, split: Sequence[tuple[bool, str]]) -> list[Part]:
        parts: list[Part] = []
        for is_thought, text in split:
            if is_thought:
                parts.append(("thought", text))
            elif self._said is None:
                parts.append(("text", text))
            else:
                parts += self._said.feed(text)
        return parts

"""An answer while it is being written: the parts a parser finds in its text, and what a client has not taken yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from localllm.chat.thoughts import Splitter
from localllm.engine.events import FinishedEvent, TokenLogprob

# call: one begins, of the tool that is named; arguments: more of the JSON of the call that began last.
Kind = Literal["text", "thought", "call", "arguments"]
Part = tuple[Kind, str]
# What a grammar lets an answer have beside calls.
Says = Literal["anything", "json", "nothing"]


@dataclass
class ToolCallDelta:
    """More of the call `index` of an answer. name: of its tool, where it begins; arguments: of its JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class Delta:
    """The part of one answer that was emitted since the last delta was taken.

    thought: the part of it that was thought
    calls: one entry for each call
    prompt_logprobs: of the prompt's tokens, None of the first
    num_tokens: how many tokens it is made of
    num_thought_tokens: about so many of them were thought; these have no log-probabilities
    finished: the end; it is the last delta
    others: answers that a beam search has found beside it
    """

    text: str = ""
    thought: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_tokens: int = 0
    num_thought_tokens: int = 0
    finished: FinishedEvent | None = None
    others: list[Delta] = field(default_factory=list)

    def add(self, later: Delta) -> None:
        """Append what was emitted later."""
        self.text += later.text
        self.thought += later.thought
        for call in later.calls:
            self.add_call(call)
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.num_tokens += later.num_tokens
        self.num_thought_tokens += later.num_thought_tokens
        self.finished = later.finished
        self.others += later.others

    def add_call(self, more: ToolCallDelta) -> None:
        """Append more of the last call, or the next call."""
        if self.calls and self.calls[-1].index == more.index:
            self.calls[-1].arguments += more.arguments
        else:
            self.calls.append(replace(more))

    @property
    def end(self) -> FinishedEvent:
        """The end of a whole answer."""
        assert self.finished is not None
        return self.finished


class AnswerParser(Protocol):
    """Parses one answer while it is being written. However the text is cut, the parts add up to the same."""

    @property
    def is_thinking(self) -> bool: ...

    def feed(self, text: str) -> list[Part]: ...

    def end(self, *, is_cut: bool) -> list[Part]:
        """Return what was held back. is_cut: the answer would have gone on."""
        ...


class ThoughtParser:
    """Separates a thought from what follows it, which another parser may read."""

    def __init__(self, *, is_thinking: bool, said: AnswerParser | None = None) -> None:
        self._splitter = Splitter(is_thinking=is_thinking)
        self._said = said

    @property
    def is_thinking(self) -> bool:
        return self._splitter.is_thinking

    def feed(self, text: str) -> list[Part]:
        return self._parse(self._splitter.feed(text))

    def end(self, *, is_cut: bool) -> list[Part]:
        parts = self._parse(self._splitter.end())
        return parts + (self._said.end(is_cut=is_cut) if self._said is not None else [])

    def _parse(self, split: Sequence[tuple[bool, str]]) -> list[Part]:
        parts: list[Part] = []
        for is_thought, text in split:
            if is_thought or self._said is None:
                parts.append(("thought" if is_thought else "text", text))
            else:
                parts += self._said.feed(text)
        return parts

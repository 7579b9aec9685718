"""The texts of a conversation that are copied: the last answer, and the code blocks of all answers, numbered through
it. The number on the screen is the one to copy by."""

from __future__ import annotations

from collections.abc import Sequence, Set

from localllm.chat.thoughts import kept_apart
from localllm.history import content_of
from localllm.tui.markdown_render import CodeBlock, code_blocks
from localllm.tui.messages import Turn


class CodeIndex:
    """Answers that stay are read once."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._found: list[list[CodeBlock]] = []  # of each turn so far read
        self._thinking: Set[int] = frozenset()

    def update(self, turns: Sequence[Turn], thinking: Set[int]) -> None:
        """thinking: the answers that begin in a thought, whose code has no number."""
        num_same = 0
        for turn, before in zip(turns, self._turns, strict=False):
            if turn is not before:
                break
            num_same += 1
        self._turns, self._thinking = list(turns), thinking
        del self._found[num_same:]

    def num_before(self, index: int) -> int:
        """The number of code blocks in the turns before this one."""
        self._read(index)
        return sum(map(len, self._found[:index]))

    @property
    def blocks(self) -> list[CodeBlock]:
        """All of them; number 1 is the first."""
        self._read(len(self._turns))
        return [block for found in self._found for block in found]

    @property
    def num_before_latest(self) -> int:
        """`num_before` of the latest answer that has code; 0 without one."""
        total = len(self.blocks)
        return next((count for at in range(len(self._turns), -1, -1) if (count := self.num_before(at)) < total), 0)

    @property
    def last_answer(self) -> str:
        """The last answer without its thought; "" without one."""
        at = next((at for at in range(len(self._turns) - 1, -1, -1) if self._turns[at]["role"] == "assistant"), None)
        return "" if at is None else self._answer(at)

    def _answer(self, index: int) -> str:
        text = content_of(self._turns[index])[0]
        return kept_apart(text, is_thinking=index in self._thinking)[1]

    def _read(self, num_turns: int) -> None:
        for index in range(len(self._found), min(num_turns, len(self._turns))):
            self._found.append(self._read_turn(index))

    def _read_turn(self, index: int) -> list[CodeBlock]:
        turn = self._turns[index]
        text = content_of(turn)[0] if turn["role"] == "assistant" else ""
        if not any(sign in text for sign in ("```", "~~~", "    ", "\t")):  # parsing takes a third of a ms
            return []
        return code_blocks(self._answer(index))

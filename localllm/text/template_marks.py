"""Tell the special tokens that a chat template has written itself from their texts in messages.

While a template renders for ids, a private character stands for each special token in the template's own literals.
Messages are left as they are: however a template cuts, trims or joins them, they never hold such a character, and so
nobody can forge a role. A template still finds in a message what is not a special token (`</think>`).

A template that builds special tokens from roles ('<|' + role + '|>') means that for the ordinary roles only.

Knows nothing about running templates or encoding texts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Self

from localllm.errors import UsageError

# The last plane first: hardly anyone writes its characters, so that one set of marks serves every chat.
_PRIVATE = (range(0x100000, 0x10FFFE), range(0xF0000, 0xFFFFE), range(0xE000, 0xF900))
_ROLE = re.compile(
    r"(?<![a-z0-9_])(?:user|assistant|system|tool|developer|function|observation|ipython|model)(?![a-z0-9_])",
    re.IGNORECASE,
)


class WrittenText(str):
    """A text of ours within a message, in which special tokens are meant where `pieces` says so."""

    __slots__ = ("pieces",)
    pieces: Sequence[tuple[str, bool]]  # (text, special tokens are meant in it)

    def __new__(cls, pieces: Sequence[tuple[str, bool]]) -> Self:
        text = super().__new__(cls, "".join(piece for piece, _ in pieces))
        text.pieces = pieces
        return text


class SpecialMarks:
    """The private characters for one set of special tokens."""

    def __init__(self, specials: Collection[str], taken: Collection[str] = ()) -> None:
        """Assign a character to each. taken: those in messages. Raises UsageError where too few are left."""
        self.specials = frozenset(specials)
        free = (char for code in chain(*_PRIVATE) if (char := chr(code)) not in taken)
        # Tokens that a template may build from a role, as (beginning, role, end).
        self._built = [
            (special[: role.start()], role[0], special[role.end() :])
            for special in sorted(self.specials)
            for role in _ROLE.finditer(special)
            if role.start() and role.end() < len(special)
        ]
        self._wholes = _assign(sorted(self.specials, key=len, reverse=True), free)
        self._starts = _assign(sorted({start for start, _, _ in self._built}, key=len, reverse=True), free)
        self._ends = _assign(sorted({end for _, _, end in self._built}, key=len, reverse=True), free)
        self._texts = {char: special for special, char in self._wholes.items()}
        self._halves = {char: half for half, char in chain(self._starts.items(), self._ends.items())}
        self._any_whole = re.compile(f"([{''.join(self._texts)}])" if self._texts else "(?!)")
        self._marks = frozenset(self._texts | self._halves)

    def clash_with(self, characters: Collection[str]) -> bool:
        """Tell if one of these characters is a mark."""
        return not self._marks.isdisjoint(characters)

    def mark(self, literal: str) -> str:
        """Return a literal with marks for special tokens, and for halves that become one with a role between them."""
        for special, char in self._wholes.items():
            if special in literal:
                literal = literal.replace(special, char)
        if start := next(filter(literal.endswith, self._starts), ""):
            literal = literal.removesuffix(start) + self._starts[start]
        if end := next(filter(literal.startswith, self._ends), ""):
            literal = self._ends[end] + literal.removeprefix(end)
        return literal

    def marked(self, text: WrittenText) -> str:
        """Return a text of ours with marks for its special tokens."""
        return "".join(self.mark(piece) if is_special else piece for piece, is_special in text.pieces)

    def pieces(self, rendered: str) -> list[tuple[str, bool]]:
        """Split a rendered prompt into texts, none empty: (special token, True) or (plain text, False)."""
        for start, role, end in self._built:
            marked = self._starts[start] + role + self._ends[end]
            rendered = rendered.replace(marked, self._wholes[start + role + end])
        for char, half in self._halves.items():
            rendered = rendered.replace(char, half)
        parts = self._any_whole.split(rendered)
        return [(self._texts[part], True) if number % 2 else (part, False) for number, part in enumerate(parts) if part]


def _assign(texts: Collection[str], free: Iterator[str]) -> dict[str, str]:
    assigned = dict(zip(texts, free, strict=False))
    if len(assigned) < len(texts):
        raise UsageError("there are too few private-use characters", why=f"{len(texts)} special tokens need one each")
    return assigned

"""Texts in llguidance's Lark, with marks that are one token of a model's vocabulary as that token.

Source of its syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

TokenId = Callable[[str], int | None]

ANY = "(.|\\n)*"
_LEXEMES = re.compile(r'"[^"]*"|, |: |.', re.DOTALL)


class Lark:
    """Writes the texts of a grammar."""

    def __init__(self, marks: Iterable[str], token_id: TokenId, *, is_bare: bool = False) -> None:
        """token_id: of a mark that is one token of the vocabulary; None of another text. is_bare: texts are in
        lexemes of JSON. The lexer does not go back: where an answer may be JSON, too, both are made of the same."""
        self._is_bare = is_bare
        self._ids = {mark: index for mark in marks if (index := token_id(mark)) is not None}
        self._any = re.compile(f"({'|'.join(map(re.escape, self._ids)) or '(?!)'})")

    def is_token(self, mark: str) -> bool:
        return mark in self._ids

    def __call__(self, text: str) -> str:
        """Return "" for no text."""
        parts = self._any.split(text)
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else self._texts(part) for part in parts if part)

    def _texts(self, text: str) -> str:
        return " ".join(map(quoted, _LEXEMES.findall(text))) if self._is_bare else quoted(text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def pattern(text: str) -> str:
    """Return the regular expression of a text, as it stands between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")

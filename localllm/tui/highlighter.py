"""Code in colours, line by line, also while it is being written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from textual.content import Content, Span
from textual.highlight import HighlightTheme

_TAB = 4  # columns
_BACK = (16, 64)  # lines before the new ones at which lexing may begin
_WAIT = 32  # lines after a failure: within a long string it fails for each line


class Highlighter:
    """Highlights growing code from a few lines before its end, where that gives these lines the colours they have: 200
    lines of Python take 16 ms as a whole. Later lines may change earlier ones (the end of a comment): a fresh
    highlighter draws the code once it is complete."""

    def __init__(self) -> None:
        self._language = ""
        self._rows: list[str] = []
        self._lines: list[Content] = []
        self._whole_until = 0  # lines; before that the end alone is not tried again

    def lines(self, code: str, language: str) -> list[Content]:
        """The highlighted lines. language: of a fence; an unknown one is plain text. Lines before the part that is new
        are the objects of the last call."""
        rows = code.expandtabs(_TAB).split("\n")
        lexer = _lexer(language)
        num_known = max(0, len(self._rows) - 1)  # the last may have got longer
        if language != self._language or rows[:num_known] != self._rows[:num_known]:
            num_known = self._whole_until = 0
        self._lines = self._continued(rows, lexer, num_known) or _highlighted(rows, lexer)
        self._language, self._rows = language, rows
        return self._lines

    def _continued(self, rows: Sequence[str], lexer: Lexer, num_known: int) -> list[Content]:
        """The lines from the known ones on; [] where earlier lines may matter for the new ones."""
        if len(rows) < self._whole_until:
            return []
        begins = [num_known - back for back in _BACK if num_known > back]
        for begin in begins:
            lines = _highlighted(rows[begin:], lexer)
            known = self._lines[begin:num_known]
            if all(line.is_same(before) for line, before in zip(lines, known, strict=False)):
                return self._lines[:num_known] + lines[len(known) :]
        self._whole_until = len(rows) + _WAIT if begins else 0
        return []


@cache
def _lexer(language: str) -> Lexer:
    options: dict[str, Any] = {"stripnl": False, "ensurenl": True, "tabsize": 0}
    try:
        return get_lexer_by_name(language or "text", **options)
    except ClassNotFound:
        return get_lexer_by_name("text", **options)


def _highlighted(rows: Sequence[str], lexer: Lexer) -> list[Content]:
    spans = [[Span(0, len(row), "$text")] for row in rows] + [[]]
    line = column = 0
    for kind, token in lexer.get_tokens("\n".join(rows)):
        style = _style(kind)
        for number, part in enumerate(token.split("\n")):
            if number:
                line, column = line + 1, 0
            if part and style:
                spans[min(line, len(rows))].append(Span(column, column + len(part), style))
            column += len(part)
    return [Content(row, spans=found) for row, found in zip(rows, spans, strict=False)]


@cache
def _style(kind: Any) -> str:
    """The style of a kind of tokens, or of its parent kind."""
    found = HighlightTheme.STYLES.get(kind)
    return found or (_style(kind.parent) if kind.parent is not None else "")

"""Breaks a text that is still being written at its words, for a terminal.

Knows characters and columns. Lines that are code (in a ``` block, or indented) go through as they are.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable


class WordWrap:
    """Text in, piece by piece; out what can be shown of it. The last word waits until it is known to be whole."""

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns  # asked at each word: a window may be resized while an answer comes
        self._line = ""  # of the text, since its last newline
        self._fenced = False
        self._used = 0  # columns of the terminal's line
        self._gap = ""  # blanks before the word
        self._word = ""
        self._continues = False  # the word's beginning has been shown: it was longer than a line

    def feed(self, text: str) -> str:
        return "".join(map(self._take, text))

    def flush(self) -> str:
        """The word that waits, with the blanks before it."""
        if not self._word:
            return ""
        word, gap, self._word, self._gap = self._word, self._gap, "", ""
        columns, needed = self._columns(), width(gap) + width(word)
        if self._used and self._used + needed > columns and not self._continues:
            gap, needed, self._used = "\n", width(word), 0
        self._used = (self._used + needed - 1) % columns + 1  # a word longer than the line is broken by the terminal
        return gap + word

    def _take(self, character: str) -> str:
        if character == "\n":
            shown = self.flush() + "\n"
            self._fenced ^= self._line.lstrip().startswith("```")
            self._line, self._gap, self._used, self._continues = "", "", 0, False
            return shown
        self._line += character
        if self._fenced or self._line.startswith(("  ", "\t", "```")):
            shown, self._gap = self.flush() + self._gap + character, ""
            return shown
        if character in " \t":
            shown = self.flush()
            self._gap += character
            self._continues = False
            return shown
        wide, long = width(character) == 2, len(self._word) >= self._columns()
        shown = self.flush() if wide or long else ""
        self._continues = not wide and (long or self._continues)
        self._word += character
        return shown + self.flush() if wide else shown  # a line may break beside every wide character


def width(text: str) -> int:
    """Columns on a terminal: two for a wide character, none for one that is put on top of another."""
    return sum(_width(character) for character in text)


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1

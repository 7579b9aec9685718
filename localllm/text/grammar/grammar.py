"""What an answer must look like, as a request states it: plain data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_schema", "regex", "lark", "gbnf"]


@dataclass(frozen=True)
class Grammar:
    """What an answer has to look like. Plain data, unlike a `TokenMask`.

    source: a JSON Schema as JSON, a regular expression, a grammar in llguidance's Lark or in llama.cpp's GBNF.
    thoughts: opening and closing marks of what may be thought before, in which everything may be said. A special token
    that is a mark, or its beginning, is written by its number: <[7]>. is_thinking: the answer begins inside of one.
    """

    kind: GrammarKind
    source: str
    thoughts: tuple[tuple[str, str], ...] = ()
    is_thinking: bool = False

"""Read GBNF, the grammars of llama.cpp, for llguidance.

Its own converter (gbnf_to_lark) is not used: its lexemes take what has to follow them, it reads classes as Rust does
and its errors have no column.

Source of the syntax: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_
from typing import NamedTuple, NoReturn

from localllm.errors import GrammarError
from localllm.text.grammar import lexemes
from localllm.text.grammar.lexemes import Chain, Choice, Leaf, Node, Reference, Repeated, character_bits

MAX_NESTING = 50  # of parentheses, each of which takes half a dozen nested calls of Python
_LAST_CHARACTER = 0x10FFFF
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<blank> [ \t]+ | \#[^\r\n]* )
      | (?P<newline> \r\n? | \n )
      | (?P<name> [A-Za-z0-9_-]+ )
      | (?P<defines> ::= )
      | (?P<text> "(?:\\.|[^"\\])*" )
      | (?P<class> \[(?:\\.|[^\]\\])*\] )
      | (?P<times> [*+?] | \{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\} )
      | (?P<token> !?<[^<>\s]+> )
      | (?P<mark> [().|] )""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt\\\"\[\]-]))|\\(.?)|(.)", re.DOTALL
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_MOST_DIGITS = 9
_EMPTY = Leaf('""', ())


def is_gbnf(source: str) -> bool:
    """Tell GBNF from Lark, which has no `::=` behind a name."""
    return _RULE.search(source.removeprefix("\ufeff")) is not None


def as_lark(source: str) -> str:
    """Raises GrammarError with the line and column of what is no GBNF, and for rules that are missing."""
    return lexemes.as_lark(_Reader(source).rules(), "root")


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Reader:
    """Reads from the first token to the last, one rule after the other."""

    def __init__(self, source: str) -> None:
        self._source = source.removeprefix("\ufeff")
        self._tokens = self._split()
        self._next = 0
        self._references: list[_Token] = []

    def rules(self) -> dict[str, Node]:
        """Return the rules of the grammar by their names."""
        rules: dict[str, Node] = {}
        while (token := self._token()).kind != "end":
            name = self._taken("name", "the name of a rule")
            self._taken("defines", "::=")
            if name in rules:
                self._refuse(token.at, f"the rule {name!r} is there twice")
            rules[name] = self._choice(0)
            if self._token().kind != "end":
                self._taken("newline", "the end of the line")
        if "root" not in rules:
            raise GrammarError("the GBNF grammar cannot be used", why="it has no rule 'root', with which it begins")
        for reference in self._references:
            if reference.text not in rules:
                self._refuse(reference.at, f"there is no rule {reference.text!r}")
        return rules

    def _choice(self, nesting: int) -> Node:
        parts = [self._chain(nesting)]
        while self._token().text == "|":
            self._next += 1
            parts.append(self._chain(nesting))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _chain(self, nesting: int) -> Node:
        parts: list[Node] = []
        while True:
            token = self._token()
            match token.kind, token.text:
                case "times", _:
                    if not parts:
                        self._expect("something to repeat")
                    parts[-1] = self._repeated(parts[-1], token)
                case "name", name:
                    self._references.append(token)
                    parts.append(Reference(name))
                case "text", text:
                    characters = [each for each, _ in self._characters(token, text[1:-1], 1)]
                    bits = tuple(character_bits(ord(each), ord(each)) for each in characters)
                    parts.append(Leaf(json.dumps("".join(characters)), bits))
                case "class", _:
                    parts.append(self._class(token))
                case _, ".":
                    parts.append(_class_of([(0, _LAST_CHARACTER)]))
                case _, "(":
                    parts.append(self._group(token, nesting + 1))
                case "token", _:
                    self._refuse(token.at, f"{token.text}, a token of a model, is not supported: write its text")
                case _:
                    return parts[0] if len(parts) == 1 else Chain(tuple(parts)) if parts else _EMPTY
            self._next += 1

    def _group(self, opening: _Token, nesting: int) -> Node:
        """Read what is in parentheses, up to the closing one."""
        if nesting > MAX_NESTING:
            self._refuse(opening.at, f"it is nested deeper than {MAX_NESTING} levels")
        self._next += 1
        node = self._choice(nesting)
        if self._token().text != ")":
            self._expect("a closing parenthesis")
        return node

    def _repeated(self, part: Node, token: _Token) -> Node:
        if token.text in _SIGNS:
            return Repeated((part,), *_SIGNS[token.text])
        least, comma, most = "".join(token.text[1:-1].split()).partition(",")
        if max(len(least), len(most)) > _MOST_DIGITS:
            self._refuse(token.at, f"{token.text[:40]} is too often")
        found = Repeated((part,), int(least), int(most) if most else None if comma else int(least))
        if found.most is not None and found.least > found.most:
            self._refuse(token.at, f"{token.text} is never: {found.least} is more than {found.most}")
        return found if found.most != 0 else _EMPTY

    def _class(self, token: _Token) -> Leaf:
        negated = token.text.startswith("[^")
        skipped = 2 if negated else 1
        characters = list(self._characters(token, token.text[skipped:-1], skipped))
        ranges, index = list[tuple[int, int]](), 0
        while index < len(characters):
            first = last = characters[index][0]
            if index + 2 < len(characters) and characters[index + 1] == ("-", False):
                last, index = characters[index + 2][0], index + 2
            if first > last:
                self._refuse(token.at, f"the range from {first!r} to {last!r} in {token.text} is empty")
            ranges.append((ord(first), ord(last)))
            index += 1
        if not ranges:
            self._refuse(token.at, f"the class {token.text} has no characters")
        found = list(_others(ranges)) if negated else ranges
        if not found:
            self._refuse(token.at, f"the class {token.text} leaves no character")
        return _class_of(found)

    def _characters(self, token: _Token, inner: str, skipped: int) -> Iterator[tuple[str, bool]]:
        """Yield the characters meant, and for each if it is an escape. skipped: of the token, before `inner`."""
        for found in _CHARACTER.finditer(inner):
            two, four, eight, letter, unknown, plain = found.groups()
            at = token.at + skipped + found.start()
            if unknown is not None:
                self._refuse(at, f"{found[0]} is no escape of GBNF")
            code = int(two or four or eight or "0", 16)
            if code > _LAST_CHARACTER or 0xD800 <= code < 0xE000:
                self._refuse(at, f"{found[0]} is no character")
            yield (plain or _LETTERS.get(letter, letter) or chr(code)), plain is None

    def _split(self) -> list[_Token]:
        """Return the tokens of the grammar, with line ends only where a rule may end."""
        tokens, at, nesting = list[_Token](), 0, 0
        while at < len(self._source):
            found = _TOKEN.match(self._source, at)
            if found is None or found.lastgroup is None:
                self._refuse(at, f"{self._source[at]!r} is not expected, or is not ended")
            token = _Token(found.lastgroup, found[0], at)
            at = found.end()
            nesting = max(0, nesting + (token.text == "(") - (token.text == ")"))
            last = tokens[-1] if tokens else _Token("newline", "", 0)
            goes_on = nesting or last.kind in ("newline", "defines") or last.text == "|"
            if token.kind == "blank" or (token.kind == "newline" and goes_on):
                continue
            if token.text == "|" and tokens and last.kind == "newline":  # alternatives may begin in the next line
                tokens.pop()
            tokens.append(token)
        return [*tokens, _Token("end", "", at)]

    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _taken(self, kind: str, expected: str) -> str:
        if self._token().kind != kind:
            self._expect(expected)
        self._next += 1
        return self._tokens[self._next - 1].text

    def _expect(self, expected: str) -> NoReturn:
        token = self._token()
        ends = {"end": "the end of the grammar", "newline": "the end of the line"}
        self._refuse(token.at, f"expected {expected}, not {ends.get(token.kind, token.text)}")

    def _refuse(self, at: int, why: str) -> NoReturn:
        line, column = self._source.count("\n", 0, at) + 1, at - self._source.rfind("\n", 0, at)
        raise GrammarError("the GBNF grammar cannot be used", why=f"line {line}, column {column}: {why[:200]}")


def _class_of(ranges: Iterable[tuple[int, int]]) -> Leaf:
    """Return one character of these ranges of code points."""
    written = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)
    return Leaf(f"/[{written}]/", (reduce(or_, (character_bits(*each) for each in ranges)),))


def _others(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of all other characters."""
    begin = 0
    for first, last in sorted(ranges):
        if begin < first:
            yield begin, first - 1
        begin = max(begin, last + 1)
    if begin <= _LAST_CHARACTER:
        yield begin, _LAST_CHARACTER

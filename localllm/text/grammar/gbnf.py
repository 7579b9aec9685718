"""GBNF, the grammars of llama.cpp, written as llguidance's Lark.

Source of the syntax: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from localllm.errors import GrammarError
from localllm.text.grammar import lexemes
from localllm.text.grammar.lexemes import LAST_CHARACTER, Chain, Choice, Class, Node, Reference, Repeated, Text

MAX_NESTING = 50  # of parentheses, each of which is gone through by half a dozen calls of Python
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


def is_gbnf(source: str) -> bool:
    """Whether a grammar of unknown kind has a rule of GBNF, which no Lark has."""
    return _RULE.search(source.removeprefix("\ufeff")) is not None


def as_lark(source: str) -> str:
    """Raises GrammarError with the line and column of what is no GBNF, and for rules that are missing."""
    return lexemes.as_lark(_Reader(source).rules(), "root")


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: int


class _Reader:
    """Reads from the first token to the last, one rule after the other."""

    def __init__(self, source: str) -> None:
        self._source = source.removeprefix("\ufeff")
        self._tokens = list(self._split())
        self._next = 0

    def rules(self) -> dict[str, Node]:
        """All of the grammar, by their names."""
        rules: dict[str, Node] = {}
        self._skip_newlines()
        while (token := self._token()).kind != "end":
            name = self._taken("name", "the name of a rule")
            self._taken("defines", "::=")
            if name in rules:
                self._refuse(token.at, f"the rule {name!r} is there twice")
            rules[name] = self._choice(0)
            if self._token().kind not in ("newline", "end"):
                self._expect("the end of the line")
            self._skip_newlines()
        if "root" not in rules:
            raise GrammarError("the GBNF grammar cannot be used", why="it has no rule 'root', with which it begins")
        for reference in (each for rule in rules.values() for each in lexemes.references(rule)):
            if reference.name not in rules:
                self._refuse(reference.at, f"there is no rule {reference.name!r}")
        return rules

    def _choice(self, nesting: int) -> Node:
        self._skip_newlines()
        parts = [self._chain(nesting)]
        while self._goes_on(nesting):
            self._next += 1
            self._skip_newlines()
            parts.append(self._chain(nesting))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _goes_on(self, nesting: int) -> bool:
        """Whether another alternative follows, which may stand in the next line."""
        before = self._next
        self._skip_newlines()
        found = self._token().text == "|"
        if not found and not nesting:
            self._next = before
        return found

    def _chain(self, nesting: int) -> Node:
        parts: list[Node] = []
        while True:
            if nesting:
                self._skip_newlines()
            token = self._token()
            if token.kind == "times":
                if not parts:
                    self._expect("something to repeat")
                parts[-1] = self._repeated(parts[-1], token)
            elif token.kind == "name":
                parts.append(Reference(token.text, token.at))
            elif token.kind == "text":
                parts.append(Text("".join(character for character, _ in self._characters(token, token.text[1:-1], 1))))
            elif token.kind == "class":
                parts.append(self._class(token))
            elif token.text == ".":
                parts.append(Class(((0, LAST_CHARACTER),)))
            elif token.text == "(":
                parts.append(self._group(token, nesting + 1))
            elif token.kind == "token":
                self._refuse(token.at, f"{token.text}, a token of a model, is not supported: write its text")
            else:
                return parts[0] if len(parts) == 1 else Chain(tuple(parts)) if parts else Text("")
            self._next += 1

    def _group(self, opens: _Token, nesting: int) -> Node:
        """What is in parentheses; the closing one is the token that is looked at then."""
        if nesting > MAX_NESTING:
            self._refuse(opens.at, f"it is nested deeper than {MAX_NESTING} levels")
        self._next += 1
        node = self._choice(nesting)
        if self._token().text != ")":
            self._expect("a closing parenthesis")
        return node

    def _repeated(self, part: Node, token: _Token) -> Node:
        if token.text in _SIGNS:
            return Repeated(part, *_SIGNS[token.text])
        least, comma, most = "".join(token.text[1:-1].split()).partition(",")
        if max(len(least), len(most)) > _MOST_DIGITS:
            self._refuse(token.at, f"{token.text[:40]} is too often")
        found = Repeated(part, int(least), int(most) if most else None if comma else int(least))
        if found.most is not None and found.least > found.most:
            self._refuse(token.at, f"{token.text} is never: {found.least} is more than {found.most}")
        return found if found.most != 0 else Text("")

    def _class(self, token: _Token) -> Class:
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
        found = _others(ranges) if negated else tuple(ranges)
        if not found:
            self._refuse(token.at, f"the class {token.text} leaves no character")
        return Class(found)

    def _characters(self, token: _Token, inner: str, skipped: int) -> Iterator[tuple[str, bool]]:
        """Those meant, and whether each is written as an escape. skipped: of the token, before `inner`."""
        for found in _CHARACTER.finditer(inner):
            two, four, eight, letter, unknown, plain = found.groups()
            at = token.at + skipped + found.start()
            if unknown is not None:
                self._refuse(at, f"{found[0]} is no escape of GBNF")
            code = int(two or four or eight or "0", 16)
            if code > LAST_CHARACTER or 0xD800 <= code < 0xE000:
                self._refuse(at, f"{found[0]} is no character")
            yield (plain or _LETTERS.get(letter, letter) or chr(code)), plain is None

    def _split(self) -> Iterator[_Token]:
        at = 0
        while at < len(self._source):
            found = _TOKEN.match(self._source, at)
            if found is None or found.lastgroup is None:
                self._refuse(at, f"{self._source[at]!r} is not expected, or is not ended")
            if found.lastgroup != "blank":
                yield _Token(found.lastgroup, found[0], at)
            at = found.end()
        yield _Token("end", "", at)

    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _skip_newlines(self) -> None:
        while self._token().kind == "newline":
            self._next += 1

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


def _others(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """What is left of all characters."""
    found, begin = [], 0
    for first, last in sorted(ranges):
        if begin < first:
            found.append((begin, first - 1))
        begin = max(begin, last + 1)
    return (*found, (begin, LAST_CHARACTER)) if begin <= LAST_CHARACTER else tuple(found)

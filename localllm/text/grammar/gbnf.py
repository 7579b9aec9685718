"""Read GBNF, the grammars of llama.cpp, and write it as llguidance's Lark.

llguidance reads a text as a lexer does, by the longest lexeme, and never goes back: a lexeme that could go on where
something else could follow would swallow that, and the answer would never end. So a grammar that does not lead back to
itself becomes one lexeme, one regular expression; in another, a part becomes one where no character behind a whole
text of it makes a longer one, as behind a quoted string. The rest is taken apart, into characters if need be: of
152,000 tokens a mask costs 5 ms where any text is taken character for character, 0.01 inside of a lexeme.

Its own converter (gbnf_to_lark) is not used: its lexemes take what has to follow them, it reads classes as Rust does
and its errors have no column.

Source of the syntax: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import ClassVar, NamedTuple, NoReturn

from localllm.errors import GrammarError
from localllm.text.grammar.termination import grounded

_START = "root"
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
_SIGN_OF = {times: sign for sign, times in _SIGNS.items()}
_MOST_DIGITS = 9
_NUM_CHARACTERS = 128  # that are told apart; all others count as one


@dataclass(frozen=True)
class Leaf:
    """A text or a class of characters. lark: how it is written. sets: the characters at each place, as bits."""

    lark: str
    sets: tuple[int, ...]
    parts: ClassVar[tuple[Node, ...]] = ()


@dataclass(frozen=True)
class Reference:
    name: str
    parts: ClassVar[tuple[Node, ...]] = ()


@dataclass(frozen=True)
class Chain:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeated:
    """One part, from `least` to `most` times; None for any number."""

    parts: tuple[Node]
    least: int
    most: int | None


Node = Leaf | Reference | Chain | Choice | Repeated
Rules = dict[str, Node]


def character_bits(first: int, last: int) -> int:
    """Return the set of the characters from one code point to another."""
    return (2 << min(last, _NUM_CHARACTERS)) - (1 << min(first, _NUM_CHARACTERS))


_EMPTY = Leaf('""', ())


def is_gbnf(source: str) -> bool:
    """Tell GBNF from Lark, which has no `::=` behind a name."""
    return _RULE.search(source.removeprefix("\ufeff")) is not None


def as_lark(source: str) -> str:
    """Raises GrammarError with the line and column of what is not GBNF, for rules that are missing or never end."""
    rules = _reachable(_Reader(source).rules())
    writer = _Writer(rules)
    ending = grounded({id(node): _needs(node, rules) for node in _with_parts(rules.values())})
    if endless := [name for name, node in rules.items() if id(node) not in ending]:
        why = f"what meets the rule {endless[-1]!r} has to hold itself, without end"
        raise GrammarError("the grammar never ends", why=why, fix="give the rule an alternative that does without it")
    return writer.lark()


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
                self._refuse(at, f"{found[0]} is not an escape of GBNF")
            code = int(two or four or eight or "0", 16)
            if code > _LAST_CHARACTER or 0xD800 <= code < 0xE000:
                self._refuse(at, f"{found[0]} is not a character")
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


def _needs(node: Node, rules: Rules) -> list[list[int]]:
    """Return the ways to meet a node: what has to end for each."""
    match node:
        case Reference(name):
            return [[id(rules[name])]]
        case Choice(parts):
            return [[id(part)] for part in parts]
        case Repeated(_, 0):
            return [[]]
    return [list(map(id, node.parts))]


class _Facts(NamedTuple):
    """The facts about the texts of a node, with sets of characters.

    is_nullable: one of them is empty.
    first: begins one.
    longer: may follow a whole one and make another one of it.
    any: stands in one.
    """

    is_nullable: bool = True
    first: int = 0
    longer: int = 0
    any: int = 0


def _chosen(found: list[_Facts]) -> _Facts:
    is_nullable = any(each.is_nullable for each in found)
    first, longer, any_ = (reduce(or_, sets) for sets in list(zip(*found, strict=True))[1:])
    seen = 0
    for each in found:
        if seen & each.first:  # one may be the beginning of another
            longer |= any_
        seen |= each.first
    return _Facts(is_nullable, first, longer | (first if is_nullable else 0), any_)


def _chained(one: _Facts, other: _Facts) -> _Facts:
    any_ = one.any | other.any
    longer = other.longer | (one.longer | other.first if other.is_nullable else 0)
    if one.longer & other.first:  # where the first one ends is open
        longer |= any_
    first = one.first | (other.first if one.is_nullable else 0)
    return _Facts(one.is_nullable and other.is_nullable, first, longer, any_)


def _repeated(one: _Facts, least: int, most: int | None) -> _Facts:
    longer = one.longer | (one.first if least != most else 0)
    if one.longer & one.first and most != 1:
        longer |= one.any
    return _Facts(one.is_nullable or not least, one.first, longer, one.any)


class _Writer:
    """Writes rules as r0, r1 and so on, or as lexemes T0, T1; their parts as p1 or L1.

    Nothing stands in parentheses: the library takes some twenty in each other.
    """

    def __init__(self, rules: Rules) -> None:
        """rules: each behind those that it holds unless they lead back to it."""
        self._rules = rules
        self._index = {name: index for index, name in enumerate(rules)}
        self._facts: dict[int, _Facts | None] = {}
        self._of_rule: dict[str, _Facts | None] = {}
        for name, node in rules.items():
            self._of_rule[name] = self._found(node)
        self._lines: list[str] = []
        self._named: set[str] = set()
        self._wanted: list[tuple[str, str]] = []  # (name in Lark, rule)
        self._num_parts = 0

    def lark(self) -> str:
        is_plain = self._of_rule[_START] is not None  # it does not lead to a rule that leads to itself
        self._lines = ["%llguidance {}", f"start: {self._part(Reference(_START), is_plain)}"]
        while self._wanted:
            name, rule = self._wanted.pop()
            self._lines.append(f"{name}: {self._whole(self._rules[rule], name[0] == 'T')}")
        return "\n".join([*self._lines, ""])

    def _whole(self, node: Node, in_lexeme: bool) -> str:
        parts = [self._part(part, in_lexeme) for part in node.parts]
        match node:
            case Chain():
                return " ".join(parts)
            case Choice():
                return " | ".join(parts)
            case Repeated(_, least, most):
                return parts[0] + (_SIGN_OF.get((least, most)) or f"{{{least},{'' if most is None else most}}}")
        return self._part(node, in_lexeme)

    def _part(self, node: Node, in_lexeme: bool) -> str:
        """Return the name of a node, which is written or will be, or a text or class itself."""
        facts = self._found(node)
        in_lexeme = in_lexeme or (facts is not None and not facts.longer)
        if isinstance(node, Leaf):
            return node.lark
        if isinstance(node, Reference):
            name = f"{'T' if in_lexeme else 'r'}{self._index[node.name]}"
            if name not in self._named:
                self._named.add(name)
                self._wanted.append((name, node.name))
            return name
        self._num_parts += 1
        name = f"{'L' if in_lexeme else 'p'}{self._num_parts}"
        self._lines.append(f"{name}: {self._whole(node, in_lexeme)}")
        return name

    def _found(self, node: Node) -> _Facts | None:
        """Return the facts of a node; None where it holds a rule that leads to itself."""
        if id(node) not in self._facts:
            self._facts[id(node)] = self._looked(node)
        return self._facts[id(node)]

    def _looked(self, node: Node) -> _Facts | None:
        if isinstance(node, Leaf):
            return _Facts(not node.sets, node.sets[0] if node.sets else 0, 0, reduce(or_, node.sets, 0))
        if isinstance(node, Reference):
            return self._of_rule.get(node.name)
        parts = [facts for part in node.parts if (facts := self._found(part)) is not None]
        if len(parts) < len(node.parts):
            return None
        if isinstance(node, Repeated):
            return _repeated(parts[0], node.least, node.most)
        return _chosen(parts) if isinstance(node, Choice) else reduce(_chained, parts, _Facts())


def _reachable(rules: Rules) -> Rules:
    """Return the rules that the first one leads to, each behind those that it holds unless they lead back to it."""
    found, seen, rest = dict[str, Node](), set[str](), [(_START, False)]
    while rest:
        name, is_done = rest.pop()
        if is_done:
            found[name] = rules[name]
        elif name not in seen:
            seen.add(name)
            rest.append((name, True))
            rest += ((part.name, False) for part in _with_parts([rules[name]]) if isinstance(part, Reference))
    return found


def _with_parts(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield nodes and all that they are made of."""
    rest = list(nodes)
    while rest:
        node = rest.pop()
        rest += node.parts
        yield node

"""Write a context-free grammar of characters as llguidance's Lark, and decide which parts of it become lexemes.

llguidance reads a text as a lexer does, by the longest lexeme, and never goes back: a lexeme that could go on where
something else could follow would swallow that, and the answer would never end. So a grammar that does not lead back to
itself becomes one lexeme, one regular expression; in another, a part becomes one where no character behind a whole
text of it makes a longer one, as behind a quoted string. The rest is taken apart, into characters if need be: of
152,000 tokens a mask costs 5 ms where any text is taken character for character, 0.01 inside of a lexeme.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import ClassVar, NamedTuple

from localllm.errors import GrammarError
from localllm.text.grammar.termination import grounded

_NUM_CHARACTERS = 128  # that are told apart; all others count as one
_SIGNS = {(0, None): "*", (1, None): "+", (0, 1): "?"}


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


def as_lark(rules: Rules, start: str) -> str:
    """Write a grammar in which every reference has its rule.

    Raises GrammarError for a rule that has to hold itself, and for a grammar that is too large to be looked through.
    """
    rules = _reachable(rules, start)
    writer = _Writer(rules)
    nodes = list(_with_parts(rules.values()))
    ending = grounded({id(node): _needs(node, rules) for node in nodes})
    if endless := [name for name, node in rules.items() if id(node) not in ending]:
        why = f"what meets the rule {endless[-1]!r} has to hold itself, without end"
        raise GrammarError("the grammar never ends", why=why, fix="give the rule an alternative that does without it")
    return writer.lark(start)


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

    def is_plain(self, name: str) -> bool:
        """Tell if a rule does not lead to one that leads to itself."""
        return self._of_rule[name] is not None

    def lark(self, start: str) -> str:
        self._lines = ["%llguidance {}", f"start: {self._part(Reference(start), self.is_plain(start))}"]
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
                return parts[0] + (_SIGNS.get((least, most)) or f"{{{least},{'' if most is None else most}}}")
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


def _reachable(rules: Rules, start: str) -> Rules:
    """Return the rules that `start` leads to, each behind those that it holds unless they lead back to it."""
    found, seen, rest = dict[str, Node](), set[str](), [(start, False)]
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

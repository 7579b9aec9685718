"""A context-free grammar of characters, written as llguidance's Lark: which parts of it become lexemes.

llguidance reads a text as a lexer does, by the longest lexeme, and never goes back: one that could go on where
something else could follow would swallow that, and the answer would never end. So a part becomes a lexeme, one regular
expression, where no character that may follow could lengthen it. What is left is taken apart, into characters if need
be: of 152,000 tokens a mask costs 5 ms where any text is taken character for character, 0.01 inside of a lexeme.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from localllm.errors import GrammarError
from localllm.text.grammar.circles import holding_themselves

LAST_CHARACTER = 0x10FFFF
_MOST_LOOKS = 50_000  # at a rule, until all is known of what may follow what
_SIGNS = {(0, None): "*", (1, None): "+", (0, 1): "?"}


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Class:
    """One character. ranges: first and last code points."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Reference:
    """at: where it stands in what was read."""

    name: str
    at: int


@dataclass(frozen=True)
class Chain:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeated:
    """most: None for any number."""

    part: Node
    least: int
    most: int | None


Node = Text | Class | Reference | Chain | Choice | Repeated
Rules = Mapping[str, Node]


def as_lark(rules: Rules, start: str) -> str:
    """Every reference has its rule. Raises GrammarError for a rule that has to hold itself, and for a grammar that is
    too large to be looked through."""
    rules = _reachable(rules, start)
    if (name := next(iter(rules.keys() - _ending(rules)), None)) is not None:
        why = f"what meets the rule {name!r} has to hold itself, without end"
        raise GrammarError("the grammar never ends", why=why, fix="give the rule an alternative that does without it")
    return _Writer(rules).lark(start)


def references(node: Node) -> Iterator[Reference]:
    """All that stand in it."""
    rest = [node]
    while rest:
        part = rest.pop()
        if isinstance(part, Reference):
            yield part
        rest += _parts(part)


@dataclass(frozen=True)
class _Facts:
    """Sets of characters, a bit for each range that the grammar tells apart. first: with which it may begin; longer:
    that may follow a whole one and lengthen it; any: that it may have."""

    is_nullable: bool = False
    first: int = 0
    longer: int = 0
    any: int = 0


class _Language:
    """What is known of the rules of a grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._borders = _borders(rules)
        self._of_rule = dict.fromkeys(rules, _Facts())
        self.follow = dict.fromkeys(rules, 0)  # characters that may stand behind each
        self._num_looks = 0
        holders = _holders(rules)
        self._settle(lambda name: holders[name] if self._looked(name) else ())
        self._settle(lambda name: self._passed_on(rules[name], self.follow[name]))

    def facts(self, node: Node) -> _Facts:
        match node:
            case Text(text):
                used = [self._bits(ord(each), ord(each)) for each in text]
                return _Facts(not text, used[0] if used else 0, 0, _union(used))
            case Class(ranges):
                bits = _union(self._bits(first, last) for first, last in ranges)
                return _Facts(False, bits, 0, bits)
            case Reference(name):
                return self._of_rule[name]
            case Choice(parts):
                return self._of_choice([self.facts(each) for each in parts])
            case Chain(parts):
                found = _Facts(is_nullable=True)
                for each in parts:
                    found = _chained(found, self.facts(each))
                return found
            case Repeated(part, least, most):
                return _repeated(self.facts(part), least, most)

    @staticmethod
    def _of_choice(found: list[_Facts]) -> _Facts:
        first, any_ = _union(each.first for each in found), _union(each.any for each in found)
        longer, seen = _union(each.longer for each in found), 0
        is_nullable = any(each.is_nullable for each in found)
        for each in found:
            if seen & each.first:  # one may be the beginning of another
                longer |= any_
            seen |= each.first
        return _Facts(is_nullable, first, longer | (first if is_nullable else 0), any_)

    def _settle(self, look: Callable[[str], Iterable[str]]) -> None:
        """Looks at all rules, and again at those of which it says that they may have changed."""
        rest = list(self._rules)
        waiting = set(rest)
        while rest:
            name = rest.pop()
            waiting.discard(name)
            self._num_looks += 1
            if self._num_looks > _MOST_LOOKS:
                why = f"what may follow what of its {len(self._rules)} rules is not found out in {_MOST_LOOKS} steps"
                raise GrammarError("the grammar explodes", why=why, fix="make it simpler")
            changed = [each for each in look(name) if each not in waiting]
            waiting.update(changed)
            rest += changed

    def _looked(self, name: str) -> bool:
        before, self._of_rule[name] = self._of_rule[name], self.facts(self._rules[name])
        return before != self._of_rule[name]

    def _passed_on(self, node: Node, after: int) -> list[str]:
        """Rules of which more is known to follow, where `after` may follow the node."""
        match node:
            case Reference(name):
                before = self.follow[name]
                self.follow[name] |= after
                return [name] if self.follow[name] != before else []
            case Choice(parts) | Chain(parts):
                afters = self.afters(node, after)
                return [name for part, each in zip(parts, afters, strict=True) for name in self._passed_on(part, each)]
            case Repeated(part):
                return self._passed_on(part, self.afters(node, after)[0])
        return []

    def afters(self, node: Node, after: int) -> list[int]:
        """What may follow each of its parts, where `after` may follow all of it."""
        match node:
            case Chain(parts):
                found = []
                for part in reversed(parts):
                    found.append(after)
                    facts = self.facts(part)
                    after = facts.first | (after if facts.is_nullable else 0)
                return found[::-1]
            case Repeated(part, _, most):
                return [after | (self.facts(part).first if most != 1 else 0)]
            case Choice(parts):
                return [after] * len(parts)
        return []

    def _bits(self, first: int, last: int) -> int:
        return (1 << bisect_left(self._borders, last + 1)) - (1 << bisect_left(self._borders, first))


def _chained(one: _Facts, other: _Facts) -> _Facts:
    any_ = one.any | other.any
    longer = other.longer | (one.longer | other.first if other.is_nullable else 0)
    if one.longer & other.first:  # where the one ends is open
        longer |= any_
    first = one.first | (other.first if one.is_nullable else 0)
    return _Facts(one.is_nullable and other.is_nullable, first, longer, any_)


def _repeated(one: _Facts, least: int, most: int | None) -> _Facts:
    longer = one.longer | (one.first if least != most else 0)
    if one.longer & one.first and most != 1:
        longer |= one.any
    return _Facts(one.is_nullable or not least, one.first, longer, one.any)


class _Writer:
    """Rules are r0, r1 and so on, the same as lexemes T0, T1; parts p1, p2 of rules, L1, L2 of lexemes. Nothing stands
    in parentheses: the library takes some twenty in each other."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._index = {name: index for index, name in enumerate(rules)}
        self._recursive = holding_themselves({name: _held(node) for name, node in rules.items()})
        self._language = _Language(rules) if self._recursive else None
        self._lines: list[str] = []
        self._named: set[str] = set()
        self._wanted: list[tuple[str, str]] = []  # under which name, which rule
        self._num_parts = 0

    def lark(self, start: str) -> str:
        self._lines = ["%llguidance {}", f"start: {self._in_rule(Reference(start, 0), 0)}"]
        while self._wanted:
            name, rule = self._wanted.pop()
            node, follow = self._rules[rule], self._language.follow[rule] if self._language else 0
            self._lines.append(f"{name}: {self._lexeme(node) if name[0] == 'T' else self._rule(node, follow)}")
        return "\n".join([*self._lines, ""])

    def _rule(self, node: Node, after: int) -> str:
        """What a rule is made of, where `after` may follow."""
        if not _parts(node) or self._is_lexeme(node, after):
            return self._in_rule(node, after)
        assert self._language is not None
        afters = self._language.afters(node, after)
        return _joined(node, [self._in_rule(part, each) for part, each in zip(_parts(node), afters, strict=True)])

    def _in_rule(self, node: Node, after: int) -> str:
        if self._is_lexeme(node, after):
            return self._in_lexeme(node)
        return self._name("r", node.name) if isinstance(node, Reference) else self._part("p", self._rule(node, after))

    def _is_lexeme(self, node: Node, after: int) -> bool:
        if not self._recursive.isdisjoint(_held(node)):
            return False
        return self._language is None or not self._language.facts(node).longer & after

    def _lexeme(self, node: Node) -> str:
        """What a lexeme is made of: lexemes alone."""
        match node:
            case Text(text):
                return json.dumps(text)
            case Class(ranges):
                numbers = (rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)
                return f"/[{''.join(numbers)}]/"
            case Reference(name):
                return self._name("T", name)
        return _joined(node, list(map(self._in_lexeme, _parts(node))))

    def _in_lexeme(self, node: Node) -> str:
        return self._part("L", self._lexeme(node)) if _parts(node) else self._lexeme(node)

    def _part(self, kind: str, text: str) -> str:
        self._num_parts += 1
        self._lines.append(f"{kind}{self._num_parts}: {text}")
        return f"{kind}{self._num_parts}"

    def _name(self, kind: str, rule: str) -> str:
        """Of a rule that will be written."""
        name = f"{kind}{self._index[rule]}"
        if name not in self._named:
            self._named.add(name)
            self._wanted.append((name, rule))
        return name


def _parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Chain | Choice):
        return node.parts
    return (node.part,) if isinstance(node, Repeated) else ()


def _joined(node: Node, parts: list[str]) -> str:
    if isinstance(node, Repeated):
        most = "" if node.most is None else node.most
        return f"{parts[0]}{_SIGNS.get((node.least, node.most)) or f'{{{node.least},{most}}}'}"
    return (" | " if isinstance(node, Choice) else " ").join(parts)


def _borders(rules: Rules) -> list[int]:
    """Where ranges of characters begin, and behind where they end."""
    borders = {0}
    rest = list(rules.values())
    while rest:
        node = rest.pop()
        if isinstance(node, Text):
            borders.update(border for each in node.text for border in (ord(each), ord(each) + 1))
        elif isinstance(node, Class):
            borders.update(border for first, last in node.ranges for border in (first, last + 1))
        rest += _parts(node)
    return sorted(borders)


def _held(node: Node) -> set[str]:
    """Rules that are referred to in it."""
    return {each.name for each in references(node)}


def _holders(rules: Rules) -> dict[str, list[str]]:
    """Rules in which each is referred to."""
    holders: dict[str, list[str]] = {name: [] for name in rules}
    for name, node in rules.items():
        for each in _held(node):
            holders[each].append(name)
    return holders


def _reachable(rules: Rules, start: str) -> Rules:
    found, rest = dict[str, Node](), [start]
    while rest:
        name = rest.pop()
        if name not in found:
            found[name] = rules[name]
            rest += _held(rules[name])
    return found


def _ending(rules: Rules) -> set[str]:
    """Rules that some text meets."""
    holders, found, rest = _holders(rules), set[str](), list(rules)
    while rest:
        name = rest.pop()
        if name not in found and _ends(rules[name], found):
            found.add(name)
            rest += holders[name]
    return found


def _ends(node: Node, ending: set[str]) -> bool:
    match node:
        case Reference(name):
            return name in ending
        case Chain(parts):
            return all(_ends(part, ending) for part in parts)
        case Choice(parts):
            return any(_ends(part, ending) for part in parts)
        case Repeated(part, least):
            return not least or _ends(part, ending)
    return True


def _union(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found

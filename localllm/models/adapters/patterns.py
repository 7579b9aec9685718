"""PEFT's patterns of module names: a name, the end of one, or a regular expression for it.

The expressions are a stranger's, and Python's `re` can take years for one. They are matched here by following all ways
at once (Thompson, "Regular expression search algorithm", 1968), which takes one pass over the expression.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from localllm.errors import AdapterError, show

V = TypeVar("V")

_PLAIN = re.compile(r"[\w.]+")
# A character or a class of them, perhaps repeated; or a sign.
_TOKEN = re.compile(r"(\\[.\-_dDwW]|\[\^?[\w.\-]+\]|[\w.\-])([*+?]?)|(\((?:\?:)?|[)|^$])")
_MOST_EXPRESSIONS, _MOST_CHARACTERS, _DEEPEST = 64, 512, 8


class NamePatterns(Generic[V]):
    """Values by patterns, the first of which counts, as in PEFT: one matches a module's name from its beginning, or
    from behind a dot, to its end."""

    def __init__(self, patterns: Mapping[str, V], source: str) -> None:
        """source: names the file and the key in errors. Raises AdapterError."""
        self._values = list(patterns.values())
        plain = [(number, key) for number, key in enumerate(patterns) if _PLAIN.fullmatch(key)]
        self._plain = {key: number for number, key in plain}
        others = [(number, key) for number, key in enumerate(patterns) if key not in self._plain]
        if len(others) > _MOST_EXPRESSIONS:
            why = f"{len(others)} regular expressions; at most {_MOST_EXPRESSIONS} are read"
            raise AdapterError(f"{source} is too long", why=why, fix="choose another adapter")
        self._expressions = [(number, _parsed(key, source)) for number, key in others]

    def value(self, name: str) -> V | None:
        """Return the value of the first pattern that matches; None where none does."""
        begins = [0, *(dot.end() for dot in re.finditer(r"\.", name))]
        found = [self._plain[name[begin:]] for begin in begins if name[begin:] in self._plain]
        positions = sum(1 << begin for begin in begins)
        for number, expression in self._expressions:
            if _ends(expression, name, positions) >> len(name) & 1:
                found.append(number)
                break
        return self._values[min(found)] if found else None


class _Character(NamedTuple):
    kind: re.Pattern[str]
    repeat: str  # "", "*", "+" or "?"


_Alternatives = list[list["_Character | str | _Alternatives"]]  # texts: "^" and "$"


def _parsed(key: str, source: str) -> _Alternatives:
    """Raises AdapterError for what is none of characters, classes, repeats of these, and groups of alternatives."""
    tokens = list(_TOKEN.finditer(key))
    root: _Alternatives = [[]]
    open_groups = [root]
    is_known = len(key) <= _MOST_CHARACTERS and "".join(token[0] for token in tokens) == key
    for token in tokens if is_known else ():
        character, repeat, sign = token.groups()
        if character is not None:
            try:
                open_groups[-1][-1].append(_Character(re.compile(character), repeat))
            except re.error:  # a class from z to a
                is_known = False
        elif sign == "|":
            open_groups[-1].append([])
        elif sign in "^$":
            open_groups[-1][-1].append(sign)
        elif sign == ")":
            open_groups.pop()
        else:
            group: _Alternatives = [[]]
            open_groups[-1][-1].append(group)
            open_groups.append(group)
        if not 1 <= len(open_groups) <= _DEEPEST:
            break
    if is_known and len(open_groups) == 1 and open_groups[0] is root:
        return root
    why = f"{show(key)} is none of letters, classes, repeats of one of these, and alternatives"
    raise AdapterError(f"{source} has a regular expression that is not read", why=why, fix="choose another adapter")


def _ends(alternatives: _Alternatives, name: str, begins: int) -> int:
    """Return where matches end that begin at one of these places of a name: the bits of a number."""
    ends = 0
    for sequence in alternatives:
        places = begins
        for item in sequence:
            if not places:
                break
            if isinstance(item, _Character):
                places = _behind(item, name, places)
            elif isinstance(item, str):
                places &= 1 if item == "^" else 1 << len(name)
            else:
                places = _ends(item, name, places)
        ends |= places
    return ends


def _behind(item: _Character, name: str, places: int) -> int:
    fitting = sum(1 << place for place, letter in enumerate(name) if item.kind.fullmatch(letter))
    once = (places & fitting) << 1
    if item.repeat == "?":
        return places | once
    if not item.repeat:
        return once
    reached, found = once, 0
    while reached & ~found:
        found |= reached
        reached = (found & fitting) << 1
    return found | places if item.repeat == "*" else found

"""PEFT's patterns of module names: a name, the end of one, or a regular expression for it.

The expressions are a stranger's: only those are taken whose search cannot take long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

from localllm.errors import AdapterError, show

V = TypeVar("V")

_PLAIN = re.compile(r"[\w.]+")
# Letters, classes of them and groups of alternatives; what repeats is one character.
_SAFE = re.compile(r"(?:(?:\\[.\-_dDwW]|\[\^?[\w.\-]+\]|[\w.\-])[*+?]?|\((?:\?:)?|[)|^$])*")
_MOST_REPEATS, _MOST_EXPRESSIONS, _MOST_CHARACTERS = 3, 64, 512


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
        self._expressions = [(number, _compiled(key, source)) for number, key in others]

    def value(self, name: str) -> V | None:
        """Return the value of the first pattern that matches; None where none does."""
        begins = [0, *(dot.end() for dot in re.finditer(r"\.", name))]
        found = [self._plain[name[begin:]] for begin in begins if name[begin:] in self._plain]
        for number, expression in self._expressions:
            if any(expression.fullmatch(name, begin) for begin in begins):
                found.append(number)
                break
        return self._values[min(found)] if found else None


def _compiled(key: str, source: str) -> re.Pattern[str]:
    repeats = key.count("*") + key.count("+")
    if len(key) <= _MOST_CHARACTERS and repeats <= _MOST_REPEATS and _SAFE.fullmatch(key):
        try:
            return re.compile(key)
        except re.error:
            pass
    why = f"{show(key)} is none of letters, classes and alternatives with at most {_MOST_REPEATS} repeats"
    raise AdapterError(f"{source} has a regular expression that is not read", why=why, fix="choose another adapter")

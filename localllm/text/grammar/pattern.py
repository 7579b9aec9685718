"""Find what Rust reads otherwise, or quietly leaves out, in the regular expressions of a JSON Schema (JavaScript's)."""

from __future__ import annotations

import re

# Inside a class these mean something else to Rust than to JavaScript.
_CLASS_OPERATOR = re.compile(r"&&|--|~~|\[")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\}|(.))", re.DOTALL
)
# A class that is not ended goes to the end: else every bracket would be looked at from there to the end.
_CLASS = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])*)(?:\]|\\?\Z)", re.DOTALL)
# Escapes and classes, which only look like one of these, are matched first.
_BACKTRACKING = re.compile(
    r"(?P<word>\\[bB])|\\[^1-9k]|\[(?:\\.|[^\]\\])*\]|(?P<look>\(\?<?[=!])|(?P<back>\\(?:[1-9]|k<))", re.DOTALL
)
_REFUSED = {"word": "asks where a word ends (\\b, \\B)", "look": "looks around", "back": "refers back to a group"}
_PARSE_ERROR = re.compile(r"regex parse error:\n {4}(.*)\n( *)\^+\nerror: (.*)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # that JSON writes as \u alone, and the last


def why_not(pattern: str) -> str:
    """Return why an answer cannot be held to a pattern; "" where it can, as far as its spelling tells."""
    for found in _CLASS.finditer(pattern):
        if found[2] and _CLASS_OPERATOR.search(_ESCAPE.sub("", found[2])):
            return "has an operator in a class: && -- ~~ or a second [ (write \\[)"
    kinds = {found.lastgroup for found in _BACKTRACKING.finditer(pattern)}
    for kind, why in _REFUSED.items():
        if kind in kinds:
            return why
    if has_control(_ESCAPE.sub(_meant, _CLASS.sub(_single, pattern))):
        return "wants a control character, which an answer cannot have"
    return ""


def parse_error(message: str) -> str | None:
    """Return the library's message about a pattern in one line; None where it is about something else."""
    found = _PARSE_ERROR.search(message)
    return found and f"{found[3]}, at character {len(found[2]) - 3} of {found[1][:80]}"


def has_control(text: str) -> bool:
    """Tell if a text has a character that an answer, which has no \\u in its strings, cannot have."""
    return _CONTROL.search(text) is not None


def has_surrogate(text: str) -> bool:
    """Tell if a text has half of a pair of surrogates, which is no character."""
    return _SURROGATE.search(text) is not None


def _single(found: re.Match[str]) -> str:
    """Return the character of a class of one, nothing for other classes, and what is no class as it is."""
    if found[2] is None:
        return found[0]
    is_single = not found[1] and (len(found[2]) == 1 or _ESCAPE.fullmatch(found[2]) is not None)
    return found[2] if is_single else ""


def _meant(found: re.Match[str]) -> str:
    """Return the character of an escape, where it is a control character; else a letter."""
    code = next((digits for digits in found.groups()[:4] if digits is not None), None)
    if code is None:
        return {"a": "\a", "v": "\v"}.get(found[5], "x")
    return chr(int(code, 16)) if int(code, 16) < 0x80 else "x"

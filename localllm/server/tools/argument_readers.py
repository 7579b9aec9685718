"""Readers of a call's arguments, which make JSON of them while they are being written.

Knows the notations' marks, no family of models, and no marks around a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal, NamedTuple, Protocol

from localllm.chat.tool_words import loaded

Schema = Mapping[str, Any]
TEXT = frozenset({"string"})  # the types of a text that is nothing else

_MOST_NAME = 256  # characters of an argument's name, or of a number
_MOST_BLANKS = 64  # between a mark and what shows whether it is one
_MOST_REFERENCES = 20
_SLICE = 2048  # characters that are looked at together: each step copies the rest of them
_BRACKETS = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_WORD = re.compile(r"[^\s{}\[\](),:=<'\"]+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{char: char for char in "\\\"'/"}}
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Read(NamedTuple):
    """The next part of a call's arguments.

    json: more of them
    rest: the text behind them, or from where it shows that they are none; None as long as they go on
    """

    json: str
    rest: str | None = None
    is_broken: bool = False


class ArgumentsReader(Protocol):
    """Reads the arguments of one call. However the text is cut, the parts add up to the same."""

    def feed(self, text: str) -> Read: ...


class ValueEnd:
    """Follows one object or list to its end, looking at each character once. What is not JSON ends somewhere, too."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Return the index behind the value's last character; None where it goes on."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._is_in_string else _BRACKETS).search(text, at)
            if found is None:
                return None
            at = found.end()
            match found[0]:
                case "\\":
                    self._is_escaped = True
                case '"':
                    self._is_in_string = not self._is_in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None


class JsonReader:
    def __init__(self) -> None:
        self._end = ValueEnd()

    def feed(self, text: str) -> Read:
        at = self._end.feed(text)
        return Read(text) if at is None else Read(text[:at], text[at:])


class _Reader:
    """Reads step by step what is not JSON. Only what may still be a part of a mark or of a word waits."""

    def __init__(self) -> None:
        self._pending = ""
        self._json: list[str] = []
        self._state: Literal["open", "ended", "broken"] = "open"

    def feed(self, text: str) -> Read:
        at = 0
        while at < len(text) and self._state == "open":
            self._pending += text[at : at + _SLICE]
            at += _SLICE
            while self._pending and self._state == "open" and self._step():
                pass
        found = "".join(self._json)
        self._json.clear()
        return Read(found, None if self._state == "open" else self._pending + text[at:], self._state == "broken")

    def _step(self) -> bool:
        """Take something off the pending text. Return False where more has to come."""
        raise NotImplementedError

    def _break(self) -> bool:
        self._state = "broken"
        return False


class TaggedReader(_Reader):
    """A value ends with its mark where another argument or the end follows: a text may have the mark in it."""

    def __init__(self, begins: str, middle: str, ends: str, last: str, schema: Schema) -> None:
        """As `TaggedNotation` has them."""
        super().__init__()
        self._begins, self._last, self._schema = begins, last, schema
        between = r"\s*".join(map(re.escape, re.split(r"\s+|(?<=>)(?=<)", middle.strip())))
        self._name = re.compile(rf'{re.escape(begins)}([^\n<>"]{{1,{_MOST_NAME}}}?){between}')
        self._ends = ends.strip()
        self._line = "\n" if ends.startswith("\n") else ""  # that the notation puts around a value
        self._is_in_value = self._is_at_start = False
        self._is_text = False
        self._value: list[str] = []  # of a text that is not a string, or may not be
        self._of_value: Schema = {}
        self._num_read = 0

    def _step(self) -> bool:
        return self._read_value() if self._is_in_value else self._read_name()

    def _read_name(self) -> bool:
        text = self._pending = self._pending.lstrip()
        begins, last = self._begins, self._last
        if text.startswith(last):
            self._json.append("}" if self._num_read else "{}")
            self._pending, self._state = text[len(last) :], "ended"
        elif (found := self._name.match(text)) is not None:
            properties = self._schema.get("properties")
            of_value = properties.get(found[1]) if isinstance(properties, Mapping) else None
            self._of_value = of_value if isinstance(of_value, Mapping) else {}
            self._is_text = types_of(self._of_value, self._schema) == TEXT
            before = ", " if self._num_read else "{"
            self._json.append(f"{before}{dumped(found[1])}: " + '"' * self._is_text)
            self._num_read += 1
            self._is_in_value, self._is_at_start = True, bool(self._line)
            self._pending = text[found.end() :]
            return True
        elif not (last.startswith(text) or begins.startswith(text)):
            may_be_name = text.startswith(begins) and len(text) < 2 * _MOST_NAME
            return False if may_be_name else self._break()
        return False

    def _read_value(self) -> bool:
        text = self._pending
        if self._is_at_start:
            self._is_at_start, self._pending = False, text.removeprefix("\n")
            return True
        marks = (self._begins, self._last)
        at = text.find(self._ends)
        while at >= 0:
            end = at + len(self._ends)
            behind = text[end : end + _MOST_BLANKS + max(map(len, marks))]
            next_mark = behind.lstrip()
            is_end = next_mark.startswith(marks)
            is_near = len(behind) - len(next_mark) <= _MOST_BLANKS
            if is_near and (is_end or any(mark.startswith(next_mark) for mark in marks)):
                said = text[:at].removesuffix(self._line)
                self._take(said)
                self._pending = text[end:] if is_end else text[len(said) :]
                if is_end:
                    self._end_value()
                return is_end
            at = text.find(self._ends, end)
        said = text[: len(text) - _held(text, self._ends, self._line + self._ends)]
        self._take(said)
        self._pending = text[len(said) :]
        return False

    def _take(self, text: str) -> None:
        if self._is_text:
            self._json.append(_escaped(text))
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        self._json.append('"' if self._is_text else dumped(typed("".join(self._value), self._of_value, self._schema)))
        self._value.clear()
        self._is_in_value = False


def typed(text: str, schema: Schema, root: Schema) -> Any:
    """Return a bare text as a value of its schema's type; one that fits none stays text."""
    types = types_of(schema, root)
    if types == TEXT:
        return text
    word = text.strip()
    value = _CONSTANTS[word] if word in _CONSTANTS else loaded(word)
    if value is None and word not in _CONSTANTS:
        value = _loaded_literal(word)
        if value is None:
            return text
    if types is None:
        return value
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    name = _TYPES.get(type(value), "null")
    return value if name in types or (name == "integer" and "number" in types) else text


def types_of(schema: object, root: Schema, *, depth: int = 0) -> frozenset[str] | None:
    """Return the names of the types that a schema takes; None for any."""
    if not isinstance(schema, Mapping) or depth > _MOST_REFERENCES:
        return None
    found: list[frozenset[str] | None] = []
    if isinstance(reference := schema.get("$ref"), str):
        found.append(types_of(referred(reference, root), root, depth=depth + 1))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found.append(frozenset(_TYPES.get(type(value), "null") for value in values))
    elif isinstance(named := schema.get("type"), str | list):
        found.append(frozenset([named] if isinstance(named, str) else map(str, named)))
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(several, list):
            ways = [types_of(each, root, depth=depth + 1) for each in several]
            found.append(None if None in ways else frozenset().union(*filter(None, ways)))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found.append(types_of(each, root, depth=depth + 1))
    known = [types for types in found if types is not None]
    if not known:
        return None
    met = frozenset.intersection(*known)
    return met | {"null"} if schema.get("nullable") is True else met


def referred(reference: str, root: Schema) -> object:
    """Return the part of a schema that a reference into it names."""
    found: object = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


class LiteralReader(_Reader):
    """Reads names and literals; of quotes, both that Python has and the notation's own."""

    def __init__(self, quote: str, opens: str = "[{") -> None:
        """opens: what may stand in front of all."""
        super().__init__()
        self._quotes = tuple(dict.fromkeys((quote, '"', "'")))
        self._opens = opens
        self._wants: Literal["all", "name", "equals", "value", "next"] = "all"
        self._closings: list[tuple[str, str]] = []  # each with the bracket that JSON has there
        self._quote = ""  # of the text that is being read
        self._comma = ""  # in front of what comes next

    def _step(self) -> bool:
        if self._quote:
            return self._read_raw() if len(self._quote) > 1 else self._read_quoted()
        text = self._pending = self._pending.lstrip()
        if not text:
            return False
        if self._wants == "all":
            return self._open(text) if text[0] in self._opens else self._break()
        closing, of_json = self._closings[-1]
        if text[0] == closing and self._wants != "equals" and (self._wants, of_json) != ("value", "}"):
            self._close(of_json)
        elif self._wants == "equals" and text[0] in ":=":
            self._json.append(": ")
            self._wants = "value"
        elif self._wants == "next" and text[0] == ",":
            self._comma, self._wants = ", ", "name" if of_json == "}" else "value"
        else:
            return self._read_item(text) if self._wants in ("name", "value") else self._break()
        self._pending = text[1:]
        return True

    def _read_item(self, text: str) -> bool:
        """Read a name, or a value."""
        for quote in self._quotes:
            if text.startswith(quote):
                self._say('"')
                self._quote, self._pending = quote, text[len(quote) :]
                return True
            if quote.startswith(text):
                return False
        if self._wants == "value" and text[0] in "{[(":
            return self._open(text)
        word = _WORD.match(text)
        if word is None or word.end() > _MOST_NAME:
            return self._break()
        if word.end() == len(text):
            return False
        said = dumped(word[0]) if self._wants == "name" else _constant(word[0])
        if said is None:
            return self._break()
        self._say(said)
        self._pending = text[word.end() :]
        self._behind_item()
        return True

    def _say(self, text: str) -> None:
        self._json.append(self._comma + text)
        self._comma = ""

    def _behind_item(self) -> None:
        self._wants = "equals" if self._wants == "name" else "next"

    def _open(self, text: str) -> bool:
        has_names = text[0] == "{" or (text[0] == "(" and not self._closings)
        self._say("{" if has_names else "[")
        self._closings.append(({"{": "}", "[": "]", "(": ")"}[text[0]], "}" if has_names else "]"))
        self._wants, self._pending = "name" if has_names else "value", text[1:]
        return True

    def _close(self, of_json: str) -> None:
        self._json.append(of_json)
        self._closings.pop()
        self._wants, self._comma = "next", ""
        if not self._closings:
            self._state = "ended"

    def _read_raw(self) -> bool:
        said, found, rest = self._pending.partition(self._quote)
        if not found:
            held = _held(said, self._quote)
            said, rest = said[: len(said) - held], said[len(said) - held :]
        self._json.append(_escaped(said))
        self._pending = rest
        if found:
            self._end_text()
        return bool(found)

    def _read_quoted(self) -> bool:
        text, quote = self._pending, self._quote
        if text[0] == quote:
            behind = text[1:].lstrip()
            if not behind and len(text) <= _MOST_BLANKS:
                return False
            # People's quotes within a text are not always escaped.
            if behind and behind[0] in (":=" if self._wants == "name" else ",)]}"):
                self._end_text()
            else:
                self._json.append(_escaped(quote))
            self._pending = text[1:]
        elif text[0] != "\\":
            end = min(at if (at := text.find(char)) >= 0 else len(text) for char in (quote, "\\"))
            self._json.append(_escaped(text[:end]))
            self._pending = text[end:]
        elif _BEGUN_ESCAPE.fullmatch(text) or (found := _ESCAPE.match(text)) is None:
            return False
        else:
            hexadecimal = found[1] or found[2]
            said = "" if hexadecimal else _ESCAPED.get(found[3], f"\\{found[3]}")
            self._json.append(f"\\u{hexadecimal:0>4}" if hexadecimal else _escaped(said))
            self._pending = text[found.end() :]
        return True

    def _end_text(self) -> None:
        self._json.append('"')
        self._quote = ""
        self._behind_item()


def _constant(word: str) -> str | None:
    """Return a number, true, false or null as JSON; None for another word."""
    if word in _CONSTANTS:
        return dumped(_CONSTANTS[word])
    if isinstance(loaded(word), int | float):
        return word
    try:
        number = float(word)
    except ValueError:
        return None
    return dumped(number) if isfinite(number) else None


def _loaded_literal(text: str) -> Any:
    """Return a list or an object that is written as Python has it; None for another text."""
    read = LiteralReader('"').feed(text)
    return loaded(read.json) if read.rest == "" and not read.is_broken else None


def _held(text: str, *marks: str) -> int:
    """Return how many characters at the end of a text may begin a mark."""
    found = 0
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while at >= 0 and not mark.startswith(text[at:]):
            at = text.find(mark[0], at + 1)
        found = max(found, len(text) - at if at >= 0 else 0)
    return found


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _escaped(text: str) -> str:
    return dumped(text)[1:-1]

"""JSON in text that arrives in pieces: where a value ends, and which calls it makes. Knows no marks around it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from pydantic_core import from_json

from localllm.chat.tool_words import arguments_of, loaded
from localllm.text.tokenizer import valid_unicode

NAME = r"[a-zA-Z0-9_.-]{1,128}"
_BRACKETS = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_ARGUMENTS = ("arguments", "parameters")

ToolCallText = tuple[str, str]  # name, arguments as JSON


class ValueEnd:
    """Follows one object or list to its end, looking at each character once. What is no JSON ends somewhere, too."""

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


def calls_of(text: str, names: Collection[str]) -> list[ToolCallText] | None:
    """Return the calls of an object {name, arguments}, or of a list of those; None for anything else."""
    value = loaded(text)
    found = [_call_of(each, names) for each in (value if isinstance(value, list) else [value])]
    return [call for call in found if call is not None] if found and None not in found else None


def partial_object(text: str) -> dict[str, Any]:
    """Return as much of an object as its text has, which may have been cut."""
    try:
        value = from_json(text, allow_partial=True, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _call_of(value: Any, names: Collection[str]) -> ToolCallText | None:
    """Return the call. Some models write the function as an object of its own, some the arguments as a text."""
    if not isinstance(value, dict):
        return None
    said: dict[str, Any] = value["function"] if isinstance(value.get("function"), dict) else value
    name = said.get("name")
    arguments = arguments_of(next((said[key] for key in _ARGUMENTS if key in said), None))
    if not (isinstance(name, str) and name in names and arguments is not None):
        return None
    return name, dumped(arguments)


def dumped(arguments: dict[str, Any]) -> str:
    """Return the JSON of what `loaded` returned."""
    return valid_unicode(json.dumps(arguments, ensure_ascii=False))

"""Check a JSON Schema (draft 2020-12) and prepare it for llguidance.

Every keyword that is taken is enforced; what cannot be enforced is refused by its name and place before anything runs.
What a keyword does is up to llguidance; which ones are passed on to it was decided by the test suite of the
specification, `tests/structured/test_suite.py`. Knows no tokenizer and no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any, NoReturn

from localllm.errors import GrammarError
from localllm.text.grammar.schema_parts import (
    ANNOTATIONS,
    BOUNDS,
    COUNTS,
    DEFINITIONS,
    NAMED,
    ONE,
    SEVERAL,
    SUPPORTED,
    TYPES,
    References,
    Steps,
    mapped,
    pointer,
)
from localllm.text.grammar.schema_rewrites import FORMATS, close, with_ends, with_pattern, without_format
from localllm.text.grammar.termination import endless

MAX_SOURCE = 256 << 10  # characters: a schema of 250 types has 60,000
MAX_NESTING = 100  # of JSON in JSON; llguidance reads 128, and wraps it in a few
MAX_SCHEMAS = 10_000
MAX_LEAST = 1_000_000  # characters, items or properties

_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/2019-09|draft/2020-12)/schema#?")
_NUM_REPORTED = 8  # of what is refused
_MOST_EXACT = 2**53  # llguidance computes with doubles: beyond it, and with more digits, it writes other numbers
_MOST_DIGITS = 15
_ENFORCED = SUPPORTED - {"nullable"} | {"$schema"}  # by which the library knows the draft

_OWN_PLACE = re.compile(r" while processing json-schema:///#/\$defs/_\S*")  # that `with_ends` has made
# What llguidance says of keywords that it cannot enforce as they stand.
_COMPLAINTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("oneOf constraints", ("oneOf",)),
    ("patternPropert", ("patternProperties",)),
    ("min/maxProperties", ("minProperties", "maxProperties")),
    ("multipleOf", ("multipleOf",)),
    ("too many digits", ("multipleOf",)),
    ("integer range", BOUNDS),
    ("number range", BOUNDS),
    ("regex", ("pattern", "patternProperties")),
    ("lookaround", ("pattern", "patternProperties")),
)
# Patterns: what Rust reads otherwise than JavaScript, or quietly leaves out.
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
_UNREAD = {"word": "asks where a word ends (\\b, \\B)", "look": "looks around", "back": "refers back to a group"}
_PARSE_ERROR = re.compile(r"regex parse error:\n {4}(.*)\n( *)\^+\nerror: (.*)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # that JSON writes as \u alone, and the last


def checked(source: str) -> CheckedSchema:
    """Raises GrammarError, naming keywords and where they stand, for a schema that an answer cannot be held to."""
    if len(source) > MAX_SOURCE:
        why = f"it has {len(source)} characters, and at most {MAX_SOURCE} are taken"
        raise GrammarError("the JSON Schema is too large", why=why, fix="leave out what the answer does not need")
    try:
        schema = json.loads(source, parse_constant=_refuse_constant)
        is_text = not has_surrogate(json.dumps(schema, ensure_ascii=False))
    except json.JSONDecodeError as error:
        why = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise GrammarError("the JSON Schema is not JSON", why=why) from None
    except RecursionError:
        raise _nested() from None
    except ValueError as error:  # a number of thousands of digits
        raise GrammarError("the JSON Schema has a number that cannot be read", why=str(error)) from None
    if not is_text:
        why = "a text of it has half of a pair of surrogates, which is not a character"
        raise GrammarError("the JSON Schema has what no answer can have", why=why)
    if not isinstance(schema, dict | bool):
        why = f"it is {_kind(schema)}, and must be an object"
        raise GrammarError("this is not a JSON Schema", why=why, fix='{"type": "object"} takes any object')
    if schema is False:
        raise GrammarError("no answer can meet the JSON Schema", why="the schema is false at #")
    return CheckedSchema({} if schema is True else schema)


class CheckedSchema:
    """A schema and the places of its keywords.

    schema: without annotations, with whole numbers as such, references as pointers, patterns for some formats, and
    objects closed that do not say otherwise.
    opened: the same before objects are closed.
    by_the_letter: open too, and without formats, which not every validator looks at: of `oneOf` no other may be met by
    that either. Both are None without `oneOf`.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self.places: dict[str, list[str]] = {}
        self._refused: list[str] = []
        self._num_schemas = 0
        self._references = References(schema)
        self._used = self._references.used()
        self._bounds: list[tuple[str, float, str]] = []  # (keyword, value, place)
        self._multiples: list[int] = []
        self._named: list[float] = []  # numbers of values
        walked: dict[str, Any] = self._walked(schema, (), 0)
        self._require_closed_zero()
        if self._refused:
            more = f", and {len(self._refused) - _NUM_REPORTED} more" if len(self._refused) > _NUM_REPORTED else ""
            raise GrammarError(
                "the JSON Schema has what an answer cannot be held to",
                why=f"{'; '.join(self._refused[:_NUM_REPORTED])}{more}",
                fix="write it otherwise, or check the answer for it; docs/using/structured.md has what is supported",
            )
        closed: dict[str, Any] = mapped(walked, with_pattern)
        if (place := endless(closed)) is not None:
            raise GrammarError(
                "the JSON Schema never ends",
                why=f"what meets {place} has to hold itself, without end",
                fix="let it end: a property that is not required, an array that may be empty, or anyOf with null",
            )
        has_one_of = "oneOf" in self.places
        others = [*self._named, *(value for _, value, _ in self._bounds)]
        self.opened = with_ends(closed, self._multiples, others) if has_one_of else None
        self.by_the_letter: dict[str, Any] | None = mapped(walked, without_format) if has_one_of else None
        close(closed)
        self.schema = with_ends(closed, self._multiples, others)

    def refuse(self, message: str) -> NoReturn:
        """Raise GrammarError with llguidance's message and the keyword that it is about."""
        why = parse_error(message) or _OWN_PLACE.sub("", " ".join(message.split()))[:300]
        if "Unsatisfiable" in message or "NoExtension" in message:
            raise GrammarError("no answer can meet the JSON Schema", why=why)
        if "too large" in message:
            raise GrammarError("the JSON Schema explodes", why=f"{why}: allOf of several anyOf is every pair of them")
        for words, keywords in _COMPLAINTS:
            places = [f"{each!r} at {place}" for each in keywords for place in self.places.get(each, ())]
            if words in message and places:
                raise GrammarError(
                    "the JSON Schema has what an answer cannot be held to",
                    why=f"{', '.join(places[:_NUM_REPORTED])}: {why}",
                    fix="write it otherwise, or leave it out and check the answer for it",
                )
        raise GrammarError("the JSON Schema cannot be used", why=why)

    def _walked(self, schema: Any, steps: Steps, nesting: int) -> Any:
        """Return a part of the schema normalised, and note what is wrong with it."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            why = f"it has more than {MAX_SCHEMAS} schemas"
            raise GrammarError("the JSON Schema is too large", why=why)
        if nesting > MAX_NESTING:
            raise _nested()
        if isinstance(schema, bool):
            return {} if schema else False
        if not isinstance(schema, dict):
            self._refuse(_place(steps), f"is {_kind(schema)}, and must be a schema")
            return schema
        least, required = schema.get("minProperties"), schema.get("required")
        if isinstance(least, int | float) and least - len(required if isinstance(required, list) else ()) > 1:
            # Names of the model's own may come twice in an answer, and a reader of the answer counts one.
            why = "is enforced where at most one property more than `required` has is wanted"
            self._refuse(_place((*steps, "minProperties")), why, "minProperties")
        walked = {key: self._keyword(key, value, steps, nesting) for key, value in schema.items()}
        found = {key: value for key, value in walked.items() if key in _ENFORCED}
        if found.get("format") not in FORMATS:
            found.pop("format", None)
        return _or_null(found) if schema.get("nullable") is True and not self._refused else found

    def _keyword(self, key: str, value: Any, steps: Steps, nesting: int) -> Any:
        at = _place((*steps, key))
        if key == "$schema" and not (isinstance(value, str) and _DRAFTS.fullmatch(value)):
            self._refuse(at, "names no draft of JSON Schema that is known", key)
        if key in ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):
            return value
        if key not in SUPPORTED:
            self._refuse(at, f"is not supported{_meant(key, SUPPORTED, ', but {} is')}", key)
            return value
        self.places.setdefault(key, []).append(at)
        if key == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                if why := why_not(pattern):
                    self._refuse(at, why, key)
        if key in DEFINITIONS and isinstance(value, dict):
            value = {name: each for name, each in value.items() if (*steps, key, name) in self._used}
        if key in NAMED and isinstance(value, dict):
            return {name: self._walked(each, (*steps, key, name), nesting + 2) for name, each in value.items()}
        if key in SEVERAL and isinstance(value, list):
            return [self._walked(each, (*steps, key, str(i)), nesting + 2) for i, each in enumerate(value)]
        if key in ONE:
            return self._walked(value, (*steps, key), nesting + 1)
        if key in NAMED or key in SEVERAL:
            self._refuse(at, f"is {_kind(value)}", key)
            return value
        if key in _KINDS and not isinstance(value, _KINDS[key]):
            self._refuse(at, f"is {_kind(value)}, and must be {_KIND_NAMES[_KINDS[key]]}", key)
            return value
        if key == "$ref":
            target = self._references.target(steps, value)
            if target is None:
                self._refuse(at, f"points at {value[:80]!r}, which is not a schema of this document", "$ref")
            return value if target is None else pointer(target)
        if key in (*COUNTS, "multipleOf") and isinstance(value, float) and value.is_integer():
            value = int(value)
        if why := _fault(key, value):
            self._refuse(at, why, key)
        elif key in BOUNDS:
            self._bounds.append((key, value, at))
        elif key == "multipleOf":
            self._multiples.append(value)
        elif key in ("enum", "const"):
            self._named += (part for part in _all_in(value) if isinstance(part, float))
        return value

    def _refuse(self, at: str, why: str, key: str = "") -> None:
        self._refused.append(f"{key!r} {why} ({at})" if key else f"{at} {why}")

    def _require_closed_zero(self) -> None:
        """Note an exclusive bound of 0 beside a bound nearer than 1.

        llguidance takes 0 for more than 0 where numbers end below 1, -0 for less where they begin above -1. Bounds
        meet in `allOf` and by `$ref`: all of the schema counts.
        """
        near = {(key.lower()[-7:], value > 0) for key, value, _ in self._bounds if 0 < abs(value) < 1}
        for key, value, at in self._bounds:
            if value == 0 and key == "exclusiveMinimum" and ("maximum", True) in near:
                self._refuse(at, "of 0 is not enforced beside a maximum below 1", key)
            if value == 0 and key == "exclusiveMaximum" and ("minimum", False) in near:
                self._refuse(at, "of 0 is not enforced beside a minimum above -1", key)


_KINDS: dict[str, type] = {"$ref": str, "pattern": str, "format": str, "enum": list, "nullable": bool}
_KIND_NAMES = {str: "a text", list: "a list", bool: "true or false"}


def _fault(key: str, value: Any) -> str:
    """Return what is wrong with the value of a keyword; "" for nothing."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in COUNTS:
        if not is_number or not isinstance(value, int) or not 0 <= value < 2**31:
            return "must be a whole number, 0 or more"
        is_long = key.startswith("min") and value > MAX_LEAST
        return f"is more than {MAX_LEAST}: no context has room for that" if is_long else ""
    if key in BOUNDS:
        return "" if is_number and abs(value) <= _MOST_EXACT else f"must be a number of at most {_MOST_EXACT}"
    match key:
        case "pattern":
            return why_not(value)
        case "multipleOf" if not is_number or not isinstance(value, int) or value <= 0:
            return "is enforced for whole numbers alone: of others, validators find quotients that differ"
        case "required" if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            return "must be a list of names"
        case "type":
            names = value if isinstance(value, list) else [value]
            for name in names:
                if not (isinstance(name, str) and name in TYPES):
                    return f"knows no {str(name)[:40]!r}{_meant(name, TYPES, ', but {}')}"
            return "" if names else "has no type in it"
        case "enum" | "const":
            parts = list(_all_in(value))
            if any(isinstance(part, str) and has_control(part) for part in parts):
                return "has a control character, which an answer cannot have"
            if not all(map(_is_exact, parts)):
                return f"has a number beyond {_MOST_EXACT}, or of more than {_MOST_DIGITS} digits"
    return ""


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Let null be an answer, too, as OpenAPI's `nullable` means it, whatever else a schema asks for."""
    outside = {key: value for key, value in schema.items() if key in ("$schema", *DEFINITIONS)}
    rest = {key: value for key, value in schema.items() if key not in outside}
    if not rest:
        return schema
    if not rest.keys().isdisjoint(("$ref", "allOf", "anyOf", "oneOf")):
        return {**outside, "anyOf": [rest, {"type": "null"}]}
    given = rest.get("type", [])
    types = {"type": list(dict.fromkeys([*([given] if isinstance(given, str) else given), "null"]))} if given else {}
    values = {"enum": [*rest["enum"], None]} if "enum" in rest else {}
    const = {"enum": [rest.pop("const"), None]} if "const" in rest and not values else {}
    return {**outside, **rest, **types, **values, **const}


def _place(steps: Steps) -> str:
    """Return a place for people: a name stands as it is."""
    return "/".join(("#", *steps))


def _meant(word: Any, known: Collection[str], pattern: str) -> str:
    """Return the nearest known word in `pattern`; "" where none is near."""
    near = get_close_matches(word, known, 1, 0.8) if isinstance(word, str) else []
    return pattern.format(repr(near[0])) if near else ""


def _all_in(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all that it holds, names of properties too."""
    rest = [value]
    while rest:
        part = rest.pop()
        yield part
        if isinstance(part, dict):
            rest += part.keys()
        if isinstance(part, list | dict):
            rest += part.values() if isinstance(part, dict) else part


def _is_exact(value: Any) -> bool:
    """Tell if a value is not a number that would be written as another."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    digits = repr(value).partition("e")[0].replace(".", "").strip("-0") if isinstance(value, float) else ""
    return abs(value) <= _MOST_EXACT and len(digits) <= _MOST_DIGITS


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _nested() -> GrammarError:
    return GrammarError("the JSON Schema is nested too deeply", why=f"at most {MAX_NESTING} levels are taken")


def _refuse_constant(name: str) -> NoReturn:
    raise GrammarError("the JSON Schema is not JSON", why=f"JSON has no {name}")


def why_not(pattern: str) -> str:
    """Return why an answer cannot be held to a pattern; "" where it can, as far as its spelling tells."""
    for found in _CLASS.finditer(pattern):
        if found[2] and _CLASS_OPERATOR.search(_ESCAPE.sub("", found[2])):
            return "has an operator in a class: && -- ~~ or a second [ (write \\[)"
    kinds = {found.lastgroup for found in _BACKTRACKING.finditer(pattern)}
    for kind, why in _UNREAD.items():
        if kind in kinds:
            return why
    if has_control(_ESCAPE.sub(_unescaped, _CLASS.sub(_single, pattern))):
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
    """Tell if a text has half of a pair of surrogates, which is not a character."""
    return _SURROGATE.search(text) is not None


def _single(found: re.Match[str]) -> str:
    """Return the character of a class of one, nothing for other classes, and what is not a class as it is."""
    if found[2] is None:
        return found[0]
    is_single = not found[1] and (len(found[2]) == 1 or _ESCAPE.fullmatch(found[2]) is not None)
    return found[2] if is_single else ""


def _unescaped(found: re.Match[str]) -> str:
    """Return the character of an escape, where it is a control character; else a letter."""
    code = next((digits for digits in found.groups()[:4] if digits is not None), None)
    if code is None:
        return {"a": "\a", "v": "\v"}.get(found[5], "x")
    return chr(int(code, 16)) if int(code, 16) < 0x80 else "x"

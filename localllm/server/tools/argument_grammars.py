"""The grammars of a call's arguments, in each notation, by the JSON Schema that the tool has for them.

JSON is llguidance's own. In the other notations objects have their properties in the order of the schema, and a text
is held to its length, its pattern and its values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from localllm.errors import GrammarError
from localllm.server.tools.argument_readers import TEXT, Schema, referred, types_of
from localllm.server.tools.lark import ANY, Lark, pattern, quoted
from localllm.server.tools.notations import LiteralNotation, Notation, TaggedNotation

# Arguments are written as the templates do, with nothing that a small model could get lost in.
OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
_DEFINITIONS = ("$defs", "definitions")
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$schema", *_DEFINITIONS}
_OF_TEXTS = {"type", "minLength", "maxLength", "pattern"}
_OF_NUMBERS = {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_LISTS = {"type", "items", "minItems", "maxItems"}
_ODD = {"$ref", "allOf", "not"}
_ANY_VALUE = {"type": ["array", "boolean", "null", "number", "object", "string"]}
_NAME = "/[^\\n<>\"'{}\\[\\](),:= ]{1,64}/"


def arguments_lark(lark: Lark, notation: Notation, name: str, schema: Schema, *, is_strict: bool) -> list[str]:
    """Return the rules of arguments; the first has the name, with which the others begin.

    schema: as `CheckedSchema` has it
    is_strict: what a notation cannot be held to is an error, and not left open
    Raises GrammarError.
    """
    match notation:
        case TaggedNotation():
            return _Tagged(lark, name, schema, notation, is_strict=is_strict).rules()
        case LiteralNotation():
            return _Literals(lark, name, schema, notation, is_strict=is_strict).rules()
    return [f"{name}: {json_lark(schema)}"]


def json_lark(schema: Schema) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": OPTIONS})


class _Rules:
    """Writes the rules of one tool's arguments."""

    def __init__(self, lark: Lark, name: str, root: Schema, *, is_strict: bool) -> None:
        self._lark = lark
        self._name = name
        self._root = root
        self._definitions = {key: root[key] for key in _DEFINITIONS if key in root}
        self._is_strict = is_strict
        self._lines: list[str] = []

    def _new(self, body: str, options: str = "", *, is_terminal: bool = False) -> str:
        """Add a rule, and return its name."""
        name = f"{self._name}_{len(self._lines)}"
        name = name.upper() if is_terminal else name
        self._lines.append(f"{name}{options}: {body}")
        return name

    def _json(self, schema: Schema) -> str:
        return self._new(json_lark({**schema, **self._definitions}))

    def _resolved(self, schema: object) -> Schema:
        """Return a schema, or the one that it refers to and no more."""
        for _ in range(100):
            if not isinstance(schema, Mapping):
                return {}
            if schema.keys() != {"$ref"}:
                return schema
            schema = referred(schema["$ref"], self._root)
        return {}

    def _properties(self, schema: Schema) -> tuple[dict[str, Any], frozenset[str], Schema | None]:
        """Return the properties of an object, which of them are required, and the schema of others; None for none.
        Raises GrammarError where the schema says more."""
        if odd := schema.keys() - _OF_OBJECTS:
            raise _unheld(sorted(odd))
        properties, required = dict(schema.get("properties", {})), frozenset(schema.get("required", ()))
        more = schema.get("additionalProperties", "properties" not in schema)
        if missing := required - properties.keys():
            properties |= dict.fromkeys(sorted(missing), {} if more is True else self._resolved(more))
        return properties, required, None if more is False else {} if more is True else more

    def _text(self, schema: Schema, ends: str) -> str:
        """Return the name of a rule for a bare text and what ends it."""
        keys = schema.keys() - {"enum", "const"}
        if self._is_strict and (odd := keys - _OF_TEXTS):
            raise _unheld(sorted(odd))
        limits = []
        if "minLength" in schema or "maxLength" in schema:
            limits.append(f"(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
        if "pattern" in schema:
            limits.append(_searched(schema["pattern"]))
        mark, line = ends.strip(), "\\n" * ends.startswith("\n")
        if self._lark.is_token(mark):
            said = " & ".join(f"/({limit}){line}/" for limit in limits or [ANY])
            text = self._new(f"{said} & ~/{ANY}{pattern(mark)}{ANY}/", is_terminal=True)
            return self._new(f"{text} {self._lark(ends.lstrip())}")
        if not limits:
            return self._new(f"/{ANY}/", f"[suffix={quoted(ends)}]")
        said = " & ".join(f"/({limit}){pattern(ends)}/" for limit in limits)
        text = self._new(f"{said} & ~/{ANY}{pattern(ends)}(.|\\n)+/", is_terminal=True)
        return self._new(text, "[lazy]")

    def _joined(self, items: Sequence[tuple[str, bool]], between: str) -> str:
        """Return the name of a rule for items, each with whether it has to be there, with something between two."""
        behind, first = self._new('""'), self._new('""')  # behind another item; behind none
        for said, is_required in reversed(items):
            ways = ["", ""] if is_required else [f" | {behind}", f" | {first}"]
            first = self._new(f"{said} {behind}{ways[1]}")
            behind = self._new(f"{between} {said} {behind}{ways[0]}")
        return first


class _Tagged(_Rules):
    def __init__(self, lark: Lark, name: str, root: Schema, tags: TaggedNotation, *, is_strict: bool) -> None:
        super().__init__(lark, name, root, is_strict=is_strict)
        self._tags = tags

    def rules(self) -> list[str]:
        properties, required, more = self._properties(self._resolved(self._root))
        said = []
        for key, schema in properties.items():
            if any(char in key for char in '\n<>"'):
                raise GrammarError(f"no call can name the argument {key[:80]!r}", why="the model's calls have tags")
            one = f"{self._lark(self._tags.begins + key + self._tags.middle)} {self._value(schema)}"
            said.append(one if key in required else f"({one})?")
        if more is not None:
            said.append(
                f"({self._lark(self._tags.begins)} {_NAME} {self._lark(self._tags.middle)} {self._value(more)})*"
            )
        return [f"{self._name}: {' '.join(said)} {self._lark(self._tags.last)}", *self._lines]

    def _value(self, schema: Schema) -> str:
        """Return a rule for the value of an argument and what ends it."""
        schema = self._resolved(schema)
        types = types_of(schema, self._root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None and (types is None or "string" in types):
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return f"({' | '.join(map(quoted, texts))}) {self._lark(self._tags.ends)}"
        if types == TEXT:
            return self._text(schema, self._tags.ends)
        if types is None or "string" in types:  # any text is one
            if self._is_strict and not self._is_free(schema):
                raise _unheld(sorted(schema))
            return self._text({}, self._tags.ends)
        return f"{self._json(schema)} {self._lark(self._tags.ends)}"

    def _is_free(self, schema: object) -> bool:
        """Tell if any text meets a schema."""
        schema = self._resolved(schema)
        ways = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        if ways:
            return any(map(self._is_free, ways))
        types = types_of(schema, self._root)
        return (types is None or "string" in types) and schema.keys().isdisjoint(
            {"minLength", "maxLength", "pattern", "format", "enum", "const", "not", "allOf"}
        )


class _Literals(_Rules):
    def __init__(self, lark: Lark, name: str, root: Schema, literals: LiteralNotation, *, is_strict: bool) -> None:
        super().__init__(lark, name, root, is_strict=is_strict)
        self._literals = literals
        self._between = lark(literals.between)
        self._known: dict[str, str] = {}  # rules of schemas, which may refer to themselves

    def rules(self) -> list[str]:
        said = self._object(self._resolved(self._root), is_bare=True)
        return [
            f"{self._name}: {self._lark(self._literals.opens)} {said} {self._lark(self._literals.closes)}",
            *self._lines,
        ]

    def _object(self, schema: Schema, *, is_bare: bool) -> str:
        """Return a rule for what is between the brackets of an object. is_bare: its names have no quotes."""
        properties, required, more = self._properties(schema)
        equals = self._lark(self._literals.equals if is_bare else ": ")
        names = sorted(properties, key=str.lower) if self._literals.has_bare_names else properties
        said = []
        for name in names:
            written = self._lark(name) if is_bare else quoted(json.dumps(name, ensure_ascii=False))
            said.append((f"{written} {equals} {self._value(properties[name])}", name in required))
        if more is not None:
            any_name = _NAME if is_bare else self._json({"type": "string"})
            one = f"{any_name} {equals} {self._value(more)}"
            said.append((f"{one} ({self._between} {one})*", False))
        return self._joined(said, self._between)

    def _value(self, schema: object) -> str:
        """Return the name of a rule."""
        schema = self._resolved(schema)
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            self._known[key] = f"{self._name}_of{len(self._known)}"
            self._lines.append(f"{self._known[key]}: {' | '.join(self._ways(schema))}")
        return self._known[key]

    def _ways(self, schema: Schema) -> Iterable[str]:
        """Return the ways in which a value may be written."""
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return [self._lark(self._literals.value(value)) for value in values]
        for several in ("anyOf", "oneOf"):
            if several in schema:
                rest = {key: value for key, value in schema.items() if key not in (several, *_DEFINITIONS)}
                return [self._value({**rest, **self._resolved(each)}) for each in schema[several]]
        types = types_of(schema, self._root)
        if odd := schema.keys() & _ODD:
            if self._is_strict:
                raise _unheld(sorted(odd))
            return [self._value(_ANY_VALUE)]
        if types is None:
            return [self._value({**_ANY_VALUE, **schema})]
        return [self._way(name, schema) for name in sorted(types)]

    def _way(self, name: str, schema: Schema) -> str:
        def part(keys: Iterable[str]) -> dict[str, Any]:
            return {**{key: schema[key] for key in keys if key in schema}, "type": name}

        match name:
            case "string" if len(self._literals.quote) == 1:
                return self._json(part({*_OF_TEXTS, "format"} - {"type"}))
            case "string":
                of_text = {key: schema[key] for key in schema if key in _OF_TEXTS or key == "format"}
                return f"{self._lark(self._literals.quote)} {self._text(of_text, self._literals.quote)}"
            case "array":
                return self._list(schema)
            case "object":
                of_object = part(_OF_OBJECTS - {"type", *_DEFINITIONS})
                return f'"{{" {self._object(of_object, is_bare=self._literals.has_bare_names)} "}}"'
            case "boolean":
                return " | ".join(map(quoted, self._literals.constants[:2]))
            case "null":
                return quoted(self._literals.constants[2])
        return self._json(part(_OF_NUMBERS - {"type"}))

    def _list(self, schema: Schema) -> str:
        if self._is_strict and (odd := schema.keys() - _OF_LISTS - _OF_TEXTS - _OF_NUMBERS - _OF_OBJECTS):
            raise _unheld(sorted(odd))
        item, between = self._value(schema.get("items", _ANY_VALUE)), self._between
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"({between} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'


def _searched(wanted: str) -> str:
    """Return a regular expression of texts in which a pattern of JSON Schema is found. Raises GrammarError for anchors
    that do not stand around all of it."""
    begins, ends = wanted.startswith("^"), wanted.endswith("$") and not wanted.endswith("\\$")
    inside = wanted[begins : len(wanted) - ends]
    depth, at, is_class = 0, 0, False
    while at < len(inside):
        char = inside[at]
        if char == "\\":
            at += 1
        elif is_class:
            is_class = char != "]"
        elif char == "[":
            is_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char in "^$" or (char == "|" and not depth and (begins or ends)):
            raise GrammarError(
                "a pattern cannot be enforced in this model's calls", why=f"{char!r} within {wanted[:80]!r}"
            )
        at += 1
    said = inside.replace("/", "\\/").replace("\\\\/", "\\/")
    return f"{'' if begins else ANY}({said}){'' if ends else ANY}"


def _unheld(keywords: Sequence[str]) -> GrammarError:
    names = ", ".join(map(repr, keywords))
    return GrammarError("the schema has what this model's calls cannot be held to", why=f"{names} in its notation")

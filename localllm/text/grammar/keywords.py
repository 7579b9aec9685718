"""Which keywords of JSON Schema there are, and what a schema is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "id", "$anchor", "contentEncoding", "contentMediaType", "contentSchema", "discriminator",
    "externalDocs", "xml", "markdownDescription",
})  # fmt: skip
ONE = ("additionalProperties", "items")
SEVERAL = ("prefixItems", "items", "anyOf", "allOf", "oneOf")
DEFINITIONS = ("$defs", "definitions")
NAMED = ("properties", "patternProperties", *DEFINITIONS)
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SUPPORTED = frozenset({*ONE, *SEVERAL, *NAMED, *COUNTS, *BOUNDS,
                       "type", "enum", "const", "required", "multipleOf", "pattern", "format", "$ref",
                       "nullable"})  # fmt: skip
TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})

Steps = tuple[str, ...]


def parts(schema: Mapping[str, Any]) -> Iterator[tuple[Steps, Any]]:
    """Schemas that it is made of, true and false among them, and the way to each from it."""
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            for name, each in value.items():
                yield (key, name), each
        elif key in SEVERAL and isinstance(value, list):
            for index, each in enumerate(value):
                yield (key, str(index)), each
        elif key in ONE and isinstance(value, Mapping | bool):
            yield (key,), value


def all_parts(schema: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """It and all that it is made of, each behind what holds it, with the way there from the root."""
    rest = [(steps, schema)]
    while rest:
        at, part = rest.pop()
        yield at, part
        if isinstance(part, Mapping):
            rest += reversed([((*at, *way), each) for way, each in parts(part)])


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A schema of changed parts, each of which is changed when all that it is made of has been."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED:
            found[key] = {name: mapped(each, change) for name, each in value.items()}
        elif key in SEVERAL and isinstance(value, list):
            found[key] = [mapped(each, change) for each in value]
        else:
            found[key] = mapped(value, change) if key in ONE else value
    return change(found)

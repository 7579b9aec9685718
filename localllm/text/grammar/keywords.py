"""The keywords of JSON Schema, and the parts of a schema."""

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
    """Yield the way to each schema that one is made of, and that schema; true and false are schemas."""
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
    """Yield the way from the root and the schema, for one and all that it is made of, each behind what holds it."""
    rest = [(steps, schema)]
    while rest:
        at, part = rest.pop()
        yield at, part
        if isinstance(part, Mapping):
            rest += reversed([((*at, *way), each) for way, each in parts(part)])


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema of changed parts. Each is changed after all that it is made of."""
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

"""A JSON Schema whose objects hold what it names and nothing else, where it says nothing about that.

So do OpenAI, Ollama and llama.cpp have it, and so their clients mean it: by the letter anything may stand beside, and a
small model that may go on writing properties does not end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_OPENED = ("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties")
_COMPOSING = ("$ref", "allOf", "anyOf", "oneOf")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What fits it fits the schema too. One whose objects are put together of several is left as it is: closed, no part
    would let the others stand."""
    parts = list(_schemas(schema))
    is_composed = any("properties" in part and any(key in part for key in _COMPOSING) for part in parts)
    if is_composed or any(len(part["allOf"]) > 1 for part in parts if isinstance(part.get("allOf"), list)):
        return dict(schema)
    return _closed(schema)  # type: ignore[no-any-return]


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _closed(each) for name, each in value.items()}
        elif key in _LISTED and isinstance(value, list):
            found[key] = list(map(_closed, value))
        else:
            found[key] = _closed(value) if key in ("items", "additionalProperties") else value
    if _is_named(schema) and not any(key in schema for key in _OPENED):
        found["additionalProperties"] = False
    return found


def _is_named(schema: Mapping[str, Any]) -> bool:
    """Whether it names what it holds, and all that it has to."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """It and all that it is made of."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            for each in value.values():
                yield from _schemas(each)
        elif key in _LISTED and isinstance(value, list):
            for each in value:
                yield from _schemas(each)
        elif key in ("items", "additionalProperties"):
            yield from _schemas(value)

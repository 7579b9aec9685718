"""An object holds what its schema names, unless that says otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.engine.grammar.schema import checked

OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = {**OBJECT, "additionalProperties": False}
OTHER = {"type": "object", "properties": {"b": {"type": "string"}}}
NEEDS_A = {"required": ["a"]}
DEFS = {"$defs": {"A": OBJECT}}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        (OBJECT, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        ({**OBJECT, "additionalProperties": True}, {**OBJECT, "additionalProperties": True}),
        ({**OBJECT, "required": ["b"]}, {**OBJECT, "required": ["b"]}),
        ({"type": "array", "items": OBJECT}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [OBJECT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({**DEFS, "$ref": "#/$defs/A"}, {"$defs": {"A": CLOSED}, "$ref": "#/$defs/A"}),
        ({"description": "", "allOf": [OBJECT]}, {"description": "", "allOf": [CLOSED]}),
        ({"allOf": [OBJECT, OTHER]}, {"allOf": [OBJECT, OTHER]}),
        ({"allOf": [OBJECT, NEEDS_A]}, {"allOf": [CLOSED, NEEDS_A]}),
        ({**OBJECT, "anyOf": [NEEDS_A]}, {**CLOSED, "anyOf": [NEEDS_A]}),
        ({**OBJECT, "anyOf": [OTHER]}, {**OBJECT, "anyOf": [OTHER]}),
        ({**OBJECT, **DEFS, "$ref": "#/$defs/A"}, {**CLOSED, "$defs": {"A": CLOSED}, "$ref": "#/$defs/A"}),
        ({**OTHER, **DEFS, "$ref": "#/$defs/A"}, {**OTHER, **DEFS, "$ref": "#/$defs/A"}),
        (
            {"type": "array", "prefixItems": [{"allOf": [OBJECT, OTHER]}, OBJECT]},
            {"type": "array", "prefixItems": [{"allOf": [OBJECT, OTHER]}, CLOSED]},
        ),
        ({**OBJECT, "properties": {"properties": OBJECT}}, {**CLOSED, "properties": {"properties": CLOSED}}),
    ],
)
def test_an_object_holds_what_its_schema_names_unless_that_says_otherwise(schema: Any, is_closed: Any) -> None:
    assert checked(json.dumps(schema)).schema == is_closed

"""An object holds what its schema names, unless that says otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.errors import GrammarError
from localllm.text.grammar.definition import defined
from localllm.text.grammar.rewriting import close
from tests.structured.support import json_schema

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
        ({"allOf": [OBJECT]}, {"allOf": [CLOSED]}),
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
    asked = json.loads(json.dumps(schema))
    close(asked)
    assert asked == is_closed


def test_one_of_several_is_one_by_the_letter_too() -> None:
    """Closed, the first would be met by no answer of the second; to a validator it is met by each of them."""
    second = {"properties": {**OTHER["properties"], "a": {"type": "string"}}, "required": ["b"]}
    with pytest.raises(GrammarError, match="cannot be held to"):
        defined(json_schema({"oneOf": [OBJECT, {"type": "object", **second}]}))
    kinds = [{**OBJECT, "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "xy"]
    defined(json_schema({"oneOf": kinds}))
    with pytest.raises(GrammarError, match="cannot be held to"):
        defined(json_schema({"oneOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "ipv4"}]}))

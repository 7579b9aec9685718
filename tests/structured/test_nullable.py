"""OpenAPI's `nullable`: null beside whatever else a schema asks for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.structured.support import json_schema, takes

NAME = {"type": "string"}
DEFS = {"$defs": {"a": {"enum": ["x"]}}}


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize(
    "schema",
    [
        NAME,
        {"type": ["string", "integer"]},
        {"type": "string", "enum": ["x"]},
        {"enum": ["x", None]},
        {"const": "x"},
        {"type": "string", "const": "x"},
        {"allOf": [NAME]},
        {"anyOf": [NAME, {"type": "integer"}]},
        {"oneOf": [NAME, {"type": "integer"}]},
        {"type": "string", "anyOf": [{"minLength": 1}, {"pattern": "^$"}]},
        {**DEFS, "$ref": "#/$defs/a"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **DEFS, "allOf": [{"$ref": "#/$defs/a"}]},
        {},
    ],
)
def test_null_is_taken_beside_what_a_schema_asks_for(schema: dict[str, Any]) -> None:
    for is_nullable in (True, False):
        asked = json_schema({**schema, "nullable": is_nullable})
        is_open = is_nullable or not schema or None in schema.get("enum", ())
        assert takes(asked, '"x"') and takes(asked, "null") == is_open
        assert takes(asked, "[1]") == (not schema)


@pytest.mark.usefixtures("tried_here")
def test_an_object_stays_closed_and_what_it_holds_may_be_null() -> None:
    asked = json_schema(
        {
            "type": "object",
            "properties": {"a": {**NAME, "nullable": True}, "b": {"$ref": "#/properties/a"}},
            "required": ["a"],
            "nullable": True,
        }
    )
    for text in ("null", '{"a": null}', '{"a": "x", "b": null}'):
        assert takes(asked, text)
    assert not takes(asked, '{"a": 1}') and not takes(asked, '{"a": "x", "c": 1}')

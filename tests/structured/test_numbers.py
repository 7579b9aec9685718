"""Numbers end, wherever a schema lets one stand, whatever a model likes best."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from localllm.text.grammar.definition import defined
from tests.structured.support import BYTES, json_schema, takes

MOST = 400  # bytes
LIKED = (b"9876543210", b"0123456789", b"-.1", b".0", b"eE+1.0", b"-0.", b"9.")
NUMBER = {"type": "number"}
NUMBERS: dict[str, Any] = {
    "integer": {"type": "integer"},
    "number": NUMBER,
    "one of several types": {"type": ["integer", "null"]},
    "whatever is no text": {"minLength": 3},
    "anything": {},
    "minimum": {"type": "integer", "minimum": 3},
    "maximum": {"type": "integer", "maximum": 3},
    "exclusive": {"type": "integer", "exclusiveMinimum": -7},
    "of a number": {"type": "number", "minimum": 0, "exclusiveMaximum": 1.5},
    "above a number": {"type": "number", "exclusiveMinimum": 0},
    "below a number": {"type": "number", "exclusiveMaximum": -0.5},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "multipleOf of a number": {"type": "number", "multipleOf": 7},
    "multiples that are met together": {"allOf": [{**NUMBER, "multipleOf": 11}, NUMBER, {"multipleOf": 13}]},
    "a reference": {"$defs": {"a": NUMBER}, "$ref": "#/$defs/a"},
    "a reference of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"a": NUMBER},
        "$ref": "#/definitions/a",
    },
    "allOf": {"allOf": [NUMBER, {"minimum": 0}]},
    "anyOf": {"type": "number", "anyOf": [{"minimum": 5}, {"maximum": -5}]},
    "allOf that says nothing": {"type": "integer", "allOf": [{"title": "a"}, {"title": "b"}]},
    "several that say nothing": {"type": "number", "anyOf": [{"title": "a"}], "allOf": [{"title": "b"}]},
    "a reference to nothing": {"$defs": {"a": {}}, "type": "integer", "$ref": "#/$defs/a", "allOf": [{}]},
}
HOLDERS: dict[str, Any] = {
    "items": lambda schema: {"type": "array", "items": schema, "minItems": 1, "maxItems": 1},
    "prefixItems": lambda schema: {"type": "array", "prefixItems": [schema], "minItems": 1, "maxItems": 1},
    "a property": lambda schema: {"type": "object", "properties": {"a": schema}, "required": ["a"]},
    "any property": lambda schema: {"type": "object", "additionalProperties": schema, "required": ["a"]},
}
FREE: dict[str, Any] = {
    "an object": {"type": "object", "required": ["a"]},
    "an open one": {"type": "object", "properties": {}, "required": ["a"], "additionalProperties": True},
    "an array": {"type": "array", "minItems": 1},
    "a property of two": {
        "type": "object",
        "properties": {"a": {}},
        "patternProperties": {"^x": {}},
        "required": ["a"],
    },
    "an array of two": {"allOf": [{"type": "array", "minItems": 1}, {"maxItems": 1}]},
    "a name that is taken": {"$defs": {"any": {"type": "null"}}, "type": "array", "minItems": 1},
}


def written(schema: Any, liked: bytes) -> str:
    """The text of a model that goes on for as long as it may, with the first that is allowed of what it likes; else it
    ends what it is in."""
    matcher, text = LLMatcher(BYTES, defined(json_schema(schema)), log_level=0), bytearray()
    while len(text) < MOST and not matcher.is_stopped():
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if bits >> byte & 1]
        if not allowed:
            break
        byte = next((each for each in liked + b'[{"a:' if each in allowed), allowed[-1])
        matcher.consume_token(byte)
        text.append(byte)
    assert len(text) < MOST and matcher.is_accepting(), text[:100]
    return text.decode()


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("schema", NUMBERS.values(), ids=NUMBERS)
def test_a_number_ends_whatever_a_model_likes_best(schema: Any) -> None:
    for liked in LIKED:
        text = written(schema, liked)
        assert max(map(len, re.findall("[0-9]+", text)), default=0) <= 16, text
        json.loads(text)


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("schema", [{}, NUMBER, {"type": "integer", "minimum": 0}], ids=str)
def test_so_does_one_in_something_else(schema: Any, holder: Any) -> None:
    for liked in LIKED:
        json.loads(written(holder(schema), liked))


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("schema", FREE.values(), ids=FREE)
def test_so_does_one_that_nothing_is_said_of(schema: Any) -> None:
    for liked in LIKED:
        text = written(schema, liked)
        assert max(map(len, re.findall("[0-9]+", text)), default=0) <= 16, text


@pytest.mark.usefixtures("tried_here")
def test_as_many_digits_as_there_may_be_are_taken() -> None:
    for text in ("9999999999999998", "-9999999999999998", "1234567890123456", "0"):
        assert (
            takes(json_schema({"type": "integer"}), text)
            and takes(json_schema(NUMBER), text)
            and takes(json_schema({}), text)
        )
    for text in ("1234567890123456.123456789", "-0.000000001", "2.50"):
        assert takes(json_schema(NUMBER), text) and takes(json_schema({}), text)
    for text in ("12345678901234567", "0.1234567890", "1e5"):
        assert not takes(json_schema(NUMBER), text) and not takes(json_schema({}), text)
    assert takes(json_schema({"type": "object"}), '{"a": [{"b": 2.5, "c": {}}, null, true, "d"]}')


@pytest.mark.usefixtures("tried_here")
def test_a_number_that_the_schema_names_is_taken_however_fine() -> None:
    assert takes(json_schema({"allOf": [NUMBER, {"enum": [1.5e-12, 3]}]}), "0.0000000000015")
    assert takes(json_schema({"type": "number", "exclusiveMinimum": 1e-12, "maximum": 2e-12}), "0.0000000000015")


@pytest.mark.usefixtures("tried_here")
def test_multiples_are_counted_beside_the_last_digit() -> None:
    both = {"allOf": [NUMBER, {"multipleOf": 7}]}
    assert [takes(json_schema(both), text) for text in ("14", "15", "14.5")] == [True, False, False]
    free = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 7}, "b": NUMBER}}
    assert takes(json_schema(free), '{"a": 7, "b": 0.12345678}') and not takes(
        json_schema(free), '{"a": 7, "b": 0.123456789}'
    )

"""A schema before llguidance is given it: objects are closed, null may be allowed, formats and numbers end."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from localllm.errors import GrammarError
from localllm.text.grammar.compiled import Grammars
from localllm.text.grammar.definition import defined
from localllm.text.grammar.schema_rewrites import close, with_pattern
from localllm.text.tokenizer import Tokenizer
from tests.structured.support import BYTES, accepts, drawn, json_schema, takes
from tests.thinning import every_other

pytestmark = pytest.mark.usefixtures("tried_here")


# An object holds what its schema names, unless that says otherwise.


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


# OpenAPI's `nullable`: null beside whatever else a schema asks for.


NAME = {"type": "string"}
DEFINED = {"$defs": {"a": {"enum": ["x"]}}}


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
        {**DEFINED, "$ref": "#/$defs/a"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **DEFINED, "allOf": [{"$ref": "#/$defs/a"}]},
        {},
    ],
)
def test_null_is_taken_beside_what_a_schema_asks_for(schema: dict[str, Any]) -> None:
    for is_nullable in (True, False):
        asked = json_schema({**schema, "nullable": is_nullable})
        is_open = is_nullable or not schema or None in schema.get("enum", ())
        assert takes(asked, '"x"') and takes(asked, "null") == is_open
        assert takes(asked, "[1]") == (not schema)


def test_an_object_stays_closed_and_what_it_holds_may_be_null() -> None:
    parts = {"a": {**NAME, "nullable": True}, "b": {"$ref": "#/properties/a"}}
    asked = json_schema({"type": "object", "properties": parts, "required": ["a"], "nullable": True})
    for text in ("null", '{"a": null}', '{"a": "x", "b": null}'):
        assert takes(asked, text)
    assert not takes(asked, '{"a": 1}') and not takes(asked, '{"a": "x", "c": 1}')


# Formats of texts: dates that there are, and times with 60 seconds a minute.


READ: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}


def matches(name: str, text: str) -> bool:
    return re.search(with_pattern({"format": name})["pattern"], text) is not None


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


@settings(deadline=None)
@given(year=st.integers(0, 9999), month=st.integers(0, 13), day=st.integers(0, 32))
def test_a_date_is_a_day_of_the_calendar(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    assert matches("date", text) == is_date(text)


@pytest.mark.parametrize("year", [4, 96, 100, 400, 1900, 1904, 2000, 2023, 2024, 2100, 9996])
def test_the_last_of_february(year: int) -> None:
    assert matches("date", f"{year:04}-02-29") == is_date(f"{year:04}-02-29")


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("date", ["2024-02-29"], ["2023-02-29", "2024-02-30", "24-02-28"]),
        ("time", ["23:59:59Z", "00:00:00.5+14:00"], ["23:59:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-02-29T01:02:03Z"], ["2023-02-29T01:02:03Z", "2024-02-28 01:02:03Z"]),
    ],
)
def test_an_answer_is_held_to_it(
    grammars: Grammars, tokenizer: Tokenizer, name: str, taken: list[str], refused: list[str]
) -> None:
    constraint = grammars.constraint(json_schema({"type": "string", "format": name}))
    assert all(accepts(constraint, tokenizer, json.dumps(text)) for text in taken)
    assert not any(accepts(constraint, tokenizer, json.dumps(text)) for text in refused)


def test_a_pattern_and_a_format_are_both_held(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2024", "allOf": [{"pattern": "29$"}]}
    constraint = grammars.constraint(json_schema(schema))
    assert accepts(constraint, tokenizer, '"2024-02-29"')
    assert not any(accepts(constraint, tokenizer, f'"{text}"') for text in ("2024-02-28", "2023-03-29", "2024-29"))


@pytest.mark.parametrize("name", READ)
def test_what_is_drawn_is_read_by_others(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    constraint = grammars.constraint(json_schema({"type": "string", "format": name}))
    texts = [text for seed in range(20) if (text := drawn(constraint, tokenizer, seed)) is not None]
    assert len(texts) > 10
    for text in texts:
        READ[name](json.loads(text))


# Numbers end, wherever a schema lets one stand, whatever a model likes best.


MOST = 400  # bytes
LIKED = (b"9876543210", b"0123456789", b"-.1", b".0", b"eE+1.0", b"-0.", b"9.")
NUMBER = {"type": "number"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
NUMBERS: dict[str, Any] = {
    "integer": {"type": "integer"},
    "number": NUMBER,
    "one of several types": {"type": ["integer", "null"]},
    "whatever is not a text": {"minLength": 3},
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
    "a reference of draft 7": {"$schema": DRAFT_7, "definitions": {"a": NUMBER}, "$ref": "#/definitions/a"},
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
OPEN: dict[str, Any] = {"type": "object", "required": ["a"]}
FREE: dict[str, Any] = {
    "an object": OPEN,
    "an open one": {**OPEN, "properties": {}, "additionalProperties": True},
    "an array": {"type": "array", "minItems": 1},
    "a property of two": {**OPEN, "properties": {"a": {}}, "patternProperties": {"^x": {}}},
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


@pytest.mark.parametrize("schema", every_other(NUMBERS.values()))
def test_a_number_ends_whatever_a_model_likes_best(schema: Any) -> None:
    for liked in LIKED:
        text = written(schema, liked)
        assert max(map(len, re.findall("[0-9]+", text)), default=0) <= 16, text
        json.loads(text)


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("schema", [{}, NUMBER, {"type": "integer", "minimum": 0}], ids=str)
def test_so_does_one_in_something_else(schema: Any, holder: Any) -> None:
    for liked in LIKED:
        json.loads(written(holder(schema), liked))


@pytest.mark.parametrize("schema", FREE.values(), ids=FREE)
def test_so_does_one_that_nothing_is_said_of(schema: Any) -> None:
    for liked in LIKED:
        text = written(schema, liked)
        assert max(map(len, re.findall("[0-9]+", text)), default=0) <= 16, text


def test_as_many_digits_as_there_may_be_are_taken() -> None:
    for text in ("9999999999999998", "-9999999999999998", "1234567890123456", "0"):
        assert all(takes(json_schema(schema), text) for schema in ({"type": "integer"}, NUMBER, {}))
    for text in ("1234567890123456.123456789", "-0.000000001", "2.50"):
        assert all(takes(json_schema(schema), text) for schema in (NUMBER, {}))
    for text in ("12345678901234567", "0.1234567890", "1e5"):
        assert not any(takes(json_schema(schema), text) for schema in (NUMBER, {}))
    assert takes(json_schema({"type": "object"}), '{"a": [{"b": 2.5, "c": {}}, null, true, "d"]}')


def test_a_number_that_the_schema_names_is_taken_however_fine() -> None:
    assert takes(json_schema({"allOf": [NUMBER, {"enum": [1.5e-12, 3]}]}), "0.0000000000015")
    assert takes(json_schema({"type": "number", "exclusiveMinimum": 1e-12, "maximum": 2e-12}), "0.0000000000015")


def test_multiples_are_counted_beside_the_last_digit() -> None:
    both = {"allOf": [NUMBER, {"multipleOf": 7}]}
    assert [takes(json_schema(both), text) for text in ("14", "15", "14.5")] == [True, False, False]
    free = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 7}, "b": NUMBER}}
    texts = ('{"a": 7, "b": 0.12345678}', '{"a": 7, "b": 0.123456789}')
    assert [takes(json_schema(free), text) for text in texts] == [True, False]

"""Schemas by chance, of all that is supported and one in another: what is drawn of them validates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from localllm.errors import GrammarError
from localllm.text.grammar.definition import defined
from tests.structured.support import BYTES, json_schema

DEFS = ("A", "B")
VALUES: tuple[Any, ...] = (1, "a", 'é"\\', None, True, [1, 2], {"a": 1}, 2.5, "", -3)
MOST_BYTES = 500


def schema(choose: random.Random, depth: int, has_defs: bool) -> Any:
    kinds = ["string", "number", "integer", "enum", "scalar", *(["ref"] if has_defs else [])]
    if depth:
        kinds += ["array", "array", "object", "object", "anyOf", "oneOf", "allOf", "true"]
    kind = choose.choice(kinds)
    of = MAKERS.get(kind)
    if of is not None:
        return of(choose, lambda: schema(choose, depth - 1, has_defs))
    if kind == "enum":
        return {"enum": choose.sample(VALUES, choose.randint(1, 4))}
    if kind == "ref":
        return {"$ref": f"#/$defs/{choose.choice(DEFS)}"}
    if kind == "true":
        return choose.choice([True, {}, {"const": choose.choice(VALUES)}])
    return {"type": choose.sample(["null", "boolean", "integer"], 2)}


def string(choose: random.Random, _: Callable[[], Any]) -> Any:
    least = choose.randint(0, 4)
    found: dict[str, Any] = {"type": "string", "minLength": least, "maxLength": least + choose.randint(0, 6)}
    if choose.random() < 0.3:
        found["pattern"] = choose.choice(["^a", "b$", "[0-9]{2}", "^[a-z]+$", "x|y", r"\d", r"\w\s", "^.{1,3}$"])
    formats = ["date", "time", "date-time", "ipv4", "uuid"]
    return {"type": "string", "format": choose.choice(formats)} if choose.random() < 0.1 else found


def number(choose: random.Random, _: Callable[[], Any], kind: str = "number") -> Any:
    least = choose.choice([-100, -7, -1.5, 0, 0.25, 3, 1000])
    found: dict[str, Any] = {"type": kind}
    if choose.random() < 0.6:
        found[choose.choice(["minimum", "exclusiveMinimum"])] = least
    if choose.random() < 0.6:
        found[choose.choice(["maximum", "exclusiveMaximum"])] = least + choose.choice([0, 1, 2.5, 1000])
    return {**found, "multipleOf": choose.choice([2, 3, 7])} if choose.random() < 0.2 else found


def integer(choose: random.Random, part: Callable[[], Any]) -> Any:
    return number(choose, part, "integer")


def array(choose: random.Random, part: Callable[[], Any]) -> Any:
    least = choose.randint(0, 2)
    found = {"type": "array", "items": part(), "minItems": least, "maxItems": least + choose.randint(0, 2)}
    return {**found, "prefixItems": [part()]} if choose.random() < 0.3 else found


def object_(choose: random.Random, part: Callable[[], Any]) -> Any:
    names = choose.sample(["a", "b", "c d", "é"], choose.randint(0, 3))
    found: dict[str, Any] = {"type": "object", "properties": {name: part() for name in names}}
    found["required"] = choose.sample(names, choose.randint(0, len(names)))
    if choose.random() < 0.4:
        found["additionalProperties"] = choose.choice([True, False, part()])
    if choose.random() < 0.2:
        found["patternProperties"] = {"^p": part()}
    if choose.random() < 0.2:
        found[choose.choice(["minProperties", "maxProperties"])] = choose.randint(0, 3)
    return found


MAKERS: dict[str, Callable[[random.Random, Callable[[], Any]], Any]] = {
    "string": string,
    "number": number,
    "integer": integer,
    "array": array,
    "object": object_,
    "anyOf": lambda choose, part: {"anyOf": [part(), part()]},
    "oneOf": lambda choose, part: {"oneOf": [part(), part()]},
    "allOf": lambda choose, part: {"allOf": [part() for _ in range(choose.randint(1, 2))]},
}


def drawn(definition: str, choose: random.Random) -> str | None:
    """A text by chance, with a liking for its end; None where that did not come."""
    matcher, text = LLMatcher(BYTES, definition, log_level=0), bytearray()
    while len(text) < MOST_BYTES and not matcher.is_stopped():
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if bits >> byte & 1]
        if not allowed or (matcher.is_accepting() and choose.random() < 0.5):
            break
        closing = [byte for byte in allowed if byte in b'"]},']
        byte = choose.choice(closing if closing and choose.random() < 0.4 else allowed)
        matcher.consume_token(byte)
        text.append(byte)
    return text.decode() if matcher.is_accepting() else None


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("num_schemas", [100, pytest.param(6000, marks=pytest.mark.slow)])
def test_what_is_drawn_of_schemas_by_chance_validates(num_schemas: int) -> None:
    num_refused = num_drawn = 0
    for seed in range(num_schemas):
        choose = random.Random(seed)
        has_defs = choose.random() < 0.4
        asked = {"allOf": [schema(choose, 3, has_defs)], "$defs": {name: schema(choose, 2, has_defs) for name in DEFS}}
        try:
            definition = defined(json_schema(asked))
        except GrammarError:
            num_refused += 1
            continue
        validator = Draft202012Validator(asked)
        for text in (drawn(definition, choose) for _ in range(4)):
            if text is not None:
                num_drawn += 1
                assert validator.is_valid(json.loads(text)), (asked, text)
    assert num_refused < num_schemas / 2 and num_drawn > num_schemas

"""The test suite of JSON Schema, draft 2020-12: each schema of it is enforced, or refused by the name of a keyword.

A compiled schema takes no instance that the suite calls invalid. It takes those that are valid, but for what REASONS
lists: an answer is written in one way where JSON has several.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from localllm.errors import GrammarError
from localllm.text.grammar.compiled import Grammars
from localllm.text.grammar.schema_parts import SUPPORTED
from localllm.text.tokenizer import Tokenizer
from tests.structured.support import accepts, drawn, json_schema

Locate = Callable[[str], Path]
SUITE = "adversarial/json_schema_2020_12"
FILES = (
    "additionalProperties", "allOf", "anchor", "anyOf", "boolean_schema", "const", "contains", "content", "default",
    "defs", "dependentRequired", "dependentSchemas", "dynamicRef", "enum", "exclusiveMaximum", "exclusiveMinimum",
    "format", "if-then-else", "infinite-loop-detection", "items", "maxContains", "maxItems", "maxLength",
    "maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not",
    "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "ref", "refRemote",
    "required", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "vocabulary",
)  # fmt: skip
UNSUPPORTED = frozenset({
    "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "$dynamicRef", "$dynamicAnchor",
    "if", "then", "else", "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    "$vocabulary",
})  # fmt: skip
REASONS = {
    "closed": "an object holds what its schema names, where that says nothing of others",
    "order": "properties come in the order of the schema",
    "whole": "a whole number is written without a fraction",
    "format": "formats are enforced, where the specification lets them be annotations",
    "control": "control characters are written as \\n, \\t and their like, or not at all",
}


def narrowed(schema: Any, data: Any, test: str) -> str | None:
    """Which of REASONS keeps a valid instance out; None for none."""
    text = json.dumps(data)
    if test.endswith("is only an annotation by default"):
        return REASONS["format"]
    if re.search(r"\d\.0\b", text):
        return REASONS["whole"]
    if re.search(r"\\u00[01]|\\f", text):
        return REASONS["control"]
    if isinstance(data, dict) and '"properties"' in json.dumps(schema) and not data.keys() <= set(named(schema)):
        return REASONS["closed"]
    is_object = isinstance(data, dict) and len(data) > 1
    return REASONS["order"] if is_object and re.search('"(properties|const)"', json.dumps(schema)) else None


def named(schema: Any) -> Iterator[str]:
    """Names of all its `properties`."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key == "properties":
            yield from value
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from named(part)
        yield from named(value)


def groups(shared_data: Locate, name: str) -> Iterator[dict[str, Any]]:
    yield from json.loads(shared_data(f"{SUITE}/{name}.json").read_text())


def keywords(schema: Any) -> Iterator[str]:
    """All that stands in it as a key."""
    if isinstance(schema, dict):
        yield from schema
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from keywords(value)


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("name", FILES)
def test_a_schema_is_enforced_or_refused_by_a_keyword(
    shared_data: Locate, grammars: Grammars, tokenizer: Tokenizer, name: str
) -> None:
    for group in groups(shared_data, name):
        schema = group["schema"]
        try:
            constraint = grammars.constraint(json_schema(schema))
        except GrammarError as error:
            names_keyword = set(re.findall(r"'([^']+)'", error.why)) & set(keywords(schema))
            assert names_keyword or "no answer can meet" in error.what, (group["description"], error.what, error.why)
            continue
        assert not UNSUPPORTED & set(keywords(schema)) - {"not"} or "$defs" in schema, group["description"]
        for test in group["tests"]:
            is_met = accepts(constraint, tokenizer, json.dumps(test["data"], ensure_ascii=False))
            where = (group["description"], test["description"], test["data"])
            if not test["valid"]:
                assert not is_met, where
            elif not is_met:
                assert narrowed(schema, test["data"], test["description"]), where


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("draws", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_what_is_drawn_validates(shared_data: Locate, grammars: Grammars, tokenizer: Tokenizer, draws: int) -> None:
    """1,500 answers, where there is the time."""
    assert sum(require_valid(shared_data, grammars, tokenizer, name, draws) for name in FILES) >= 75 * draws


def require_valid(shared_data: Locate, grammars: Grammars, tokenizer: Tokenizer, name: str, draws: int) -> int:
    """How many answers were whole, every one of them valid."""
    count = 0
    for group in groups(shared_data, name):
        schema = group["schema"]
        try:
            constraint = grammars.constraint(json_schema(schema))
        except GrammarError:
            continue
        for seed in range(draws):
            text = drawn(constraint, tokenizer, seed)
            if text is not None:
                count += 1
                try:
                    errors = list(Draft202012Validator(schema).iter_errors(json.loads(text)))
                except re.error:  # \p{Letter}, which Python does not know
                    continue
                assert not errors, (group["description"], text, errors[0].message)
    return count


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED))
def test_an_unsupported_keyword_is_refused_by_its_name_and_place(grammars: Grammars, keyword: str) -> None:
    schema = {"type": "object", "properties": {"a/b": {"items": [{keyword: {}}]}}}
    with pytest.raises(GrammarError) as refused:
        grammars.check(json_schema(schema))
    assert f"{keyword!r} is not supported (#/properties/a/b/items/0/{keyword})" in refused.value.why


def test_every_file_of_the_suite_is_looked_at(shared_data: Locate) -> None:
    assert sorted(path.stem for path in shared_data(SUITE).glob("*.json")) == sorted(FILES)
    assert SUPPORTED.isdisjoint(UNSUPPORTED)

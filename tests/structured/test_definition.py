"""What is taken and what is refused: hostile schemas, patterns and grammars cost a second at most, and no process."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import BusyError, GrammarError
from localllm.hub.names import TINY_DIRECTORY
from localllm.server.errors import failure_of
from localllm.text.grammar import compile_check, definition
from localllm.text.grammar.compile_check import CPU_S
from localllm.text.grammar.compiled import Grammars
from localllm.text.grammar.definition import defined
from localllm.text.grammar.grammar import Grammar, GrammarKind
from localllm.text.grammar.schema import checked
from localllm.text.tokenizer import Tokenizer
from tests.structured.support import json_schema
from tests.thinning import thinned


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def nested_list(levels: int) -> list[Any]:
    return [nested_list(levels - 1)] if levels else []


def unions(length: int) -> dict[str, Any]:
    """One of so many objects with as many properties."""
    names = [[f"a{i}_{j}" for j in range(length)] for i in range(length)]
    return {"anyOf": [{"type": "object", "properties": {name: {} for name in each}} for each in names]}


def chained(length: int, link: str) -> dict[str, Any]:
    """Definitions, each of which is the next one, or holds it."""
    links: dict[str, Any] = {}
    for number in range(length):
        target = {"$ref": f"#/$defs/d{number + 1}"}
        of_object = {"type": "object", "properties": {"a": target}, "required": ["a"]}
        links[f"d{number}"] = {"ref": target, "allOf": {"allOf": [target, target]}, "object": of_object}[link]
    return {"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def holding(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


EACH_ENDS = {
    "$defs": {
        "n": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}},
        "m": {"properties": {"a": {"$ref": "#/$defs/m"}}, "required": ["a"]},
    },
    "allOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/m"}],
}
CLOSED = {"type": "object", "required": ["z"], "additionalProperties": False}
ENDLESS = {
    "itself": {"$ref": "#"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "allOf": {"allOf": [{"$ref": "#"}]},
    "anyOf": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "anyOf that might end": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    "a property": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "any property": {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
    "items": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "a tuple": {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    "an anchor": {"$anchor": "a", "type": "object", "properties": {"b": {"$ref": "#a"}}, "required": ["b"]},
    "an address": {"$id": "http://x/y", "type": "array", "items": {"$ref": "y"}, "minItems": 1},
    "a name with a blank": {"$defs": {"a b": {"$ref": "#/$defs/a%20b"}}, "$ref": "#/$defs/a%20b"},
    "one property at least": {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
    "a pattern": {"type": "object", "patternProperties": {"^a": {"$ref": "#"}}, "required": ["ab"]},
    "parts": {"allOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}}, {"required": ["a"]}]},
    "false": holding({"anyOf": [{"$ref": "#"}, False]}),
    "two types": holding({"anyOf": [{"$ref": "#"}, {"allOf": [{"type": "string"}, {"type": "integer"}]}]}),
    "a closed one": holding({"anyOf": [{"$ref": "#"}, CLOSED]}),
    "no items": holding({"anyOf": [{"$ref": "#"}, {"type": "array", "items": False, "minItems": 1}]}),
    "unreachable": {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
}
RECURSIVE = {
    "a list": holding({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "a tree": {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
    "not required": {"type": "object", "properties": {"a": {"$ref": "#"}}},
    "backwards": chained(40, "ref"),
    "another pattern": {**holding({"type": "string"}), "patternProperties": {"^child_": {"$ref": "#"}}},
    "one of them ends": {
        "type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "null"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "parts": {"allOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}}, {"maxProperties": 1}]},
}  # fmt: skip
EXPLODING: list[tuple[GrammarKind, Any]] = [
    ("json_schema", {"allOf": [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(40)]}),
    ("json_schema", {"allOf": [{"type": "integer", "multipleOf": each} for each in (9973, 9967, 9949)]}),
    ("json_schema", {"allOf": [{"anyOf": [{"required": [f"{i}_{j}"]} for j in range(9)]} for i in range(9)]}),
    ("json_schema", {"type": "string", "pattern": "^(a{1000}){1000}$"}),
    ("json_schema", {"properties": {f"p{number}": {"type": "string"} for number in range(6000)}}),
    ("json_schema", chained(3000, "object")),
    ("json_schema", chained(2500, "allOf")),
    ("json_schema", {"allOf": [unions(50)] * 3}),
    ("json_schema", {"properties": {f"p{n}": {"allOf": [unions(9), {"$ref": "#"}]} for n in range(300)}}),
    ("json_schema", {"type": "string", "pattern": "[" * 100_000}),
    ("lark", "start: nothing" + "\n" * 60_000),
    ("gbnf", "\n" * 60_000),
    ("regex", "(((a{100}){100}){100}){100}"),
    ("regex", "(a?){500}a{500}"),
    ("lark", 'start: "a"{1000000}'),
    ("gbnf", 'root ::= "a"{1000000}'),
]
REFUSED_SCHEMAS = {
    "{": "line 1, column 2",
    "[]": "a list",
    "false": "false",
    '{"maximum": NaN}': "NaN",
    '{"type": "strin"}': "'type' knows no 'strin', but 'string' (#/type)",
    '{"maxlength": 3}': "'maxlength' is not supported, but 'maxLength' is (#/maxlength)",
    '{"uniqueitems": true}': "'uniqueitems' is not supported (#/uniqueitems)",
    '{"x-guidance": {"lenient": true}}': "'x-guidance' is not supported",
    '{"nullable": "yes"}': "'nullable' is a text, and must be true or false (#/nullable)",
    '{"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}': "'not' is not supported (#/$defs/a/not)",
    '{"$ref": "#/$defs/a/$defs/b", "$defs": {"a": {"$defs": {"b": {"if": {}}}}}}': (
        "'if' is not supported (#/$defs/a/$defs/b/if)"
    ),
    '{"minItems": -1}': "'minItems' must be a whole number",
    '{"minLength": 1000000000}': "'minLength' is more than 1000000",
    '{"multipleOf": 0.01}': "'multipleOf' is enforced for whole numbers alone",
    '{"maximum": 1e400}': "'maximum' must be",
    '{"exclusiveMinimum": 0, "maximum": 0.5}': "'exclusiveMinimum' of 0 is not enforced",
    '{"allOf": [{"exclusiveMaximum": 0}, {"minimum": -0.5}]}': "'exclusiveMaximum' of 0 is not enforced",
    '{"pattern": "(?=a)b"}': "'pattern' looks around (#/pattern)",
    '{"pattern": "[(]a(?!x)"}': "'pattern' looks around (#/pattern)",
    '{"pattern": "(a)\\\\1"}': "'pattern' refers back to a group (#/pattern)",
    '{"pattern": "[a-z&&[^b]]"}': "'pattern' has an operator in a class",
    '{"pattern": "a\\\\u0001b"}': "'pattern' wants a control character",
    '{"const": 1e300}': "'const' has a number beyond 9007199254740992",
    '{"enum": [1234567890123456789]}': "'enum' has a number beyond",
    '{"enum": [{"a": [9007199254740993]}]}': "'enum' has a number beyond",
    '{"const": 123456789.123456789}': "of more than 15 digits",
    '{"minimum": 9007199254740993}': "'minimum' must be a number of at most 9007199254740992",
    '{"properties": {"\\ud800": {}}}': "half of a pair of surrogates",
    '{"enum": [{"a\\u0001": 1}]}': "'enum' has a control character",
    '{"const": "a\\u0000b"}': "'const' has a control character",
    '{"$ref": "#/$defs/nothing"}': "'$ref' points at '#/$defs/nothing'",
    '{"$ref": "http://localhost/schema.json"}': "'$ref' points at 'http://localhost/schema.json'",
    '{"x-a": {"b": {"not": {}}}, "$ref": "#/x-a/b"}': "'$ref' points at '#/x-a/b'",
    '{"$ref": "//[a"}': "'$ref' points at '//[a'",
    '{"$schema": "http://localhost/schema"}': "'$schema' names no draft",
    '{"oneOf": [{"type": "string"}, {"maxLength": 2}]}': "'oneOf' at #/oneOf",
    '{"patternProperties": {"a": {}, "b": {}}}': "'patternProperties' at #/patternProperties",
    '{"type": "object", "minProperties": 2}': "'minProperties' is enforced where",
    '{"type": "string", "minLength": 3, "maxLength": 2}': "minLength (3)",
    '{"properties": {"a": 3}}': "#/properties/a is a number",
    json.dumps(nested(120)): "100 levels",
    "[" * 100000: "100 levels",
    json.dumps({"enum": ["v" * 300000]}): "characters",
    '{"allOf": [{"type": "string"}, {"type": "integer"}]}': "no answer can meet the JSON Schema",
    json.dumps(holding(CLOSED)): "no answer can meet the JSON Schema",
    json.dumps(EACH_ENDS): "stack level exceeded",
    '{"type": "integer", "multipleOf": 1099511627776}': "'multipleOf' at #/multipleOf",
    '{"pattern": "a("}': "'pattern' at #/pattern: unclosed group, at character 2 of a(",
}
REFUSED: list[tuple[GrammarKind, str, str]] = [
    *(("json_schema", source, says) for source, says in REFUSED_SCHEMAS.items()),
    ("regex", "\ud800", "half of a pair of surrogates"),
    ("regex", "ab(c", "unclosed group, at character 3 of ab(c"),
    ("regex", "(?=a)b", "look-ahead"),
    ("regex", "(a)\\1", "backreferences"),
    ("regex", "[^\\s\\S]", "nothing with which it can go on"),
    ("regex", "(" * 20000, "unclosed group"),
    ("lark", 'start: "a" b\nb: nothing', "line 2, column 4: unknown name"),
    ("lark", "start: start", "nothing with which it can go on"),
    ("lark", 'start: a\na[temperature=0.3]: "x"', "'temperature' in line 2"),
    ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    ("gbnf", "root ::= (", "line 1, column 11: expected a closing parenthesis, not the end of the grammar"),
    ("gbnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    ("gbnf", 'root ::= "' + "a" * 70000 + '"', "characters"),
]


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
def test_a_schema_that_never_ends_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="never ends"):
        defined(json_schema(schema))


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("schema", RECURSIVE.values(), ids=RECURSIVE)
def test_a_recursive_schema_that_can_end_is_taken(schema: Any) -> None:
    defined(json_schema(schema))


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize(("kind", "source", "says"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(kind: GrammarKind, source: str, says: str) -> None:
    with pytest.raises(GrammarError) as refused:
        defined(Grammar(kind, source))
    assert says in f"{refused.value.what}: {refused.value.why}" and len(refused.value.why) < 1500


# The others explode in the same ways, and take up to a second and a half each.
OFTEN = [EXPLODING[number] for number in (0, 3, 5, 9, 10, 12, 15)]


@pytest.mark.parametrize(("kind", "asked"), thinned(EXPLODING, OFTEN.__contains__))
def test_what_explodes_is_refused_before_it_costs_a_second(kind: GrammarKind, asked: Any) -> None:
    """And takes no process with it: a chain of thousands overflows the stack of native code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(GrammarError):
        defined(Grammar(kind, asked if isinstance(asked, str) else json.dumps(asked)))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_S + 0.4


def test_a_busy_machine_is_not_the_fault_of_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gets no CPU in time is not refused, and may be asked for again."""
    tokenizer = Tokenizer.load(TINY_DIRECTORY)
    grammars, grammar = Grammars(tokenizer, {2}, tokenizer.vocab_size), Grammar("regex", "a")
    with monkeypatch.context() as patched, pytest.raises(BusyError) as busy:
        patched.setattr(definition, "_PATIENCE_S", 0.0)
        grammars.check(grammar)
    assert "this machine is busy" in busy.value.why and failure_of(busy.value).status == 503
    grammars.check(grammar)


def test_a_trial_that_is_killed_is_not_the_fault_of_a_grammar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed = tmp_path / "killed.py"
    killed.write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setattr(compile_check, "__file__", str(killed))
    with pytest.raises(BusyError, match="could not be tried out") as busy:
        defined(Grammar("regex", "a"))
    assert "SIGKILL" in busy.value.why


@pytest.mark.usefixtures("tried_here")
def test_what_a_schema_only_notes_is_no_part_of_the_grammar() -> None:
    noted = {"default": nested_list(130), "examples": [nested_list(90)], "title": "t", "x-of-mine": 1, "$comment": "c"}
    assert defined(json_schema({"type": "null", **noted})) == defined(json_schema({"type": "null"}))


@pytest.mark.usefixtures("tried_here")
def test_what_nothing_refers_to_is_no_part_of_the_grammar() -> None:
    circle = {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b", "uniqueItems": True}}
    unused: dict[str, Any] = {"a": {"not": {}}, **circle, "d": {"$ref": "http://localhost/elsewhere"}, "e": 3}
    used = {"type": "array", "items": {"$ref": "#/$defs/f/properties/g"}}
    holder = {"properties": {"g": {"type": "null"}}, "definitions": {"h": {"propertyNames": {}}}}
    whole = {**used, "$defs": {**unused, "f": holder}, "definitions": {"i": {"contains": {}}}}
    assert checked(json.dumps(whole)).schema["$defs"].keys() == {"f", "_any"}
    defined(json_schema(whole))


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("name", ["int32", "regex", "uri-reference", "phone", "a format of mine"])
def test_a_format_that_is_not_known_says_nothing(name: str) -> None:
    for schema in ({"type": "string", "maxLength": 3}, {"type": "integer"}, {}):
        assert defined(json_schema({**schema, "format": name})) == defined(json_schema(schema))


@pytest.mark.parametrize("source", ["(a+)+$", "(x+x+)+y", "(.*a){20}b", "(a|b)*a(a|b){40}"])
def test_what_makes_other_engines_backtrack_is_taken(source: str) -> None:
    defined(Grammar("regex", source))

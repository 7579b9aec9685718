"""Calls in every syntax: two hundred answers of each, in random pieces, with arguments of every type; and grammars that
let just those through."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from localllm import hub
from localllm.server.tools.deltas import Part
from localllm.server.tools.tool_formats import GENERIC, TOOL_FORMATS, ToolFormat
from localllm.server.tools.tool_grammars import tools_lark
from localllm.server.tools.tool_parser import HarmonyParser, ToolCallParser
from localllm.server.tools.toolset import Tool, toolset
from localllm.text.grammar.compiled import Grammars
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer import Tokenizer
from tests.server.support import Json
from tests.thinning import examples

BY_NAME = {form.name: form for form in (*TOOL_FORMATS, GENERIC)}
SCHEMA: Json = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "pages": {"type": "integer", "minimum": 0},
        "price": {"type": "number"},
        "sold": {"type": "boolean"},
        "genre": {"enum": ["crime", "poetry"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "about": {"$ref": "#/$defs/About"},
        "note": {"type": ["string", "null"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"},
        "short": {"type": "string", "minLength": 1, "maxLength": 4},
    },
    "required": ["title", "sold"],
    "$defs": {
        "About": {
            "type": "object",
            "properties": {
                "lists": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                "next": {"anyOf": [{"$ref": "#/$defs/About"}, {"type": "null"}]},
                "word": {"type": "string"},
            },
        }
    },
}
TOOLS = (Tool("book", "A book.", SCHEMA), Tool("clock", "", {"type": "object", "properties": {}}))
TEXTS = ("Rome", "", "42", "true", "null", "-1.5", "[1]", '{"a": 1}', "a\nb", "\n", " x ", 'say "hi", ok', "it's \\ it",
         "東京 🙂 naïve", "<b>bold</b> & more", "</parameter", "a, b=(c) [d] {e: f}", "x=1)", "`code`\t")  # fmt: skip


def about(choose: random.Random, depth: int = 0) -> Json:
    """In the order of the schema, as a grammar has it."""
    deeper = about(choose, depth + 1) if depth < 2 and choose.random() < 0.5 else None
    return {"lists": [[1, -2], []], "next": deeper, "word": choose.choice(TEXTS)}


def a_book(choose: random.Random) -> Json:
    book: Json = {
        "title": choose.choice(TEXTS),
        "pages": choose.choice([0, 7, 12345]),
        "price": choose.choice([0.5, 3, -2.25]),
    }
    book |= {"sold": choose.random() < 0.5, "genre": choose.choice(["crime", "poetry"])}
    book |= {"tags": choose.choices(TEXTS, k=choose.randint(0, 3)), "about": about(choose)}
    book |= {"note": choose.choice([None, "A note.", "Of 東京\n"]), "code": choose.choice(["AB1", "ZZ99"])}
    book |= {"short": choose.choice(["a", "\nb", "1234"])}
    optional = [name for name in book if name not in SCHEMA["required"]]
    dropped = set(choose.sample(optional, choose.randint(0, len(optional))))
    return {name: value for name, value in book.items() if name not in dropped}


def some_calls(form: ToolFormat, choose: random.Random) -> list[tuple[str, Json]]:
    count = 1 if form.one_call else choose.randint(1, 3)
    return [("book", a_book(choose)) if choose.random() < 0.8 else ("clock", {}) for _ in range(count)]


def read(form: ToolFormat, pieces: list[str], *, streams: bool) -> list[Part]:
    if form.is_harmony:
        parser: Any = HarmonyParser([tool.name for tool in TOOLS], streams=streams)
    else:
        schemas = {tool.name: tool.schema for tool in TOOLS}
        parser = ToolCallParser(form, schemas, streams=streams, says="anything")
    return [part for piece in pieces for part in parser.feed(piece)] + parser.end(is_cut=False)


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    found: list[list[str]] = []
    for kind, text in parts:
        if kind == "call":
            found.append([text, ""])
        elif kind == "arguments":
            found[-1][1] += text
    return [(name, json.loads(arguments)) for name, arguments in found]


def in_pieces(text: str, choose: random.Random) -> list[str]:
    most = choose.choice([1, 3, 12, 80])
    pieces, at = [], 0
    while at < len(text):
        length = choose.randint(1, most)
        pieces.append(text[at : at + length])
        at += length
    return pieces


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", BY_NAME)
def test_answers_have_the_same_calls_in_whatever_pieces(name: str, streams: bool) -> None:
    form, choose = BY_NAME[name], random.Random(name)
    for _ in range(examples(200)):
        calls = some_calls(form, choose)
        said = (
            choose.choice(["", "Let me look.", "Schön: 1 < 2 🙂\n\n"]) if not (form.is_bare or form.is_harmony) else ""
        )
        text = said + form.written(calls)
        whole = read(form, [text], streams=streams)
        parts = read(form, in_pieces(text, choose), streams=streams)
        assert calls_of(parts) == calls_of(whole) == calls, text
        assert "".join(part for kind, part in parts if kind == "text").strip() == said.strip()


@pytest.mark.parametrize("name", BY_NAME)
def test_broken_answers_are_the_same_in_whatever_pieces(name: str) -> None:
    form, choose = BY_NAME[name], random.Random(name)
    for _ in range(examples(200)):
        text = form.written(some_calls(form, choose))
        at, more = choose.randrange(len(text)), choose.choice(["", "}", "]", "<", "\n", '"', "x", form.ends, form.last])
        broken = text[:at] + more + text[at + choose.randint(1, 8) :]
        whole, parts = (
            "".join(f"<{kind}>{part}" if kind == "call" else part for kind, part in read(form, pieces, streams=False))
            for pieces in ([broken], in_pieces(broken, choose))
        )
        assert parts == whole, broken


# Grammars


PLAIN = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # as GLM has them


@pytest.fixture(scope="module", params=["tokens", "texts"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """The built-in model's; as tokens: with the marks of every family."""
    backend = tokenizers.Tokenizer.from_file(str(hub.locate("tiny").directory / "tokenizer.json"))
    if request.param == "tokens":
        marks = (mark for form in BY_NAME.values() for mark in form.special)
        backend.add_special_tokens([mark for mark in marks if mark not in PLAIN])
        backend.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


@cache
def grammars_of(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, [tokenizer.eos_token_id], tokenizer.vocab_size)


MISFITS: list[tuple[str, Json]] = [
    ("nobody", {}),
    ("book", {"title": "a"}),
    ("book", {"sold": True}),
    *(("book", {"title": "a", "sold": True, **odd}) for odd in (
        {"pages": "many"}, {"pages": -1}, {"pages": 1.5}, {"price": "dear"}, {"sold": "yes"}, {"genre": "cookery"},
        {"tags": [1]}, {"tags": ["a"] * 4}, {"about": {"lists": [["a"]]}}, {"about": [1]}, {"code": "ab1"},
        {"short": "12345"}, {"other": 1})),
]  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_a_grammar_takes_the_calls_that_fit_and_no_others(tokenizer: Tokenizer, name: str) -> None:
    form, choose = BY_NAME[name], random.Random(name)
    if form.is_harmony and tokenizer.token_id("<|channel|>") is None:
        pytest.skip("every model of harmony has its marks as tokens")
    strict = tuple(Tool(tool.name, tool.description, tool.parameters, strict=True) for tool in TOOLS)
    tools = toolset(strict, must_call=True)
    assert tools is not None
    grammar = Grammar("lark", tools_lark(form, tools, tokenizer.token_id))
    constraint = grammars_of(tokenizer).constraint(grammar)

    def takes(calls: list[tuple[str, Json]]) -> bool:
        return constraint.is_met(tokenizer.encode(form.written(calls), special=True))

    for _ in range(examples(40)):
        calls = some_calls(form, choose)
        if not any(mark in text for mark in form.special for text in TEXTS):
            assert takes(calls), form.written(calls)
    for call in MISFITS:
        assert not takes([call]), form.written([call])

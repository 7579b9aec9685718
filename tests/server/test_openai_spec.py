"""Replies are what OpenAI's own description of its interface says that they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.server.support import OWL, Json, Running
from tests.server.tools_support import FUNCTIONS, OPENAI_TOOLS, ROOM

CHAT = {"model": "tiny", "messages": OWL, "max_tokens": 6}
TEXT = {"model": "tiny", "prompt": "Once", "max_tokens": 6}
ASKED = {"model": "tiny", "input": "A tale, please.", "max_output_tokens": 6}

COUNTED = {**CHAT, "stream_options": {"include_usage": True}, "logprobs": True}
CALLED = {
    **CHAT, "max_tokens": ROOM, "tools": OPENAI_TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "clock"}},
}  # fmt: skip
CALLED_ITEM = {
    **ASKED, "max_output_tokens": ROOM, "tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "clock"},
    "text": {"format": {"type": "json_object"}},
}  # fmt: skip

Spec = Callable[[str], Draft202012Validator]


def nullable(schema: Any) -> Any:
    """With `nullable`, which OpenAPI 3.1 has no more and the description still uses, as what it means."""
    if isinstance(schema, list):
        return [nullable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: nullable(each) for name, each in schema.items() if name != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


@pytest.fixture(scope="module")
def spec(shared_data: Callable[[str], Path]) -> Spec:
    """A validator for a schema of the description."""
    document = nullable(json.loads(shared_data("openai/openapi.json").read_text(encoding="utf-8")))

    def of(name: str) -> Draft202012Validator:
        return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})

    return of


@pytest.mark.parametrize(
    ("schema", "path", "body"),
    [
        pytest.param("CreateChatCompletionResponse", "/v1/chat/completions", CHAT, marks=pytest.mark.slow),
        ("CreateChatCompletionResponse", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}),
        ("CreateChatCompletionResponse", "/v1/chat/completions", CALLED),
        pytest.param("CreateCompletionResponse", "/v1/completions", TEXT, marks=pytest.mark.slow),
        ("CreateCompletionResponse", "/v1/completions", {**TEXT, "logprobs": 2, "n": 2}),
        ("CreateEmbeddingResponse", "/v1/embeddings", {"model": "tiny", "input": ["a", "b"]}),
        pytest.param("Response", "/v1/responses", {**ASKED, "max_output_tokens": 600}, marks=pytest.mark.slow),
        ("Response", "/v1/responses", {**ASKED, "top_logprobs": 2}),
        ("Response", "/v1/responses", CALLED_ITEM),
    ],
)
def test_a_reply_is_as_described(server: Running, spec: Spec, schema: str, path: str, body: Json) -> None:
    spec(schema).validate(server.post(path, body).json())


@pytest.mark.parametrize(
    ("schema", "path", "body"),
    [
        ("CreateChatCompletionStreamResponse", "/v1/chat/completions", CHAT),
        ("CreateChatCompletionStreamResponse", "/v1/chat/completions", COUNTED),
        ("CreateCompletionResponse", "/v1/completions", {**TEXT, "logprobs": 1}),
        ("CreateChatCompletionStreamResponse", "/v1/chat/completions", {**CALLED, "logprobs": True}),
        ("ResponseStreamEvent", "/v1/responses", ASKED),
        ("ResponseStreamEvent", "/v1/responses", CALLED_ITEM),
    ],
)
def test_each_part_of_a_stream_is_as_described(server: Running, spec: Spec, schema: str, path: str, body: Json) -> None:
    validator = spec(schema)
    for _ in range(20):  # a busy machine may have several tokens for one piece
        if len(pieces := server.events(path, {**body, "stream": True})) > 3:
            break
    assert len(pieces) > 3
    for piece in pieces:
        if schema == "CreateCompletionResponse":  # whose pieces are not described: the original's have null here
            for choice in piece["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        validator.validate(piece)


def test_the_models_are_listed_as_described(server: Running, spec: Spec) -> None:
    spec("ListModelsResponse").validate(server.get("/v1/models").json())
    spec("Model").validate(server.get("/v1/models/tiny").json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {**CHAT, "model": "no"}),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "owl " * 3000}]}),
        ("/v1/nothing", {}),
    ],
)
def test_an_error_is_as_described(server: Running, spec: Spec, path: str, body: Json) -> None:
    reply = server.post(path, body)
    assert reply.status_code >= 400
    spec("ErrorResponse").validate(reply.json())

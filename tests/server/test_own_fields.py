"""Fields of our own, which every dialect takes beside its original's, and what replies say of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.server.support import Running
from tests.test_cli_compress import QUESTION, TALE

WORDS = ["a", "king", "who", "had", "garden", "and", "in", "it", "stood", "tree", "with", "golden", "apples"]


def asking(path: str, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    short = {
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/responses": {"input": text, "max_output_tokens": 1},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/api/chat": {"messages": messages, "stream": False, "options": {"num_predict": 1}},
        "/api/generate": {"prompt": text, "stream": False, "options": {"num_predict": 1}},
    }
    return {"model": "tiny", **short[path], **more}


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")


def reused(reply: dict[str, Any]) -> int | None:
    """The tokens that a reply says were taken from another position."""
    usage = reply.get("usage", reply)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    count: int | None = details.get("reused_tokens", details.get("reused_count"))
    return count


@pytest.mark.parametrize("path", PATHS)
def test_a_document_is_reused_where_a_request_of_any_dialect_allows_it(server: Running, path: str) -> None:
    seed = PATHS.index(path)
    tales = [" ".join(random.Random(10 * seed + n).choices(WORDS, k=200)) for n in range(2)]
    server.answer(path, asking(path, f"First: {tales[0]} {tales[1]}"))
    exact = server.answer(path, asking(path, f"Another order: {tales[1]} {tales[0]}"))
    near = server.answer(path, asking(path, f"An order of its own: {tales[1]} {tales[0]}", reuse="chunks"))
    assert reused(exact) is None and (reused(near) or 0) > 0
    error = server.error(path, asking(path, "Once", reuse="chunk"))
    assert "reuse" in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", PATHS[1:])
def test_a_chat_of_any_dialect_is_compressed_and_says_what_left(server: Running, path: str) -> None:
    asked = asking(path, f"{TALE}\n\n{QUESTION}", compress=0.4)
    told = server.answer(path, asked)["compression"]
    assert told["judge"] == "tiny" and 0.3 < told["tokens_after"] / told["tokens_before"] <= 0.4
    streamed = [
        json.loads(each[each.index("{") :])
        for each in server.stream_lines(path, asked | {"stream": True})
        if "{" in each
    ]
    found = [
        each[key]["compression"]
        for each in streamed
        for key in ("response", "message")
        if "compression" in (each.get(key) or {})
    ]
    found += [each["compression"] for each in streamed if "compression" in each]
    assert found and all(each == told for each in found)
    error = server.error(path, asking(path, "Once", compress_with="tiny"))
    assert "'compress_with' cannot be honoured" in (error if isinstance(error, str) else error["message"])


def test_a_raw_prompt_is_not_compressed(server: Running) -> None:
    asked = asking("/api/generate", TALE, raw=True, compress=0.4)
    assert "'compress' cannot be honoured" in server.error("/api/generate", asked)


@pytest.mark.parametrize("field", [{"reuse": "chunks"}, {"compress": 0.4}, {"structured_outputs": {"regex": "a"}}])
def test_a_field_among_ollamas_options_is_told_its_place(server: Running, field: dict[str, Any]) -> None:
    asked = {"model": "tiny", "prompt": "Once", "options": field}
    assert "put it beside 'options'" in server.error("/api/generate", asked)

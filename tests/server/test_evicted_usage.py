"""A reply's usage says how many tokens' keys and values left before its end."""

from __future__ import annotations

from typing import Any

from tests.server.support import running

TEXT = "Once upon a time there was a fox. " * 40


def replies(text: str) -> list[tuple[str, dict[str, Any]]]:
    turn = [{"role": "user", "content": text}]
    return [
        ("/v1/completions", {"prompt": text, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": turn, "max_tokens": 2}),
        ("/v1/responses", {"input": text, "max_output_tokens": 16}),
        ("/v1/messages", {"messages": turn, "max_tokens": 2}),
        ("/api/generate", {"prompt": text, "stream": False, "options": {"num_predict": 2}}),
    ]


def test_every_dialect_says_what_left_and_nothing_where_nothing_did():
    with running(kv_evict="sinks:64") as server:
        for path, body in replies(TEXT):
            reply = server.answer(path, {"model": "tiny", **body})
            usage = reply.get("usage", reply)
            assert usage.get("evicted_tokens", usage.get("evicted_count")) > 0, path
        for path, body in replies("Once"):
            reply = server.answer(path, {"model": "tiny", **body})
            assert not {"evicted_tokens", "evicted_count"} & {*reply.get("usage", reply)}, path

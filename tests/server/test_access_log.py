"""A line and a count of every request: of those that were answered, that failed, and whose client has gone."""

from __future__ import annotations

import asyncio
import re

import pytest
from starlette.types import Message, Receive, Scope, Send

from localllm.server.access_log import AccessLog, Metrics
from tests.server.conftest import Connect
from tests.server.support import OWL, Running, wait_for

CHAT = "/v1/chat/completions"
ENDLESS = {"messages": OWL, "logit_bias": {"2": -100, "0": -100}}


def num_requests(metrics: Metrics, path: str, status: int) -> float:
    labels = {"path": path, "status": str(status)}
    return metrics.registry.get_sample_value("localllm_requests_total", labels) or 0


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_gone_is_no_failure(connect: Connect, server: Running, stream: bool) -> None:
    server.log.clear()
    before = num_requests(server.server.metrics, CHAT, 499)
    raw = connect(server)
    raw.post(CHAT, {**ENDLESS, "stream": stream})
    if stream:
        raw.read_until(b"data: ")
    wait_for(lambda: server.engine.has_work)
    raw.close()
    assert re.fullmatch(rf"POST {CHAT} 499 [\d.]+ s \w+", server.line_with(f"POST {CHAT} 499 "))
    assert num_requests(server.server.metrics, CHAT, 499) == before + 1


def test_a_reply_and_its_line_have_one_id(server: Running) -> None:
    one, other = server.get("/health"), server.get("/health")
    request_id = one.headers["x-request-id"]
    assert request_id == one.headers["request-id"] == server.line_with(request_id).split()[-1]
    assert len(request_id) == 16 and other.headers["x-request-id"] != request_id


def test_what_fails_without_a_reply_is_noted_as_a_failure() -> None:
    lines: list[str] = []
    metrics = Metrics()

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        await receive()
        raise ValueError("nobody foresaw it")

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    logbook = AccessLog(app, ["/health"], metrics, lines.append)
    with pytest.raises(ValueError, match="foresaw"):
        asyncio.run(logbook({"type": "http", "method": "GET", "path": "/health"}, receive, send))
    assert lines[0].startswith("GET /health 500 ") and num_requests(metrics, "/health", 500) == 1

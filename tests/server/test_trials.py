"""Grammars that are new are tried out beside all else: who asks for none does not wait for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from localllm.server.served import Capacity
from tests.server.support import OWL, Running, running

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": OWL, "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def processes() -> Iterator[Running]:
    with running(in_processes=True, capacity=Capacity(parallel=8, queue=64)) as server:
        yield server


def exploding(number: int) -> dict[str, Any]:
    pattern = f"{number}(((a{{100}}){{100}}){{100}}){{100}}"
    return {**ASKED, "structured_outputs": {"regex": pattern}}


def told(server: Running, body: dict[str, Any]) -> tuple[httpx2.Response, float]:
    """The reply, and after how many seconds it came."""
    started = time.monotonic()
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        reply = client.post(CHAT, json=body)
    return reply, time.monotonic() - started


def test_a_plain_chat_does_not_wait_for_grammars_that_explode(processes: Running) -> None:
    told(processes, ASKED)
    _, alone_s = told(processes, ASKED)
    with ThreadPoolExecutor(8) as threads:
        refusals = [threads.submit(told, processes, exploding(number)) for number in range(8)]
        time.sleep(0.3)
        waits = [told(processes, ASKED) for _ in range(3)]
        refused = [each.result()[0] for each in refusals]
    assert all(reply.status_code == 200 for reply, _ in waits)
    assert max(seconds for _, seconds in waits) < alone_s + 0.5
    assert {reply.status_code for reply in refused} == {400}
    assert all(reply.json()["error"]["code"] == "invalid_grammar" for reply in refused)


@pytest.mark.slow
def test_more_new_grammars_than_may_wait_are_refused_for_now(processes: Running) -> None:
    with ThreadPoolExecutor(30) as threads:
        replies = [each[0] for each in threads.map(lambda n: told(processes, exploding(100 + n)), range(30))]
    busy = [reply for reply in replies if reply.status_code == 503]
    assert {reply.status_code for reply in replies} == {400, 503} and busy
    assert all("grammars" in reply.json()["error"]["message"] and reply.headers["retry-after"] for reply in busy)


def test_many_who_ask_for_the_same_new_grammar_at_once_all_have_it(processes: Running) -> None:
    body = {**ASKED, "structured_outputs": {"regex": "(owl|fox|cat)"}}
    with ThreadPoolExecutor(40) as threads:
        replies = [each[0] for each in threads.map(lambda _: told(processes, body), range(40))]
    assert {reply.status_code for reply in replies} == {200}

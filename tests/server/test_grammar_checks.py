"""Grammars that are new are tried out beside all else: who asks for none does not wait for them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from localllm.engine.request import Request
from localllm.errors import ContextOverflowError, GrammarError
from localllm.runtime.engine_client import RemoteEngine
from localllm.server.model_server import AT_ONCE, Capacity, GrammarChecks
from tests.patience import PATIENCE_S
from tests.server.support import OWL, Json, Patch, Running, running, wait_for

CHAT = "/v1/chat/completions"
ASKED: Json = {"messages": OWL, "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def processes() -> Iterator[Running]:
    with running(in_processes=True, capacity=Capacity(parallel=8, queue=64)) as server:
        yield server


def exploding(number: int) -> Json:
    return {**ASKED, "structured_outputs": {"regex": f"{number}(((a{{100}}){{100}}){{100}}){{100}}"}}


def told(server: Running, body: Json) -> httpx2.Response:
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        return client.post(CHAT, json=body)


def test_a_plain_chat_does_not_wait_for_grammars_that_explode(processes: Running, monkeypatch: Patch) -> None:
    told(processes, ASKED)
    check, tried, answered = RemoteEngine.check, itertools.count(), threading.Event()

    def check_in_turn(engine: RemoteEngine, request: Request) -> None:
        if request.grammar is not None and next(tried) >= AT_ONCE:
            answered.wait(PATIENCE_S)
        check(engine, request)

    monkeypatch.setattr(RemoteEngine, "check", check_in_turn)
    with ThreadPoolExecutor(8) as threads:
        refusals = [threads.submit(told, processes, exploding(number)) for number in range(AT_ONCE + 1)]
        replies = [told(processes, ASKED) for _ in range(3)]
        num_waiting = sum(not each.done() for each in refusals)
        answered.set()
        refused = [each.result() for each in refusals]
    assert {reply.status_code for reply in replies} == {200} and num_waiting >= 1
    assert {reply.status_code for reply in refused} == {400}
    assert all(reply.json()["error"]["code"] == "invalid_grammar" for reply in refused)


def test_what_is_wrong_with_one_request_is_not_told_to_another_of_the_same_grammar() -> None:
    begun, may_end, checked = threading.Event(), threading.Event(), list[str]()

    def too_long() -> None:
        begun.set()
        may_end.wait(PATIENCE_S)
        raise ContextOverflowError("the prompt is too long")

    async def asked() -> None:
        trials = GrammarChecks(asyncio.to_thread)
        first = asyncio.create_task(trials.check("a grammar", too_long))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        others = [asyncio.create_task(trials.check("a grammar", lambda: checked.append("one"))) for _ in range(2)]
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(ContextOverflowError):
            await first
        await asyncio.gather(*others)
        with pytest.raises(ContextOverflowError):
            await trials.check("a grammar", too_long)
        trials.close()

    asyncio.run(asked())
    assert checked == ["one", "one"]


def test_a_grammar_that_is_refused_is_refused_to_all_who_ask_for_it() -> None:
    may_end, num_tried = threading.Event(), list[int]()

    def refuse() -> None:
        num_tried.append(1)
        may_end.wait(PATIENCE_S)
        raise GrammarError("the grammar explodes", why="it does", fix="make it simpler")

    async def asked() -> list[BaseException | None]:
        async def off_loop(work: Callable[[], None]) -> None:
            raise AssertionError("it has not passed")

        trials = GrammarChecks(off_loop)
        tasks = [asyncio.create_task(trials.check("a grammar", refuse)) for _ in range(3)]
        await asyncio.sleep(0)
        may_end.set()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    errors = asyncio.run(asked())
    assert len(num_tried) == 1 and len({id(error) for error in errors}) == 3
    assert {(str(error), getattr(error, "fix", "")) for error in errors} == {(str(errors[0]), "make it simpler")}


def test_more_new_grammars_than_may_wait_are_refused_for_now(processes: Running, monkeypatch: Patch) -> None:
    refused = threading.Event()

    def check(_engine: RemoteEngine, _request: Request) -> None:
        refused.wait(PATIENCE_S)
        raise GrammarError("the grammar explodes")

    monkeypatch.setattr(RemoteEngine, "check", check)
    with ThreadPoolExecutor(30) as threads:
        asked = [threads.submit(told, processes, exploding(100 + number)) for number in range(30)]
        wait_for(lambda: sum(each.done() for each in asked) == 30 - AT_ONCE - 16)
        refused.set()
        replies = [each.result() for each in asked]
    busy = [reply for reply in replies if reply.status_code == 503]
    assert {reply.status_code for reply in replies} == {400, 503} and len(busy) == 30 - AT_ONCE - 16
    assert all("grammars" in reply.json()["error"]["message"] and reply.headers["retry-after"] for reply in busy)


def test_many_who_ask_for_the_same_new_grammar_at_once_all_have_it(processes: Running) -> None:
    body = {**ASKED, "structured_outputs": {"regex": "(owl|fox|cat)"}}
    with ThreadPoolExecutor(40) as threads:
        replies = list(threads.map(lambda _: told(processes, body), range(40)))
    assert {reply.status_code for reply in replies} == {200}

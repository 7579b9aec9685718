"""Clients that go, stall, or say things by halves: the engine is idle at once, and others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from localllm.engine.engine import Engine
from localllm.engine.events import TokenEvent
from localllm.engine.sequence import Sequence
from localllm.server import http_server, replies
from localllm.server.logprobs import CompletionTokens
from localllm.server.model_server import Capacity
from localllm.server.stream import Delta, EventMailbox
from tests.cli_support import write_checkpoint
from tests.kv_support import check_prefix
from tests.patience import PATIENCE_S
from tests.server.conftest import Connect
from tests.server.support import OWL, Json, Patch, Raw, Running, num_cancelled, running, wait_for
from tests.thinning import thinned

CHAT = "/v1/chat/completions"
Stalled = list[http_server.HttpConnection]
PHASES = ("queued", "reading the prompt", "before the first token", "answering", "answered by half")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that never ends its answer, one answer at a time, prompts in small chunks."""
    folder = write_checkpoint(tmp_path_factory.mktemp("endless"), hidden=128, layers=6, context=8192)
    with running(folder, capacity=Capacity(parallel=1, queue=8)) as server:
        yield server


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Of what its clients do not take, the system keeps next to nothing; its model ends no answer."""
    folder = write_checkpoint(tmp_path_factory.mktemp("narrow"), context=4096)
    with running(folder, send_bytes=4096, speculate="off") as server:
        yield server


def long_chat(number: int) -> list[dict[str, str]]:
    """One of which the prefix cache knows nothing."""
    return [{"role": "user", "content": f"{number} " * 3 + "fox lantern " * 1400}]


class Steps:
    """Counts the steps that an engine computes, and those of them after requests were aborted."""

    def __init__(self, engine: Engine, monkeypatch: Patch) -> None:
        self.all = self.after = 0
        self._aborted: set[int] = set()
        plain_abort, plain_step = engine.abort, engine.step

        def abort(request_id: int) -> None:
            self._aborted.add(request_id)
            plain_abort(request_id)

        def step(*arguments: Any) -> Any:
            held = {sequence.request_id for sequence in engine.scheduler.sequences}
            self.all += bool(held)
            self.after += bool(held & self._aborted)
            return plain_step(*arguments)

        monkeypatch.setattr(engine, "abort", abort)
        monkeypatch.setattr(engine, "step", step)


def is_in(phase: str, sequence: Sequence, running: list[Sequence]) -> bool:
    done = sequence.kv.length if sequence.kv is not None else 0
    match phase:
        case "queued":
            return sequence not in running
        case "reading the prompt":
            return 0 < done < sequence.num_prompt_tokens // 2
        case "before the first token":
            return sequence.num_prompt_tokens // 2 <= done and sequence.num_completion_tokens == 0
        case "answering":
            return sequence.num_completion_tokens >= 1
    return sequence.num_completion_tokens >= 40


def leave_in(connect: Connect, server: Running, phase: str, steps: Steps, *, stream: bool, number: int) -> None:
    """Asks for an answer and goes while it is in that phase; steps: has counted those since then."""
    scheduler = server.engine.scheduler
    others = [connect(server)] if phase == "queued" else []
    for other in others:
        other.post(CHAT, {"messages": OWL})
        wait_for(lambda: bool(scheduler.running))
    known = {sequence.request_id for sequence in scheduler.sequences}
    raw = connect(server)
    raw.post(CHAT, {"messages": long_chat(number) if "prompt" in phase or "first" in phase else OWL, "stream": stream})

    def has_come() -> bool:
        found = [sequence for sequence in scheduler.sequences if sequence.request_id not in known]
        return bool(found) and is_in(phase, found[0], scheduler.running)

    wait_for(has_come)
    steps.all = 0
    raw.close()
    for other in others:
        wait_for(lambda: {sequence.request_id for sequence in scheduler.sequences} <= known)
        other.close()


# Each phase, now streamed and now not.
OFTEN = list(zip(PHASES, itertools.cycle((True, False)), strict=False))


@pytest.mark.parametrize(
    ("phase", "stream"), thinned(itertools.product(PHASES, (True, False)), OFTEN.__contains__), ids=str
)
@pytest.mark.parametrize("times", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_who_goes_is_not_computed_for(
    connect: Connect, endless: Running, phase: str, stream: bool, times: int, monkeypatch: Patch
) -> None:
    for number in range(times):
        with monkeypatch.context() as patch:
            steps, before = Steps(endless.engine, patch), num_cancelled(endless)
            fresh = 100 * PHASES.index(phase) + 2 * number + stream
            leave_in(connect, endless, phase, steps, stream=stream, number=fresh)
            endless.wait_until_idle()
            assert steps.after <= 2  # the step that was under way, and the one that lets go of it
            assert steps.all < 1000  # of the 8,000 of its answer: the loop hears of it at once, on a busy machine too
            wait_for(lambda count=before + 1 + (phase == "queued"): num_cancelled(endless) == count)
    check_prefix(endless.engine.prefix)


def test_who_goes_while_a_completion_is_made_ready_leaves_no_answer_behind(
    connect: Connect, server: Running, monkeypatch: Patch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def made_slowly(*given: Any, **named: Any) -> CompletionTokens:
        begun.set()
        goes_on.wait(PATIENCE_S)
        return CompletionTokens(*given, **named)

    monkeypatch.setattr("localllm.server.openai.completions.CompletionTokens", made_slowly)
    raw = connect(server)
    raw.post("/v1/completions", {"prompt": ["Once", "A tale"], "n": 2, "max_tokens": 2})
    try:
        assert begun.wait(PATIENCE_S)
        raw.close()
        server.wait_until_idle()
    finally:
        goes_on.set()


def test_what_a_reader_has_not_taken_is_one_piece_of_text() -> None:
    async def taken() -> dict[int, Delta]:
        mail = EventMailbox(lambda: None, lambda _event: None)
        for index in range(100_000):
            mail.put(TokenEvent(7, index % 4, "ab"))
        return await mail.take(None)

    pieces = asyncio.run(taken())
    assert list(pieces) == [7] and pieces[7].text == "ab" * 100_000


@pytest.fixture
def stalled(monkeypatch: Patch) -> Stalled:
    """Connections whose clients take nothing any more."""
    found: Stalled = []
    plain = http_server.HttpConnection.pause_writing

    def pause_writing(self: http_server.HttpConnection) -> None:
        found.append(self)
        plain(self)

    monkeypatch.setattr(http_server.HttpConnection, "pause_writing", pause_writing)
    return found


def test_a_reader_that_takes_nothing_costs_little_and_holds_nobody_up(
    connect: Connect, narrow: Running, stalled: Stalled
) -> None:
    slow = connect(narrow, receive_bytes=4096)
    slow.post(CHAT, {"messages": OWL, "stream": True, "max_tokens": 900})
    assert narrow.post(CHAT, {"messages": OWL, "max_tokens": 8}).status_code == 200
    narrow.wait_until_idle_engine()
    (connection,) = stalled
    assert 0 < connection.transport.get_write_buffer_size() < 128 << 10  # of 216 KiB
    assert b"[DONE]" in slow.read_until(b"[DONE]")
    narrow.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_takes_nothing_for_long_is_given_up(
    connect: Connect,
    narrow: Running,
    stalled: Stalled,
    monkeypatch: Patch,
    stream: bool,
) -> None:
    monkeypatch.setattr(http_server, "STALL_S", 0.2)
    slow = connect(narrow, receive_bytes=4096)
    slow.post(CHAT, {"messages": OWL, "stream": stream, "max_tokens": 300, "logprobs": True, "top_logprobs": 5})
    wait_for(lambda: bool(stalled))
    narrow.wait_until_idle()
    (connection,) = stalled
    wait_for(lambda: connection.transport.is_closing() and not connection.transport.get_write_buffer_size())


def test_where_all_connections_are_taken_one_that_reads_nothing_gives_way(
    connect: Connect, narrow: Running, stalled: Stalled, monkeypatch: Patch
) -> None:
    narrow.client.close()
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)
    for _ in range(4):
        connect(narrow, receive_bytes=4096).post(CHAT, {"messages": OWL, "stream": True, "max_tokens": 900})
    wait_for(lambda: len(stalled) == 4)
    late = connect(narrow)
    late.get("/v1/models")
    assert late.status() == 200
    assert sum(each.transport.is_closing() for each in stalled) == 1


def test_half_a_body_holds_nobody_up_and_is_given_up(connect: Connect, server: Running, monkeypatch: Patch) -> None:
    half, late = connect(server), connect(server)
    half.post(CHAT, b'{"messages": [', content_length="1000")
    assert server.post(CHAT, {"messages": OWL, "max_tokens": 2}).status_code == 200
    monkeypatch.setattr("localllm.server.bodies._BODY_S", 0.1)
    late.post(CHAT, b'{"messages": [', content_length="1000")
    assert late.status() == 408


def test_a_body_that_comes_slowly_but_steadily_is_awaited(
    connect: Connect, server: Running, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("localllm.server.bodies._BODY_S", 0.3)
    monkeypatch.setattr("localllm.server.bodies._LEAST_BYTES_S", 0.1)  # so that the first byte is good for ten seconds
    body = json.dumps({"messages": OWL, "max_tokens": 1}).encode()
    slow = connect(server)
    slow.post(CHAT, body[:60], content_length=str(len(body)))
    time.sleep(0.6)
    slow.send(body[60:])
    assert slow.status() == 200


def test_who_says_nothing_does_not_stay(connect: Connect, server: Running, monkeypatch: Patch) -> None:
    monkeypatch.setattr(http_server, "_HEADERS_S", 0.2)
    silent, slow = connect(server), connect(server)
    with contextlib.suppress(ConnectionError):  # where it comes too late for its half
        slow.send(b"GET /v1/models HTTP/1.1\r\nhost: ")
        assert slow.read_all() == b""
    assert silent.read_all() == b""


def test_who_was_answered_stays_and_who_then_says_half_of_something_does_not(
    connect: Connect, server: Running, monkeypatch: Patch
) -> None:
    idle, half = kept(connect, server), kept(connect, server)
    monkeypatch.setattr(http_server, "_HEADERS_S", 0.2)
    half.send(b"GET /v1/models HTTP/1.1\r\nhost: ")
    assert half.read_all() == b""
    assert is_open(idle.sock)


def test_of_silent_connections_as_many_stay_as_may_and_none_that_is_answered_goes(
    connect: Connect, server: Running, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    busy = connect(server)
    busy.post(CHAT, {"messages": OWL, "stream": True, "max_tokens": 100, "logit_bias": {"2": -100, "0": -100}})
    assert busy.read_until(b"data: ")
    silent = [connect(server) for _ in range(40)]
    last = connect(server)
    last.get("/v1/models")
    assert last.status() == 200
    assert b"[DONE]" in busy.read_until(b"[DONE]")
    assert sum(is_open(raw.sock) for raw in silent) < 8


def kept(connect: Connect, server: Running) -> Raw:
    """A connection that stays after its first request."""
    raw = connect(server)
    raw.get("/health")
    assert raw.read_until(b"}").endswith(b'{"status":"ok"}')
    return raw


def test_who_has_said_nothing_gives_way_before_who_was_answered_and_then_one_of_those(
    connect: Connect, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    with running() as server:
        used = [kept(connect, server) for _ in range(7)]
        for _ in range(12):
            connect(server)
        used.append(kept(connect, server))
        assert all(is_open(raw.sock) for raw in used)
        used.append(kept(connect, server))
        wait_for(lambda: sum(is_open(raw.sock) for raw in used) == 8)


def test_who_has_not_taken_all_of_a_reply_does_not_give_way(
    connect: Connect, narrow: Running, stalled: Stalled, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)
    slow = connect(narrow, receive_bytes=4096)
    slow.post(CHAT, {"messages": OWL, "max_tokens": 300, "logprobs": True, "top_logprobs": 5})
    wait_for(lambda: bool(stalled))
    narrow.wait_until_idle()
    for _ in range(24):
        kept(connect, narrow)
    assert b'"usage"' in slow.read_until(b'"usage"')


def test_who_goes_on_reading_is_not_given_up(connect: Connect, narrow: Running, stalled: Stalled) -> None:
    slow = connect(narrow, receive_bytes=4096)
    slow.post(CHAT, {"messages": OWL, "stream": True, "max_tokens": 700})
    wait_for(lambda: bool(stalled))
    assert stalled[0].is_stalled
    slow.read_until(b"[DONE]")
    wait_for(lambda: not stalled[0].is_stalled)


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True


NO_HTTP = {"garbage": b"GARBAGE\r\n\r\n", "head": b"GET / HTTP/1.1\r\nx: " + b"a" * (70 << 10)}


@pytest.mark.parametrize("said", NO_HTTP.values(), ids=NO_HTTP)
def test_what_is_no_http_is_refused_as_all_else_is(connect: Connect, server: Running, said: bytes) -> None:
    raw = connect(server)
    raw.send(said)
    head, _, body = raw.read_all().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"x-content-type-options: nosniff" in head
    assert json.loads(body)["error"]["code"] == "invalid_request"


def test_bytes_that_are_no_http_behind_a_reply_end_the_connection_in_silence(
    connect: Connect, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    raw = connect(server)
    raw.send(f"POST /no HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    assert raw.status() == 404
    raw.send(b"no chunk at all\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        raw.read_all()
    assert server.get("/v1/models").status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_requests_in_a_row_on_one_connection_are_answered_in_order(connect: Connect, server: Running) -> None:
    raw = connect(server)
    body = json.dumps({"messages": OWL, "max_tokens": 3, "temperature": 0}).encode()
    one = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-type: application/json\r\n"
    raw.send((f"{one}content-length: {len(body)}\r\n\r\n".encode() + body) * 3)
    raw.send(f"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\nconnection: close\r\n\r\n".encode())
    replies = raw.read_all()
    assert replies.count(b"HTTP/1.1 200 OK") == 4
    assert replies.rindex(b"chat.completion") < replies.index(b'"object":"list"')


def test_more_than_may_wait_is_refused_with_the_time_to_come_back(connect: Connect, endless: Running) -> None:
    clients = [connect(endless) for _ in range(9)]
    for raw in clients:
        raw.post(CHAT, {"messages": OWL})
    wait_for(lambda: endless.served.num_open == 9)
    refused = endless.post(CHAT, {"messages": OWL})
    assert refused.status_code == 503 and 0 < int(refused.headers["retry-after"]) <= 120
    assert refused.json()["error"]["code"] == "overloaded"
    for raw in clients:
        raw.close()
    endless.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "asked", "sign"),
    [
        (CHAT, {"messages": OWL}, b": ping\n\n"),
        ("/v1/completions", {"prompt": "Once"}, b": ping\n\n"),
        ("/v1/responses", {"input": "Once"}, b": ping\n\n"),
        ("/v1/messages", {"messages": OWL, "max_tokens": 9}, b'event: ping\ndata: {"type":"ping"}\n\n'),
        ("/api/chat", {"messages": OWL}, b"\r\n\r\n"),  # it begins, and has no line that says nothing
    ],
)
def test_a_stream_gives_signs_of_life_while_it_waits(
    connect: Connect, endless: Running, monkeypatch: Patch, path: str, asked: Json, sign: bytes
) -> None:
    monkeypatch.setattr(replies, "SILENCE_S", 0.02)
    first, second = connect(endless), connect(endless)
    first.post(CHAT, {"messages": OWL})
    wait_for(lambda: bool(endless.engine.scheduler.running))
    second.post(path, {**asked, "stream": True})
    said = second.read_until(sign)
    assert said.startswith(b"HTTP/1.1 200") and sign in said
    for raw in (first, second):
        raw.close()
    endless.wait_until_idle()


def test_a_server_that_loads_says_so_and_lists_its_model_at_once(monkeypatch: Patch) -> None:
    loaded = threading.Event()

    def load() -> Engine:
        loaded.wait(PATIENCE_S)
        return Engine.load("tiny")

    with running(load=load) as server:
        assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["tiny"]
        assert server.get("/health").status_code == 503
        monkeypatch.setattr("localllm.runtime.model_pool.LOAD_WAIT_S", 0.05)
        refused = server.post(CHAT, {"messages": OWL})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert refused.json()["error"]["code"] == "loading"
        monkeypatch.undo()
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(server.post, CHAT, {"messages": OWL, "max_tokens": 1})
            loaded.set()
            assert asked.result().status_code == 200
        assert server.get("/health").json() == {"status": "ok"}


def test_a_model_that_cannot_be_loaded_is_an_error_that_nobody_retries() -> None:
    def load() -> Engine:
        raise MemoryError("no room")

    with running(load=load) as server:
        wait_for(lambda: server.served.handle is None)
        refused = server.post(CHAT, {"messages": OWL})
        assert refused.status_code == 503 and refused.headers["x-should-retry"] == "false"
        assert server.get("/health").status_code == 503

"""What a request may weigh: refused at the door, quickly, while a running answer goes on."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import itertools
import json
import re
import time
import tracemalloc
from typing import Any

import psutil
import pytest
from starlette.requests import Request

from localllm.server.app import ENDPOINTS
from localllm.server.bodies import MAX_BODY_BYTES, Body, read_body, validated
from localllm.server.errors import RequestError
from localllm.server.http_server import MAX_HEADER_BYTES, HttpConnection
from tests.server.conftest import Connect
from tests.server.support import OWL, Json, Patch, Raw, Running, running, wait_for

CHAT = "/v1/chat/completions"
ASKED: Json = {"messages": OWL, "max_tokens": 4}
MOST_CPU_S = 20.0  # of all that this process does meanwhile: what explodes takes minutes and more
MOST_BYTES = 50 << 20


def with_field(field: bytes) -> bytes:
    """A chat with one more field."""
    return json.dumps(ASKED).encode()[:-1] + b"," + field + b"}"


def nested(depth: int) -> bytes:
    return with_field(b'"metadata":' + b'{"a":' * depth + b"1" + b"}" * depth)


HOSTILE: Json = {
    "n": {**ASKED, "n": 10**9},
    "top_logprobs": {**ASKED, "logprobs": True, "top_logprobs": 10**6},
    "logit_bias": {**ASKED, "logit_bias": {str(i): 1 for i in range(10**6)}},
    "stops": {**ASKED, "stop": ["x"] * 10**5},
    "messages": {**ASKED, "messages": OWL * 10**5},
    "a long stop": {**ASKED, "stop": "x" * 10**6},
    "an id below zero": {"prompt": [-1]},
    "an id that the model does not have": {"prompt": [4096]},
    "deep": nested(10**5),
    "deep enough": nested(300),
    "not a number": with_field(b'"temperature":NaN'),
    "endless": with_field(b'"keep_alive":1e999'),
    "huge number": with_field(b'"seed":' + b"9" * 5000),
    "half a character": b'{"messages":"\xff"}',
    "no object": b"[1]",
    "a long name of a field": {**ASKED, "x" * 3_900_000: 1},
    "a long name of a model": {**ASKED, "model": "tiny" * 10**6},
    "a long name of metadata": {**ASKED, "metadata": {"x" * 3_900_000: 1}},
    "a long name of a variable": {**ASKED, "chat_template_kwargs": {"x" * 3_900_000: 1}},
    "parts that are none": {"messages": [{"role": "user", "content": [1] * 10**6}]},
    "ids that are none": {"prompt": [-1] * 10**6},
    "empty": b"",
    "regex": {**ASKED, "response_format": {"type": "regex", "pattern": "(a+)+$"}},
    "schema": {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
    "template": {**ASKED, "chat_template": "{{ ''.__class__ }}"},
    "template variable": {**ASKED, "chat_template_kwargs": {"messages": []}},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///a"}}]}]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_asks_for_too_much_is_refused_at_once(connect: Connect, server: Running, name: str) -> None:
    body = HOSTILE[name]
    path = "/v1/completions" if isinstance(body, dict) and "prompt" in body else CHAT
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    before, started, raw = psutil.Process().memory_info().rss, time.process_time(), connect(server)
    raw.post(path, data)
    head = raw.read_until(b"\r\n\r\n").lower()
    assert 400 <= int(head.split()[1]) < 500
    assert int(re.findall(rb"content-length: (\d+)", head)[0]) < 2000
    assert time.process_time() - started < MOST_CPU_S
    assert psutil.Process().memory_info().rss - before < MOST_BYTES


def many(item: str, around: str) -> bytes:
    """`around`, with as many of the item in it as there is room for."""
    count = (MAX_BODY_BYTES - len(around)) // (len(item) + 1)
    return around.replace("...", ",".join([item] * count)).encode()


WRONG = {
    "ids": ("/v1/completions", many("-1", '{"prompt":[...]}')),
    "lists of ids": ("/v1/embeddings", many("[-1,-1,-1,-1,-1,-1,-1,-1]", '{"input":[...]}')),
    "tokens": ("/detokenize", many("-1", '{"tokens":[...]}')),
    "parts": (CHAT, many("1", '{"messages":[{"role":"user","content":[...]}]}')),
    "blocks": ("/v1/messages", many("1", '{"max_tokens":1,"messages":[{"role":"user","content":[...]}]}')),
    "system": ("/v1/messages", many("1", '{"max_tokens":1,"messages":[],"system":[...]}')),
    "items": ("/v1/responses", many("1", '{"input":[{"role":"user","content":[...]}]}')),
    "fields": (CHAT, b"{%s}" % b",".join(b'"%06x":1' % index for index in range(350_000))),
    "metadata": (CHAT, b'{"metadata":{%s}}' % b",".join(b'"%06x":1' % index for index in range(350_000))),
}


@pytest.mark.parametrize("name", WRONG)
def test_of_a_million_mistakes_few_are_told_in_about_the_time_that_reading_takes(name: str, monkeypatch: Patch) -> None:
    """So nobody else waits for it: both are the processor's time alone, whatever else this machine does."""
    path, data = WRONG[name]
    counts: list[int] = []
    plain = Body.model_validate_json.__func__  # type: ignore[attr-defined]

    def noting(cls: type[Body], *arguments: Any) -> Body:
        try:
            return plain(cls, *arguments)
        except ValueError as error:
            counts.append(error.error_count())  # type: ignore[attr-defined]
            raise

    monkeypatch.setattr(Body, "model_validate_json", classmethod(noting))
    of = next(each.body for each in ENDPOINTS if each.path == path and each.body)
    started = time.thread_time()
    json.loads(data)
    read = time.thread_time()
    with pytest.raises(RequestError) as caught:
        validated(of, data)
    assert time.thread_time() - read < 20 * (read - started)
    assert caught.value.status == 400 and len(str(caught.value)) < 1000
    assert counts[0] < 20 or (name in ("fields", "metadata") and f"{counts[0]} fields" in caught.value.why)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 17), ("n", 1.5), ("n", True), ("messages", OWL * 10_001), ("stop", ["x"] * 65), ("stop", "x" * 1025),
        ("logit_bias", dict.fromkeys(map(str, range(1025)), 1)), ("logit_bias", {"1": 101}), ("logit_bias", {"-1": 1}),
        ("top_logprobs", 21), ("max_tokens", 2**31), ("max_tokens", 0), ("max_tokens", "4"), ("seed", 2**63),
        ("temperature", 101), ("temperature", "0.5"), ("stream", "yes"), ("logprobs", 1), ("user", "x" * 10_001),
        ("metadata", dict.fromkeys(map(str, range(65)), "")), ("metadata", {"a": 1}), ("frobnicate", 1),
        ("chat_template_kwargs", dict.fromkeys(map(str, range(33)), 1)),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else None,
)  # fmt: skip
def test_a_limit_is_told_by_the_name_of_its_field(server: Running, field: str, value: object) -> None:
    error = server.error(CHAT, {**ASKED, "logprobs": True, field: value})
    assert error["code"] in ("invalid_value", "unknown_parameter")
    assert str(error["param"]).partition(".")[0] == field


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"content": "x" * ((1 << 20) + 1)}), ("/detokenize", {"tokens": [4096]})],
    ids=["too long a text", "a token that there is not"],
)
def test_what_is_no_text_to_be_had_is_refused(server: Running, path: str, body: Json) -> None:
    assert server.post(path, body).status_code == 400


def test_many_texts_to_embed_leave_room_for_others(server: Running) -> None:
    capacity = server.server.capacity
    texts = ["a"] * (capacity.parallel + capacity.queue + 1)
    assert len(server.post("/v1/embeddings", {"input": texts}).json()["data"]) == len(texts)


def test_of_a_long_name_little_is_compared(server: Running, monkeypatch: Patch) -> None:
    lengths: list[int] = []
    plain = difflib.SequenceMatcher.set_seq2
    monkeypatch.setattr(
        difflib.SequenceMatcher, "set_seq2", lambda self, text: (lengths.append(len(text)), plain(self, text))
    )
    name = "x" * 100_000
    replies = [server.post(CHAT, {**ASKED, "model": name}), server.post(CHAT, {**ASKED, name: 1})]
    replies += [server.post(path, {"model": name}) for path in ("/api/pull", "/api/show")]
    assert [reply.status_code for reply in replies] == [404, 400, 404, 404]
    assert len(lengths) >= 3 and max(lengths) <= 200


def test_a_body_that_does_not_end_is_neither_kept_nor_read_for_ever() -> None:
    piece, count = bytes(1 << 20), 0

    async def receive() -> Json:
        nonlocal count
        count += 1
        return {"type": "http.request", "body": piece, "more_body": count < 1000}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as caught:
            asyncio.run(read_body(Request(scope, receive), Body))
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413
    assert count < 100 and most_bytes < 4 * MAX_BODY_BYTES


def test_a_body_that_is_announced_too_large_is_not_read(connect: Connect, server: Running) -> None:
    raw = connect(server)
    raw.post(CHAT, b"{", content_length=str(1 << 30))
    assert raw.status() == 413


def begin_chunks(raw: Raw) -> None:
    head = f"host: 127.0.0.1:{raw.port}\r\ncontent-type: application/json\r\ntransfer-encoding: chunked"
    raw.send(f"POST {CHAT} HTTP/1.1\r\n{head}\r\n\r\n".encode())


def test_a_body_that_grows_too_large_is_given_up(connect: Connect, server: Running) -> None:
    raw = connect(server)
    before = psutil.Process().memory_info().rss
    begin_chunks(raw)
    piece = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
    with contextlib.suppress(OSError):  # the connection is closed while it is still being sent
        for _ in range(20 * MAX_BODY_BYTES >> 20):
            raw.send(piece)
    with contextlib.suppress(OSError):
        assert raw.status() == 413
    assert psutil.Process().memory_info().rss - before < MOST_BYTES


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("max_token", "'max_tokens' is a known field"),
        ("mesages", "'messages' is a known field"),
        ("qqq", "leave it out"),
    ],
)
def test_a_field_that_is_not_known_is_told_with_the_one_that_was_meant(server: Running, field: str, told: str) -> None:
    error = server.post(CHAT, {**ASKED, field: 1}).json()["error"]
    assert error["param"] == field and told in error["message"]


def test_too_few_messages_are_told_in_a_sentence(server: Running) -> None:
    error = server.error(CHAT, {"messages": []})
    assert error["param"] == "messages"
    assert error["message"] == "messages is invalid: List should have at least 1 item, not 0"


def test_a_body_that_grows_too_large_and_does_not_end_is_refused_for_size(connect: Connect, server: Running) -> None:
    raw = connect(server)
    begin_chunks(raw)
    raw.send(b"".join(b"10000\r\n" + b" " * 65536 + b"\r\n" for _ in range(65)))
    reply = raw.read_all()
    assert reply.split()[1] == b"413" and b"connection: close" in reply.lower()


def test_a_header_may_be_as_large_as_is_told(connect: Connect, server: Running, monkeypatch: Patch) -> None:
    arrived, receive = list[bytes](), HttpConnection.data_received
    monkeypatch.setattr(
        HttpConnection, "data_received", lambda self, data: (receive(self, data), arrived.append(data))[0]
    )
    raw = connect(server)
    head = f"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\nx: "
    raw.send(head.encode() + b"y" * (MAX_HEADER_BYTES - len(head) - 100))
    wait_for(lambda: arrived)  # what arrives whole is not measured
    raw.send(b"\r\n\r\n")
    assert raw.status() == 200


@pytest.mark.parametrize("head", [b"x: " + b"y" * (1 << 20), b"x" * MAX_HEADER_BYTES + b": y"], ids=["value", "name"])
def test_a_header_that_is_too_large_is_refused(connect: Connect, server: Running, head: bytes) -> None:
    raw = connect(server)
    raw.send(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n" % server.port + head)
    assert raw.status() in (400, 431)


def test_a_running_answer_goes_on_while_others_ask_for_too_much(connect: Connect, server: Running) -> None:
    listener = connect(server)
    listener.post(CHAT, {"messages": OWL, "stream": True, "max_tokens": 160, "logit_bias": {"2": -100, "0": -100}})
    said, others = listener.read_until(b"data: "), list[Raw]()
    hostile = itertools.cycle(WRONG.values())
    while b"[DONE]" not in said:
        said += listener.sock.recv(4096)
        if said.count(b"data: ") > 40 * len(others):
            others.append(connect(server))
            others[-1].post(*next(hostile))
    assert said.count(b"data: ") > 100 and len(others) > 2
    assert {other.status() for other in others} == {400}


@pytest.mark.parametrize("text", ["a\r\nPOST /v1/x 200", "\x1b]0;title\x07", "\u202eevil"])
def test_what_a_client_sends_is_not_in_the_log(server: Running, text: str) -> None:
    server.log.clear()
    server.post(CHAT, {"model": text, "messages": [{"role": "user", "content": text}], "user": text})
    server.get("/v1/models/" + "".join(f"%{byte:02x}" for byte in text.encode()))
    wait_for(lambda: len(server.log) >= 2)
    for line in server.log:
        assert line.isprintable() and line.isascii() and "evil" not in line and "title" not in line


def test_the_log_has_no_prompt_and_no_key() -> None:
    key, wrong = "correct-horse-battery-staple", "another-horse-battery-staple"
    with running(key=key) as locked:
        for sent in (key, wrong):
            for headers in ({"authorization": f"Bearer {sent}"}, {"x-api-key": sent}):
                body = {"messages": [{"role": "user", "content": "sesame-opens"}], "max_tokens": 1}
                locked.client.post(CHAT, json=body, headers=headers)
        wait_for(lambda: len(locked.log) == 4)
    assert [" 200 " in line for line in locked.log] == [True, True, False, False]
    assert not any(word in line for line in locked.log for word in ("sesame", "horse", "Bearer"))


HEADS = {
    "an escape in a value": b"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nx: \x1b]0;sesame\x07\r\n\r\n",
    "a line feed in a value": b"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nx: a\nset-cookie: sesame\r\n\r\n",
    "a carriage return in a value": b"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nx: a\rsesame\r\n\r\n",
    "a zero in a value": b"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nx: a\x00sesame\r\n\r\n",
    "a folded value": b"GET /v1/models HTTP/1.1\r\nhost: {host}\r\norigin: a\r\n sesame\r\n\r\n",
    "letters of elsewhere in a host": b"GET /v1/models HTTP/1.1\r\nhost: \x85\xad\xffsesame\r\n\r\n",
    "letters of elsewhere in an origin": b"GET /v1/models HTTP/1.1\r\nhost: {host}\r\norigin: \x85\xad\xff\r\n\r\n",
    "letters of elsewhere in a key": b"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nx-api-key: \x85\xad\xff\r\n\r\n",
    "an odd method": b"SESAME /v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n",
    "a method of signs": b"\x1b[2J /v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n",
    "a long method": b"S" * 10_000 + b" /v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n",
    "a tunnel": b"CONNECT sesame.test:443 HTTP/1.1\r\nhost: {host}\r\n\r\n",
    "another server's address": b"GET http://sesame.test/v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n",
    "a long address": b"GET /" + b"sesame" * 9000 + b" HTTP/1.1\r\nhost: {host}\r\n\r\n",
    "an address of signs": b"GET /sesame\x1b]0;\x07 HTTP/1.1\r\nhost: {host}\r\n\r\n",
    "an encoded address": b"GET /%0d%0asesame%1b%00%e2%80%ae HTTP/1.1\r\nhost: {host}\r\n\r\n",
    "half an encoded character": b"GET /v1/models/%ff%zz HTTP/1.1\r\nhost: {host}\r\n\r\n",
    "no version": b"GET /v1/models\r\nhost: {host}\r\n\r\n",
    "a later version": b"GET /v1/models HTTP/9.9\r\nhost: {host}\r\n\r\n",
    "no request": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a page's socket": b"GET /v1/models HTTP/1.1\r\nhost: {host}\r\norigin: http://sesame.test\r\n"
    b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: YQ==\r\n\r\n",
}


@pytest.mark.parametrize("name", HEADS)
def test_whatever_a_head_says_the_log_has_one_line_of_ours(server: Running, connect: Connect, name: str) -> None:
    server.log.clear()
    raw = connect(server)
    raw.send(HEADS[name].replace(b"{host}", b"127.0.0.1:%d" % server.port))
    head = raw.read_until(b"\r\n\r\n")
    status = int(head.split()[1])
    assert 400 <= status < 500 or (name.endswith(("value", "key", "version")) and status == 200)
    assert b"set-cookie" not in head and b"\x1b" not in head
    raw.close()
    answered = b"x-request-id" in head  # what is not a request at all is refused before it is one
    wait_for(lambda: len(server.log) >= answered)
    assert len(server.log) == answered
    assert all(line.isascii() and line.isprintable() and len(line) < 200 for line in server.log)
    assert "sesame" not in "".join(server.log).lower()

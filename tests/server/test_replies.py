"""What replies are made of: JSON that every client reads, encoded while others have their turn."""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.server import replies
from localllm.server.bodies import Absent, NullOrAbsent, ReplyBody
from localllm.server.errors import ClientGoneError
from localllm.server.replies import encoded, encoded_in_parts, unless_gone
from localllm.server.stream import EventMailbox
from tests.server.support import OWL, Patch, Running

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_in_parts_it_is_the_same(value: Any) -> None:
    said = b"".join(encoded_in_parts(value))
    assert said == encoded(value) and said.isascii() and json.loads(said) == value


class Inner(ReplyBody):
    text: str | None = None
    left_out: Absent[int] = None


class Outer(ReplyBody):
    kind: Literal["outer"] = "outer"
    inner: list[Inner]
    usage: NullOrAbsent[int] = None


def test_a_model_is_written_in_the_order_of_its_fields_without_those_that_are_absent() -> None:
    reply = Outer(inner=[Inner(), Inner(text="a", left_out=1)])
    told = b'{"kind":"outer","inner":[{"text":null},{"text":"a","left_out":1}]}'
    assert encoded(reply) == b"".join(encoded_in_parts(reply)) == told


def test_the_schema_of_a_reply_requires_what_is_always_written() -> None:
    schema = Outer.model_json_schema()
    assert schema["required"] == ["kind", "inner"] and schema["$defs"]["Inner"]["required"] == ["text"]
    assert schema["$defs"]["Inner"]["properties"]["left_out"]["type"] == "integer"
    assert {"type": "null"} in schema["properties"]["usage"]["anyOf"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_in_json_is_not_said(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encoded({"a": [number]})


def test_a_large_reply_is_made_in_parts_beside_the_loop(monkeypatch: Patch) -> None:
    sizes, threads = list[int](), set[int]()

    def noting(value: object) -> bytes:
        threads.add(threading.get_ident())
        sizes.append(len(encoded(value)))
        return encoded(value)

    monkeypatch.setattr(replies, "encoded", noting)
    vectors = [{"index": index, "embedding": [0.25] * 64} for index in range(100)]
    reply = asyncio.run(replies.whole(lambda: {"object": "list", "data": vectors}))
    assert json.loads(bytes(reply.body)) == {"object": "list", "data": vectors}
    assert max(sizes) < 1000 < len(reply.body) and threading.get_ident() not in threads


STREAMS = {"/v1/chat/completions": "text/event-stream", "/api/chat": "application/x-ndjson"}


@pytest.mark.parametrize(("path", "kind"), STREAMS.items())
def test_a_stream_is_told_not_to_be_kept_back(server: Running, path: str, kind: str) -> None:
    with server.client.stream("POST", path, json={"messages": OWL, "stream": True}) as reply:
        assert reply.headers["content-type"].startswith(kind)
        assert reply.headers["x-accel-buffering"] == "no"


def test_an_error_that_many_are_told_does_not_grow() -> None:
    try:
        raise ValueError("the engine broke")
    except ValueError as error:
        broken = error

    async def told() -> set[int]:
        mails = [EventMailbox(lambda: None, lambda _event: None) for _ in range(5)]
        for mail in mails:
            mail.put(broken)
        depths = set()
        for mail in mails:
            with pytest.raises(ValueError, match="broke"):
                await mail.take(None)
            depths.add(len(traceback.extract_tb(broken.__traceback__)))
        return depths

    assert len(asyncio.run(told())) == 1


def test_where_the_client_goes_the_work_has_ended_before_that_is_told() -> None:
    did: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            did.append("tidied up")

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def tell() -> None:
        with pytest.raises(ClientGoneError):
            await unless_gone(receive, work())
        did.append("told")

    asyncio.run(tell())
    assert did == ["tidied up", "told"]

"""Replies: JSON, and streams that end where their reader has gone, in every phase of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localllm.server.answering import Answers, Piece
from localllm.server.failures import ClientGoneError, Failure, failure_of
from localllm.server.logbook import note_failure

T = TypeVar("T")

SILENCE_S = 15.0  # after which a stream gives a sign of life: proxies and clients give up after 30 to 60 s

EVENT_STREAM, NDJSON = "text/event-stream", "application/x-ndjson"


def encoded(value: object) -> bytes:
    """JSON in ASCII: some clients take U+2028 and its like for the end of a line."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def encoded_in_parts(value: object) -> Iterator[bytes]:
    """As `encoded`, but that other threads have their turn between the parts: what is encoded at once keeps the
    interpreter, for a reply of a hundred megabytes three seconds."""
    if isinstance(value, Mapping) and any(isinstance(each, Mapping | list) for each in value.values()):
        for count, (name, each) in enumerate(value.items()):
            yield (b"," if count else b"{") + encoded(name) + b":"
            yield from encoded_in_parts(each)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        for count, each in enumerate(value):
            yield b"," if count else b"["
            yield from encoded_in_parts(each)
        yield b"]"
    else:
        yield encoded(value)


class Json(Response):
    """A whole reply."""

    media_type = "application/json"

    def __init__(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encoded(value), status, dict(headers or {}))


async def whole(build: Callable[[], object], headers: Mapping[str, str] | None = None) -> Response:
    """A reply that may be large, made while the loop goes on, and while prompts are prepared."""
    data = await asyncio.to_thread(lambda: b"".join(encoded_in_parts(build())))
    return Response(data, headers=dict(headers or {}), media_type=Json.media_type)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What comes of the work, which is cancelled where the client goes first. Raises ClientGoneError then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        if not task.done():
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# What is new of which answer; None: nothing for a while.
News = AsyncIterator[tuple[int, Piece] | None]


class Stream(Response):
    """Pieces as they come, and what `failed` makes of the error that ends them; `close` is called in any case."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        failed: Callable[[Failure], bytes],
        close: Callable[[], None],
        media_type: str,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._pieces = pieces
        self._failed = failed
        self._close = close
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({**headers, "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(scope, send))
        finally:
            self._close()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            failure = failure_of(error)
            note_failure(scope, failure)
            await send({"type": "http.response.body", "body": self._failed(failure), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def streamed(
    answers: Answers,
    speak: Callable[[News], AsyncIterator[bytes]],
    failed: Callable[[Failure], bytes],
    media_type: str,
) -> Stream:
    """A stream of what `speak` makes of the answers. failed: how it ends where they do in an error.

    Raises what ends them before anything is said, so that it can be told by a status.
    """
    news = answers.pieces(SILENCE_S)
    try:
        first = await anext(news)
    except BaseException:
        answers.close()
        raise

    async def all_news() -> News:
        yield first
        async for each in news:
            yield each

    return Stream(speak(all_news()), failed, answers.close, media_type, evicted_header(answers))


async def collected(answers: Answers) -> list[Piece]:
    """All of each answer. Raises what ends them."""
    try:
        return await answers.whole()
    finally:
        answers.close()


def evicted_header(answers: Answers) -> dict[str, str]:
    """Tells of turns that have left the context."""
    turns = answers.asked.num_evicted
    return {"x-localllm-evicted-turns": str(turns)} if turns else {}


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event. Without `id:` and `retry:`, at which some decoders trip."""
    head = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return head + b"data: " + encoded(data) + b"\n\n"


PING = b": ping\n\n"

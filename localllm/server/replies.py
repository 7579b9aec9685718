"""Replies: JSON, and streams that end where their reader has gone, in every phase of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localllm.engine.events import FinishedEvent
from localllm.server.bodies import Absent, ReplyBody
from localllm.server.errors import ClientGoneError, Failure, body_of, dialect_of, failure_of
from localllm.server.stream import GenerationStream
from localllm.server.tools.deltas import Delta

T = TypeVar("T")

SILENCE_S = 15.0  # after which a stream gives a sign of life: proxies and clients give up after 30 to 60 s

FinishReason = Literal["stop", "length"]

EVENT_STREAM, NDJSON = "text/event-stream", "application/x-ndjson"


def encoded(value: object) -> bytes:
    """Return JSON in ASCII: some clients take U+2028 and its like for the end of a line."""
    return _ENCODER.encode(value).encode("ascii")


# To make one takes 1 us.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=operator.attrgetter("written"))


def encoded_in_parts(value: object) -> Iterator[bytes]:
    """Encode in parts, between which other threads have their turn: encoding a hundred megabytes at once holds the
    interpreter for three seconds."""
    value = value.written if isinstance(value, ReplyBody) else value
    if isinstance(value, Mapping) and any(isinstance(each, Mapping | ReplyBody | list) for each in value.values()):
        for count, (name, each) in enumerate(value.items()):
            yield (b"," if count else b"{") + encoded(name) + b":"
            yield from encoded_in_parts(each)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], Mapping | ReplyBody | list):
        for count, each in enumerate(value):
            yield b"," if count else b"["
            yield from encoded_in_parts(each)
        yield b"]"
    else:
        yield encoded(value)


class JsonReply(Response):
    """A whole reply."""

    media_type = "application/json"

    def __init__(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encoded(value), status, dict(headers or {}))


def error_reply(scope: Scope, error: BaseException) -> JsonReply:
    """Return the error in the dialect that was spoken, noted for the log."""
    failure = failure_of(error)
    note_failure(scope, failure)
    return JsonReply(body_of(failure, dialect_of(scope["path"])), failure.status, failure.headers)


def note_failure(scope: Scope, failure: Failure) -> None:
    """Note for the log how the request failed."""
    scope.setdefault("state", {})["failure"] = " ".join(filter(None, (failure.name, failure.place)))


async def whole(build: Callable[[], object], headers: Mapping[str, str] | None = None) -> Response:
    """Return a reply that may be large, built off the loop."""
    data = await asyncio.to_thread(lambda: b"".join(encoded_in_parts(build())))
    return Response(data, headers=dict(headers or {}), media_type=JsonReply.media_type)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of the work, which is cancelled where the client goes first. Raises ClientGoneError then."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
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


class AnswerWriter(Protocol):
    """Writes answers in one dialect, whole or piece by piece."""

    media_type: str = EVENT_STREAM
    ping: bytes = b": ping\n\n"  # a sign of life; b"" where the dialect has none

    def whole(self, answers: list[Delta]) -> object:
        """Return the reply that has all answers."""
        ...

    def begin(self) -> Iterable[bytes]:
        return ()

    def write(self, index: int, delta: Delta) -> Iterable[bytes]:
        """Write what is new of the answer `index`."""
        ...

    def end(self) -> Iterable[bytes]:
        """Write what follows the ends of all answers."""
        return ()

    def fail(self, failure: Failure) -> bytes:
        """Write the error that ends them."""
        ...


class StreamReply(Response):
    """Sends pieces as they come, and what `failed` makes of the error that ends them. Calls `close` in any case."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        failed: Callable[[Failure], bytes],
        close: Callable[[], None],
        media_type: str,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.pieces = pieces
        self.failed = failed
        self.close = close
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({**headers, "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for piece in self.pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except Exception as error:
                failure = failure_of(error)
                note_failure(scope, failure)
                await send({"type": "http.response.body", "body": self.failed(failure), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_gone(receive, send_all())
        finally:
            self.close()


async def soon_or_late(work: Coroutine[Any, Any, Response], path: str) -> Response:
    """Return the reply of the work; where it takes long, a stream that gives signs of life until the reply, a stream,
    goes on with it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=SILENCE_S)
    except BaseException:
        task.cancel()
        raise
    if task.done():
        return await task
    began: list[StreamReply] = []

    async def pieces() -> AsyncIterator[bytes]:
        while not task.done():
            yield AnswerWriter.ping
            await asyncio.wait({task}, timeout=SILENCE_S)
        reply = await task
        assert isinstance(reply, StreamReply)
        began.append(reply)
        async for piece in reply.pieces:
            yield piece

    def failed(failure: Failure) -> bytes:
        dialect = dialect_of(path)
        plain = event(body_of(failure, dialect), "error" if dialect == "anthropic" else None)
        return began[0].failed(failure) if began else plain

    def close() -> None:
        if not task.cancel() and not task.cancelled() and task.exception() is None:
            reply = task.result()
            assert isinstance(reply, StreamReply)
            reply.close()

    return StreamReply(pieces(), failed, close, EVENT_STREAM)


async def replied(answers: GenerationStream, writer: AnswerWriter, *, is_streamed: bool | None) -> Response:
    """Return the answers as the writer has them."""
    if is_streamed:
        return await _streamed(answers, writer)
    found = await collected(answers)
    return await whole(lambda: writer.whole(found), _evicted_header(answers))


async def _streamed(answers: GenerationStream, writer: AnswerWriter) -> StreamReply:
    """Return the answers as a stream. Raises what ends them before anything was emitted, so that it has a status."""
    deltas = answers.deltas(SILENCE_S)
    try:
        first = await anext(deltas)
    except BaseException:
        answers.close()
        raise

    async def pieces() -> AsyncIterator[bytes]:
        for piece in writer.begin():
            yield piece
        arrived: tuple[int, Delta] | None = first
        while True:
            for piece in (writer.ping,) if arrived is None else writer.write(*arrived):
                if piece:
                    yield piece
            try:
                arrived = await anext(deltas)
            except StopAsyncIteration:
                break
        for piece in writer.end():
            yield piece

    return StreamReply(pieces(), writer.fail, answers.close, writer.media_type, _evicted_header(answers))


async def collected(answers: GenerationStream) -> list[Delta]:
    """Return all of each answer. Raises what ends them."""
    try:
        return await answers.wholes()
    finally:
        answers.close()


def _evicted_header(answers: GenerationStream) -> dict[str, str]:
    """Return the header that counts the turns which have left the context."""
    turns = answers.prepared.num_evicted
    return {"x-localllm-evicted-turns": str(turns)} if turns else {}


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def event(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event. It is without `id:` and `retry:`, at which some decoders trip."""
    head = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return head + b"data: " + encoded(data) + b"\n\n"


class TimingsReply(ReplyBody):
    """Timings as llama.cpp has them: milliseconds, and rates, which are null where nothing was measured.

    draft_n: draft tokens, where there were any; draft_n_accepted: those that were accepted
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: Absent[int] = None
    draft_n_accepted: Absent[int] = None


def finish_reason(finished: FinishedEvent) -> FinishReason:
    return "length" if finished.finish_reason == "length" else "stop"


def timings_of(finished: FinishedEvent) -> TimingsReply:
    usage, timings, drafts = finished.usage, finished.timings, finished.speculation
    num_prefilled = usage.prompt_tokens - usage.cached_tokens
    prefill_ms, step_ms = _ms(timings.prefill_tok_s), _ms(timings.decode_tok_s)
    has_drafts = drafts is not None and drafts.drafted > 0
    return TimingsReply(
        cache_n=usage.cached_tokens,
        prompt_n=num_prefilled,
        prompt_ms=num_prefilled * (prefill_ms or 0.0),
        prompt_per_token_ms=prefill_ms,
        prompt_per_second=timings.prefill_tok_s or None,
        predicted_n=usage.completion_tokens,
        predicted_ms=max(0, usage.completion_tokens - 1) * (step_ms or 0.0),
        predicted_per_token_ms=step_ms,
        predicted_per_second=timings.decode_tok_s or None,
        draft_n=drafts.drafted if drafts is not None and has_drafts else None,
        draft_n_accepted=drafts.accepted if drafts is not None and has_drafts else None,
    )


def _ms(rate: float | None) -> float | None:
    """Return milliseconds of one token; None where nothing was measured."""
    return 1000 / rate if rate else None

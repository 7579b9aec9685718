"""The one address of all replicas: passes requests on, and those of a replica that has died to another."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.server.access_log import Log, Metrics
from localllm.server.app import endpoints_of, guarded
from localllm.server.bodies import read_bytes
from localllm.server.errors import ClientGoneError, Failure, RequestError, body_of, busy, dialect_of, failure_of
from localllm.server.guard import Admission
from localllm.server.ollama.common import line
from localllm.server.replicas.affinity import ReplicaCall, beginning_of
from localllm.server.replies import EVENT_STREAM, NDJSON, error_reply, event, note_failure, unless_gone

# A request that ends a replica would end them all, one after the other, if it were passed on for ever.
_MOST_TRIES = 3

Ask = Callable[[ReplicaCall], AsyncGenerator[Message, None]]


class ReplicaGoneError(Exception):
    """The replica that was answering has died."""


def create_front(front: ReplicaFront, admission: Admission, *, log: Log = lambda _line: None) -> ASGIApp:
    """The front behind the checks and the log that every server has."""
    endpoints = endpoints_of(needs_key=admission.key_digest is not None, with_metrics=False)
    return guarded(front, admission, endpoints, Metrics(), log)


class ReplicaFront:
    """ask: has a replica answer; its messages are those of ASGI. It raises ReplicaGoneError, and RequestError where
    there is no replica yet."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._answering: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """Ends what is being answered, with a word. On the server's loop."""
        self._is_stopping = True
        for task in self._answering:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = _Reply(scope, receive, send)
        try:
            body = await read_bytes(Request(scope, receive))
            await unless_gone(receive, self._answer(_call(scope, body), reply))
        except (ClientGoneError, ClientDisconnect):
            if not reply.is_over:
                raise
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
            await reply.fail(RequestError(503, "the server is shutting down", name="shutting_down"))
        except Exception as error:
            await reply.fail(error)

    async def _answer(self, call: ReplicaCall, reply: _Reply) -> None:
        """Raises RequestError where replicas die under it."""
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            for _ in range(_MOST_TRIES):
                try:
                    async with aclosing(self._ask(call)) as messages:
                        async for message in messages:
                            await reply.pass_on(message)
                    return
                except ReplicaGoneError:
                    if reply.has_begun:
                        raise busy("the replica that was answering has died", "its output so far is above") from None
            raise busy("no replica could answer", f"{_MOST_TRIES} replicas died because of or during this request")
        finally:
            self._answering.discard(task)


def _call(scope: Scope, body: bytes) -> ReplicaCall:
    plain: dict[str, Any] = {name: scope[name] for name in ("method", "path", "raw_path", "query_string")}
    plain |= {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    plain |= {
        "headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]],
        "client": None,
        "server": None,
    }
    return ReplicaCall(plain, body, beginning_of(body) if scope["method"] == "POST" else ())


class _Reply:
    """The reply to the client. has_begun: a part of it was sent, so that no other replica can answer. is_over: all of
    it was sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.has_begun = self.is_over = False
        self._scope, self._receive, self._send = scope, receive, send
        self._start: Message = {}
        self._sequence_number = -1  # of the last event, where a dialect counts them

    async def pass_on(self, message: Message) -> None:
        """The head goes with the first piece of the body: until then another replica may answer."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if not self.has_begun:
            failure = self._start.pop("failure")
            if failure is not None:
                self._scope.setdefault("state", {})["failure"] = failure
            self.has_begun = True
            await self._send(self._start)
        numbers = re.findall(rb'"sequence_number":(\d+)', message["body"])
        self._sequence_number = int(numbers[-1]) if numbers else self._sequence_number
        await self._send(message)
        self.is_over = not message.get("more_body")

    async def fail(self, error: BaseException) -> None:
        """In the dialect that was spoken: a reply of its own, or the last word of one that has begun."""
        if not self.has_begun:
            await error_reply(self._scope, error)(self._scope, self._receive, self._send)
            return
        failure = failure_of(error)
        note_failure(self._scope, failure)
        await self._send({"type": "http.response.body", "body": self._last_word(failure), "more_body": False})

    def _last_word(self, failure: Failure) -> bytes:
        path = self._scope["path"]
        dialect = dialect_of(path)
        media_type = dict(self._start["headers"]).get(b"content-type", b"").decode("latin-1")
        if media_type.startswith(NDJSON):
            return line(body_of(failure, dialect))
        if not media_type.startswith(EVENT_STREAM):
            return b""
        if path == "/v1/responses":
            told = {"code": failure.name, "message": failure.message, "param": failure.param}
            return event({"type": "error", "sequence_number": self._sequence_number + 1, **told}, "error")
        return event(body_of(failure, dialect), "error" if dialect == "anthropic" else None)

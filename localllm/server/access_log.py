"""A line and a count of every request, also of those that were refused, with nothing that a client has sent."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.server.errors import ClientGoneError, Failure
from localllm.server.metrics import Metrics

Log = Callable[[str], None]

IGNORED_HEADER = "x-ignored-fields"  # of a reply: fields of its request that changed no answer

_UNKNOWN = "(no such address)"
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})
_GONE = 499  # as nginx counts who did not wait for an answer


def note_failure(scope: Scope, failure: Failure) -> None:
    """Note for the log how the request failed."""
    scope.setdefault("state", {})["failure"] = " ".join(filter(None, (failure.name, failure.place)))


class AccessLog:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, paths: Iterable[str], metrics: Metrics, log: Log) -> None:
        """paths: as the endpoints have them."""
        self._app = app
        self._paths = [(compile_path(path)[0], path) for path in paths]
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, request_id, ignored = time.perf_counter(), 0, secrets.token_hex(8), ""

        async def noting(message: Message) -> None:
            nonlocal status, ignored
            if message["type"] == "http.response.start":
                ignored = Headers(raw=message["headers"]).get(IGNORED_HEADER, "")
                status = message["status"]
                names = (b"x-request-id", b"request-id")  # as OpenAI's libraries look for it, and Anthropic's
                message["headers"] = [*message["headers"], *((name, request_id.encode("ascii")) for name in names)]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except (ClientGoneError, ClientDisconnect):
            status = _GONE
        finally:
            seconds = time.perf_counter() - started
            fields = f"ignored={ignored.replace(' ', '')} " if ignored else ""
            self._note(scope, status or 500, f"{fields}{seconds:.3f} s {request_id}")

    def _note(self, scope: Scope, status: int, rest: str) -> None:
        state = scope.get("state", {})
        method = scope["method"] if scope["method"] in _METHODS else "(odd)"
        endpoint = next((path for pattern, path in self._paths if pattern.match(scope["path"])), _UNKNOWN)
        failure = state.get("failure")
        self._metrics.count_request(endpoint, status)
        self._log(" ".join([method, endpoint, str(status), *([failure] if failure else []), rest]))

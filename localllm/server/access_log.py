"""A line and counts of every request, also of those that were refused: no text, no key, no path of a user's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.engine.events import FinishedEvent
from localllm.server.errors import ClientGoneError

Log = Callable[[str], None]

IGNORED_HEADER = "x-ignored-fields"  # of a reply: fields of its request that changed no answer

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})
_GONE = 499  # as nginx counts clients that left before the answer


class Metrics:
    """The metrics of one server, for Prometheus."""

    def __init__(self) -> None:
        self.registry = here = CollectorRegistry()
        self._requests = Counter("localllm_requests", "Requests.", ["path", "status"], registry=here)
        self._tokens = Counter("localllm_tokens", "Tokens, by their kind.", ["kind"], registry=here)
        self._ttft = Histogram(
            "localllm_time_to_first_token_seconds",
            "From a request's arrival at the engine to an answer's first token.",
            buckets=_SECONDS,
            registry=here,
        )
        self._ended = Counter("localllm_answers", "Answers, by finish reason.", ["reason"], registry=here)
        self._running = Gauge("localllm_answers_running", "Answers being computed now.", registry=here)
        self._waiting = Gauge("localllm_answers_waiting", "Answers waiting now.", registry=here)
        self._num_loaded = Gauge("localllm_models_loaded", "Loaded models.", registry=here)

    def count_request(self, path: str, status: int) -> None:
        """path: the endpoint's, not the request's."""
        self._requests.labels(path, str(status)).inc()

    def count_answer(self, finished: FinishedEvent) -> None:
        usage = finished.usage
        self._ended.labels(finished.finish_reason).inc()
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("prompt_cached").inc(usage.cached_tokens)
        self._tokens.labels("completion").inc(usage.completion_tokens)
        if finished.timings.ttft_s is not None:
            self._ttft.observe(finished.timings.ttft_s)
        if finished.speculation is not None:
            self._tokens.labels("drafted").inc(finished.speculation.drafted)
            self._tokens.labels("draft_accepted").inc(finished.speculation.accepted)

    def text(self, num_running: int, num_waiting: int, *, num_loaded: int) -> bytes:
        """Return Prometheus' format."""
        self._num_loaded.set(num_loaded)
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        return generate_latest(self.registry)


class AccessLog:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, paths: Iterable[str], metrics: Metrics, log: Log) -> None:
        """paths: as the endpoints have them."""
        self._app = app
        self._paths = [(compile_path(path)[0], path) for path in paths]
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status, request_id, ignored = time.perf_counter(), 0, secrets.token_hex(8), ""

        async def noting(message: Message) -> None:
            nonlocal status, ignored
            if message["type"] == "http.response.start":
                ignored = Headers(raw=message["headers"]).get(IGNORED_HEADER, "").replace(" ", "")
                status = message["status"]
                names = (b"x-request-id", b"request-id")  # as OpenAI's libraries look for it, and Anthropic's
                message["headers"] = [*message["headers"], *((name, request_id.encode("ascii")) for name in names)]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except (ClientGoneError, ClientDisconnect):
            status = _GONE
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "(odd)"
            found = (path for pattern, path in self._paths if pattern.match(scope["path"]))
            endpoint = next(found, "(no such address)")
            self._metrics.count_request(endpoint, status or 500)
            state, ignored = scope.get("state", {}), ignored and f"ignored={ignored}"
            failure, cascade = state.get("failure", ""), state.get("cascade", "")
            cascade = cascade and f"cascade={cascade}"
            rest = f"{time.perf_counter() - started:.3f} s {request_id}"
            self._log(" ".join(filter(None, [method, endpoint, str(status or 500), failure, cascade, ignored, rest])))

"""The application: endpoints behind a guard, every error in the shape of the dialect that was spoken."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from localllm.server import anthropic, ollama, openai, system_routes
from localllm.server.access_log import IGNORED_HEADER, AccessLog, Log, Metrics
from localllm.server.bodies import Body, ignored_fields, read_body
from localllm.server.cascade import HEADER, UnsureError, tried_text
from localllm.server.endpoint import OPENAPI_PATH, ApiCall, Endpoint, document
from localllm.server.errors import ClientGoneError, RequestError
from localllm.server.guard import Admission, Guard
from localllm.server.model_server import ModelServer
from localllm.server.replies import EVENT_STREAM, JsonReply, error_reply, soon_or_late, unless_gone
from localllm.server.web_page import PAGE_PATH, WebPage

ENDPOINTS: tuple[Endpoint, ...] = (*openai.ENDPOINTS, *anthropic.ENDPOINTS, *ollama.ENDPOINTS, *system_routes.ENDPOINTS)

_NEAR = 0.8  # of 1: less alike is another address, not a misspelt one


def create_app(
    server: ModelServer, admission: Admission, *, log: Log = lambda _line: None, with_metrics: bool = False
) -> ASGIApp:
    """log: called with a line for each request, without its contents."""
    endpoints = endpoints_of(needs_key=admission.key_digest is not None, with_metrics=with_metrics)
    router = create_router(endpoints, server)
    return guarded(router, admission, endpoints, server.metrics, log)


def guarded(app: ASGIApp, admission: Admission, endpoints: Sequence[Endpoint], metrics: Metrics, log: Log) -> ASGIApp:
    """Return the application behind the log and the checks that every server has, beside the page for browsers."""
    return AccessLog(Guard(app, admission, WebPage()), [*(each.path for each in endpoints), PAGE_PATH], metrics, log)


def endpoints_of(*, needs_key: bool, with_metrics: bool) -> list[Endpoint]:
    """Return the endpoints of a server, with the document that describes them."""
    endpoints = [each for each in ENDPOINTS if with_metrics or each.path != system_routes.METRICS_PATH]
    described = document(endpoints, needs_key=needs_key)

    async def describe(_call: ApiCall, _body: None) -> JsonReply:
        return JsonReply(described)

    return [*endpoints, Endpoint("GET", OPENAPI_PATH, describe, "This document", reply=dict[str, Any])]


def create_router(endpoints: Sequence[Endpoint], server: ModelServer) -> ASGIApp:
    """Return what answers admitted requests; by itself it is for a socket that only this user can open."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method] = each
    routes = [Route(path, _Address(by_method, paths, server)) for path, by_method in paths.items()]
    # Without starlette's own middleware, which takes a client that has gone for an error of the server.
    return Router(routes, redirect_slashes=False, default=_Address({}, paths, server))


class _Address:
    """Answers at one address, or at any that is not known, which has no methods. It is a class, as starlette hands
    functions only what fits into its own request and response."""

    def __init__(self, by_method: Mapping[str, Endpoint], known: Iterable[str], server: ModelServer) -> None:
        self._by_method = by_method
        self._known = known
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = await self._reply(Request(scope, receive))
        except (ClientGoneError, ClientDisconnect):
            raise
        except Exception as error:
            reply = error_reply(scope, error)
        await reply(scope, receive, send)

    async def _reply(self, request: Request) -> Response:
        if not self._by_method:
            raise self._no_address(request.method, request.scope["path"])
        endpoint = self._by_method.get("GET" if request.method == "HEAD" else request.method)
        if endpoint is None:
            allowed = ", ".join(self._by_method)
            what, why = "this path does not support the method", f"{request.method[:20]}; it knows {allowed}"
            raise RequestError(405, what, why=why, name="method_not_allowed", headers={"allow": allowed})
        body = None if endpoint.body is None else await read_body(request, endpoint.body)
        cascade, work = self._server.cascade, self._answered(endpoint, request, body)
        if cascade is not None and endpoint.stream_type == EVENT_STREAM and cascade.streams(body):
            work = soon_or_late(work, endpoint.path)
        reply = await unless_gone(request.receive, work)
        if body is not None and (ignored := ignored_fields(body)):
            reply.headers[IGNORED_HEADER] = ", ".join(ignored)
        return reply

    async def _answered(self, endpoint: Endpoint, request: Request, body: Body | None) -> Response:
        """Return the reply; of a cascade, that of the first model that is sure."""
        call = ApiCall(request, self._server)
        try:
            while True:
                with suppress(UnsureError):
                    reply = await endpoint.handle(call, body)
                    break
        finally:
            if asked := tried_text(call.tried):
                request.scope.setdefault("state", {})["cascade"] = asked
        if asked:
            reply.headers[HEADER] = asked
        return reply

    def _no_address(self, method: str, path: str) -> RequestError:
        near = difflib.get_close_matches(path[:200], self._known, n=1, cutoff=_NEAR)
        fix = f"ask for {near[0]}" if near else f"GET {OPENAPI_PATH} lists all of them"
        if path == system_routes.METRICS_PATH:
            fix = "start the server with --metrics"
        why = f"{method[:20]} {path[:200]}"
        return RequestError(404, "there is no such path", why=why, fix=fix, name="not_found")

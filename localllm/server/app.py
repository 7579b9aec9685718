"""The application: endpoints behind a guard, every error in the shape of the dialect that was spoken."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from localllm.server import anthropic, ollama, openai, openapi, system_routes
from localllm.server.access_log import IGNORED_HEADER, AccessLog, Log, note_failure
from localllm.server.bodies import ignored_fields, read_body
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import ClientGoneError, RequestError, body_of, dialect_of, failure_of
from localllm.server.guard import Admission, Guard
from localllm.server.model_server import ModelServer
from localllm.server.replies import JsonReply, unless_gone

ENDPOINTS: tuple[Endpoint, ...] = (*openai.ENDPOINTS, *anthropic.ENDPOINTS, *ollama.ENDPOINTS, *system_routes.ENDPOINTS)

_NEAR = 0.8  # of 1: less alike is another address, not a misspelt one


def create_app(
    server: ModelServer, admission: Admission, *, log: Log = lambda _line: None, with_metrics: bool = False
) -> ASGIApp:
    """log: called with a line for each request, without its contents."""
    endpoints = endpoints_of(needs_key=admission.key_digest is not None, with_metrics=with_metrics)
    router = create_router(endpoints, server)
    return AccessLog(Guard(router, admission), [each.path for each in endpoints], server.metrics, log)


def endpoints_of(*, needs_key: bool, with_metrics: bool) -> list[Endpoint]:
    """Return the endpoints of a server, with the document that describes them."""
    endpoints = [each for each in ENDPOINTS if with_metrics or each.path != system_routes.METRICS_PATH]
    described = openapi.document(endpoints, needs_key=needs_key)

    async def describe(_call: ApiCall, _body: None) -> JsonReply:
        return JsonReply(described)

    return [*endpoints, Endpoint("GET", openapi.PATH, describe, "This document", reply=dict[str, Any])]


def create_router(endpoints: Sequence[Endpoint], server: ModelServer) -> ASGIApp:
    """Return what answers admitted requests; by itself it is for a socket that only this user can open."""
    routes = [_route(paths, server) for paths in _by_path(endpoints)]
    # Without starlette's own middleware, which takes a client that has gone for an error of the server.
    return Router(routes, redirect_slashes=False, default=_Elsewhere([each.path for each in endpoints]))


def _by_path(endpoints: Sequence[Endpoint]) -> list[list[Endpoint]]:
    paths: dict[str, list[Endpoint]] = {}
    for each in endpoints:
        paths.setdefault(each.path, []).append(each)
    return list(paths.values())


def _route(endpoints: Sequence[Endpoint], server: ModelServer) -> Route:
    by_method: dict[str, Endpoint] = {each.method: each for each in endpoints}
    allowed = ", ".join(by_method)

    class Endpoints:
        """A class, as starlette hands functions only what fits into its own request and response."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            endpoint = by_method.get("GET" if scope["method"] == "HEAD" else scope["method"])
            if endpoint is None:
                reply: Response = _failed(request, _no_method(scope["method"], allowed))
            else:
                reply = await _reply(endpoint, ApiCall(request, server))
            await reply(scope, receive, send)

    return Route(endpoints[0].path, Endpoints())


def _no_method(method: str, allowed: str) -> RequestError:
    what, why = "this address knows no such method", f"{method[:20]}; it knows {allowed}"
    return RequestError(405, what, why=why, name="method_not_allowed", headers={"allow": allowed})


class _Elsewhere:
    """Answers for unknown addresses. paths: the known ones."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"][:20], scope["path"][:200]
        near = difflib.get_close_matches(path, self._paths, n=1, cutoff=_NEAR)
        fix = f"ask for {near[0]}" if near else f"GET {openapi.PATH} lists all of them"
        if path == system_routes.METRICS_PATH:
            fix = "start the server with --metrics"
        error = RequestError(404, "there is no such address", why=f"{method} {path}", fix=fix, name="not_found")
        await _failed(Request(scope, receive), error)(scope, receive, send)


async def _reply(endpoint: Endpoint, call: ApiCall) -> Response:
    try:
        body = None if endpoint.body is None else await read_body(call.request, endpoint.body)
        reply = await unless_gone(call.request.receive, endpoint.handle(call, body))
        if body is not None and (ignored := ignored_fields(body)):
            reply.headers[IGNORED_HEADER] = ", ".join(ignored)
        return reply
    except (ClientGoneError, ClientDisconnect):
        raise
    except Exception as error:
        return _failed(call.request, error)


def _failed(request: Request, error: Exception) -> Response:
    failure = failure_of(error)
    note_failure(request.scope, failure)
    return JsonReply(body_of(failure, dialect_of(request.url.path)), failure.status, failure.headers)

"""One address of the server: its body, its handler, its reply. The routes and the OpenAPI document are made of the same
list of these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from localllm.runtime.model_pool import ModelPool
from localllm.runtime.served_model import ServedModel
from localllm.server.bodies import Body
from localllm.server.fields import KeepAlive, keep_seconds
from localllm.server.model_server import ModelServer
from localllm.server.replies import EVENT_STREAM, NDJSON


@dataclass(frozen=True)
class ApiCall:
    """A request that was admitted."""

    request: Request
    server: ModelServer

    @property
    def pool(self) -> ModelPool:
        return self.server.pool

    async def model(self, name: str | None, keep_alive: KeepAlive = None) -> ServedModel:
        """Return the requested model, loaded. keep_alive: as requests have it. Raises RequestError."""
        return await self.server.model(name, keep_seconds(keep_alive))


Handler = Callable[[ApiCall, Any], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """body: of a POST
    reply: what comes back as JSON; None where it is text
    stream: one piece of the streamed form
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handle: Handler
    summary: str
    body: type[Body] | None = None
    reply: Any = None
    stream: Any = None
    deprecated: bool = False

    @property
    def stream_type(self) -> str:
        return NDJSON if self.path.startswith("/api/") else EVENT_STREAM

"""One address of the server: what it takes, who answers, and what the answer looks like. The routes and the OpenAPI
document are made of the same list of these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from localllm.server.bodies import Body
from localllm.server.fields import KeepAlive, keep_seconds
from localllm.server.pool import Pool
from localllm.server.served import Served


@dataclass(frozen=True)
class Call:
    """A request that was let in."""

    request: Request
    pool: Pool

    async def model(self, name: str | None, keep_alive: KeepAlive = None) -> Served:
        """The one that is asked for, loaded. keep_alive: as requests have it. Raises RequestError."""
        return await self.pool.model(name, keep_seconds(keep_alive))


Handler = Callable[[Call, Any], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """body: of a POST. reply: a TypedDict, of what comes back as JSON; None where it is text. stream: the type of the
    other form, and what one of its pieces is."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handle: Handler
    summary: str
    body: type[Body] | None = None
    reply: Any = None
    stream: tuple[str, Any] | None = None
    deprecated: bool = False

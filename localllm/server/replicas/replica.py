"""The content of each of Ray's processes: an engine, and the server's application around it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Message

from localllm import hub
from localllm.config import ResolvedSettings
from localllm.engine.validation import require_unchanged
from localllm.errors import LocalLLMError, ModelNotFoundError
from localllm.runtime import protocol
from localllm.runtime.engine_loader import Opening, open_engine
from localllm.runtime.engine_thread import EngineThread
from localllm.runtime.model_pool import ModelPool
from localllm.runtime.selection import selected, told_of
from localllm.server.app import create_router, endpoints_of
from localllm.server.model_server import Capacity, ModelServer
from localllm.server.replicas.affinity import ReplicaCall

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.request import Pooling

BEGINS, ENDS = "<localllm ", " localllm>"  # around what a replica says of why it cannot start, in a trace of Ray's


@dataclass(frozen=True)
class Role:
    """The arguments that every replica is started with.

    model: a name by which the model is found on whichever machine
    resolved: the settings, with the replica's share of its machine
    needs_key: whether clients need one
    is_alone: nothing of it is for other machines
    """

    model: str
    resolved: ResolvedSettings
    capacity: Capacity
    aliases: tuple[str, ...]
    pooling: Pooling
    needs_key: bool
    is_alone: bool = True


class ReplicaError(Exception):
    """A replica cannot start. Its text is all that reaches the fleet."""

    def __init__(self, error: LocalLLMError) -> None:
        super().__init__(f"{BEGINS}{json.dumps(protocol.plain(error))}{ENDS}")


class Replica:
    """Loads its engine when it is made: Ray sends it nothing before."""

    _server: ModelServer | None = None
    _contents = ""  # of the model's files, at the last look

    def __init__(self, role: Role) -> None:
        """Raises ReplicaError."""
        if role.is_alone:
            _listen_on_loopback()
        try:
            selection = selected(role.resolved, role.model)
        except LocalLLMError as error:
            raise ReplicaError(error) from None

        def load() -> Engine:
            from localllm.engine.loader import Watcher

            return open_engine(selection, Opening(keeps_pages=True, parallel=role.capacity.parallel), Watcher(), print)

        handle = EngineThread(load)
        pool = ModelPool(selection, role.resolved, lambda *_: EngineThread(load), aliases=role.aliases, on_demand=False)
        pool.adopt(handle)
        self._server = ModelServer(pool, role.capacity, role.pooling)
        self._router = create_router(endpoints_of(needs_key=role.needs_key, with_metrics=False), self._server)
        try:
            handle.wait_loaded()
        except Exception as error:
            raise ReplicaError(told_of(error, selection.files, selection.resolved)) from None

    def check_health(self) -> None:
        """Raises BusyError where the engine is broken, and ModelChangedError where the model's files are others and
        have been left alone for a second. Ray asks every second, and starts the replica anew then."""
        assert self._server is not None
        model = self._server.pool.first
        loaded = model.engine().contents
        with contextlib.suppress(ModelNotFoundError):  # what is in memory still answers; a new replica could not
            directory = hub.current(model.selection.files).directory
            before, self._contents = self._contents, hub.contents(directory)
            if self._contents == before:
                require_unchanged(directory, loaded)

    async def answer(self, call: ReplicaCall) -> AsyncIterator[Message]:
        """Yield the messages of the reply, as ASGI has them; texts that have come meanwhile are one. Cancelled, it
        stops the computation."""
        scope, outbox = {**call.scope, "state": {}}, asyncio.Queue[Message | None]()
        inbox = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            return inbox.pop() if inbox else await asyncio.Future[Message]()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["failure"] = scope["state"].get("failure")
            outbox.put_nowait(message)

        task = asyncio.ensure_future(self._router(scope, receive, send))
        task.add_done_callback(lambda _: outbox.put_nowait(None))
        try:
            while (message := await _next_of(outbox)) is not None:
                yield message
            await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def __del__(self) -> None:
        """Close the server; Ray calls this where a replica ends in peace."""
        if self._server is not None:
            self._server.close()


def _listen_on_loopback() -> None:
    """Ray Serve opens a port for calls between deployments, of which there is one: on every interface, to whoever finds
    it, with pickles. It does so when the replica has been made."""
    import grpc.aio

    kind: Any = next(each for each in type(grpc.aio.server()).__mro__ if "add_insecure_port" in vars(each))
    plain = kind.add_insecure_port

    def add_insecure_port(self: Any, address: str) -> int:
        return int(plain(self, f"127.0.0.1:{address.rpartition(':')[2]}"))

    kind.add_insecure_port = add_insecure_port


async def _next_of(outbox: asyncio.Queue[Message | None]) -> Message | None:
    """The next message. Of bodies that have come meanwhile one is made: each costs Ray a round trip."""
    message = await outbox.get()
    if message is None or message["type"] != "http.response.body":
        return message
    pieces = [message["body"]]
    while message.get("more_body") and not outbox.empty():
        later = outbox.get_nowait()
        if later is None:
            outbox.put_nowait(None)
            break
        message = later
        pieces.append(message["body"])
    return {**message, "body": b"".join(pieces)}

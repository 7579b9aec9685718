"""The interface to an engine that front ends hold, wherever it runs, and to the process that has it. No torch."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from localllm.engine.events import Event, FinishedEvent
from localllm.engine.request import Request

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.runtime.protocol import Message

Inbox = queue.SimpleQueue[Event | BaseException]
# Receives an event on the engine's thread, which waits for it. The last of a request is its FinishedEvent, or what
# broke the engine.
Receive = Callable[[Event | BaseException], None]


class RequestStream:
    """The events of one request, in order, unless they go elsewhere; the last is a FinishedEvent. Raises what
    broke the engine, if anything."""

    def __init__(self, request_id: int, abort: Callable[[int], None]) -> None:
        self.request_id = request_id
        self.events: Inbox = queue.SimpleQueue()
        self._abort = abort

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self.events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, FinishedEvent):
                return

    def abort(self) -> None:
        """Stop the request; what was generated stays, and its FinishedEvent says "cancelled"."""
        self._abort(self.request_id)


class EngineHandle(Protocol):
    """An engine that is being loaded, and then works: an `EngineThread` or an `EngineClient`."""

    def wait_loaded(self, timeout_s: float | None = None) -> LoadedEngine | None:
        """Return the engine once it is loaded; None if that takes longer than `timeout_s`, or the handle is closed.

        Raises what stopped the load.
        """
        ...

    @property
    def is_settled(self) -> bool:
        """Whether the engine is loaded, or cannot be."""
        ...

    def submit(self, request: Request, receive: Receive | None = None) -> RequestStream:
        """Queue a request. receive: is given its events, which do not go into the stream then."""
        ...

    def wait_ended(self) -> BaseException | None:
        """Wait until the engine takes no step any more; return what broke it, or None where it was stopped."""
        ...

    def stop(self) -> None:
        """Cancel what runs, and accept no more requests."""
        ...

    def close(self, timeout_s: float = 4.0) -> None:
        """`stop`, and end; returns after `timeout_s` even where a forward is still at work."""
        ...


class EnginePeer:
    """A process that has an engine, or will have one. Others than the plain one know more of it."""

    pid: int | None = None  # once it is known
    socket_path: Path | None = None  # at which other programs reach the engine, where they can

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect

    def connect(self) -> socket.socket:
        """Wait until the engine can be reached. Called once, on a thread of the connection."""
        return self._connect()

    def receive(self, message: Message) -> None:
        """Receive a message about the load."""

    def why_gone(self) -> str:
        """Explain a connection that has ended without having been closed here."""
        return "its process has ended"

    def kill(self) -> None:
        """End a process that does not move on."""

    def stop_load(self) -> None:
        """Give up an engine that is still being loaded."""

    def close(self, timeout_s: float) -> None:
        """Release the process, after the connection."""

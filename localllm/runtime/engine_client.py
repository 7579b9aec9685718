"""An engine in another process, held as one of this process is. Knows the way to it, not who started it. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from localllm.engine.request import Request
from localllm.engine.validation import require_same
from localllm.errors import EngineGoneError, ModelChangedError
from localllm.runtime import protocol
from localllm.runtime.engine_connection import EngineConnection, RemoteEngine
from localllm.runtime.engine_handle import EnginePeer, Recipient, RequestStream
from localllm.runtime.watchdog import Patience, Watchdog

_CLOSE_S = 5.0  # a process that is told to end leaves within four


class EngineClient:
    """`EngineHandle` of an engine in another process."""

    def __init__(
        self,
        directory: Path,
        peer: EnginePeer,
        again: Callable[[], EnginePeer] | None = None,
        patience: Patience = Patience(),  # noqa: B008
    ) -> None:
        """
        directory: the model's files
        peer: the process that has the engine
        again: begins to load the same model anew, or finds it elsewhere; it is called by the next request where the
            engine is gone, or the model's files have changed. None: the client ends with its engine.
        patience: after which a process that does not move on is killed
        """
        self._directory = directory
        self._again = again
        self._patience = patience
        self._connection = EngineConnection(directory, peer, patience)
        self._lock = threading.Lock()
        self._engine: RemoteEngine | None = None  # the same for all connections, where there may be several
        self._is_closed = self._has_reconnected = False

    def wait_loaded(self, timeout_s: float | None = None) -> RemoteEngine | None:
        """Raises what stopped the load, and EngineGoneError. The first engine may be gone before it was there."""
        try:
            engine = self._connection.wait_loaded(timeout_s)
        except EngineGoneError:
            if self._again is None or self._engine is not None or self._has_reconnected or self._is_closed:
                raise
            engine = self._current_connection().wait_loaded(timeout_s)
        if engine is None or self._again is None:
            return engine
        if self._engine is None:
            self._engine = engine
        elif engine is not self._engine:
            self._engine.go_on_as(engine)
        return self._engine

    @property
    def is_settled(self) -> bool:
        return self._connection.is_settled

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will arrive from the present engine."""
        return self._connection.has_ended

    @property
    def peer(self) -> EnginePeer:
        """The process that has the present engine."""
        return self._connection.peer

    @property
    def watchdog(self) -> Watchdog:
        """The watchdog of the present engine."""
        return self._connection.watchdog

    @property
    def is_doubtful(self) -> bool:
        """Whether the engine has not moved on for half of the patience, though somebody waits."""
        return self.watchdog.is_doubtful and not self.has_ended

    def submit(self, request: Request, recipient: Recipient | None = None) -> RequestStream:
        """Raises as `EngineConnection.submit`; ModelChangedError where the request was made for what the model was."""
        contents = "" if self._engine is None else self._engine.contents
        connection = self._current_connection()
        engine = self.wait_loaded()
        if engine is not None and self._again is not None:
            require_same(contents, engine.contents)
        return connection.submit(request, recipient)

    def answer(self, message: protocol.Message) -> None:
        """Send the answer to what the peer has asked."""
        with self._lock:  # a new peer may ask before its connection has taken the place of the one before
            connection = self._connection
        connection.answer(message)

    def wait_ended(self) -> BaseException | None:
        return self._connection.wait_ended()

    def stop(self) -> None:
        """As `EngineHandle.stop`; a load is given up at once."""
        self._is_closed = True
        self._connection.stop()
        if not self.is_settled:
            self.peer.stop_load()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        self._is_closed = True
        self._connection.close(timeout_s)
        self.peer.close(timeout_s)

    def _current_connection(self) -> EngineConnection:
        """Return the connection, or a new one in the place of one that has ended, or whose model has changed."""
        with self._lock:
            if self._again is not None and not self._is_closed and (self.has_ended or self._has_changed()):
                self._has_reconnected = True
                self._connection.close(_CLOSE_S)
                self.peer.close(_CLOSE_S)
                self._connection = EngineConnection(self._directory, self._again(), self._patience)
            return self._connection

    def _has_changed(self) -> bool:
        """Raises ModelNotFoundError."""
        try:
            if self._engine is not None:
                self._engine.require_unchanged()
        except ModelChangedError:
            return True
        return False

"""The engine of this process, for front ends in others: their requests arrive as `protocol`'s messages, and each
receives the events of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from localllm.engine.engine_info import LoadedEngine
from localllm.engine.events import Event, FinishedEvent
from localllm.engine.request import Request
from localllm.errors import CardFaultError, EngineClosedError, EngineGoneError, UsageError
from localllm.runtime import protocol
from localllm.runtime.engine_client import ASK_AGAIN
from localllm.runtime.engine_handle import EngineHandle, RequestStream
from localllm.runtime.sockets import Outbox

_LEAVE_S = 4.0  # in which what is being computed for one that leaves comes to its end, between two blocks
_MOVE_S = 5.0  # between two signs of life
_MOST_CLIENTS = 64  # a shell's worth of programs; each has two threads here


class ClientConnection:
    """One front end's connection. Its requests end with it."""

    def __init__(self, sock: socket.socket, engine: EngineHandle, gone: Callable[[ClientConnection], None]) -> None:
        """gone: called once, on a thread of its own."""
        self._sock = sock
        self._engine = engine
        self._gone = gone
        self._streams: dict[int, RequestStream] = {}  # by the client's number
        self._lock = threading.Condition()
        self._outbox = Outbox(sock)

    def begin(self) -> None:
        threading.Thread(target=self._read, name="localllm-client-read", daemon=True).start()

    def send(self, message: protocol.Message) -> None:
        """Send a message from any thread, without waiting."""
        self._outbox.send(protocol.line(message))

    def end(self, error: BaseException) -> None:
        """Tell what has ended the engine; nothing follows."""
        self.send({"op": "failed", "error": protocol.plain(_from_outside(error))})
        self._outbox.end(_LEAVE_S)
        self.close()

    def report_move(self) -> None:
        if self._streams:
            self.send({"op": "moved"})

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            try:
                self.send({"op": "loaded", "facts": protocol.plain(self._loaded().facts())})
            except BaseException as error:
                self.send({"op": "failed", "error": protocol.plain(_from_outside(error))})
            with self._sock.makefile("rb") as lines:
                while data := lines.readline(protocol.MOST_BYTES):
                    self._take(protocol.message(data))
        except (OSError, protocol.WireError, KeyError, TypeError, ValueError, RecursionError):
            pass  # a client that does not keep to the protocol is left
        finally:
            self._leave()

    def _leave(self) -> None:
        """Stop what still runs; a client that has only closed its sending side receives the end of it."""
        with self._lock:
            for stream in self._streams.values():
                stream.abort()
            self._lock.wait_for(lambda: not self._streams, _LEAVE_S)
        self._outbox.end(_LEAVE_S)  # the process may end upon `gone`, before the last events are on their way
        self.close()
        self._gone(self)

    def _loaded(self, timeout_s: float | None = None) -> LoadedEngine:
        engine = self._engine.wait_loaded(timeout_s)
        if engine is None:
            raise EngineClosedError("the engine has been closed")
        return engine

    def _take(self, message: protocol.Message) -> None:
        number = int(message["id"])
        match message["op"]:
            case "submit":
                self._submit(number, message["request"])
            case "abort":
                with self._lock:
                    stream = self._streams.get(number)
                if stream is not None:
                    stream.abort()
            case "call" if message["name"] in SLOW_CALLS:
                arguments = (number, message["name"], message.get("argument"))
                threading.Thread(target=self._answer, args=arguments, name="localllm-client-call", daemon=True).start()
            case "call":
                self._answer(number, message["name"], message.get("argument"))
            case other:
                raise protocol.WireError(f"{other!r} is not known")

    def _submit(self, number: int, request: Any) -> None:
        with self._lock:  # its end must not arrive before it is known
            try:
                tell = partial(self._tell, number)
                self._streams[number] = self._engine.submit(protocol.read(Request, request), tell)
            except Exception as error:
                self.send({"op": "broken", "id": number, "error": protocol.plain(_from_outside(error))})

    def _tell(self, number: int, item: Event | BaseException) -> None:
        """Send an event of a request, or what broke the engine, under the client's number. Where the process ends of
        it, its end tells."""
        if isinstance(item, CardFaultError):
            pass
        elif isinstance(item, BaseException):
            self.send({"op": "broken", "id": number, "error": protocol.plain(item)})
        else:
            event = protocol.plain(replace(item, request_id=number))
            self.send({"op": "event", "kind": type(item).__name__, "event": event})
        if isinstance(item, BaseException | FinishedEvent):
            with self._lock:
                self._streams.pop(number, None)
                self._lock.notify_all()

    def _answer(self, number: int, name: str, argument: Any) -> None:
        try:
            value = CALLS[name](self._loaded(0), argument)
        except Exception as error:
            self.send({"op": "refused", "id": number, "error": protocol.plain(_from_outside(error))})
            return
        self.send({"op": "answered", "id": number, "value": protocol.plain(value)})


# The calls beside requests, by name.
CALLS: dict[str, Callable[[LoadedEngine, Any], Any]] = {
    "check": lambda engine, argument: engine.check(protocol.read(Request, argument)),
    "fixes_for": lambda engine, argument: protocol.plain_fixes(engine.fixes_for(int(argument))),
    "unload_adapter": lambda engine, path: engine.unload_adapter(str(path)),
    "facts": lambda engine, _: engine.facts(),
    "status": lambda engine, _: engine.status(),
}

# Calls that may take a second, as a new grammar does: other messages are read meanwhile.
SLOW_CALLS = frozenset({"check"})


def _from_outside(error: BaseException) -> BaseException:
    """Return what an error is to a client: a process that ends of a GPU's fault is followed by another one."""
    if not isinstance(error, CardFaultError):
        return error
    return EngineGoneError("the engine is gone", why=f"{error.what}: {error.why}", fix=ASK_AGAIN)


class EngineServer:
    """All connections of one engine."""

    def __init__(self, engine: EngineHandle) -> None:
        self._engine = engine
        self._clients: set[ClientConnection] = set()
        self._reported_at = 0.0
        self._lock = threading.Lock()
        self.owner_gone = threading.Event()

    def take_owner(self, sock: socket.socket) -> ClientConnection:
        """Take the connection of the process that has started the engine, and follows the load."""
        return self._take(sock, self.owner_gone.set)

    def listen(self, listener: socket.socket) -> None:
        """Accept other clients, until the socket is closed."""
        threading.Thread(target=self._accept, args=(listener,), name="localllm-accept", daemon=True).start()

    def report_move(self) -> None:
        """Report to all clients that wait for an answer, also behind others, that the engine has moved on."""
        now = time.monotonic()
        if now - self._reported_at < _MOVE_S:
            return
        self._reported_at = now
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.report_move()

    def end(self, error: BaseException) -> None:
        """Tell all clients what has ended the engine."""
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.end(error)

    def close(self) -> None:
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with self._lock:
                    is_full = len(self._clients) >= _MOST_CLIENTS
                if is_full:
                    error = UsageError("too many programs use this model", why=f"{_MOST_CLIENTS} do already")
                    with contextlib.suppress(OSError):
                        sock.sendall(protocol.line({"op": "failed", "error": protocol.plain(error)}))
                    sock.close()
                else:
                    self._take(sock, lambda: None)

    def _take(self, sock: socket.socket, gone: Callable[[], None]) -> ClientConnection:
        def left(client: ClientConnection) -> None:
            with self._lock:
                self._clients.discard(client)
            gone()

        client = ClientConnection(sock, self._engine, left)
        with self._lock:
            self._clients.add(client)
        client.begin()
        return client

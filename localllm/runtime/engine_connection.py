"""One connection to an engine in another process, for as long as that lasts. No torch."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm.engine.engine_info import EngineFacts
from localllm.engine.events import Event, FinishedEvent, GrownEvent
from localllm.engine.request import Request
from localllm.engine.validation import require_fit
from localllm.errors import EngineClosedError, EngineGoneError, EngineStuckError, LocalLLMError
from localllm.runtime import protocol
from localllm.runtime.engine_handle import Recipient, RequestStream
from localllm.runtime.engine_peer import EnginePeer
from localllm.runtime.remote_engine import RemoteEngine
from localllm.runtime.watchdog import Patience, Watchdog

_CALL_S = 120.0  # for an answer, which takes a second at most: a machine may be busy, a process may be stopped
_LOOK_S = 5.0  # for one that nothing has to be computed for
_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)
_LOOKS = frozenset({"facts", "status"})
_ASK_AGAIN = "ask again: it is started anew"


class _Outbox:
    """Messages to a socket from any thread: none of them waits for a peer that does not read."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._is_draining = False

    def send(self, data: bytes) -> None:
        """Ignore a connection that has ended: the thread that reads it finds out."""
        with self._lock:
            if not self._is_draining:
                data = self._unsent_of(data)
                if not data:
                    return
                self._is_draining = True
                threading.Thread(target=self._drain, name="localllm-send", daemon=True).start()
            self._unsent.append(data)

    def _unsent_of(self, data: bytes) -> bytes:
        """Return what is left of a message where the system takes no more at once."""
        try:
            return data[self._sock.send(data, _AT_ONCE) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._unsent:
                    self._is_draining = False
                    return
                data = self._unsent.popleft()
            with contextlib.suppress(OSError):
                self._sock.sendall(data)


class EngineConnection:
    """Requests and calls over one socket, and their answers. Ends with the socket, and is not opened again."""

    def __init__(self, directory: Path, peer: EnginePeer, patience: Patience) -> None:
        """directory: the model's files. patience: after which a process that does not move on is killed."""
        self.peer = peer
        self._directory = directory
        self._sock: socket.socket | None = None
        self._outbox: _Outbox | None = None
        self._engine: RemoteEngine | None = None
        self._failure: BaseException | None = None
        self._settled = threading.Event()
        self._is_closed = self._has_ended = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._recipients: dict[int, Recipient] = {}
        self._calls: dict[int, queue.SimpleQueue[Any]] = {}
        self._is_asked = False  # the other side waits for an answer, and not this one for it
        self.watchdog = Watchdog(lambda: peer.pid, self._waits, self._convict, patience)
        self._unanswered = -1  # the number of messages that had come when a look was given up
        self._began = self._load_s = 0.0
        self._thread = threading.Thread(target=self._run, name="localllm-connection", daemon=True)
        self._thread.start()

    def wait_loaded(self, timeout_s: float | None = None) -> RemoteEngine | None:
        """Raises what stopped the load, and EngineGoneError."""
        if not self._settled.wait(timeout_s):
            return None
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return None if self._is_closed else self._engine

    @property
    def is_settled(self) -> bool:
        return self._settled.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self._has_ended

    def submit(self, request: Request, recipient: Recipient | None = None) -> RequestStream:
        """Raises what `RemoteEngine.check` does without a call, and EngineGoneError; what else refuses the request
        arrives in the place of events."""
        engine = self.wait_loaded()
        if engine is None:
            raise EngineClosedError("the engine has been closed", fix="load it again")
        require_fit(request, engine.ctx, engine.config, engine.fixes_for)
        plain = protocol.plain(request)
        stream = RequestStream(next(self._numbers), self._abort)
        with self._lock:
            if self._has_ended:
                raise self._failure or EngineClosedError("the engine has been closed", fix="load it again")
            self._recipients[stream.request_id] = stream.events if recipient is None else recipient
        self.watchdog.begin()
        self._send({"op": "submit", "id": stream.request_id, "request": plain})
        return stream

    def answer(self, message: protocol.Message) -> None:
        """Send the answer to what the peer has asked."""
        self._is_asked = False
        self.watchdog.begin()
        self._send(message)

    def wait_ended(self) -> BaseException | None:
        self._thread.join()
        return self._failure

    def stop(self) -> None:
        self._is_closed = True
        with self._lock:
            running = list(self._recipients)
        for number in running:
            self._abort(number)

    def close(self, timeout_s: float) -> None:
        self.stop()
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        self._thread.join(timeout_s)

    def _abort(self, number: int) -> None:
        self._send({"op": "abort", "id": number})

    def _call(self, name: str, argument: Any) -> Any:
        """Raises what the call raised there, EngineGoneError, and EngineStuckError where no answer comes;
        at once where nothing has come since the last one was given up."""
        is_look = name in _LOOKS
        patience_s = _LOOK_S if is_look else _CALL_S
        silent = EngineStuckError("the engine does not answer", why=f"it was asked {patience_s:.0f} s ago")
        number, answer = next(self._numbers), queue.SimpleQueue[Any]()
        with self._lock:
            if self._has_ended:
                raise self._failure or EngineClosedError("the engine has been closed")
            if is_look and self._unanswered == self.watchdog.num_received:
                raise silent
            self._calls[number] = answer
        self.watchdog.begin()
        self._send({"op": "call", "id": number, "name": name, "argument": argument})
        try:
            value = answer.get(timeout=patience_s)
        except queue.Empty:
            self._unanswered = self.watchdog.num_received
            raise silent from None
        finally:
            with self._lock:
                self._calls.pop(number, None)
        if isinstance(value, BaseException):
            raise value
        return value

    def _send(self, message: protocol.Message) -> None:
        if self._outbox is not None:
            self._outbox.send(protocol.line(message))

    # Whether the engine moves on

    def _waits(self) -> bool:
        """Return whether anybody waits for the other side; also where it has said nothing since a look was given up."""
        if self._sock is None or self._is_closed or self._has_ended or self._is_asked:
            return False
        is_silent = self._unanswered == self.watchdog.num_received
        return bool(self._recipients or self._calls or is_silent or not self._settled.is_set())

    def _convict(self, why: str) -> None:
        with self._lock:
            if self._has_ended or self._is_closed:
                return
            self._failure = self._failure or EngineStuckError("the engine does not move on", why=why, fix=_ASK_AGAIN)
        self.peer.kill()
        if self._sock is not None:
            with contextlib.suppress(OSError):  # a process that waits for a disk need not end at once
                self._sock.shutdown(socket.SHUT_RDWR)

    # What arrives

    def _run(self) -> None:
        failure: BaseException | None = None
        self._began = time.perf_counter()
        try:
            self._sock = self.peer.connect()
            self._outbox = _Outbox(self._sock)
            self.watchdog.begin()
        except Exception as error:
            gone = EngineGoneError("the engine's process cannot be reached", why=str(error), fix="ask again")
            self._end(error if isinstance(error, LocalLLMError) else gone)
            return
        try:
            with self._sock, self._sock.makefile("rb") as lines:
                while data := lines.readline(protocol.MOST_BYTES):
                    message = protocol.message(data)
                    is_answer = message["op"] in ("answered", "refused")
                    self.watchdog.received(has_moved=not (is_answer and self._recipients))
                    self._take(message)
        except OSError:
            pass
        except BaseException as error:
            failure = error
        self._end(failure)

    def _take(self, message: protocol.Message) -> None:
        match message["op"]:
            case "event":
                self._dispatch(protocol.read(protocol.EVENTS[message["kind"]], message["event"]))
            case "broken":
                with self._lock:
                    recipient = self._recipients.pop(message["id"], None)
                if recipient is not None:
                    recipient.put(protocol.read(BaseException, message["error"]))
            case "answered" | "refused" as how:
                with self._lock:
                    answer = self._calls.get(message["id"])
                if answer is not None:
                    is_error = how == "refused"
                    answer.put(protocol.read(BaseException, message["error"]) if is_error else message["value"])
            case "loaded":
                self._engine = RemoteEngine(self._directory, protocol.read(EngineFacts, message["facts"]), self._call)
                self._load_s = time.perf_counter() - self._began
                self._settled.set()
            case "failed":
                self._failure = protocol.read(BaseException, message["error"])
                self._settled.set()
            case op:
                self._is_asked |= op == "foreseen"
                self.peer.receive(message)

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, GrownEvent) and self._engine is not None:
            self._engine.set_ctx(event.ctx)
        if isinstance(event, FinishedEvent):  # who attaches has not waited for what was loaded before
            event = replace(event, timings=replace(event.timings, load_s=self._load_s))
        with self._lock:
            recipient = self._recipients.get(event.request_id)
            if isinstance(event, FinishedEvent):
                self._recipients.pop(event.request_id, None)
        if recipient is not None:
            recipient.put(event)

    def _end(self, failure: BaseException | None) -> None:
        if failure is None and not self._is_closed and self._failure is None:
            why = self.peer.why_gone()
            failure = EngineGoneError("the engine is gone", why=why, fix=_ASK_AGAIN)
        with self._lock:
            self._has_ended = True
            self._engine = None  # which knows this: a tokenizer of 100 MB would wait for the garbage collector
            self._failure = self._failure or failure
            error = self._failure or EngineClosedError("the engine has been closed")
            recipients, self._recipients = list(self._recipients.values()), {}
            calls = list(self._calls.values())
        for recipient in recipients:
            recipient.put(error)
        for call in calls:
            call.put(error)
        self.watchdog.end()
        self._settled.set()

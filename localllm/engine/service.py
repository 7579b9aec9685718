"""One thread owns the engine and its device; front ends submit requests and read events from any other.

Imports no torch: the engine, and what it needs, is loaded on that thread while the front end stays awake.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from localllm.engine.events import Event, FinishedEvent
from localllm.engine.request import Request
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.engine.engine import Engine


Inbox = queue.SimpleQueue[Event | BaseException]


class RequestStream:
    """The events of one request, in order; the last is a FinishedEvent. Raises what broke the engine, if anything."""

    def __init__(self, request_id: int, abort: Callable[[int], None], inbox: Inbox | None = None) -> None:
        """inbox: where several requests' events go together; it is read in place of their streams."""
        self.request_id = request_id
        self.events: Inbox = queue.SimpleQueue() if inbox is None else inbox
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


class EngineService:
    """Loads an engine on its own thread and steps it there while there is work."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load: Callable[[], Engine] | None = load
        self._engine: Engine | None = None
        self._failure: BaseException | None = None
        self._loaded = threading.Event()
        self._wake = threading.Event()
        self._ended = False
        self._lock = threading.Lock()
        self._streams: dict[int, RequestStream] = {}
        self._thread = threading.Thread(target=self._run, name="localllm-engine", daemon=True)
        self._thread.start()

    def wait_loaded(self, timeout_s: float | None = None) -> Engine | None:
        """The engine once it is loaded; None if that takes longer than `timeout_s`, or the service is closed.

        Raises what stopped the load.
        """
        if not self._loaded.wait(timeout_s):
            return None
        if self._failure is not None:
            raise self._failure
        return self._engine

    def submit(self, request: Request, inbox: Inbox | None = None) -> RequestStream:
        """Queue a request; `inbox` is as in `RequestStream`. Raises ContextOverflowError or UsageError at once."""
        engine = self.wait_loaded()
        with self._lock:  # the device thread must not dispatch an event before its stream is known
            if self._ended or engine is None:
                raise self._failure or LocalLLMError("the engine has been closed", fix="load it again")
            request_id = engine.submit(request)
            stream = RequestStream(request_id, self._abort, inbox)
            self._streams[request_id] = stream
        self._wake.set()
        return stream

    def close(self, timeout_s: float = 4.0) -> None:
        """Cancel what runs and end the thread; returns after `timeout_s` even where a forward is still at work."""
        with self._lock:
            self._ended = True
            running = list(self._streams)
        for request_id in running:
            self._abort(request_id)
        self._wake.set()
        self._thread.join(timeout_s)

    def _abort(self, request_id: int) -> None:
        engine = self._engine
        if engine is not None:
            engine.abort(request_id)
        self._wake.set()

    def _run(self) -> None:
        load, self._load = self._load, None  # it may hold the service before, and that its engine
        assert load is not None
        try:
            self._engine = load()
        except BaseException as error:
            self._failure = error
            return
        finally:
            del load
            self._loaded.set()
        try:
            with closing(self._engine):
                self._serve(self._engine)
        except BaseException as error:
            with self._lock:
                self._failure, self._ended = error, True
                for stream in self._streams.values():
                    stream.events.put(error)
        finally:
            self._engine = None  # it is closed; who keeps the service keeps no more than that

    def _serve(self, engine: Engine) -> None:
        while not (self._ended and not engine.has_work):
            if not engine.has_work:
                self._wake.wait()
                self._wake.clear()
            for event in engine.step(self._pass_on):
                self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        with self._lock:
            stream = self._streams[event.request_id]
            if isinstance(event, FinishedEvent):
                del self._streams[event.request_id]
        stream.events.put(event)

"""One thread owns the engine and its device; front ends submit requests and read events from any other.

Imports no torch: the engine, and what it needs, is loaded on that thread while the front end stays awake.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING

from localllm.engine.events import Event, FinishedEvent
from localllm.engine.request import Request
from localllm.errors import EngineClosedError
from localllm.runtime.engine_handle import Receive, RequestStream

if TYPE_CHECKING:
    from localllm.engine.engine import Engine


class EngineThread:
    """`EngineHandle` of an engine that is loaded on a thread of this process, and steps there while there is work."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load: Callable[[], Engine] | None = load
        self._engine: Engine | None = None
        self._failure: BaseException | None = None
        self._failed_at: TracebackType | None = None
        self._loaded = threading.Event()
        self._wake = threading.Event()
        self._ended = False
        self.moved: Callable[[], None] = lambda: None  # called after every block, on the engine's thread
        self._lock = threading.Lock()
        self._receivers: dict[int, Receive] = {}  # of events, by request
        self._thread = threading.Thread(target=self._run, name="localllm-engine", daemon=True)
        self._thread.start()

    def wait_loaded(self, timeout_s: float | None = None) -> Engine | None:
        """Raises what stopped the load."""
        if not self._loaded.wait(timeout_s):
            return None
        if self._failure is not None:
            raise self._raised_failure(self._failure)
        return self._engine

    @property
    def is_settled(self) -> bool:
        return self._loaded.is_set()

    def submit(self, request: Request, receive: Receive | None = None) -> RequestStream:
        """Raises ContextOverflowError or UsageError at once."""
        engine = self.wait_loaded()
        with self._lock:  # the device thread must not dispatch an event before its stream is known
            if self._ended or engine is None:
                if self._failure is not None:
                    raise self._raised_failure(self._failure)
                raise EngineClosedError("the engine has been closed", fix="load it again")
            request_id = engine.submit(request)
            stream = RequestStream(request_id, self._abort)
            self._receivers[request_id] = receive or stream.events.put
        self._wake.set()
        return stream

    def wait_ended(self) -> BaseException | None:
        self._thread.join()
        return self._failure

    def stop(self) -> None:
        with self._lock:
            self._ended = True
            running = list(self._receivers)
        for request_id in running:
            self._abort(request_id)
        self._wake.set()

    def close(self, timeout_s: float = 4.0) -> None:
        self.stop()
        self._thread.join(timeout_s)

    def _raised_failure(self, failure: BaseException) -> BaseException:
        """Return the error with the place where it happened, without the frames of its earlier receivers."""
        return failure.with_traceback(self._failed_at)

    def _abort(self, request_id: int) -> None:
        engine = self._engine
        if engine is not None:
            engine.abort(request_id)
        self._wake.set()

    def _run(self) -> None:
        load, self._load = self._load, None  # it may hold the handle before, and that its engine
        assert load is not None
        try:
            self._engine = load()
            self._engine.scheduler.on_block = lambda: self.moved()
        except BaseException as error:
            self._failure, self._failed_at = error, error.__traceback__
            return
        finally:
            del load
            self._loaded.set()
        try:
            with closing(self._engine):
                self._serve(self._engine)
        except BaseException as error:
            with self._lock:
                self._failure, self._failed_at, self._ended = error, error.__traceback__, True
                for receive in self._receivers.values():
                    receive(error)
        finally:
            self._engine = None  # it is closed: the handle shall not keep its memory

    def _serve(self, engine: Engine) -> None:
        while not (self._ended and not engine.has_work):
            if not engine.has_work:
                self._wake.wait()
                self._wake.clear()
            for event in engine.step(self._pass_on):
                self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        with self._lock:
            receive = self._receivers[event.request_id]
            if isinstance(event, FinishedEvent):
                del self._receivers[event.request_id]
        receive(event)

"""The handle of an engine in another process that is started anew, or found elsewhere, where the process is gone. No
torch."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable

from localllm.engine.events import Event, PrefillEvent
from localllm.engine.request import Request
from localllm.engine.validation import require_same
from localllm.errors import EngineGoneError, EngineStuckError, ModelChangedError
from localllm.runtime.engine_client import CLOSE_S, EngineClient, RemoteEngine
from localllm.runtime.engine_handle import Receive, RequestStream


def may_renew(item: object) -> bool:
    """Return whether this is an engine that is gone, and is not stuck: it might be so in the request."""
    return isinstance(item, EngineGoneError) and not isinstance(item, EngineStuckError)


class RenewedClient:
    """`EngineHandle` of an engine in another process, and of another one where that is gone."""

    def __init__(self, first: EngineClient, again: Callable[[], EngineClient]) -> None:
        """again: begins to load the same model anew, or finds it elsewhere; it is called by the next request where the
        engine is gone, or the model's files have changed."""
        self.client = first  # of the present engine
        self._again = again
        self._lock = threading.Lock()
        self._numbers = itertools.count()  # of the requests of all clients
        self._engine: RemoteEngine | None = None  # the same for all clients
        self._is_renewed = False
        self._closed = threading.Event()

    def wait_loaded(self, timeout_s: float | None = None) -> RemoteEngine | None:
        """Raises what stopped the load, and EngineGoneError. The first engine may be gone before it was there."""
        try:
            engine = self.client.wait_loaded(timeout_s)
        except EngineGoneError:
            if self._engine is not None or self._is_renewed or self._closed.is_set():
                raise
            engine = self._current().wait_loaded(timeout_s)
        if engine is None:
            return None
        if self._engine is None:
            self._engine = engine
        elif engine is not self._engine:
            self._engine.go_on_as(engine)
        return self._engine

    @property
    def is_settled(self) -> bool:
        return self.client.is_settled

    def submit(self, request: Request, receive: Receive | None = None) -> RequestStream:
        """Raises as `EngineClient.submit`; ModelChangedError where the request was made for what the model was."""
        contents = "" if self._engine is None else self._engine.contents
        number = next(self._numbers)
        renewed = _RenewedRequest(number, lambda take: self._submit(request, contents, take, number), receive)
        renewed.begin()
        return renewed.stream

    def _submit(self, request: Request, contents: str, receive: Receive, number: int) -> RequestStream:
        before = self.client
        client = self._current()
        try:
            return self._submit_to(client, request, contents, receive, number)
        except EngineGoneError as error:  # it has ended since it was looked at
            if client is not before or not may_renew(error):
                raise
            return self._submit_to(self._current(), request, contents, receive, number)

    def _submit_to(
        self, client: EngineClient, request: Request, contents: str, receive: Receive, number: int
    ) -> RequestStream:
        engine = self.wait_loaded()
        if engine is not None:
            require_same(contents, engine.contents)
        return client.submit(request, receive, number)

    def wait_ended(self) -> BaseException | None:
        return self.client.wait_ended()

    def stop(self) -> None:
        self._closed.set()
        self.client.stop()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        self._closed.set()
        self.client.close(timeout_s)

    def _current(self) -> EngineClient:
        """Return the client, or a new one in the place of one that has ended, or whose model has changed."""
        with self._lock:
            if not self._closed.is_set() and (self.client.is_gone or self._has_changed()):
                self._is_renewed = True
                self.client.close()
                self.client = self._again()
                if self._closed.is_set():  # meanwhile, with the one before
                    self.client.close()
            return self.client

    def _has_changed(self) -> bool:
        """Raises ModelNotFoundError."""
        try:
            if self._engine is not None:
                self._engine.require_unchanged()
        except ModelChangedError:
            return True
        return False


class _RenewedRequest:
    """A request that is submitted once more where the engine is gone before anything of the answer has arrived."""

    def __init__(self, number: int, submit: Callable[[Receive], RequestStream], receive: Receive | None) -> None:
        self.stream = RequestStream(number, lambda _number: self._abort())
        self._submit = submit
        self._receive = receive or self.stream.events.put
        self._submitted: RequestStream | None = None
        self._submitting = threading.Lock()
        self._is_renewable = True
        self._aborted = threading.Event()

    def begin(self) -> None:
        """Raises as `EngineClient.submit`."""
        with self._submitting:
            self._submitted = self._submit(self._take)

    def _take(self, item: Event | BaseException) -> None:
        is_renewed = self._is_renewable and may_renew(item) and not self._aborted.is_set()
        self._is_renewable = self._is_renewable and isinstance(item, PrefillEvent)
        if is_renewed:
            with contextlib.suppress(RuntimeError):  # no thread can be started
                # This is the thread of the connection that has ended, whose end the next one waits for.
                threading.Thread(target=self._renew, args=(item,), name="localllm-renew", daemon=True).start()
                return
        self._receive(item)

    def _renew(self, gone: Event | BaseException) -> None:
        with self._submitting:
            if self._aborted.is_set():
                self._receive(gone)
                return
            try:
                self._submitted = self._submit(self._receive)
            except BaseException as error:
                self._receive(error)
                return
            if self._aborted.is_set():
                self._submitted.abort()

    def _abort(self) -> None:
        self._aborted.set()
        if self._submitted is not None:
            self._submitted.abort()

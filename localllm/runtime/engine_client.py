"""An engine in another process, used as if it were here. Knows the socket to it, not who started it. No torch."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from localllm.engine.engine_info import EngineFacts, EngineStatus, Recipient, Service
from localllm.engine.events import Event, FinishedEvent, GrownEvent, ignore
from localllm.engine.request import Request
from localllm.engine.validation import encode_prompt, require_fit, require_same, require_unchanged
from localllm.errors import (
    EngineClosedError,
    EngineGoneError,
    EngineStuckError,
    LocalLLMError,
    ModelChangedError,
    TemplateError,
)
from localllm.models.config import ModelConfig
from localllm.models.families import load_config
from localllm.runtime import protocol
from localllm.runtime.watchdog import Patience, Watchdog
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

_CALL_S = 120.0  # for an answer, which takes a second at most: a machine may be busy, a process may be stopped
_LOOK_S = 5.0  # for one that nothing has to be computed for
_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)
_LOOKS = frozenset({"facts", "status"})
Call = Callable[[str, Any], Any]
T = TypeVar("T")


class AttachedEngine:
    """`LoadedEngine`: what the model's files say is read here, all else is asked over there."""

    def __init__(self, directory: Path, facts: EngineFacts, call: Call) -> None:
        self._directory = directory
        self._facts = facts
        self._call = call

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._read(Tokenizer.load)

    @cached_property
    def config(self) -> ModelConfig:
        return self._read(load_config)

    @cached_property
    def _template(self) -> ChatTemplate | TemplateError:
        tokenizer = self.tokenizer
        return self._read(lambda directory: ChatTemplate.load_or_why_not(directory, tokenizer))

    def _read(self, read: Callable[[Path], T]) -> T:
        """Read the files that the engine over there was loaded from. Raises ModelChangedError where they are others
        now."""
        try:
            return read(self._directory)
        finally:
            self.require_unchanged()

    def require_unchanged(self) -> None:
        """Raises ModelChangedError, and ModelNotFoundError where the files are gone."""
        require_unchanged(self._directory, self.contents)

    @property
    def contents(self) -> str:
        return self._facts.contents

    @property
    def template(self) -> ChatTemplate:
        """Raises TemplateError where the model has none, or a broken one."""
        if isinstance(self._template, TemplateError):
            raise self._template.with_traceback(None)
        return self._template

    @property
    def ctx(self) -> int:
        return self._facts.ctx

    @property
    def weights(self) -> str:
        return self._facts.weights

    @property
    def load_s(self) -> float:
        return self._facts.load_s

    def flags_for(self, ctx: int) -> str:
        """Return the flags with which a context of so many tokens fits; "" where none does, and where nobody can be
        asked."""
        with contextlib.suppress(EngineGoneError):
            return str(self._call("flags_for", ctx))
        return ""

    def check(self, request: Request) -> None:
        """Raises ContextOverflowError or UsageError for a request that cannot run."""
        require_fit(request, self.ctx, self.config, self.flags_for)
        if request.grammar is not None or request.beams > 1:  # compiled, and searched, where they are used
            self._call("check", protocol.plain(request))

    def encode(self, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> list[int]:
        """The ids of a prompt, as `encode_prompt` has it."""
        return encode_prompt(prompt, self.tokenizer, lambda: self.template)

    @property
    def current_plan(self) -> None:
        """It is not of this process."""
        return None

    def facts(self) -> EngineFacts:
        """Return the engine's facts as they are now, or as they were where it does not answer."""
        with contextlib.suppress(EngineStuckError):
            self._facts = protocol.read(EngineFacts, self._call("facts", None))
        return self._facts

    def status(self) -> EngineStatus:
        """Raises EngineStuckError where it does not answer."""
        status: EngineStatus = protocol.read(EngineStatus, self._call("status", None))
        return status

    def go_on_as(self, other: AttachedEngine) -> None:
        """The same model has been loaded anew, which may have changed meanwhile."""
        self.__dict__ = dict(vars(other))  # at once: other threads read it, and what they still read is the old one's

    def grown(self, ctx: int) -> None:
        """The context has become longer."""
        self._facts = replace(self._facts, ctx=ctx)


class AttachedStream:
    """The stream of an answer by an engine in another process."""

    def __init__(self, request_id: int, abort: Callable[[int], None]) -> None:
        self.request_id = request_id
        self.events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
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
        self._abort(self.request_id)


class _Outbox:
    """Messages to a socket from any thread: none of them waits for a peer that does not read."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._is_draining = False

    def say(self, data: bytes) -> None:
        """Where the connection has ended, the thread that reads finds out, and tells."""
        with self._lock:
            if not self._is_draining:
                data = self._unsent_of(data)
                if not data:
                    return
                self._is_draining = True
                threading.Thread(target=self._drain, name="localllm-say", daemon=True).start()
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


class AttachedService:
    """`Service` over one connection, for as long as that lasts."""

    def __init__(
        self,
        directory: Path,
        connect: Callable[[], socket.socket],
        hear: Callable[[protocol.Message], None] = ignore,
        why_gone: Callable[[], str] = lambda: "its process has ended",
        pid: Callable[[], int | None] = lambda: None,
        kill: Callable[[], None] = lambda: None,
        patience: Patience = Patience(),  # noqa: B008
    ) -> None:
        """directory: of the model's files. connect: called once, on a thread of this. hear: is given what is told of a
        load. why_gone: asked when the connection has ended and nobody has closed it. pid: of the engine's process, once
        it is known. kill: ends it, where it does not move on for longer than the patience has it."""
        self._directory = directory
        self._connect = connect
        self._hear = hear
        self._why_gone = why_gone
        self._sock: socket.socket | None = None
        self._outbox: _Outbox | None = None
        self._engine: AttachedEngine | None = None
        self._failure: BaseException | None = None
        self._settled = threading.Event()
        self._is_closed = self._has_ended = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._recipients: dict[int, Recipient] = {}
        self._calls: dict[int, queue.SimpleQueue[Any]] = {}
        self._kill = kill
        self.is_asked = False  # the other side waits for an answer, and not this one for it
        self.watchdog = Watchdog(pid, self._waits, self._convict, patience)
        self._unanswered = -1  # how much had been heard when a look was given up
        self._began = self._load_s = 0.0
        self._thread = threading.Thread(target=self._run, name="localllm-attached", daemon=True)
        self._thread.start()

    # As `Service` has it

    def wait_loaded(self, timeout_s: float | None = None) -> AttachedEngine | None:
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
        """Return whether nothing more will come."""
        return self._has_ended

    def submit(self, request: Request, recipient: Recipient | None = None) -> AttachedStream:
        """What refuses the request at the other end arrives as what `check` raises would, in the place of events.

        Raises what `AttachedEngine.check` does without asking, and EngineGoneError.
        """
        engine = self.wait_loaded()
        if engine is None:
            raise EngineClosedError("the engine has been closed", fix="load it again")
        require_fit(request, engine.ctx, engine.config, engine.flags_for)
        plain = protocol.plain(request)
        stream = AttachedStream(next(self._numbers), self._abort)
        with self._lock:
            if self._has_ended:
                raise self._failure or EngineClosedError("the engine has been closed", fix="load it again")
            self._recipients[stream.request_id] = stream.events if recipient is None else recipient
        self.watchdog.begin()
        self._send({"op": "submit", "id": stream.request_id, "request": plain})
        return stream

    def wait_ended(self) -> BaseException | None:
        self._thread.join()
        return self._failure

    def stop(self) -> None:
        self._is_closed = True
        with self._lock:
            running = list(self._recipients)
        for number in running:
            self._abort(number)

    def close(self, timeout_s: float = 4.0) -> None:
        self.stop()
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        self._thread.join(timeout_s)

    # What is said

    def _abort(self, number: int) -> None:
        self._send({"op": "abort", "id": number})

    def _call(self, name: str, argument: Any) -> Any:
        """Raises what it raised over there, and EngineGoneError; EngineStuckError where nothing comes, at once where
        nothing has come since that was found out."""
        is_look = name in _LOOKS
        patience_s = _LOOK_S if is_look else _CALL_S
        silent = EngineStuckError("the engine does not answer", why=f"it was asked {patience_s:.0f} s ago")
        number, answer = next(self._numbers), queue.SimpleQueue[Any]()
        with self._lock:
            if self._has_ended:
                raise self._failure or EngineClosedError("the engine has been closed")
            if is_look and self._unanswered == self.watchdog.num_heard:
                raise silent
            self._calls[number] = answer
        self.watchdog.begin()
        self._send({"op": "call", "id": number, "name": name, "argument": argument})
        try:
            value = answer.get(timeout=patience_s)
        except queue.Empty:
            self._unanswered = self.watchdog.num_heard
            raise silent from None
        finally:
            with self._lock:
                self._calls.pop(number, None)
        if isinstance(value, BaseException):
            raise value
        return value

    def _send(self, message: protocol.Message) -> None:
        if self._outbox is not None:
            self._outbox.say(protocol.line(message))

    def say(self, message: protocol.Message) -> None:
        """What is no request, and no question: the answer to one."""
        self.is_asked = False
        self.watchdog.begin()
        self._send(message)

    # Whether it moves on

    def _waits(self) -> bool:
        """Return whether anybody waits for the other side; also where it has said nothing since a look was given up."""
        if self._sock is None or self._is_closed or self._has_ended or self.is_asked:
            return False
        is_silent = self._unanswered == self.watchdog.num_heard
        return bool(self._recipients or self._calls or is_silent or not self._settled.is_set())

    def _convict(self, why: str) -> None:
        with self._lock:
            if self._has_ended or self._is_closed:
                return
            told = "ask again: it is started anew"
            self._failure = self._failure or EngineStuckError("the engine does not move on", why=why, fix=told)
        self._kill()
        if self._sock is not None:
            with contextlib.suppress(OSError):  # a process that waits for a disk need not end at once
                self._sock.shutdown(socket.SHUT_RDWR)

    # What is heard

    def _run(self) -> None:
        failure: BaseException | None = None
        self._began = time.perf_counter()
        try:
            self._sock = self._connect()
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
                    self.watchdog.heard(has_moved=not (is_answer and self._recipients))
                    self._take(message)
        except OSError:
            pass
        except BaseException as error:
            failure = error
        self._end(failure)

    def _take(self, message: protocol.Message) -> None:
        match message["op"]:
            case "event":
                self._pass_on(protocol.read(protocol.EVENTS[message["kind"]], message["event"]))
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
                self._engine = AttachedEngine(self._directory, protocol.read(EngineFacts, message["facts"]), self._call)
                self._load_s = time.perf_counter() - self._began
                self._settled.set()
            case "failed":
                self._failure = protocol.read(BaseException, message["error"])
                self._settled.set()
            case _:
                self._hear(message)

    def _pass_on(self, event: Event) -> None:
        if isinstance(event, GrownEvent) and self._engine is not None:
            self._engine.grown(event.ctx)
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
            why, fix = self._why_gone(), "ask again: it is started anew"
            failure = EngineGoneError("the engine is gone", why=why, fix=fix)
        with self._lock:
            self._has_ended = True
            self._engine = None  # which knows this: a tokenizer of 100 MB would wait for the garbage collector
            self._failure = self._failure or failure
            told = self._failure or EngineClosedError("the engine has been closed")
            recipients, self._recipients = list(self._recipients.values()), {}
            calls = list(self._calls.values())
        for recipient in recipients:
            recipient.put(told)
        for call in calls:
            call.put(told)
        self.watchdog.end()
        self._settled.set()


class Mortal(Service, Protocol):
    """A `Service` of an engine elsewhere: `AttachedService`, or `EngineProcess`."""

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more will come."""
        ...

    def wait_loaded(self, timeout_s: float | None = None) -> AttachedEngine | None: ...

    def submit(self, request: Request, recipient: Recipient | None = None) -> AttachedStream: ...


class RevivingService:
    """`Service` of one engine after the other: where it is gone, the next request asks for another."""

    def __init__(self, first: Mortal, again: Callable[[], Mortal]) -> None:
        """again: begins to load the same model anew, or finds it elsewhere."""
        self._again = again
        self._lock = threading.Lock()
        self._current = first
        self._engine: AttachedEngine | None = None
        self._is_closed = self._is_renewed = False

    def wait_loaded(self, timeout_s: float | None = None) -> AttachedEngine | None:
        """The same one whichever service there is; the first may be gone before it was there."""
        try:
            engine = self._current.wait_loaded(timeout_s)
        except EngineGoneError:
            if self._engine is not None or self._is_renewed or self._is_closed:
                raise
            engine = self._renewed().wait_loaded(timeout_s)
        if engine is None:
            return None
        if self._engine is None:
            self._engine = engine
        elif engine is not self._engine:
            self._engine.go_on_as(engine)
        return self._engine

    @property
    def is_settled(self) -> bool:
        return self._current.is_settled

    def submit(self, request: Request, recipient: Recipient | None = None) -> AttachedStream:
        """Raises as `AttachedService.submit`; ModelChangedError where the request was made for what the model was."""
        contents = "" if self._engine is None else self._engine.contents
        current = self._renewed()
        engine = self.wait_loaded()
        if engine is not None:
            require_same(contents, engine.contents)
        return current.submit(request, recipient)

    def _renewed(self) -> Mortal:
        """The service that there is, or another in the place of one that has ended, or whose files are others now."""
        with self._lock:
            if (self._current.has_ended or self._has_changed()) and not self._is_closed:
                self._is_renewed = True
                self._current.close()
                self._current = self._again()
            return self._current

    def _has_changed(self) -> bool:
        """Raises ModelNotFoundError."""
        try:
            if self._engine is not None:
                self._engine.require_unchanged()
        except ModelChangedError:
            return True
        return False

    def wait_ended(self) -> BaseException | None:
        return self._current.wait_ended()

    def stop(self) -> None:
        self._is_closed = True
        self._current.stop()

    def close(self, timeout_s: float = 4.0) -> None:
        self._is_closed = True
        self._current.close(timeout_s)

"""The handle of an engine in another process. It knows how to reach the process, not what started it. No torch."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from localllm.engine.engine_info import EngineFacts, EngineStatus
from localllm.engine.events import Event, FinishedEvent, GrownEvent
from localllm.engine.request import Request
from localllm.engine.validation import encode_prompt, require_fit, require_unchanged
from localllm.errors import (
    EngineClosedError,
    EngineGoneError,
    EngineStuckError,
    Fix,
    LocalLLMError,
    TemplateError,
)
from localllm.models.architecture import ModelConfig
from localllm.models.families import load_config
from localllm.runtime import protocol
from localllm.runtime.engine_handle import EnginePeer, Receive, RequestStream
from localllm.runtime.sockets import Outbox
from localllm.runtime.watchdog import Patience, Watchdog
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

Call = Callable[[str, Any], Any]
T = TypeVar("T")

_CALL_S = 120.0  # for an answer, which takes a second at most: a machine may be busy, a process may be stopped
_LOOK_S = 5.0  # for one that nothing has to be computed for
CLOSE_S = 5.0  # a process that is told to end leaves within four
_SEND_S = 1.0  # for what is still to be sent when a connection is closed
_LOOKS = frozenset({"facts", "status"})
ASK_AGAIN = "ask again: it is started anew"


class RemoteEngine:
    """`LoadedEngine`: what the model's files say is read here, all else is asked of the other process."""

    def __init__(self, directory: Path, facts: EngineFacts, call: Call) -> None:
        """directory: the model's files. call: asks the other process, by a name of `engine_server.CALLS`."""
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
        """Read the files that the other process has loaded from. Raises ModelChangedError where they are others
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

    def fixes_for(self, ctx: int) -> list[Fix]:
        """Return the flags with which a context of so many tokens fits; none where the engine is gone."""
        with contextlib.suppress(EngineGoneError):
            return protocol.read_fixes(self._call("fixes_for", ctx))
        return []

    def check(self, request: Request) -> None:
        """Raises ContextOverflowError or UsageError for a request that cannot run."""
        require_fit(request, self.ctx, self.config, self.fixes_for)
        if request.grammar is not None or request.beams > 1 or request.adapters:  # what they need is known there
            self._call("check", protocol.plain(request))

    def unload_adapter(self, path: str) -> int:
        """As `Engine.unload_adapter`."""
        return int(self._call("unload_adapter", path))

    def encode(self, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> list[int]:
        """Return the ids of a prompt, as `encode_prompt` does."""
        return encode_prompt(prompt, self.tokenizer, lambda: self.template)

    @property
    def current_plan(self) -> None:
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

    def go_on_as(self, other: RemoteEngine) -> None:
        """Become `other`, the same model loaded anew, which may have changed meanwhile."""
        self.__dict__ = dict(vars(other))  # at once: other threads read it, and what they still read is the old one's

    def set_ctx(self, ctx: int) -> None:
        """Take over the context's new length."""
        self._facts = replace(self._facts, ctx=ctx)


class EngineClient:
    """`EngineHandle` of an engine in another process: requests and calls over one socket, and their answers. It ends
    with the socket, and is not opened again."""

    def __init__(self, directory: Path, peer: EnginePeer, patience: Patience = Patience()) -> None:  # noqa: B008
        """directory: the model's files. peer: the process that has the engine. patience: after which a process that
        does not move on is killed."""
        self.peer = peer
        self.has_ended = False  # nothing more arrives
        self._directory = directory
        self._sock: socket.socket | None = None
        self._outbox: Outbox | None = None
        self._engine: RemoteEngine | None = None
        self._failure: BaseException | None = None
        self._settled = threading.Event()
        self._is_closed = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._receivers: dict[int, Receive] = {}  # of events, by the number of their request
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
    def is_gone(self) -> bool:
        """Whether it has ended, or the engine has said that it is about to."""
        return self.has_ended or isinstance(self._failure, EngineGoneError)

    @property
    def is_doubtful(self) -> bool:
        """Whether the engine has not moved on for half of the patience, though something waits."""
        return self.watchdog.is_doubtful and not self.has_ended

    def submit(self, request: Request, receive: Receive | None = None, number: int | None = None) -> RequestStream:
        """Raises what `RemoteEngine.check` does without a call, and EngineGoneError; what else refuses the request
        arrives in the place of events. number: the request's, where its submitter counts them itself."""
        engine = self.wait_loaded()
        if engine is None:
            raise EngineClosedError("the engine has been closed", fix="load it again")
        require_fit(request, engine.ctx, engine.config, engine.fixes_for)
        plain = protocol.plain(request)
        stream = RequestStream(next(self._numbers) if number is None else number, self._abort)
        with self._lock:
            if self.has_ended:
                raise self._failure or EngineClosedError("the engine has been closed", fix="load it again")
            self._receivers[stream.request_id] = receive or stream.events.put
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
        """As `EngineHandle.stop`; a load is given up at once."""
        self._is_closed = True
        with self._lock:
            running = list(self._receivers)
        for number in running:
            self._abort(number)
        if not self.is_settled:
            self.peer.stop_load()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        self.stop()
        if self._outbox is not None and self._sock is not None:
            self._outbox.end(min(timeout_s, _SEND_S))
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
        self._thread.join(timeout_s)
        self.peer.close(timeout_s)

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
            if self.has_ended:
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
        if self._sock is None or self._is_closed or self.has_ended or self._is_asked:
            return False
        is_silent = self._unanswered == self.watchdog.num_received
        return bool(self._receivers or self._calls or is_silent or not self._settled.is_set())

    def _convict(self, why: str) -> None:
        with self._lock:
            if self.has_ended or self._is_closed:
                return
            self._failure = self._failure or EngineStuckError("the engine does not move on", why=why, fix=ASK_AGAIN)
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
            self._outbox = Outbox(self._sock)
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
                    self.watchdog.received(has_moved=not (is_answer and self._receivers))
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
                error = protocol.read(BaseException, message["error"])
                with self._lock:
                    receive = self._receivers.pop(message["id"], None)
                if isinstance(error, EngineGoneError):
                    self._failure = error
                if receive is not None:
                    receive(error)
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
        if isinstance(event, FinishedEvent):  # a client that attaches has not waited for an earlier load
            event = replace(event, timings=replace(event.timings, load_s=self._load_s))
        with self._lock:
            receive = self._receivers.get(event.request_id)
            if isinstance(event, FinishedEvent):
                self._receivers.pop(event.request_id, None)
        if receive is not None:
            receive(event)

    def _end(self, failure: BaseException | None) -> None:
        if failure is None and not self._is_closed and self._failure is None:
            why = self.peer.why_gone()
            failure = EngineGoneError("the engine is gone", why=why, fix=ASK_AGAIN)
        with self._lock:
            self.has_ended = True
            self._engine = None  # which knows this: a tokenizer of 100 MB would wait for the garbage collector
            self._failure = self._failure or failure
            error = self._failure or EngineClosedError("the engine has been closed")
            receivers, self._receivers = list(self._receivers.values()), {}
            receivers += [answer.put for answer in self._calls.values()]
        for receive in receivers:
            receive(error)
        if self._outbox is not None:
            self._outbox.end()
        self.watchdog.end()
        self._settled.set()

"""A model on its way, told of as it comes: what a service does before its engine is there."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from textual.message import Message

from localllm.config import format_bytes
from localllm.engine.facts import Service
from localllm.errors import LocalLLMError
from localllm.frontend.attaching import attached
from localllm.frontend.opening import Opening, check, open_engine
from localllm.frontend.selection import Selection
from localllm.tui.messages import ModelLoading, Noted

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.facts import LoadedEngine
    from localllm.engine.loading import Watcher

Post = Callable[[Message], object]
_PAUSE_S = 0.1  # between two messages of progress


class Serve(Protocol):
    """Begins to load a model, after `before` has given up what was there."""

    def __call__(self, selection: Selection, post: Post, before: Callable[[], None]) -> Service: ...


def serve_attached(selection: Selection, post: Post, before: Callable[[], None]) -> Service:
    """As `serve`; where a server of this user runs, its engine is used."""

    def note(text: str) -> None:
        post(Noted(text))

    def tell(kind: str, arguments: tuple[Any, ...]) -> None:
        if kind in ("noting", "warning"):
            post(Noted(str(arguments[0]), "warning" if kind == "warning" else "information"))

    service = attached(selection, note, tell)
    if service is None:
        return serve(selection, post, before)
    before()
    note("the running server answers")
    return service


def serve(selection: Selection, post: Post, before: Callable[[], None]) -> Service:
    """The service of a model, in this process. Raises what can be known at once: that it cannot run."""
    from localllm.engine.service import EngineService

    check(selection)

    def load() -> Engine:
        before()
        return open_engine(selection, Opening(keeps_pages=True), _Watch(selection.files.name, post).watcher(), warn)

    def warn(text: str) -> None:
        post(Noted(text, "warning"))

    return EngineService(load)


class ModelLoader:
    """One model at a time, and of that one alone what is told. service: its own; None where there is none."""

    def __init__(self, serve: Serve, post: Post) -> None:
        self._serve = serve
        self._post = post
        self._watched = object()  # a sign of the load that is told of
        self.service: Service | None = None

    def begin(self, selection: Selection, ended: Callable[[Service, LoadedEngine | Exception], None]) -> None:
        """Begins to load it, after the model that is there has been given up. ended: told of it on another thread.

        Raises what can be known at once; the model that is there then stays.
        """
        before, last = self.service, self._watched
        watched = self._watched = object()

        def hear(message: Message) -> None:
            if self._watched is watched:
                self._post(message)
            elif isinstance(message, ModelLoading):  # it is given up: what it has of the memory is another's
                raise LocalLLMError("the model is not wanted any more", why="another was chosen", fix="/model NAME")

        try:
            service = self._serve(selection, hear, lambda: _give_up(before) if before is not None else None)
        except Exception:
            self._watched = last
            raise
        self.service = service
        self._post(ModelLoading(f"loading {selection.files.name}"))
        threading.Thread(target=_await, args=(service, ended), name="loading", daemon=True).start()


def _give_up(service: Service) -> None:
    service.close()
    gc.collect()  # an engine's parts know each other: 14 MiB of `tiny` would stay for a while


def _await(service: Service, ended: Callable[[Service, LoadedEngine | Exception], None]) -> None:
    try:
        engine = service.wait_loaded()
    except Exception as error:
        ended(service, error)
        return
    if engine is not None:  # else it was closed as soon as it was there: nobody waits for it any more
        ended(service, engine)


class _Watch:
    """Turns what a load tells into messages, ten a second."""

    def __init__(self, name: str, post: Post) -> None:
        self._name = name
        self._post = post
        self._posted_at = 0.0
        self._waits_for = ""

    def watcher(self) -> Watcher:
        """What `Engine.load` is given; imports torch."""
        from localllm.engine.loading import Watcher

        return Watcher(self._reading, self._packing, self._waiting, self._measuring, self._noting)

    def _reading(self, done: int, total: int) -> None:
        self._progress(f"loading {self._name}", done, total)

    def _packing(self, done: int, total: int) -> None:
        self._progress(f"packing {self._name}, once: {format_bytes(total)}", done, total)

    def _waiting(self, process: str) -> None:
        if process != self._waits_for:
            self._waits_for = process
            self._post(Noted(f"process {process} is packing {self._name}; waiting for that"))

    def _measuring(self, text: str) -> None:
        self._post(ModelLoading(text))

    def _noting(self, text: str) -> None:
        self._post(Noted(text))

    def _progress(self, text: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._posted_at >= _PAUSE_S or done >= total:
            self._posted_at = now
            self._post(ModelLoading(text, done, total))

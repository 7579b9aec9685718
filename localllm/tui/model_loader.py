"""A model that loads: the engine that will answer, and its progress as messages."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from textual.message import Message

from localllm.config import format_bytes
from localllm.engine.engine_info import LoadedEngine
from localllm.errors import LocalLLMError
from localllm.runtime.engine_handle import EngineHandle
from localllm.runtime.engine_loader import Opening, check, open_engine
from localllm.runtime.selection import Selection
from localllm.runtime.server_client import attached
from localllm.tui.job_queue import Job
from localllm.tui.messages import ModelLoading, Noted, Post

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.loader import Watcher

_PAUSE_S = 0.1  # between two messages of progress


Serve = Callable[[Selection, Post, Callable[[], None]], EngineHandle]  # the call releases the model before


def _note(post: Post, text: str, severity: Literal["information", "warning"] = "information") -> None:
    post(Noted(text, severity))


def serve_attached(selection: Selection, post: Post, before: Callable[[], None]) -> EngineHandle:
    """Use the engine of this user's running server; without a server as `serve`."""

    def tell(kind: str, arguments: tuple[Any, ...]) -> None:
        if kind in ("noting", "warning"):
            post(Noted(str(arguments[0]), "warning" if kind == "warning" else "information"))

    handle = attached(selection, partial(_note, post), tell)
    if handle is None:
        return serve(selection, post, before)
    before()
    post(Noted("the running server answers"))
    return handle


def serve(selection: Selection, post: Post, before: Callable[[], None]) -> EngineHandle:
    """Return the engine of a model in this process. Raises at once where it is known that the model cannot run."""
    from localllm.runtime.engine_thread import EngineThread

    check(selection)

    def load() -> Engine:
        before()
        watcher = _watcher(selection.files.name, post)
        return open_engine(selection, Opening(keeps_pages=True), watcher, partial(_note, post, severity="warning"))

    return EngineThread(load)


class ModelLoader:
    """Loads one model at a time, and posts the progress of that one alone. handle: its own, or None."""

    def __init__(self, serve: Serve, post: Post, start: Callable[[Job], object]) -> None:
        self._serve = serve
        self._post = post
        self._start = start
        self._current = object()  # identifies the load whose progress is posted
        self.handle: EngineHandle | None = None

    def begin(self, selection: Selection, ended: Callable[[EngineHandle, LoadedEngine | Exception], None]) -> None:
        """Begin to load, after the previous model has been released. ended: called on another thread.

        Raises what can be known at once; the previous model then stays.
        """
        before, last = self.handle, self._current
        current = self._current = object()

        def post(message: Message) -> None:
            if self._current is current:
                self._post(message)
            elif isinstance(message, ModelLoading):  # abandoned: its memory belongs to the next model
                raise LocalLLMError("the model is not wanted any more", why="another was chosen", fix="/model NAME")

        def release() -> None:
            if before is not None:
                before.close()
                gc.collect()  # an engine's parts know each other: 14 MiB of `tiny` would stay for a while

        try:
            handle = self._serve(selection, post, release)
        except Exception:
            self._current = last
            raise
        self.handle = handle
        self._post(ModelLoading(f"loading {selection.files.name}"))

        def wait() -> None:
            try:
                found: LoadedEngine | Exception | None = handle.wait_loaded()
            except Exception as error:
                found = error
            if found is not None:  # else it was closed as soon as it was loaded
                ended(handle, found)

        self._start(wait)


def _watcher(name: str, post: Post) -> Watcher:
    """An observer of `Engine.load` that posts messages, ten a second. Imports torch."""
    from localllm.engine.loader import Watcher

    posted_at, waits_for = 0.0, ""

    def progress(text: str, done: int = 0, total: int = 0) -> None:
        nonlocal posted_at
        now = time.monotonic()
        if now - posted_at >= _PAUSE_S or done >= total:
            posted_at = now
            post(ModelLoading(text, done, total))

    def waiting(process: str) -> None:
        nonlocal waits_for
        if process != waits_for:
            waits_for = process
            post(Noted(f"process {process} is packing {name}; waiting for that"))

    return Watcher(
        lambda done, total: progress(f"loading {name}", done, total),
        lambda done, total: progress(f"packing {name}, once: {format_bytes(total)}", done, total),
        waiting,
        progress,
        partial(_note, post),
    )

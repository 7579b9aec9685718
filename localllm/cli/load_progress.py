"""Loads an engine while a line on stderr shows how far it is; a signal leaves at any moment.

The first use of a weight format packs the model before it is loaded: minutes, and gigabytes, of which is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from localllm.cli.context import CliContext
from localllm.config import format_bytes
from localllm.errors import LocalLLMError
from localllm.models.checkpoints.checkpoint import is_quantized
from localllm.runtime.engine_loader import Opening, check, open_engine
from localllm.runtime.selection import Selection

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.engine_info import LoadedEngine
    from localllm.runtime.engine_handle import EngineHandle

Result = TypeVar("Result")


def on_a_thread(work: Callable[[], Result]) -> Result:
    """Return what `work` returns, or raise what it raises. This thread only waits, so that signals reach it at once."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="work", daemon=True).start()
    return future.result()


class PackingProgress:
    """The progress of a conversion, if there is one: nothing is said before it begins. Threads may share it."""

    def __init__(self, cli: CliContext, label: str, *, again: str, is_first_use: bool) -> None:
        """label: "packing tiny to int4". again: what goes on after an interruption. is_first_use: it was not asked for
        by name, so that its place and size are told."""
        self._interrupts = cli.interrupts
        self._label = label
        self._farewell = f"interrupted; what was packed is kept. To go on: {again}"
        self._is_first_use = is_first_use
        self._line = cli.output.progress(label, plain_lines=not is_first_use)
        self._process = ""
        self._has_begun = self._left = False

    def begin(self) -> None:
        """It is about to begin, as far as is known."""
        if not self._has_begun:
            self._has_begun = True
            self._interrupts.farewell = self._farewell
            self._line.show(f"{self._label} ...")

    def update(self, done: int, total: int) -> None:
        """`done` of `total` packed bytes are there."""
        if self._is_first_use and not self._has_begun and not self._left:
            from localllm.hub.packed import packed_root

            self._interrupts.farewell = self._farewell  # before a reader of the line can press Ctrl-C
            self._line.interject(f"{self._label}, once: {format_bytes(total)} in {packed_root()}")
        self.begin()
        self._line.update(done, total)

    def wait(self, process: str) -> None:
        """Another process packs the same model."""
        if process != self._process and not self._left:
            self._process = process
            self.begin()
            self._line.interject(f"process {process} is packing it; waiting for that")

    def leave(self) -> None:
        """Nothing more is shown: the command is being left."""
        self._left = True
        self._line.clear()

    def end(self) -> None:
        """It is packed, or cannot be: what follows is something else."""
        if self._has_begun:
            self._line.clear()
            self._interrupts.farewell = ""


class LoadLine:
    """The line on stderr that shows how far a load is."""

    def __init__(self, cli: CliContext, selection: Selection) -> None:
        name = selection.files.name
        self.line = cli.output.progress(f"loading {name}")
        self.packing = PackingProgress(cli, _packing_of(selection), again="the same command", is_first_use=True)
        # By the fields of `Watcher`.
        self.hearers: Mapping[str, Callable[..., None]] = {
            "reading": self._reading,
            "packing": self.packing.update,
            "waiting": self.packing.wait,
            "measuring": self.line.show,
            "noting": self.line.interject,
        }
        self._warn = cli.output.warn
        self.line.show(f"loading {name} ...")

    def hear(self, kind: str, arguments: tuple[Any, ...]) -> None:
        """Show what another process says of a load. kind: a field of `Watcher`, or "warning"."""
        {"warning": self._warn, **self.hearers}[kind](*arguments)

    def end(self) -> None:
        self.packing.end()
        self.line.clear()

    def _reading(self, done: int, total: int) -> None:
        self.packing.end()
        self.line.update(done, total)


def _packing_of(selection: Selection) -> str:
    """Return what is done by packing, as far as it is known before the weights are looked at."""
    name, weights = selection.files.name, selection.settings.weights
    if weights.partition("-")[0] == "kept":
        return f"packing {name} in its own codes"
    with suppress(LocalLLMError):  # which the load will say
        if is_quantized(selection.files.directory):  # in its own codes, where they can be kept
            return f"packing {name}" if weights == "auto" else f"packing {name} to {weights}, quantized anew"
    return f"packing {name} to {'int4' if weights == 'auto' else weights}"


@dataclass(frozen=True)
class EngineLoad:
    """An engine that is being loaded, by this process or by the server."""

    handle: EngineHandle
    shown: LoadLine

    def wait(self) -> LoadedEngine:
        """Return the engine: an `Engine` where this process loads it. Raises what stopped the load."""
        engine = self.handle.wait_loaded()
        assert engine is not None
        self.shown.line.clear()
        return engine


@contextlib.contextmanager
def loading(cli: CliContext, selection: Selection, opening: Opening, *, attaches: bool = False) -> Iterator[EngineLoad]:
    """Begin to load; what is done inside (reading the prompt) happens meanwhile. Ends the engine's thread.

    attaches: the engine of this user's server is used where one runs.
    """
    from localllm.runtime.engine_thread import EngineThread

    shown = LoadLine(cli, selection)

    def load() -> Engine:
        from localllm.engine.loader import Watcher

        try:
            return open_engine(selection, opening, Watcher(**shown.hearers), cli.output.warn)
        finally:
            shown.packing.end()

    with shown.line:
        handle: EngineHandle | None = None
        if attaches:
            from localllm.runtime.server_client import attached

            handle = attached(selection, cli.output.note, shown.hear)
        if handle is None:
            check(selection)
            handle = EngineThread(load)
        try:
            yield EngineLoad(handle, shown)
        except typer.Exit:  # an end like any other
            handle.close()
            raise
        except BaseException:
            shown.packing.leave()
            handle.close(timeout_s=0)  # its thread is a daemon: nobody waits for a step that is being computed
            raise
        handle.close()

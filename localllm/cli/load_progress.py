"""Loads an engine while a line on stderr shows how far it is; a signal leaves at any moment.

The first use of a weight format packs the model before it is loaded: minutes, and gigabytes, of which is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import typer

from localllm.cli.context import CliContext
from localllm.cli.output import ProgressLine
from localllm.config import format_bytes
from localllm.runtime.engine_loader import Opening, check, open_engine
from localllm.runtime.selection import Selection

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.engine_info import LoadedEngine
    from localllm.engine.loader import Watcher
    from localllm.runtime.engine_handle import EngineHandle
    from localllm.runtime.engine_thread import EngineThread


class PackingProgress:
    """The progress of a conversion, if there is one: nothing is said before it begins. Threads may share it."""

    def __init__(self, front: CliContext, label: str, *, again: str, is_first_use: bool) -> None:
        """label: "packing tiny to int4". again: what goes on after an interruption. is_first_use: it was not asked for
        by name, so that its place and size are told."""
        self._front = front
        self._label = label
        self._farewell = f"interrupted; what was packed is kept. To go on: {again}"
        self._is_first_use = is_first_use
        self._line: ProgressLine | None = None
        self._process = ""
        self._left = False

    def begin(self) -> None:
        """It is about to begin, as far as is known."""
        self._begun().show(f"{self._label} ...")

    def update(self, done: int, total: int) -> None:
        """`done` of `total` packed bytes are there."""
        is_first = self._line is None
        line = self._begun()
        if is_first and self._is_first_use:
            from localllm.hub.packed import packed_root

            line.interject(f"{self._label}, once: {format_bytes(total)} in {packed_root()}")
        line.update(done, total)

    def wait(self, process: str) -> None:
        """Another process packs the same model."""
        if process != self._process:
            self._process = process
            self._begun().interject(f"process {process} is packing it; waiting for that")

    def leave(self) -> None:
        """Nothing more is shown: the command is being left."""
        self._left = True
        if self._line is not None:
            self._line.clear()

    def end(self) -> None:
        """It is packed, or cannot be: what follows is something else."""
        if self._line is not None:
            self._line.clear()
            self._front.interrupts.farewell = ""

    def _begun(self) -> ProgressLine:
        if self._line is None:
            self._line = self._front.output.progress(self._label, plain_lines=not self._is_first_use)
            self._front.interrupts.farewell = self._farewell
            if self._left:
                self._line.clear()
        return self._line


class LoadLine:
    """The line on stderr that shows how far a load is."""

    def __init__(self, front: CliContext, selection: Selection) -> None:
        name, weights = selection.files.name, selection.settings.weights
        self._front = front
        self.line: ProgressLine = front.output.progress(f"loading {name}")
        self.packing = PackingProgress(
            front,
            f"packing {name} to {'int4' if weights == 'auto' else weights}",
            again="the same command",
            is_first_use=True,
        )
        self.line.show(f"loading {name} ...")

    def hear(self, kind: str, arguments: tuple[Any, ...]) -> None:
        """kind: a field of `Watcher`, or "warning"."""
        match kind:
            case "reading":
                self._reading(*arguments)
            case "packing":
                self.packing.update(*arguments)
            case "waiting":
                self.packing.wait(*arguments)
            case "measuring":
                self.line.show(*arguments)
            case "noting":
                self.line.interject(*arguments)
            case "warning":
                self._front.output.warn(*arguments)

    def watcher(self) -> Watcher:
        """Imports torch."""
        from localllm.engine.loader import Watcher

        return Watcher(self._reading, self.packing.update, self.packing.wait, self.line.show, self.line.interject)

    def end(self) -> None:
        self.packing.end()
        self.line.clear()

    def _reading(self, done: int, total: int) -> None:
        self.packing.end()
        self.line.update(done, total)


@dataclass(frozen=True)
class EngineLoad:
    """An engine that is being loaded, by this process or by the server."""

    service: EngineHandle
    shown: LoadLine

    def wait(self) -> LoadedEngine:
        """Return the engine. Raises what stopped the load."""
        engine = self.service.wait_loaded()
        assert engine is not None
        self.shown.line.clear()
        return engine


@dataclass(frozen=True)
class OwnEngineLoad(EngineLoad):
    """An engine that this process loads."""

    service: EngineThread

    def wait(self) -> Engine:
        return cast("Engine", super().wait())


@contextlib.contextmanager
def loading(front: CliContext, selection: Selection, opening: Opening) -> Iterator[OwnEngineLoad]:
    """Begins to load; what is done inside (reading the prompt) happens meanwhile. Ends the engine's thread."""
    shown = LoadLine(front, selection)
    with shown.line:
        service = _own(front, selection, opening, shown)
        with _in_use(service, shown):
            yield OwnEngineLoad(service, shown)


@contextlib.contextmanager
def attaching(front: CliContext, selection: Selection, opening: Opening, *, attaches: bool) -> Iterator[EngineLoad]:
    """Begin to load as `loading` does, or with `attaches` use the engine of this user's server where one runs."""
    from localllm.runtime.server_client import attached

    shown = LoadLine(front, selection)
    with shown.line:
        service: EngineHandle | None = attached(selection, front.output.note, shown.hear) if attaches else None
        if service is None:
            service = _own(front, selection, opening, shown)
        with _in_use(service, shown):
            yield EngineLoad(service, shown)


@contextlib.contextmanager
def _in_use(service: EngineHandle, shown: LoadLine) -> Iterator[None]:
    try:
        yield
    except typer.Exit:  # an end like any other
        service.close()
        raise
    except BaseException:
        shown.packing.leave()
        service.close(timeout_s=0)  # its thread is a daemon: nobody waits for a step that is being computed
        raise
    service.close()


def _own(front: CliContext, selection: Selection, opening: Opening, shown: LoadLine) -> EngineThread:
    from localllm.runtime.engine_thread import EngineThread

    check(selection)
    return EngineThread(lambda: _engine(front, selection, opening, shown))


def _engine(front: CliContext, selection: Selection, opening: Opening, shown: LoadLine) -> Engine:
    try:
        return open_engine(selection, opening, shown.watcher(), front.output.warn)
    finally:
        shown.packing.end()

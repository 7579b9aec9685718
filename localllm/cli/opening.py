"""Loads an engine while a line on stderr shows how far it is; a signal leaves at any moment.

The first use of a weight format packs the model before it is loaded: minutes, and gigabytes, of which is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import typer

from localllm.cli.front import Front
from localllm.cli.output import ProgressLine
from localllm.cli.packing import Packing
from localllm.runtime.engine_loader import Opening, check, open_engine
from localllm.runtime.selection import Selection

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.engine_info import LoadedEngine
    from localllm.engine.loader import Watcher
    from localllm.runtime.engine_handle import EngineHandle
    from localllm.runtime.engine_thread import EngineThread


class LoadLine:
    """What is shown of a load."""

    def __init__(self, front: Front, selection: Selection) -> None:
        name, weights = selection.files.name, selection.settings.weights
        self._front = front
        self.line: ProgressLine = front.output.progress(f"loading {name}")
        self.packing = Packing(
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
class ThreadLoad(EngineLoad):
    """An engine that this process loads."""

    service: EngineThread

    def wait(self) -> Engine:
        return cast("Engine", super().wait())


@contextlib.contextmanager
def loading(front: Front, selection: Selection, opening: Opening) -> Iterator[ThreadLoad]:
    """Begins to load; what is done inside (reading the prompt) happens meanwhile. Ends the engine's thread."""
    shown = LoadLine(front, selection)
    with shown.line:
        service = _own(front, selection, opening, shown)
        with _in_use(service, shown):
            yield ThreadLoad(service, shown)


@contextlib.contextmanager
def attaching(front: Front, selection: Selection, opening: Opening, *, attaches: bool) -> Iterator[EngineLoad]:
    """As `loading`; where a server of this user runs, its engine is used, if that `attaches`."""
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


def _own(front: Front, selection: Selection, opening: Opening, shown: LoadLine) -> EngineThread:
    from localllm.runtime.engine_thread import EngineThread

    check(selection)
    return EngineThread(lambda: _engine(front, selection, opening, shown))


def _engine(front: Front, selection: Selection, opening: Opening, shown: LoadLine) -> Engine:
    try:
        return open_engine(selection, opening, shown.watcher(), front.output.warn)
    finally:
        shown.packing.end()

"""Loads an engine while a line on stderr shows how far it is; a signal leaves at any moment.

The first use of a weight format packs the model before it is loaded: minutes, and gigabytes, of which is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from localllm.cli.front import Front
from localllm.cli.output import ProgressLine
from localllm.cli.packing import Packing
from localllm.frontend.opening import Opening, check, open_engine
from localllm.frontend.selection import Selection

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.service import EngineService


@dataclass(frozen=True)
class Loading:
    """An engine on its way."""

    service: EngineService
    line: ProgressLine

    def wait(self) -> Engine:
        """The engine. Raises what stopped the load."""
        engine = self.service.wait_loaded()
        assert engine is not None
        self.line.clear()
        return engine


@contextlib.contextmanager
def loading(front: Front, selection: Selection, opening: Opening) -> Iterator[Loading]:
    """Begins to load; what is done inside (reading the prompt) happens meanwhile. Ends the engine's thread."""
    from localllm.engine.service import EngineService

    check(selection)
    name, weights = selection.files.name, selection.settings.weights
    line = front.output.progress(f"loading {name}")
    packing = Packing(
        front,
        f"packing {name} to {'int4' if weights == 'auto' else weights}",
        again="the same command",
        is_first_use=True,
    )
    with line:
        line.show(f"loading {name} ...")
        service = EngineService(lambda: _engine(front, selection, opening, line, packing))
        try:
            yield Loading(service, line)
        except typer.Exit:  # an end like any other
            service.close()
            raise
        except BaseException:
            packing.leave()
            service.close(timeout_s=0)  # its thread is a daemon: nobody waits for a step that is being computed
            raise
        service.close()


def _engine(front: Front, selection: Selection, opening: Opening, line: ProgressLine, packing: Packing) -> Engine:
    from localllm.engine.loading import Watcher

    def reading(done: int, total: int) -> None:
        packing.end()
        line.update(done, total)

    watcher = Watcher(reading, packing.update, packing.wait, line.show, line.interject)
    try:
        return open_engine(selection, opening, watcher, front.output.warn)
    finally:
        packing.end()

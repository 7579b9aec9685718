"""Loads an engine while a line on stderr shows how far it is; a signal leaves at any moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.cli.front import Front
from localllm.cli.output import ProgressLine
from localllm.cli.selection import Selection

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
def loading(front: Front, selection: Selection) -> Iterator[Loading]:
    """Begins to load; what is done inside (reading the prompt) happens meanwhile. Ends the engine's thread."""
    from localllm.engine.service import EngineService
    from localllm.models.families import load_config

    load_config(selection.files.directory)  # a model that cannot run is refused before torch's second is spent
    settings = selection.settings
    line = front.output.progress(f"loading {selection.files.name}")

    def load() -> Engine:
        started = time.perf_counter()
        from localllm.engine.engine import Engine

        engine = Engine.load(
            selection.files.directory,
            device=settings.device,
            dtype=settings.dtype,
            ctx=settings.ctx,
            threads=settings.threads,
            progress=line.update,
        )
        engine.load_s = time.perf_counter() - started  # with the import of torch: what a person waits for
        return engine

    with line:
        line.show(f"loading {selection.files.name} ...")
        service = EngineService(load)
        try:
            yield Loading(service, line)
        except BaseException:
            service.close(timeout_s=0)  # its thread is a daemon: nobody waits for a step that is being computed
            raise
        service.close()

"""Loads an engine while a line on stderr shows how far it is; a signal leaves at any moment.

The first use of a weight format packs the model before it is loaded: minutes, and gigabytes, of which is told.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from localllm.cli.front import Front
from localllm.cli.origins import vram_cap
from localllm.cli.output import ProgressLine
from localllm.cli.packing import Packing
from localllm.cli.selection import Selection

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.kv_reuse import KVReuse
    from localllm.engine.service import EngineService
    from localllm.offload.plan import JobShape


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
def loading(
    front: Front,
    selection: Selection,
    job: JobShape | None = None,
    *,
    keeps_pages: bool = False,
    probes_kv: bool = True,
    speculates: bool = True,
) -> Iterator[Loading]:
    """Begins to load; what is done inside (reading the prompt) happens meanwhile. Ends the engine's thread.

    job: many prompts that are to be answered at once; None: single ones. keeps_pages: what is computed of the prompts
    may outlive the process, where the user has not said otherwise. probes_kv: as `Engine.load` has it. speculates: what
    the user has said of it counts; nobody guesses otherwise.
    """
    from localllm.engine.service import EngineService
    from localllm.models.families import load_config
    from localllm.offload.machine_memory import require_address_space

    require_address_space()
    load_config(selection.files.directory)  # a model that cannot run is refused before torch's second is spent
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
        service = EngineService(
            lambda: _engine(
                front,
                selection,
                line,
                packing,
                job,
                keeps_pages=keeps_pages,
                probes_kv=probes_kv,
                speculates=speculates,
            )
        )
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


def _engine(
    front: Front,
    selection: Selection,
    line: ProgressLine,
    packing: Packing,
    job: JobShape | None,
    *,
    keeps_pages: bool,
    probes_kv: bool,
    speculates: bool,
) -> Engine:
    started = time.perf_counter()
    from localllm.engine.engine import Engine
    from localllm.engine.loading import Watcher, has_card
    from localllm.engine.memory import choose_device
    from localllm.engine.speculative.choice import OFF, Speculate

    def reading(done: int, total: int) -> None:
        packing.end()
        line.update(done, total)

    settings = selection.settings
    try:
        engine = Engine.load(
            selection.files,
            device=settings.device,
            dtype=settings.dtype,
            weights=settings.weights,
            kv=settings.kv,
            ctx=settings.ctx,
            ram=settings.ram,
            vram=vram_cap(front, line.interject, has_gpu=has_card(choose_device(settings.device))),
            threads=settings.threads,
            job=job,
            watcher=Watcher(reading, packing.update, packing.wait, line.show, line.interject),
            reuse=_reuse(front, selection, keeps_pages=keeps_pages),
            probes_kv=probes_kv,
            speculate=Speculate(settings.speculate, settings.draft_tokens) if speculates else OFF,
        )
    finally:
        packing.end()
    engine.load_s = time.perf_counter() - started  # with the import of torch: what a person waits for
    return engine


def _reuse(front: Front, selection: Selection, *, keeps_pages: bool) -> KVReuse:
    from localllm.cache.page_folder import kv_root
    from localllm.engine.kv_reuse import KVReuse

    disk_bytes = selection.settings.cache_disk
    directory = kv_root() if keeps_pages and not selection.private and disk_bytes != 0 else None
    return KVReuse(directory=directory, disk_bytes=disk_bytes, warn=front.output.warn)

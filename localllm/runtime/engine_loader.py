"""An engine for a selection, as its settings want it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.runtime.selection import Selection
from localllm.runtime.vram import vram_cap

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.loader import Watcher
    from localllm.engine.prefix_config import KVReuse
    from localllm.offload.planner.plan import JobShape


@dataclass(frozen=True)
class Opening:
    """The purpose of an engine.

    job: many prompts that are to be answered at once; None: single ones.
    parallel: how many single ones may come at once; None: the usual number.
    keeps_pages: pages of the prompts may outlive the process, where the user has not said otherwise.
    speculates: the user's setting counts; tokens are never drafted otherwise.
    """

    job: JobShape | None = None
    parallel: int | None = None
    keeps_pages: bool = False
    speculates: bool = True


def check(selection: Selection) -> None:
    """Raises what can be known before torch's second is spent: that the model cannot run, that there is no memory."""
    from localllm.models.families import load_config
    from localllm.offload.planner.machine_memory import require_address_space

    require_address_space()
    load_config(selection.files.directory)


def open_engine(selection: Selection, opening: Opening, watcher: Watcher, warn: Callable[[str], None]) -> Engine:
    """Loads it; seconds, or minutes where the model has to be packed first. warn: as `KVReuse` has it.

    Raises what `Engine.load` does.
    """
    started = time.perf_counter()
    from localllm.engine.engine import Engine
    from localllm.engine.loader import has_card
    from localllm.engine.memory import choose_device
    from localllm.engine.speculative.config import OFF, Speculate
    from localllm.engine.step_types import Limits

    config = selection.settings.engine
    has_gpu = has_card(choose_device(config.device))
    engine = Engine.load(
        selection.files,
        device=config.device,
        dtype=config.dtype,
        weights=config.weights,
        kv=config.kv,
        ctx=config.ctx,
        ram=config.ram,
        vram=vram_cap(selection.resolved, watcher.noting, has_gpu=has_gpu),
        threads=config.threads,
        limits=None if opening.parallel is None else Limits(max_sequences=opening.parallel),
        job=opening.job,
        watcher=watcher,
        reuse=_reuse(selection, warn, keeps_pages=opening.keeps_pages),
        speculate=Speculate(config.speculate, config.draft_tokens) if opening.speculates else OFF,
    )
    engine.load_s = time.perf_counter() - started  # with the import of torch: what a person waits for
    return engine


def _reuse(selection: Selection, warn: Callable[[str], None], *, keeps_pages: bool) -> KVReuse:
    from localllm.cache.page_folder import kv_root
    from localllm.engine.prefix_config import KVReuse

    disk_bytes = selection.settings.engine.cache_disk
    directory = kv_root() if keeps_pages and not selection.private and disk_bytes != 0 else None
    return KVReuse(directory=directory, disk_bytes=disk_bytes, warn=warn)

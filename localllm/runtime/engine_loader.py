"""An engine for a selection, as its settings want it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.config import ResolvedSettings
from localllm.errors import Fix, UsageError
from localllm.runtime.selection import Selection
from localllm.settings import EngineConfig, Settings

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.loader import Watcher
    from localllm.models.architecture import ModelConfig
    from localllm.offload.planner.plan import JobShape


_LEAST_ADAPTER_BYTES = 64 << 20


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

    selection.adapters()
    require_address_space()
    load_config(selection.files.directory)


def engine_config(resolved: ResolvedSettings, tell: Callable[[str], None]) -> EngineConfig:
    """Return the settings of an engine. Imports torch where there may be a GPU.

    tell: hears why the CPU computes beside a GPU, and of a cap of a file or a variable that is left aside where no GPU
    is used: machines with a GPU and without share such files. Raises UsageError for one that was typed.
    """
    from localllm.engine.device import device_name, has_card, idle_gpu

    config = with_room_for_adapters(resolved.settings)
    if line := idle_gpu(config.device):
        tell(line)
    if config.vram is None or has_card(device_name(config.device)):
        return config
    refuse_idle_vram(resolved)
    tell(f"the setting vram from {resolved.origins['vram'].where} is left aside: no GPU is used")
    return replace(config, vram=None)


def with_room_for_adapters(settings: Settings) -> EngineConfig:
    """Return the settings of an engine, with memory for the adapters that are named and as many more to switch to.
    Raises AdapterError, UsageError."""
    config = settings.engine
    if not settings.adapter or config.adapter_memory is not None:
        return config
    from localllm.hub.adapters import locate_adapter, split_scale

    named = {split_scale(each)[0] for each in settings.adapter}
    num_bytes = sum(locate_adapter(name, offline=settings.offline).num_bytes for name in named)
    return replace(config, adapter_memory=max(2 * num_bytes, _LEAST_ADAPTER_BYTES))


def refuse_idle_kv(config: ModelConfig, resolved: ResolvedSettings) -> None:
    """Raises UsageError for what was typed of keys and values for a model that keeps none, or too few."""
    typed = {name for name, origin in resolved.origins.items() if origin.kind == "flag"}
    if resolved.settings.kv != "auto" and "kv" in typed and not config.kv_shapes:
        why = "all layers of this model keep a state in place of keys and values"
        raise UsageError("--kv has no effect", why=why, fix=Fix.without("--kv"))
    if resolved.settings.kv_offload != "off" and "kv_offload" in typed and None not in config.windows:
        why = "no layer of this model sees further back than a window, so that none keeps all keys and values"
        why = why if config.kv_shapes else "all layers of this model keep a state in place of keys and values"
        raise UsageError("--kv-offload has no effect", why=why, fix=Fix.without("--kv-offload"))


def refuse_idle_vram(resolved: ResolvedSettings) -> None:
    """Raises UsageError for a cap on a GPU's memory that was typed where none is used."""
    if resolved.origins["vram"].kind == "flag":
        from localllm.offload.planner.fit_errors import idle_vram

        raise idle_vram()


def open_engine(selection: Selection, opening: Opening, watcher: Watcher, warn: Callable[[str], None]) -> Engine:
    """Load the engine; seconds, or minutes where the model has to be packed first. warn: as `KVReuse` has it.

    Raises what `Engine.load` does.
    """
    started = time.perf_counter()
    from localllm.cache.page_folder import kv_root
    from localllm.engine.device import device_name, has_card
    from localllm.engine.engine import Engine
    from localllm.engine.prefix_config import KVReuse
    from localllm.engine.step_types import Limits

    config = engine_config(selection.resolved, watcher.noting)
    if not opening.speculates:
        config = replace(config, speculate="off")
    if selection.private and config.kv_offload != "off" and not has_card(device_name(config.device)):
        why = "a private chat stores nothing on the disk, where --kv-offload brings keys and values"
        raise UsageError("--private and --kv-offload cannot go together", why=why, fix=Fix.without("--kv-offload"))
    keeps_pages = opening.keeps_pages and not selection.private and config.cache_disk != 0
    engine = Engine.load(
        selection.files,
        config,
        limits=None if opening.parallel is None else Limits(max_sequences=opening.parallel),
        job=opening.job,
        watcher=watcher,
        reuse=KVReuse(directory=kv_root() if keeps_pages else None, disk_bytes=config.cache_disk, warn=warn),
    )
    engine.load_s = time.perf_counter() - started  # with the import of torch: what a person waits for
    return engine

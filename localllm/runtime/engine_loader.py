"""An engine for a selection, as its settings want it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.config import DEFAULT, ResolvedSettings
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
    measures: nothing is drafted or taken from elsewhere, whatever the settings say.
    """

    job: JobShape | None = None
    parallel: int | None = None
    keeps_pages: bool = False
    measures: bool = False


def check(selection: Selection) -> None:
    """Raises what can be known before torch's second is spent: that the model cannot run, that there is no memory."""
    from localllm.models.families import load_config
    from localllm.offload.planner.machine_memory import require_address_space

    selection.adapters()
    require_address_space()
    load_config(selection.files.directory)


def engine_config(resolved: ResolvedSettings, model: ModelConfig, tell: Callable[[str], None]) -> EngineConfig:
    """Return the settings of a model's engine. Imports torch where there may be a GPU.

    tell: hears why the CPU computes beside a GPU, and of each setting that is left aside because it cannot take effect
    with the model, or on the device: files and variables are for all models, and shared by machines with a GPU and
    without. Raises UsageError for what contradicts itself, and for what was typed and the device cannot do.
    """
    from localllm.engine.device import device_name, idle_gpu

    wanted = with_room_for_adapters(resolved.settings)
    if line := idle_gpu(wanted.device):
        tell(line)
    return effective_config(resolved, model, wanted, device_name(wanted.device), tell)


def refuse_idle(resolved: ResolvedSettings, model: ModelConfig, name: str) -> None:
    """Raises UsageError for what was typed and cannot take effect with the model that it was typed for."""
    from localllm.engine.model_options import idle_with

    _refuse_typed(resolved, idle_with(model, resolved.settings.engine, name))


def refuse_idle_vram(resolved: ResolvedSettings) -> None:
    """Raises UsageError for a cap on a GPU's memory that was typed where none is used."""
    from localllm.engine.model_options import idle_on

    _refuse_typed(resolved, idle_on("cpu", resolved.settings.engine))


def _refuse_typed(resolved: ResolvedSettings, idle: Mapping[str, UsageError]) -> None:
    typed = [name for name in idle if resolved.origins[name].kind == "flag"]
    if not typed:
        return
    error, flags = idle[typed[0]], ["--" + name.replace("_", "-") for name in typed]
    if len(typed) > 1:
        error.why += f"; neither can {' and '.join(flags[1:])}"
        error.fix = Fix.without(*flags)
    raise error


def effective_config(
    resolved: ResolvedSettings,
    model: ModelConfig,
    wanted: EngineConfig,
    device: str,
    tell: Callable[[str], None],
) -> EngineConfig:
    """Return the settings without those that cannot take effect with a model or on a device, which `tell` hears.
    Raises as `engine_config`."""
    from localllm.engine.model_options import idle_on, idle_with, require_agreement

    on_device = idle_on(device, wanted)
    _refuse_typed(resolved, on_device)
    idle = idle_with(model, wanted) | on_device
    for name, error in idle.items():
        tell(f"the setting {name} from {resolved.origins[name].where} is left aside: {error.why}")
    kept = replace(wanted, **{name: getattr(EngineConfig, name) for name in idle})
    require_agreement(kept)
    return kept


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
    from localllm.models.families import load_config

    resolved = selection.resolved
    if opening.measures:
        resolved = resolved.overlaid({"speculate": ("off", DEFAULT), "reuse": ("prefix", DEFAULT)})
    config = engine_config(resolved, load_config(selection.files.directory), watcher.noting)
    if selection.private and config.kv_offload != "off" and not has_card(device_name(config.device)):
        why = "a private chat stores nothing on the disk, where --kv-offload brings keys and values"
        fix = Fix.flag("--private", "--kv-offload", "off")  # a line: a stored one is of other chats too
        raise UsageError("--private and --kv-offload cannot go together", why=why, fix=fix)
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

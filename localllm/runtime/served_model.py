"""A model that is served: its names, and its engine where it is loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.config import Origin
from localllm.engine.engine_info import EngineFacts
from localllm.errors import BusyError, EngineClosedError
from localllm.registry import BUILT_IN
from localllm.runtime.engine_client import EngineClient
from localllm.runtime.selection import Selection

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.engine.request import SamplingParams
    from localllm.hub import ModelFiles
    from localllm.runtime.engine_handle import EngineHandle


class ServedModel:
    """One model, loaded or not."""

    def __init__(self, selection: Selection, aliases: Sequence[str] = (), taken: Collection[str] = ()) -> None:
        """
        aliases: more names for it
        taken: names of other models, in lower case
        """
        self.selection = selection
        entry = None if _is_pinned(selection) else selection.files.entry
        wanted = dict.fromkeys((own_name(selection), *aliases, *(entry.aliases if entry else ())))
        free = [name for name in wanted if name.casefold() not in taken]
        self.names = tuple(free if own_name(selection) in free else [_longer_name(selection, taken), *free])
        self.last_facts = EngineFacts(0, "", "")  # of the last load
        self.num_open = 0  # answers that were requested and have not ended
        self.handle: EngineHandle | None = None
        self.is_leaving = False  # it makes room for another as soon as it is idle
        self.last_used = 0.0  # in time.monotonic's seconds
        self.keep_s: float | None = None  # for which it stays unused; None: for good

    @property
    def name(self) -> str:
        return self.names[0]

    def has(self, name: str) -> bool:
        """Whether the model is called so, in letters of either case."""
        files = self.selection.files
        repo = None if _is_pinned(self.selection) or files.gguf is not None else files.repo
        own = (*self.names, repo or self.name, files.name)
        return name.casefold() in {each.casefold() for each in own}

    def is_of(self, files: ModelFiles) -> bool:
        """Whether these are the model's files, of whatever commit."""
        own = self.selection.files
        return own.directory == files.directory or (
            own.repo is not None and (own.repo, own.name) == (files.repo, files.name)
        )

    @property
    def is_loading(self) -> bool:
        return self.handle is not None and not self.handle.is_settled

    @property
    def is_doubtful(self) -> bool:
        """Whether the engine has not moved on for long though a request waits for it."""
        return isinstance(self.handle, EngineClient) and self.handle.is_doubtful

    @property
    def engine_if_loaded(self) -> LoadedEngine | None:
        """The engine; None while it is not loaded, and where it cannot be."""
        handle = self.handle
        if handle is None or not handle.is_settled:
            return None
        try:
            return handle.wait_loaded(0)
        except Exception:
            return None

    def engine(self) -> LoadedEngine:
        """Raises BusyError where it is not loaded."""
        engine = self.engine_if_loaded
        if engine is None:
            why = "it takes seconds, or minutes where it is packed first"
            raise BusyError(f"{self.name} is being loaded", why=why, reason="loading")
        return engine

    def loaded_handle(self) -> EngineHandle:
        """Raises EngineClosedError where the model has been unloaded."""
        if self.handle is None:
            raise EngineClosedError("the engine has been closed")
        return self.handle


@dataclass(frozen=True)
class AskedModel:
    """A model as a request names it: by a name of its own, or by a preset, which shares its engine.

    selection: the settings where the request says nothing.
    adapter: as the name has it behind the model's, where it has one.
    """

    served: ServedModel
    selection: Selection
    adapter: str = ""

    @property
    def name(self) -> str:
        preset = self.selection.preset
        name = self.served.name if preset is None else preset.name
        return f"{name}:{self.adapter}" if self.adapter else name

    def shown(self, given: str | None) -> str:
        """Return the name in a reply. given: as the request has it."""
        return given or self.name

    def with_adapter(self, adapter: str, text: str) -> AskedModel:
        """Return the model with an adapter in place of those of its settings. text: as the setting has it."""
        resolved = self.selection.resolved.overlaid({"adapter": ((text,), Origin("flag", adapter))})
        return replace(self, selection=replace(self.selection, resolved=resolved), adapter=adapter)

    @property
    def evicts(self) -> bool:
        """Whether the oldest turns leave a conversation that is too long."""
        return self.selection.settings.overflow == "evict"

    def engine(self) -> LoadedEngine:
        """Raises BusyError where it is not loaded."""
        return self.served.engine()

    def sampling(self) -> SamplingParams:
        """Return how tokens are sampled where a request does not say."""
        return self.selection.sampling()


def own_name(selection: Selection) -> str:
    """Return the model's name; of a folder, the folder's own without where it is."""
    files = selection.files
    if files.gguf is not None and files.name == str(files.gguf):
        return files.gguf.stem
    is_folder = files.repo is None and files.gguf is None and files.name != BUILT_IN
    return files.directory.absolute().name if is_folder else files.name


def _longer_name(selection: Selection, taken: Collection[str]) -> str:
    """Return the folder's name with as many of its parents as tell it apart."""
    parts = selection.files.place.parts[1:]
    names = ("/".join(parts[-count:]) for count in range(2, len(parts) + 1))
    return next((name for name in names if name.casefold() not in taken), str(selection.files.directory.absolute()))


def _is_pinned(selection: Selection) -> bool:
    """Whether a revision or a quantization was asked for by name: other names are another model's."""
    files = selection.files
    return files.repo is not None and (files.gguf is not None or "@" in files.name)

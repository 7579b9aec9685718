"""The adapters that a server's clients may name, as MODEL:ADAPTER or MODEL:ADAPTER:SCALE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localllm.errors import UsageError
from localllm.hub.adapter_files import AdapterFiles, is_for
from localllm.hub.adapters import list_adapters, split_scale
from localllm.registry import load_registry
from localllm.runtime.selection import Selection
from localllm.runtime.served_model import ServedModel


@dataclass(frozen=True)
class AdaptedName:
    """A name in its parts. base: of the model. adapter: as its client wrote it. text: as the setting `adapter` has
    it."""

    base: str
    adapter: str
    text: str


class ServedAdapters:
    """given: those that the server was started with, and what multiplies each; they are the first model's."""

    def __init__(self, given: Sequence[tuple[AdapterFiles, float]] = ()) -> None:
        self._given = given

    def splits(self, name: str) -> Iterator[AdaptedName]:
        """Yield what a name may mean: the longest name of a model first. A client's word is compared with names, and
        never is a path. Reads the disk."""
        known = self._known()
        ends = [at for at, letter in enumerate(name) if letter == ":"]
        for at in reversed(ends):
            base, behind = name[:at], name[at + 1 :]
            try:
                word, scale = split_scale(behind) if behind.casefold() not in known else (behind, None)
            except UsageError:
                continue
            found = known.get(word.casefold())
            if base and found is not None:
                files, usual = found
                yield AdaptedName(base, behind, f"{files.path}:{usual if scale is None else scale:g}")

    def of(self, model: ServedModel, *, is_first: bool) -> list[str]:
        """Return the names of the adapters that a model can be asked for with. Reads the disk."""
        registry, name = load_registry(), model.selection.model_name
        given = [files.name for files, _ in self._given] if is_first else []
        here = [each.name for each in list_adapters() if is_for(each, name, registry)]
        return list(dict.fromkeys((*given, *here)))

    def _known(self) -> dict[str, tuple[AdapterFiles, float]]:
        """Return all adapters, and what usually multiplies each, by their names in small letters."""
        here = {name.casefold(): (each, 1.0) for each in list_adapters() for name in (each.name, each.hub_name) if name}
        return here | {files.name.casefold(): (files, scale) for files, scale in self._given}


def given_adapters(selection: Selection) -> list[tuple[AdapterFiles, float]]:
    """Return the adapters that the settings name. Uses no network. Raises AdapterError, UsageError."""
    from localllm.hub.adapters import locate_adapter

    offline = selection.settings.offline
    pairs = map(split_scale, selection.settings.adapter)
    return [(locate_adapter(name, offline=offline), scale) for name, scale in pairs]

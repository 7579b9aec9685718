"""The adapters that a server's clients may name, as MODEL:ADAPTER or MODEL:ADAPTER:SCALE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from localllm.engine.request import MAX_ADAPTER_SCALE
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


@dataclass(frozen=True)
class GivenAdapter:
    """scale: that usually multiplies it. model: whose it is."""

    files: AdapterFiles
    scale: float
    model: ServedModel


class ServedAdapters:
    """Those that the server was started with, or told of since, and all that are on this disk."""

    def __init__(self) -> None:
        self._given: list[GivenAdapter] = []

    def add(self, given: GivenAdapter) -> None:
        """Let requests name it; in place of another one of that name."""
        self.remove(given.files.name)
        self._given.append(given)

    def remove(self, name: str) -> AdapterFiles | None:
        """Forget an adapter; return it, if the server was told of it."""
        found = next((each for each in self._given if each.files.name.casefold() == name.casefold()), None)
        if found is not None:
            self._given.remove(found)
        return None if found is None else found.files

    def splits(self, name: str) -> Iterator[AdaptedName]:
        """Yield what a name may mean: the longest name of a model first. A client's word is compared with names, and
        never is a path. Reads the disk."""
        known = self._known()
        ends = [at for at, letter in enumerate(name) if letter == ":"]
        for at in reversed(ends):
            base, behind = name[:at], name[at + 1 :]
            word, scale = (behind, None) if behind.casefold() in known else _with_scale(behind)
            found = known.get(word.casefold())
            if base and found is not None:
                files, usual = found
                yield AdaptedName(base, behind, f"{files.path}:{usual if scale is None else scale!r}")

    def of(self, model: ServedModel) -> list[str]:
        """Return the names of the adapters that a model can be asked for with. Reads the disk."""
        registry, name = load_registry(), model.selection.model_name
        given = [each.files.name for each in self._given if each.model is model]
        here = [each.name for each in list_adapters() if is_for(each, name, registry)]
        return list(dict.fromkeys((*given, *here)))

    def _known(self) -> dict[str, tuple[AdapterFiles, float]]:
        """Return all adapters, and what usually multiplies each, by their names in small letters."""
        here = {name.casefold(): (each, 1.0) for each in list_adapters() for name in (each.name, each.hub_name) if name}
        return here | {each.files.name.casefold(): (each.files, each.scale) for each in self._given}


def _with_scale(text: str) -> tuple[str, float | None]:
    """Return a name, and the scale behind it; all of the text as a name where none is. Looks at no path."""
    name, _, behind = text.rpartition(":")
    try:
        scale = float(behind)
    except ValueError:
        return text, None
    return (name, scale) if abs(scale) <= MAX_ADAPTER_SCALE else (text, None)  # false for NaN too


def given_adapters(selection: Selection) -> list[tuple[AdapterFiles, float]]:
    """Return the adapters that the settings name. Uses no network. Raises AdapterError, UsageError."""
    from localllm.hub.adapters import locate_adapter

    offline = selection.settings.offline
    pairs = map(split_scale, selection.settings.adapter)
    return [(locate_adapter(name, offline=offline), scale) for name, scale in pairs]

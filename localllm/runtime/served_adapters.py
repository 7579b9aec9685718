"""The adapters that a server's clients may name, as MODEL:ADAPTER or MODEL:ADAPTER:SCALE."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from localllm.engine.request import AdapterRef, Request
from localllm.errors import AdapterError, Fix, UsageError
from localllm.hub.adapter_files import AdapterFiles
from localllm.hub.adapters import adapters_for, list_adapters
from localllm.hub.names import NAME_LIMIT
from localllm.runtime.selection import Selection
from localllm.runtime.served_model import ServedModel
from localllm.settings import MAX_ADAPTER_SCALE


@dataclass(frozen=True)
class AdaptedName:
    """A name in its parts.

    base: of the model. written: what its client wrote behind that. adapter: without a scale.
    scale: None where none is written.
    files: of the adapter of that name on this disk; None where the server was told of one.
    """

    base: str
    written: str
    adapter: str
    scale: float | None
    files: AdapterFiles | None


@dataclass(frozen=True)
class GivenAdapter:
    """scale: that usually multiplies it. model: whose it is."""

    files: AdapterFiles
    scale: float
    model: ServedModel

    def check(self) -> None:
        """Bring it into the memory of its model's engine, which is loaded. Raises AdapterError, DoesNotFitError."""
        ref = AdapterRef(str(self.files.path), self.scale, self.files.name)
        self.model.engine().check(Request((0,), adapters=(ref,)))

    def is_called(self, name: str) -> bool:
        return self.files.name.casefold() == name.casefold()


class ServedAdapters:
    """Those that the server was started with, or told of since, and all that are on this disk."""

    def __init__(self) -> None:
        self._given: list[GivenAdapter] = []

    def add(self, given: GivenAdapter) -> None:
        """Let requests name it. Raises AdapterError where the model has another one of that name."""
        name = given.files.name
        old = next((each for each in self.given_to(given.model) if each.is_called(name)), None)
        if old is not None and old.files.path != given.files.path:
            why, fix = f"it is {old.files.path}", Fix.command("stop", given.model.name, "--adapter", name)
            raise AdapterError(f"{given.model.name} has an adapter {name} already", why=why, fix=fix)
        self.remove(given.model, name)
        self._given.append(given)

    def remove(self, model: ServedModel, name: str) -> GivenAdapter | None:
        """Forget an adapter of a model; return it, if the server was told of it."""
        found = next((each for each in self.given_to(model) if each.is_called(name)), None)
        if found is not None:
            self._given.remove(found)
        return found

    def given_to(self, model: ServedModel | None) -> list[GivenAdapter]:
        return [each for each in self._given if each.model is model]

    def splits(self, name: str, *, is_told: bool) -> list[AdaptedName]:
        """Return what a name may mean: the longest name of a model first. A client's word is compared with names, and
        never is a path.

        is_told: with the adapters that the server was told of; or else with those on this disk, which is read.
        """
        if ":" not in name or len(name) > NAME_LIMIT:
            return []
        told: dict[str, AdapterFiles | None] = {each.files.name.casefold(): None for each in self._given}
        known, found = told if is_told else self._here(name), []
        ends = [at for at, letter in enumerate(name) if letter == ":" and at]
        for base, written in ((name[:at], name[at + 1 :]) for at in reversed(ends)):
            adapter, scale = (written, None) if written.casefold() in known else _with_scale(written)
            if adapter.casefold() in known:
                found.append(AdaptedName(base, written, adapter, scale, known[adapter.casefold()]))
        return found

    def setting(self, model: ServedModel | None, name: AdaptedName) -> str | None:
        """Return the value of the setting `adapter` that a name means of a model; None where it has no such adapter.
        model: None for one that was not asked for yet."""
        given = next((each for each in self.given_to(model) if each.is_called(name.adapter)), None)
        files = name.files if given is None else given.files
        usual = 1.0 if given is None else given.scale
        return None if files is None else f"{files.path}:{usual if name.scale is None else name.scale!r}"

    def of(self, model: ServedModel) -> list[str]:
        """Return the names of the adapters that a model can be asked for with. Reads the disk."""
        given = [each.files.name for each in self.given_to(model)]
        here = [each.name for each in adapters_for(model.selection.model_name)]
        return list(dict.fromkeys((*given, *here)))

    def _here(self, text: str) -> dict[str, AdapterFiles | None]:
        """Return the adapters on this disk that a text may name, by their names in small letters."""
        found = list_adapters(text)
        return {name.casefold(): each for each in found for name in (each.name, each.hub_name) if name}


def _with_scale(text: str) -> tuple[str, float | None]:
    """Return a name, and the scale behind it; all of the text as a name where none is. Looks at no path."""
    name, _, behind = text.rpartition(":")
    try:
        scale = float(behind)
    except ValueError:
        return text, None
    return (name, scale) if abs(scale) <= MAX_ADAPTER_SCALE else (text, None)  # false for NaN too


def given_adapters(selection: Selection) -> list[tuple[AdapterFiles, float]]:
    """Return the adapters that the settings name. Raises AdapterError, and UsageError for two of one name: requests
    could not tell them apart."""
    given = selection.adapter_files()
    names = Counter(files.name.casefold() for files, _ in given)
    if twice := next((name for name, count in names.items() if count > 1), None):
        why = " and ".join(f"{files.path}:{scale:g}" for files, scale in given if files.name.casefold() == twice)
        fix = "name it once; a request for MODEL:ADAPTER:SCALE chooses the scale"
        raise UsageError(f"two adapters are called {twice}", why=why, fix=fix)
    return given

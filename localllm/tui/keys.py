"""The theme and the keys of a user's config.toml, checked against those that there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from textual.binding import Binding
from textual.theme import BUILTIN_THEMES

from localllm.config import ResolvedSettings, unknown_key
from localllm.errors import SettingsError
from localllm.tui.app import rooms


def checked_keys(resolved: ResolvedSettings) -> Mapping[str, str]:
    """The keys by a binding's id. Raises SettingsError, naming the nearest, for an id that there is not."""
    keys, where = resolved.settings.keys, resolved.origins["keys"].where
    known = list(_ids())
    for name, pressed in keys.items():
        if name not in known:
            raise unknown_key(name, where, known)
        if not all(key.strip() for key in pressed.split(",")):
            raise SettingsError(f"the key of {name!r} is {pressed!r} in {where}", why="a name is empty", fix='"ctrl+g"')
    return keys


def checked_theme(resolved: ResolvedSettings) -> str | None:
    """The theme; None where the terminal is to say. Raises SettingsError, naming the nearest, for one that there is
    not."""
    name, where = resolved.settings.theme, resolved.origins["theme"].where
    if name == "auto":
        return None
    if name not in BUILTIN_THEMES:
        error = unknown_key(name, where, ["auto", *BUILTIN_THEMES])
        raise SettingsError(f"there is no theme {name[:80]!r} ({where})", why=error.why, fix='theme = "auto"')
    return name


def _ids() -> Iterator[str]:
    for room in rooms().values():
        for binding in room.BINDINGS:
            if isinstance(binding, Binding) and binding.id is not None:
                yield binding.id

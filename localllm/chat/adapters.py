"""The adapters (LoRA) of a chat, which its settings name: how they are told, kept with an answer, and found again.

Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from localllm.chat.dialogue import IN_CHAT
from localllm.config import ResolvedSettings
from localllm.errors import LocalLLMError, UsageError
from localllm.history.records import UsedAdapter
from localllm.hub.adapters import is_for, list_adapters, locate_adapter, split_scale
from localllm.registry import load_registry

if TYPE_CHECKING:
    from localllm.hub.adapters import AdapterFiles
    from localllm.runtime.selection import Selection

_NONE = "/adapter NAME[:SCALE] uses one, by its name or its path; /adapter + NAME adds one, /adapter off removes all"


def used(text: str) -> UsedAdapter:
    """Return NAME_OR_PATH[:SCALE] as it is found from any folder. Raises AdapterError, UsageError."""
    name, scale = split_scale(text)
    files = locate_adapter(name)
    return UsedAdapter(name if files.repo else str(files.path), scale)


def lasting(resolved: ResolvedSettings) -> ResolvedSettings:
    """Return the settings with adapters that are found from any folder; one that is not found stays as it is named."""
    texts = []
    for text in resolved.settings.adapter:
        try:
            texts.append(used(text).text)
        except LocalLLMError:  # said where it is asked for
            texts.append(text)
    return resolved.overlaid({"adapter": (tuple(texts), resolved.origins["adapter"])}) if texts else resolved


def shown(texts: Sequence[str]) -> str:
    """Return the adapters for people: "fox:0.5 + owl"."""
    return " + ".join(UsedAdapter(*split_scale(text)).shown for text in texts)


def with_adapters(resolved: ResolvedSettings, texts: Sequence[str]) -> ResolvedSettings:
    """Return the settings with these adapters, as `/adapter` changes them."""
    return resolved.overlaid({"adapter": (tuple(texts), IN_CHAT)})


def on_disk(texts: Sequence[str], warn: Callable[[str], object]) -> tuple[str, ...]:
    """Return those that are on this disk. warn: called with what is wrong with each of the others."""
    kept = []
    for text in texts:
        try:
            used(text)
        except LocalLLMError as error:
            warn(left_out(text, error))
        else:
            kept.append(text)
    return tuple(kept)


def left_out(text: str, error: LocalLLMError) -> str:
    """Return the warning about an adapter with which a chat does not go on, and what gets it back."""
    fixes = "; ".join(str(fix) for fix in error.fixes if fix.kind in ("command", "flag", "advice"))
    back = f"; {fixes}; then /adapter + {text}" if fixes else f"; then /adapter + {text}"
    return f"going on without the adapter {shown([text])}: {error.what} ({error.why}){back}"


def changed(texts: Sequence[str], words: str) -> tuple[str, ...]:
    """Return the adapters as `/adapter WORDS` leaves them. Raises AdapterError, and UsageError for one to remove that
    is none of them."""
    sign, name = (words[0], words[1:].strip()) if words[:1] in ("+", "-") else ("", words)
    if words in ("off", "-"):
        return ()
    if not name:
        raise UsageError("/adapter + is followed by a name", why="none was given", fix="/adapter lists them")
    if sign != "-":
        new = used(name)
        others = [text for text in texts if split_scale(text)[0] != new.name]
        return (*others, new.text) if sign else (new.text,)
    kept = tuple(text for text in texts if name not in (text, split_scale(text)[0], shown([text]), _last(text)))
    if len(kept) == len(texts):
        why = f"it has {shown(texts)}" if texts else "it has none"
        fix = f"/adapter - {_last(texts[0])}" if texts else "/adapter NAME"
        raise UsageError(f"this chat has no adapter {name[:80]!r}", why=why, fix=fix)
    return kept


def _last(text: str) -> str:
    """Return the name as it is shown, without the scale."""
    return UsedAdapter(split_scale(text)[0]).shown


def lines(texts: Sequence[str], selection: Selection) -> list[str]:
    """Return the chat's adapters, those on this disk that its model can have, and how one is used."""
    fitting = fitting_adapters(selection)
    here = ", ".join(each.name for each in fitting) or "none that says so; `localllm adapters` lists all"
    return [f"adapters: {shown(texts) or 'none'}", f"for {selection.files.name} on this disk: {here}", _NONE]


def fitting_adapters(selection: Selection) -> list[AdapterFiles]:
    """Return the adapters on this disk that say that they are for this model."""
    registry, base = load_registry(), selection.model_name
    return [each for each in list_adapters() if is_for(each, base, registry)]

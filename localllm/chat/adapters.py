"""The adapters (LoRA) of a chat, which its settings name: how they are told, kept with an answer, and found again.

Knows no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.chat.dialogue import IN_CHAT
from localllm.config import ResolvedSettings
from localllm.errors import LocalLLMError, UsageError
from localllm.history.records import UsedAdapter
from localllm.hub.adapters import adapters_for, locate_adapter, split_scale
from localllm.hub.names import path_of, whole_path

if TYPE_CHECKING:
    from localllm.runtime.presets import Preset
    from localllm.runtime.selection import Selection

_USAGE = (
    "/adapter NAME[:SCALE] uses one, by its name or its path; /adapter + NAME adds one, /adapter - NAME removes one, "
    "/adapter off all"
)


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
    return " + ".join(shown_each(texts))


def shown_each(texts: Sequence[str]) -> tuple[str, ...]:
    """Return each adapter for people: "fox:0.5"; where two have the same name, with where they are from."""
    times = Counter(map(short_name, texts))
    pairs = [(text, UsedAdapter(*split_scale(text))) for text in texts]
    return tuple(
        each.shown if times[short_name(text)] == 1 else replace(each, name=_origin(text)).text for text, each in pairs
    )


def short_name(text: str) -> str:
    """Return the name of an adapter as it is shown, without its scale."""
    return UsedAdapter(split_scale(text)[0]).shown


def _origin(text: str) -> str:
    """Return where an adapter is from, however it is spelt: its whole name on the hub, or its path."""
    name = split_scale(text)[0]
    try:
        return locate_adapter(name).origin
    except LocalLLMError:  # it is gone
        return str(whole_path(path_of(name)))


def with_adapters(resolved: ResolvedSettings, texts: Sequence[str]) -> ResolvedSettings:
    """Return the settings with these adapters, as `/adapter` changes them."""
    return resolved.overlaid({"adapter": (tuple(texts), IN_CHAT)})


def under_another(resolved: ResolvedSettings, left: Preset | None, taken: Preset | None) -> ResolvedSettings:
    """Return the settings of a chat that goes on with another model or preset: with the adapters of the preset that it
    takes, or else without those of the preset that it leaves."""
    if taken is not None and "adapter" in taken.values:
        return lasting(resolved.overlaid({"adapter": (taken.values["adapter"], taken.origins["adapter"])}))
    if left is None or resolved.origins["adapter"] != IN_CHAT:
        return resolved
    origins = [(_origin(text), split_scale(text)[1]) for text in left.values.get("adapter", ())]
    texts = resolved.settings.adapter
    return with_adapters(resolved, [t for t in texts if (_origin(t), split_scale(t)[1]) not in origins])


def on_disk(texts: Sequence[str], warn: Callable[[str], object]) -> tuple[str, ...]:
    """Return those that are on this disk. warn: called with what is wrong with each of the others."""
    kept = []
    for text in texts:
        try:
            used(text)
        except LocalLLMError as error:
            warn(
                f"{left_out(text, error)}; once it is back, /adapter in the chat or --adapter on the line uses it again"
            )
        else:
            kept.append(text)
    return tuple(kept)


def left_out(text: str, error: LocalLLMError) -> str:
    """Return the warning about an adapter with which a chat does not go on, and what may help."""
    helping = [fix for fix in error.fixes if fix.kind in ("command", "flag", "advice") and not fix.runs("adapters")]
    fixes = "".join(f"; {fix}" for fix in helping)
    return f"going on without the adapter {shown([text])}: {error.what} ({error.why}){fixes}"


def changed(texts: Sequence[str], words: str) -> tuple[str, ...]:
    """Return the adapters as `/adapter WORDS` leaves them. Raises AdapterError, and UsageError for one to remove that
    is none of them, or could be two."""
    if words == "off":
        return ()
    sign, name = (words[0], words[1:].strip()) if words[:1] in ("+", "-") else ("", words)
    if not name:
        fix = "/adapter lists them" if sign == "+" else "/adapter off removes all"
        raise UsageError(f"/adapter {sign} is followed by a name", why="none was given", fix=fix)
    if sign == "-":
        return _without(texts, name)
    new = used(name)
    others = [text for text in texts if _origin(text) != _origin(new.text)]
    return (*others, new.text) if sign else (new.text,)


def _without(texts: Sequence[str], wanted: str) -> tuple[str, ...]:
    """Return the others than NAME_OR_PATH[:SCALE]."""
    name, scale = split_scale(wanted)
    found = [text for text in texts if short_name(text) == name]
    found = found or [text for text in texts if _origin(text) == _origin(name)]
    if name != wanted:  # with a scale
        found = [text for text in found if split_scale(text)[1] == scale] or found
    origins = list(dict.fromkeys(map(_origin, found)))
    if len(origins) > 1:
        fixes = [f"/adapter - {origin}" for origin in origins]
        raise UsageError(f"{name[:80]!r} names {len(origins)} adapters here", why=" and ".join(origins), fix=fixes)
    if not found:
        why = f"it has {shown(texts)}" if texts else "it has none"
        fix = f"/adapter - {short_name(texts[0])}" if texts else "/adapter NAME"
        raise UsageError(f"this chat has no adapter {name[:80]!r}", why=why, fix=fix)
    return tuple(text for text in texts if text not in found)


def lines(texts: Sequence[str], selection: Selection) -> list[str]:
    """Return the chat's adapters, those on this disk that its model can have, and how one is used."""
    model, fitting = selection.files.name, ", ".join(each.name for each in adapters_for(selection.model_name))
    none = f"no adapter on this disk says that it is for {model}; `localllm adapters` lists all"
    here = f"for {model} on this disk: {fitting}" if fitting else none
    return [f"adapters: {shown(texts) or 'none'}", here, _USAGE]

"""The slash commands of the full-screen chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localllm.chat.slash import COMMANDS as SHARED
from localllm.chat.slash import Command
from localllm.hub.adapters import list_adapters

COMMANDS: Mapping[str, Command] = {
    **{name: SHARED[name] for name in ("help", "system", "regen")},
    "continue": Command("", "continue the last answer where it ends"),
    "edit": Command("", "edit the last question"),
    **{name: SHARED[name] for name in ("undo", "clear", "fork", "title")},
    "copy": Command("[NUMBER]", "copy the last answer, or the code block of this number"),
    "code": Command("[NUMBER PATH]", "list the code blocks to copy, or save one to a file"),
    **{name: SHARED[name] for name in ("attach", "detach")},
    "model": Command("[NAME]", "choose a model; the chat stays"),
    "sessions": Command("[ID]", "show all saved chats: search, open, rename, delete, export"),
    "plan": Command("", "show where the model is placed, and how other settings would change that"),
    "save": SHARED["save"],
    "export": Command("PATH", "export the chat as Markdown (.md), or with all its branches (.json)"),
    **{name: SHARED[name] for name in ("load", "adapter", "preset")},
    "set": SHARED["set"],
    "think": SHARED["think"],
    "show": Command("", "show model, adapters, context, system message and settings"),
    "stats": Command("", "show speeds and times of the last answer"),
    **{name: SHARED[name] for name in ("tokens", "cache")},
    "theme": Command("[NAME]", "choose the colours: dark, light, auto, or a theme of the list"),
    "bye": Command("", "leave (also Ctrl-D)"),
}


_ADAPTER, _REMOVED = "/adapter ", "/adapter - "


def _adapters(text: str, used: Sequence[str]) -> list[tuple[str, str]]:
    """The adapters, and `off`, that begin as the line ends: (the completed line, the name)."""
    if text.startswith(_REMOVED):
        before, begun, names = _REMOVED, text.removeprefix(_REMOVED), used
    else:
        begun = text.rpartition(" ")[2]
        before = text.removesuffix(begun)
        usable = (adapter.name for adapter in list_adapters() if adapter.is_usable)
        names = sorted(usable, key=len)  # a whole one first, which enter sends
        names = ["off", *names] if begun and before == _ADAPTER else names
    return [(f"{before}{name}", name) for name in names if name.casefold().startswith(begun.casefold())]


def completions(text: str, adapters: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The commands that begin as the line does: (the completed line, a summary). adapters: of the chat, as they are
    shown."""
    if text.startswith(_ADAPTER):
        return _adapters(text, adapters)
    if not text.startswith("/") or "\n" in text or " " in text:
        return []
    return [
        (f"/{name}{' ' if command.parameters else ''}", f"/{name} {command.parameters}".ljust(22) + command.summary)
        for name, command in COMMANDS.items()
        if name.startswith(text[1:].casefold())
    ]

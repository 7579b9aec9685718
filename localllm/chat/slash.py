"""The slash commands of a chat: their names, what follows them, and a typed line taken apart."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from localllm.errors import UsageError


@dataclass(frozen=True)
class Command:
    """A slash command: what follows it, what it does, in words."""

    parameters: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "help": Command("", "this list"),
    "system": Command("[TEXT]", "show or replace the system message; `/system -` removes it"),
    "regen": Command("", "answer the last question again"),
    "undo": Command("", "take the last question and its answer back"),
    "clear": Command("", "start a new conversation"),
    "fork": Command("", "go on in a copy of this conversation"),
    "title": Command("[TEXT]", "show or change the title under which it is kept"),
    "sessions": Command("", "the latest chats that are kept"),
    "file": Command("PATH", "put a text file before the next question"),
    "save": Command("[PATH]", "write the conversation as JSON"),
    "load": Command("PATH", "go on from a conversation in JSON"),
    "set": Command("[KEY VALUE]", "show or change the settings of the next answers; `-`: as at first"),
    "think": Command(
        "[on|off|LEVEL]", "how much is thought before the next answers: low, medium, high; `-`: as at first"
    ),
    "show": Command("", "model, context, system message and settings"),
    "stats": Command("[on|off]", "rates and times of the last answer, or after each: copy, compute, sample, wait"),
    "tokens": Command("", "how full the context is, and of what"),
    "cache": Command("", "how much of the last prompt was not computed again, and why not more"),
    "bye": Command("", "leave (also Ctrl-D)"),
}
_ALIASES = {"exit": "bye", "quit": "bye", "?": "help"}


def split_command(line: str, commands: Mapping[str, Command] = COMMANDS) -> tuple[str, str]:
    """`/set top_k 5` -> ("set", "top_k 5"). Raises UsageError naming the nearest for one that does not exist."""
    name, _, rest = line[1:].strip().partition(" ")
    name = _ALIASES.get(name, name)
    if name not in commands:
        nearest = difflib.get_close_matches(name, [*commands, *_ALIASES], n=1)
        raise UsageError(
            f"there is no command /{name}",
            why=f"the nearest is /{nearest[0]}" if nearest else "no command is like it",
            fix="/help; a blank before the slash sends the line to the model",
        )
    if rest.strip() and not commands[name].parameters:
        raise UsageError(f"/{name} takes nothing behind it", why=f"there is {rest.strip()[:80]!r}", fix=f"/{name}")
    if not rest.strip() and commands[name].parameters == "PATH":
        raise UsageError(f"/{name} needs a path", why="nothing is behind it", fix=f"/{name} PATH")
    return name, rest.strip()


def setting(text: str) -> tuple[str, str]:
    """The key and the value behind /set: `top_k 5`, or `top_k=5`."""
    key = text.partition(" ")[0].partition("=")[0]
    return key, text[len(key) + 1 :].strip()


def command_list() -> list[str]:
    """The commands, a line each."""
    return [f"/{name} {command.parameters}".ljust(20) + command.summary for name, command in COMMANDS.items()]

"""What to type in place of a command that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from localllm.cli.prompt import has_blanks
from localllm.errors import Fix, UsageError

_LONGEST_PROMPT = 200  # characters that are worth repeating in an error
# What Ollama, llama.cpp, LM Studio and people call a command.
_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("models", "tags"), "list"),
        **dict.fromkeys(("info", "inspect", "describe"), "show"),
        **dict.fromkeys(("server", "start", "daemon"), "serve"),
        **dict.fromkeys(("get", "install", "fetch"), "pull"),
        **dict.fromkeys(("generate", "complete", "ask"), "run"),
        **dict.fromkeys(("unload", "kill"), "stop"),
        **dict.fromkeys(("status", "running"), "ps"),
        **dict.fromkeys(("convert", "pack"), "quantize"),
        "settings": "config",
        "set": "config set",
        "history": "sessions",
        "benchmark": "bench",
    }
)
# What they have and is not needed here: why, and the command that does as much.
_NEEDLESS: Mapping[str, tuple[str, Fix]] = MappingProxyType(
    {
        "cp": ("a model has one name; a server gives it others", Fix.command("serve", "MODEL", "--alias", "NAME")),
        "push": ("models are pulled, and not uploaded", Fix.command("pull", "MODEL")),
        "login": ("the variable HF_TOKEN holds the token of the Hugging Face hub", Fix.command("help", "access")),
    }
)


def unknown_command(path: str, words: Sequence[str], commands: Iterable[str]) -> UsageError:
    """Return the error for a command that there is not.

    path: of the group, such as `localllm config`.
    words: what was typed behind it.
    commands: those that the group has.
    """
    (word, *others), known = words, list(commands)
    within = path.split()[1:]
    what = f"there is no command {word[:80]!r}"
    if not within and (name := _RENAMED.get(word.casefold())) is not None:
        return UsageError(what, why=f"it is called `{name}` here", fix=Fix.command(*name.split(), *others))
    if not within and word.casefold() in _NEEDLESS:
        why, fix = _NEEDLESS[word.casefold()]
        return UsageError(what, why=why, fix=fix)
    if not within and has_blanks(word) and len(word) <= _LONGEST_PROMPT:
        return UsageError(what, why="a prompt stands behind `run`", fix=Fix.command("run", word, *others))
    if word.casefold() in ("delete", "remove") and "rm" in known:
        return UsageError(what, why="it is called `rm` here", fix=Fix.command(*within, "rm", *others))
    meant = "unset" if within == ["config"] and word in ("reset", "delete", "remove", "rm") else word.casefold()
    harmless = [name for name in known if name != "rm"]  # no slip of a finger deletes
    nearest = difflib.get_close_matches(meant, harmless, n=1)
    if nearest:
        why, fix = f"the nearest is {nearest[0]!r}", Fix.command(*within, nearest[0], *others)
        return UsageError(what, why=why, fix=fix)
    return UsageError(what, why=f"there are {', '.join(known)}", fix=Fix.command(*within, "--help"))

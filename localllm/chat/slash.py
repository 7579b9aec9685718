"""The slash commands of a chat: a typed line taken apart, and the commands that are the same on every front end."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from localllm.chat import adapters
from localllm.chat.context import usage_lines
from localllm.chat.file_references import typed_paths
from localllm.chat.session import ChatSession
from localllm.errors import LocalLLMError, UsageError

Action = Callable[[ChatSession, str], Sequence[str]]
MODEL_DEFAULT = "the model's default"


def _system(session: ChatSession, text: str) -> list[str]:
    if text:
        session.set_system(None if text == "-" else text)
    return [f"system message: {session.dialogue.system or 'none'}"]


def _undo(session: ChatSession, _: str) -> list[str]:
    done = session.dialogue.take_back_question()
    return ["removed the last question and its answer" if done else "there is no question to undo"]


def _clear(session: ChatSession, _: str) -> list[str]:
    session.clear()
    return ["started a new conversation"]


def _attach(session: ChatSession, text: str) -> list[str]:
    if text:
        session.attach(typed_paths(text))
    files = [f"{file.path}: {session.described(file)}" for file in session.dialogue.attached]
    return [f"before the next question: {', '.join(files)}"] if files else ["no file is attached"]


def _detach(session: ChatSession, _: str) -> list[str]:
    names = ", ".join(file.path for file in session.dialogue.attached)
    session.dialogue.attached.clear()
    return [f"no longer before the next question: {names}"] if names else _attach(session, "")


def _fork(session: ChatSession, _: str) -> list[str]:
    name = session.recorder.fork()
    return [
        f"continuing in a copy: {name}" if name is not None else "there is nothing to copy: the chat has no question"
    ]


def _set(session: ChatSession, text: str) -> list[str]:
    text = text.removeprefix("parameter ")  # as Ollama has it: `/set parameter temperature 0.7`
    key = text.partition(" ")[0].partition("=")[0]  # `top_k 5`, or `top_k=5`
    value = text[len(key) + 1 :].strip()
    if key == "think" and value:
        return _think(session, value)
    if key == "adapter":
        return _adapter(session, "off" if value == "-" else value)
    try:
        if value:
            session.dialogue.set(key, value)
        return session.settings_lines(key)
    except UsageError as error:
        if (saved := session.recorder.session_id) is not None:
            error.fix = [fix.with_model("--resume", saved) for fix in error.fixes]
        raise


def _adapter(session: ChatSession, words: str) -> list[str]:
    if not words:
        return adapters.lines(session.adapters, session.selection)
    if words == "off" and not session.adapters:
        return ["no adapter is on"]
    try:
        cost = session.use_adapters(adapters.changed(session.adapters, words))
    except LocalLLMError as error:
        error.fix = [f"/adapter {fix.words[1]}" if fix.kind == "word" else fix for fix in error.fixes]
        raise
    return [f"adapters: {adapters.shown(session.adapters) or 'none'}", *([cost] if cost else [])]


def _think(session: ChatSession, effort: str) -> list[str]:
    if effort:
        session.think(effort)
    return [f"thinking: {session.dialogue.resolved.settings.think or MODEL_DEFAULT}"]


def _preset(session: ChatSession, text: str) -> list[str]:
    verb, _, name = text.partition(" ")
    if verb != "save" or not name.strip():
        why = "it saves this chat's model, system message and settings"
        raise UsageError("/preset is followed by `save` and a name", why=why, fix="/preset save NAME")
    return [f"wrote {session.save_preset(name.strip())}"]


def _show(session: ChatSession, _: str) -> list[str]:
    files = session.selection.files
    tokens = _tokens(session, "") if session.engine is not None else []
    return [
        f"model {files.name} in {files.gguf or files.directory}",
        f"adapters: {adapters.shown(session.adapters) or 'none'}",
        *tokens,
        *_system(session, ""),
        *session.settings_lines(),
    ]


def _tokens(session: ChatSession, _: str) -> list[str]:
    return usage_lines(session.usage())


@dataclass(frozen=True)
class Command:
    """A slash command.

    parameters: as they are written behind its name.
    action: returns the lines to show; None where each front end has its own.
    """

    parameters: str
    summary: str
    action: Action | None = None


COMMANDS: Mapping[str, Command] = {
    "help": Command("", "show this list"),
    "system": Command("[TEXT]", "show or replace the system message; `/system -` removes it", _system),
    "regen": Command("", "generate another answer to the last question"),
    "undo": Command("", "remove the last question and its answer", _undo),
    "clear": Command("", "start a new conversation", _clear),
    "fork": Command("", "continue in a copy of this chat", _fork),
    "title": Command(
        "[TEXT]",
        "show or change the title of the saved chat",
        lambda session, text: [f"title: {session.recorder.rename(text)}"],
    ),
    "sessions": Command("[ID]", "list the latest saved chats, or go on with one"),
    "attach": Command("[PATH...]", "put files before the next question, or list them; @PATH in it does so", _attach),
    "detach": Command("", "remove the files attached to the next question", _detach),
    "save": Command(
        "[PATH]", "save the conversation to a JSON file", lambda session, path: [f"wrote {session.save(path)}"]
    ),
    "load": Command(
        "PATH", "continue from a conversation in a JSON file", lambda session, path: [f"{session.load(path)} messages"]
    ),
    "copy": Command("[NUMBER]", "copy the last answer, or its code block of this number"),
    "model": Command("[NAME]", "show the model, or continue with another; the chat stays"),
    "adapter": Command("[NAME|off]", "use an adapter (LoRA), or list them; + NAME adds, - NAME removes", _adapter),
    "preset": Command("save NAME", "save model, system message and changed settings as a preset", _preset),
    "set": Command("[KEY VALUE]", "show or change settings for the next answers; `-` resets one", _set),
    "think": Command("[on|off|LEVEL]", "how much to think before answering: low, medium, high; `-` resets it", _think),
    "show": Command("", "show model, adapters, context, system message and settings", _show),
    "stats": Command("[on|off]", "show speeds and times of the last answer, or after each one"),
    "tokens": Command("", "show what uses how much of the context", _tokens),
    "cache": Command(
        "",
        "show how much of the last prompt came from the cache, and why not more",
        lambda session, _: session.cache_lines(),
    ),
    "bye": Command("", "leave (also Ctrl-D)"),
}
_HELP = "/help; a blank before the slash sends the line to the model"
_ALIASES = {
    "exit": "bye",
    "quit": "bye",
    "?": "help",
    "file": "attach",
    "chats": "sessions",
    "resume": "sessions",
    "rename": "title",
}


def split_command(line: str, commands: Mapping[str, Command] = COMMANDS) -> tuple[str, str]:
    """Return ("set", "top_k 5") for `/set top_k 5`. Raises UsageError, for an unknown name with the nearest one."""
    name, _, rest = line[1:].strip().partition(" ")
    name = _ALIASES.get(name, name)
    if name not in commands:
        nearest = difflib.get_close_matches(name, [*commands, *_ALIASES], n=1)
        raise UsageError(
            f"there is no command /{name}",
            why=f"the nearest is /{nearest[0]}" if nearest else "no command has a similar name",
            fix=f"/{nearest[0]} {rest}".strip() if nearest else _HELP,
        )
    if rest.strip() and not commands[name].parameters:
        raise UsageError(f"/{name} takes no argument", why=f"it was given {rest.strip()[:80]!r}", fix=f"/{name}")
    if not rest.strip() and commands[name].parameters == "PATH":
        raise UsageError(f"/{name} needs a path", why="none was given", fix=f"/{name} PATH")
    return name, rest.strip()


def run(session: ChatSession, name: str, rest: str) -> Sequence[str]:
    """Run a command that is the same on every front end, and return the lines to show. Raises LocalLLMError."""
    action = COMMANDS[name].action
    assert action is not None
    return action(session, rest)


def command_list() -> list[str]:
    """Return the commands, a line each."""
    return [f"/{name} {command.parameters}".ljust(23) + command.summary for name, command in COMMANDS.items()]

"""`localllm sessions`: the chats that were kept; to list, read, search, take along, bring in and delete."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from localllm.cache.page_folder import kv_root, root_folders
from localllm.chat.recorder import exported, form_of, opened_history
from localllm.chat.text_file import replace_file
from localllm.chat.thoughts import kept_apart
from localllm.cli import options
from localllm.cli.app import PlainCommand, plain_group
from localllm.cli.context import cli_context
from localllm.cli.options import argument, choice, complete_sessions, option, takes
from localllm.cli.output import SCHEMA_VERSION
from localllm.config import format_time
from localllm.errors import Fix, UsageError
from localllm.history import History, Hit, Session, exchange, history_file, nothing_is_kept, search
from localllm.history.exchange import read_conversations

_MOST_LISTED = 20

_CHAT = argument(
    "session",
    "ID",
    "An id of `localllm sessions list`, the beginning of one, a part of a title, or `last`.",
    completion=complete_sessions,
    required=True,
)
_CHATS = argument(
    "sessions",
    "ID...",
    "Ids of `localllm sessions list`, beginnings of them, parts of titles, or `last`.",
    list[str],
    completion=complete_sessions,
)
_EVERY = option("--all", "All saved chats.", name="everything")

sessions_app = plain_group("sessions", "List, read, search, export and delete saved chats.")


@sessions_app.command("list", cls=PlainCommand)
@takes(option("--all", f"List all chats, not only the latest {_MOST_LISTED}.", name="everything"), options.AS_JSON)
def list_sessions(context: typer.Context, everything: bool, as_json: bool) -> None:
    """List the saved chats, the most recent first."""
    cli = cli_context(context)
    found: list[tuple[Session, int]] = []
    count = 0
    if not nothing_is_kept():
        with opened_history(cli.output.warn) as history:
            found, count = history.sessions(-1 if everything else _MOST_LISTED), history.count()
    if as_json:
        rows = [session_fields(session, messages) for session, messages in found]
        cli.output.json({"schema_version": SCHEMA_VERSION, "total": count, "sessions": rows}, indent=2)
        return
    if not found:
        cli.output.note("no chat is saved yet: `localllm chat` saves them, unless it is --private")
        return
    cli.output.table(
        ("ID", "WHEN", "MODEL", "MESSAGES", "TITLE"),
        [(each.id, format_time(each.updated), _short(each.model), str(num), each.title) for each, num in found],
        optional=("MODEL", "MESSAGES"),
    )
    if count > len(found):
        cli.output.note(f"{count - len(found)} more: localllm sessions list --all")


@sessions_app.command("show", cls=PlainCommand)
@takes(_CHAT, options.AS_JSON)
def show_session(context: typer.Context, session: str, as_json: bool) -> None:
    """Print a chat.

    Shows the branch that would be continued. `export --format json` has all branches.
    """
    cli = cli_context(context)
    with opened_history(cli.output.warn) as history:
        found = history.find(session)
        path = history.path(found)
    if not as_json:
        cli.output.verbatim(exchange.as_markdown(found, path, kept_apart))
        return
    messages = [
        {
            "role": message.role,
            "content": message.fields.get("content", answer),
            **({"reasoning_content": thought} if thought else {}),
            "state": message.state,
            "model": message.model,
            "created": message.created,
            "facts": message.facts,
        }
        for message in path
        for thought, answer in [exchange.told_apart(message, kept_apart)]
    ]
    fields = {**session_fields(found, len(path)), "system": found.system}
    cli.output.json({"schema_version": SCHEMA_VERSION, "session": fields, "messages": messages}, indent=2)


@sessions_app.command("search", cls=PlainCommand)
@takes(
    argument(
        "words", "WORD...", "Words that must all appear; put a phrase in double quotes.", list[str], required=True
    ),
    options.AS_JSON,
)
def search_sessions(context: typer.Context, words: Sequence[str], as_json: bool) -> None:
    """Search the titles and messages of saved chats, the latest first.

    Also searches answers that were regenerated and are no longer shown.
    """
    cli = cli_context(context)
    query = " ".join(f'"{word}"' if " " in word and '"' not in word else word for word in words)
    if not search.terms(query):
        raise UsageError(
            "there is nothing to search for", why="no word was given", fix=Fix.command("sessions", "search", "lantern")
        )
    with opened_history(cli.output.warn) as history:
        rows = [_hit_fields(hit, query) for hit in history.search(query, _MOST_LISTED)]
    if as_json:
        cli.output.json({"schema_version": SCHEMA_VERSION, "hits": rows}, indent=2)
        return
    if not rows:
        cli.output.note("nothing was found")
        return
    cli.output.table(
        ("ID", "WHEN", "ROLE", "TEXT"),
        [[row["id"], format_time(row["created"]), row["role"], row["text"]] for row in rows],
    )
    if len(rows) == _MOST_LISTED:
        cli.output.note(f"the latest {_MOST_LISTED} are shown; more words find fewer")


@sessions_app.command("export", cls=PlainCommand)
@takes(
    _CHATS,
    _EVERY,
    choice(
        "--format",
        "markdown: for reading. json: for importing, with every branch. Default: by the ending of FILE, else markdown.",
        "markdown",
        "json",
    ),
    option("-o --output", "File to write, which must not exist yet. Default: stdout.", "FILE", Path),
    option("--force", "Overwrite FILE if it exists."),
)
def export_sessions(context: typer.Context, **flags: Any) -> None:
    """Write chats as Markdown or JSON."""
    cli, file = cli_context(context), flags["output"]
    if flags["force"] and file is None:
        raise UsageError(
            "--force needs -o FILE", why="stdout is never overwritten", fix=Fix.command("sessions", "export", "--help")
        )
    with opened_history(cli.output.warn) as history:
        found = _chosen(history, flags["sessions"], flags["everything"], "export")
        text = exported(history, found, flags["format"] or form_of(file))
    if file is None:
        cli.output.verbatim(text)
        return
    if not flags["force"] and not file.is_dir() and file.exists():
        raise UsageError(
            f"{str(file)!r} is there already", why="nothing is overwritten unasked", fix=Fix.flag("--force")
        )
    replace_file(file, text)
    cli.output.note(f"wrote {_counted(found)} to {file}")


@sessions_app.command("import", cls=PlainCommand)
@takes(
    argument(
        "files",
        "FILE...",
        "A file from `export --format json`, or ChatGPT's data export: conversations.json, or the archive that "
        "contains it.",
        list[Path],
        required=True,
    ),
    options.AS_JSON,
)
def import_sessions(context: typer.Context, files: Sequence[Path], as_json: bool) -> None:
    """Import chats from another machine, or from ChatGPT.

    Nothing is added twice, and a chat that has grown gets the new messages. Images, files and tool use become notes in
    brackets.
    """
    cli = cli_context(context)
    try:
        conversations = [conversation for file in files for conversation in read_conversations(file)]
    except UsageError as error:
        error.why += "; nothing was imported"
        raise
    new = grown = messages = 0
    with opened_history(cli.output.warn, makes=True) as history, history.together():
        for conversation in conversations:
            before = history.count()
            _, added = history.add(conversation)
            is_new = history.count() > before
            new, grown, messages = new + is_new, grown + (added > 0 and not is_new), messages + added
    fields = {"read": len(conversations), "new": new, "grown": grown, "messages": messages}
    if as_json:
        cli.output.json({"schema_version": SCHEMA_VERSION, **fields})
        return
    known = len(conversations) - new - fields["grown"]
    counts = f"{fields['grown']} got new messages, {known} were complete already"
    cli.output.line(f"imported {new} chats with {fields['messages']} messages; {counts}")


@sessions_app.command("rm", cls=PlainCommand)
@takes(_CHATS, _EVERY, options.UNASKED, options.AS_JSON)
def remove_sessions(
    context: typer.Context, sessions: Sequence[str] | None, everything: bool, yes: bool, as_json: bool
) -> None:
    """Delete chats, with every branch of them.

    They are gone from the history for good: from the index and from free pages of the file, too. What a model computed
    of them stays in the prefix cache until `localllm cache clear`.
    """
    cli = cli_context(context)
    with opened_history(cli.output.warn) as history:
        found = _chosen(history, sessions, everything, "rm")
        if not yes:
            ids = ["--all"] if everything else [session.id for session in found]
            shown = [
                f"{session.id}  {format_time(session.updated)}  {session.title}" for session in found[:_MOST_LISTED]
            ]
            if len(found) > _MOST_LISTED:
                shown.append(f"and {len(found) - _MOST_LISTED} more")
            cli.ask_to_delete(_counted(found), shlex.join(["localllm", "sessions", "rm", *ids, "--yes"]), shown)
        history.remove(found)
    if as_json:
        removed = [session.id for session in found]
        cli.output.json({"schema_version": SCHEMA_VERSION, "removed": removed})
    else:
        cli.output.line(f"removed {_counted(found)}")
        if any(root_folders(kv_root())):
            cli.output.note("the prefix cache still has their pages: localllm cache clear")


def listed(limit: int) -> Iterator[str]:
    """The latest chats, a line each. Raises HistoryError."""
    if not nothing_is_kept():
        with History.open_to_read(history_file()) as history:
            for session, count in history.sessions(limit):
                yield f"{session.id}  {format_time(session.updated)}  {count:>3}  {session.title}"


def session_fields(session: Session, messages: int) -> dict[str, Any]:
    """A chat as the JSON of `sessions` has it."""
    return {
        "id": session.id,
        "title": session.title,
        "model": session.model,
        "created": session.created,
        "updated": session.updated,
        "messages": messages,
        "facts": dict(session.facts),
    }


def _chosen(history: History, words: Sequence[str] | None, everything: bool, command: str) -> list[Session]:
    """The chats that a line names, all of which must be there. Raises UsageError, HistoryError."""
    if everything and words:
        why = "--all is every chat, an id is one"
        fix = shlex.join(["localllm", "sessions", command, *words])
        raise UsageError("--all and an ID cannot go together", why=why, fix=fix)
    if everything:
        return [session for session, _ in reversed(history.sessions())]  # as an import would add them
    if not words:
        why = "neither an ID nor --all is on the line"
        raise UsageError("no chat is named", why=why, fix=Fix.command("sessions", command, "last"))
    found = {session.number: session for session in map(history.find, words)}
    return list(found.values())


def _counted(found: Sequence[Session]) -> str:
    return f"the chat {found[0].id} ({found[0].title})" if len(found) == 1 else f"{len(found)} chats"


def _short(model: str | None) -> str:
    """Shorten a folder to its name."""
    return "" if model is None else Path(model).name if model.startswith("/") else model


def _hit_fields(hit: Hit, query: str) -> Mapping[str, Any]:
    session, message = hit.session, hit.message
    text = session.title if message is None else search.excerpt(message.content, query)
    role = "title" if message is None else message.role
    created = session.updated if message is None else message.created
    return {"id": session.id, "title": session.title, "role": role, "created": created, "text": text}

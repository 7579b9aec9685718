"""What can still be read of a damaged history: conversations, for the one that is begun in its place.

A table is read from its first row on, and from its last one back, each as far as there is no damage: what lies between
is lost. Knows rows. Never writes into the damaged file.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from localllm.history.records import Conversation, Said, seconds_of

_STATES = ("complete", "interrupted")
Row = Mapping[str, Any]


def conversations(path: Path) -> list[Conversation]:
    """Of the damaged file, in the order in which they were begun; those without a message that can be read are left
    out. Raises nothing: there may be none."""
    for mode in ("ro", "ro&immutable=1"):  # with its log, where SQLite can still make sense of that
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True)) as of,
        ):
            of.row_factory = sqlite3.Row
            of.text_factory = lambda text: text.decode("utf-8", "replace")
            sessions, messages = _rows(of, "sessions"), _rows(of, "messages")
            found = [_conversation(sessions.get(number), said) for number, said in _by_session(messages)]
            if any(conversation.messages for conversation in found):
                return [conversation for conversation in found if conversation.messages]
    return []


def _rows(connection: sqlite3.Connection, table: str) -> dict[int, Row]:
    found: dict[int, Row] = {}
    for order in ("ASC", "DESC"):
        with suppress(sqlite3.Error, UnicodeError):
            for row in connection.execute(f"SELECT * FROM {table} ORDER BY number {order}"):
                if row["number"] in found and order == "DESC":  # both ways have met
                    break
                found[row["number"]] = dict(row)
    return dict(sorted(found.items()))


def _by_session(messages: Mapping[int, Row]) -> Iterator[tuple[int, list[Row]]]:
    grouped: dict[int, list[Row]] = {}
    for row in messages.values():
        if isinstance(row["session"], int):
            grouped.setdefault(row["session"], []).append(row)
    yield from grouped.items()


def _conversation(session: Row | None, rows: list[Row]) -> Conversation:
    """session: None where that was lost, and only what was said in it is left."""
    known = session or {}
    uids: dict[int, str] = {}
    said: list[Said] = []
    for row in rows:
        if not all(isinstance(row[name], str) for name in ("uid", "role", "content")):
            continue
        parent = uids.get(row["parent"]) if row["parent"] in uids else (said[-1].uid if said else None)
        uids[row["number"]] = row["uid"]
        said.append(
            Said(
                row["uid"],
                None if row["parent"] is None else parent,
                row["role"],
                row["content"],
                row["state"] if row["state"] in _STATES else "interrupted",
                _text(row["model"]),
                seconds_of(row["created"]),
                _object(row["fields"]),
                _object(row["facts"]),
            )
        )
    head = uids.get(known.get("head") or -1) or (said[-1].uid if said else None)
    return Conversation(
        uid=_text(known.get("uid")) or f"rescued-{rows[0]['uid']}",
        id=_text(known.get("id")) or "",
        title=_text(known.get("title")) or "rescued",
        model=_text(known.get("model")),
        system=_text(known.get("system")),
        created=seconds_of(known.get("created")),
        updated=seconds_of(known.get("updated")),
        head=head,
        messages=tuple(said),
        facts=_object(known.get("facts")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _object(value: object) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        found = json.loads(value) if isinstance(value, str) else None
        if isinstance(found, dict):
            return found
    return {}

"""Conversations that can still be read of a damaged history, for the one that is begun in its place.

A table is read from its first row on, and from its last one back, each as far as there is no damage. Knows rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from localllm.history.records import Conversation, Said, seconds_of

_Row = Mapping[str, Any]


def conversations(path: Path) -> list[Conversation]:
    """Those with a message that can be read, in the order in which they were begun. Raises nothing, writes nothing."""
    for mode in ("ro", "ro&immutable=1"):  # with its log, where SQLite can still make sense of that
        uri = f"{path.absolute().as_uri()}?mode={mode}"
        with suppress(sqlite3.Error), closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            sessions, messages = _rows(connection, "sessions"), _rows(connection, "messages")
            by_session: dict[Any, list[_Row]] = {}
            for row in messages.values():
                if all(isinstance(row[name], str) for name in ("uid", "role", "content")):
                    by_session.setdefault(row["session"], []).append(row)
            if by_session:
                return [_conversation(sessions.get(number, {}), rows) for number, rows in by_session.items()]
    return []


def _rows(connection: sqlite3.Connection, table: str) -> dict[int, _Row]:
    found: dict[int, _Row] = {}
    for order in ("ASC", "DESC"):
        with suppress(sqlite3.Error, UnicodeError):
            for row in connection.execute(f"SELECT * FROM {table} ORDER BY number {order}"):
                if row["number"] in found and order == "DESC":  # both ways have met
                    break
                found[row["number"]] = dict(row)
    return dict(sorted(found.items()))


def _conversation(session: _Row, rows: list[_Row]) -> Conversation:
    uids: dict[int, str] = {}
    said: list[Said] = []
    for row in rows:
        parent = uids.get(row["parent"], said[-1].uid if said else None)
        uids[row["number"]] = row["uid"]
        said.append(
            Said(
                uid=row["uid"],
                parent=None if row["parent"] is None else parent,
                role=row["role"],
                content=row["content"],
                state=row["state"] if row["state"] in ("complete", "interrupted") else "interrupted",
                model=_text(row["model"]),
                created=seconds_of(row["created"]),
                fields=_object(row["fields"]),
                facts=_object(row["facts"]),
            )
        )
    return Conversation(
        uid=_text(session.get("uid")) or f"rescued-{said[0].uid}",
        id=_text(session.get("id")) or "",
        title=_text(session.get("title")) or "rescued",
        model=_text(session.get("model")),
        system=_text(session.get("system")),
        created=seconds_of(session.get("created")),
        updated=seconds_of(session.get("updated")),
        head=uids.get(session.get("head") or -1, said[-1].uid),
        messages=tuple(said),
        facts=_object(session.get("facts")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _object(value: object) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        found = json.loads(value) if isinstance(value, str) else None
        if isinstance(found, dict):
            return found
    return {}

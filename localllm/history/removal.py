"""A session that was removed, as its file had it: to be put back as if it had never been gone.

Numbers are never given twice, so whoever still holds those of its messages is right again. Knows rows; the caller has
the transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.history.records import Conversation

_Row = Mapping[str, Any]


@dataclass(frozen=True)
class Removed:
    """What was removed. session, messages: the rows, in the order of their numbers. latest: `touched` of the session
    that then stood in front of the list, 0 where none was left."""

    conversation: Conversation
    session: _Row
    messages: tuple[_Row, ...]
    latest: int


def rows_of(connection: sqlite3.Connection, conversation: Conversation, number: int) -> Removed:
    """The session `number`, which is this conversation, with every row of it."""
    session = connection.execute("SELECT * FROM sessions WHERE number = ?", (number,)).fetchone()
    messages = connection.execute("SELECT * FROM messages WHERE session = ? ORDER BY number", (number,))
    others = connection.execute("SELECT max(touched) FROM sessions WHERE number <> ?", (number,)).fetchone()
    return Removed(conversation, dict(session), tuple(dict(row) for row in messages), others[0] or 0)


def delete(connection: sqlite3.Connection, number: int) -> None:
    """Deletes the session `number` with all that was said in it."""
    connection.execute("DELETE FROM messages WHERE session = ?", (number,))
    connection.execute("DELETE FROM sessions WHERE number = ?", (number,))


def put_back(connection: sqlite3.Connection, removed: Removed) -> bool:
    """Inserts every row as it was. False, with nothing done, where something has the place of one: the session was
    imported meanwhile, or the file is another one."""
    session = removed.session
    taken = "SELECT 1 FROM sessions WHERE number = ? OR uid = ? OR id = ?"
    if connection.execute(taken, (session["number"], session["uid"], session["id"])).fetchone():
        return False
    numbers = [(row["number"],) for row in removed.messages]
    if any(connection.execute("SELECT 1 FROM messages WHERE number = ?", number).fetchone() for number in numbers):
        return False
    # Those that were gone on with since stay in front of it, though they began to count below it.
    ahead = max(0, session["touched"] - removed.latest)
    connection.execute("UPDATE sessions SET touched = touched + ? WHERE touched > ?", (ahead, removed.latest))
    _insert(connection, "sessions", session)
    for row in removed.messages:
        _insert(connection, "messages", row)
    return True


def _insert(connection: sqlite3.Connection, table: str, row: _Row) -> None:
    places = ", ".join("?" for _ in row)
    connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", tuple(row.values()))

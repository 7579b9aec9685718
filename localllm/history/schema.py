"""The tables of the history, how older ones become these, and the index for searching.

A migration is never changed once it was released: a new one goes behind it.
"""

from __future__ import annotations

import sqlite3

APPLICATION_ID = 0x6C6C6D68  # in the file's header: a database of somebody else is not written into

# A message is a child of the one that it answers, so that another answer or another wording stands beside the first.
# Order is that of the numbers, and of `touched` for sessions: clocks jump. Times are there to be shown.
_FIRST = (
    """
    CREATE TABLE sessions (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        uid TEXT NOT NULL UNIQUE,
        title TEXT NOT NULL,
        model TEXT,
        system TEXT,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        touched INTEGER NOT NULL,
        head INTEGER,
        facts TEXT NOT NULL DEFAULT '{}'
    )
    """,
    """
    CREATE TABLE messages (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        session INTEGER NOT NULL REFERENCES sessions(number) ON DELETE CASCADE,
        parent INTEGER REFERENCES messages(number),
        uid TEXT NOT NULL,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('writing', 'complete', 'interrupted')),
        model TEXT,
        created REAL NOT NULL,
        fields TEXT NOT NULL DEFAULT '{}',
        facts TEXT NOT NULL DEFAULT '{}',
        UNIQUE (session, uid)
    )
    """,
    "CREATE INDEX sessions_by_touch ON sessions (touched)",
    "CREATE INDEX messages_by_parent ON messages (parent)",
    "CREATE INDEX messages_unfinished ON messages (number) WHERE state = 'writing'",
)
MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST,)
VERSION = len(MIGRATIONS)

# The index can be made again from the tables at any time, so it is not part of their version: a Python whose SQLite has
# no FTS5 takes the triggers away and leaves the index stale, the next one with FTS5 builds it anew. An answer that is
# being written is not in it: each of its sentences would index all of it again.
_INDEXED = (
    ("sessions", "title", "title_words", "words_title", "{0}.title IS NOT NULL", "title"),
    ("messages", "content", "message_words", "words_message", "{0}.state <> 'writing'", "content, state"),
)


def has_fts5(connection: sqlite3.Connection) -> bool:
    """Return whether this machine's SQLite can search words."""
    return bool(connection.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'").fetchone())


def has_index(connection: sqlite3.Connection) -> bool:
    """Return whether the index is kept up to date by all of its triggers."""
    return len(_triggers(connection)) == 3 * len(_INDEXED)


def migrate(connection: sqlite3.Connection, known: int) -> None:
    """Bring the tables from version `known` to VERSION; inside a transaction of the caller's."""
    for statement in (statement for statements in MIGRATIONS[known:] for statement in statements):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def make_index(connection: sqlite3.Connection) -> None:
    """Build the index from the tables, with the triggers that keep it; inside a transaction of the caller's."""
    drop_triggers(connection)
    for table, column, index, trigger, is_indexed, changes in _INDEXED:
        connection.execute(f"DROP TABLE IF EXISTS {index}")
        connection.execute(
            f"CREATE VIRTUAL TABLE {index} USING fts5({column}, content='{table}', content_rowid='number', "
            "tokenize='unicode61 remove_diacritics 2')"
        )
        connection.execute(
            f"INSERT INTO {index} (rowid, {column}) SELECT number, {column} FROM {table} "
            f"WHERE {is_indexed.format(table)}"
        )
        add = f"INSERT INTO {index} (rowid, {column}) SELECT new.number, new.{column} WHERE {is_indexed.format('new')};"
        drop = (
            f"INSERT INTO {index} ({index}, rowid, {column}) "
            f"SELECT 'delete', old.number, old.{column} WHERE {is_indexed.format('old')};"
        )
        for name, event, body in (
            ("added", "INSERT", add), ("removed", "DELETE", drop), ("changed", f"UPDATE OF {changes}", drop + add),
        ):  # fmt: skip
            connection.execute(f"CREATE TRIGGER {trigger}_{name} AFTER {event} ON {table} BEGIN {body} END")


def drop_triggers(connection: sqlite3.Connection) -> None:
    """Leave the index as it is, to be built anew; inside a transaction of the caller's."""
    for name in _triggers(connection):
        connection.execute(f"DROP TRIGGER IF EXISTS {name}")


def _triggers(connection: sqlite3.Connection) -> list[str]:
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'words%'")
    return [name for (name,) in found]

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

# The index can be made again from the tables at any time, so it is no part of their version: a Python whose SQLite has
# no FTS5 takes the triggers away and leaves the index stale, the next one with FTS5 builds it anew. An answer that is
# being written is not in it: each of its sentences would index all of it again.
_WORDS = (
    "DROP TABLE IF EXISTS message_words",
    "DROP TABLE IF EXISTS title_words",
    """
    CREATE VIRTUAL TABLE message_words USING fts5(
        content, content='messages', content_rowid='number', tokenize='unicode61 remove_diacritics 2'
    )
    """,
    """
    CREATE VIRTUAL TABLE title_words USING fts5(
        title, content='sessions', content_rowid='number', tokenize='unicode61 remove_diacritics 2'
    )
    """,
    "INSERT INTO title_words (title_words) VALUES ('rebuild')",
    "INSERT INTO message_words (rowid, content) SELECT number, content FROM messages WHERE state <> 'writing'",
)
_TRIGGERS = {
    "words_message_added": """
        AFTER INSERT ON messages WHEN new.state <> 'writing' BEGIN
            INSERT INTO message_words (rowid, content) VALUES (new.number, new.content);
        END""",
    "words_message_removed": """
        AFTER DELETE ON messages WHEN old.state <> 'writing' BEGIN
            INSERT INTO message_words (message_words, rowid, content) VALUES ('delete', old.number, old.content);
        END""",
    "words_message_changed": """
        AFTER UPDATE OF content, state ON messages BEGIN
            INSERT INTO message_words (message_words, rowid, content)
                SELECT 'delete', old.number, old.content WHERE old.state <> 'writing';
            INSERT INTO message_words (rowid, content) SELECT new.number, new.content WHERE new.state <> 'writing';
        END""",
    "words_title_added": """
        AFTER INSERT ON sessions BEGIN
            INSERT INTO title_words (rowid, title) VALUES (new.number, new.title);
        END""",
    "words_title_removed": """
        AFTER DELETE ON sessions BEGIN
            INSERT INTO title_words (title_words, rowid, title) VALUES ('delete', old.number, old.title);
        END""",
    "words_title_changed": """
        AFTER UPDATE OF title ON sessions BEGIN
            INSERT INTO title_words (title_words, rowid, title) VALUES ('delete', old.number, old.title);
            INSERT INTO title_words (rowid, title) VALUES (new.number, new.title);
        END""",
}


def has_fts5(connection: sqlite3.Connection) -> bool:
    """Whether this machine's SQLite can search words."""
    return bool(connection.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'").fetchone())


def has_index(connection: sqlite3.Connection) -> bool:
    """Whether the index is kept up to date by all of its triggers."""
    return _triggers(connection) == set(_TRIGGERS)


def migrate(connection: sqlite3.Connection, known: int) -> None:
    """Brings the tables from version `known` to VERSION; inside a transaction of the caller's."""
    for statements in MIGRATIONS[known:]:
        for statement in statements:
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def make_index(connection: sqlite3.Connection) -> None:
    """Builds the index from the tables, with the triggers that keep it; inside a transaction of the caller's."""
    drop_triggers(connection)
    for statement in _WORDS:
        connection.execute(statement)
    for name, body in _TRIGGERS.items():
        connection.execute(f"CREATE TRIGGER {name} {body}")


def drop_triggers(connection: sqlite3.Connection) -> None:
    """Leaves the index as it is, to be built anew; inside a transaction of the caller's."""
    for name in _triggers(connection):
        connection.execute(f"DROP TRIGGER IF EXISTS {name}")


def _triggers(connection: sqlite3.Connection) -> set[str]:
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'words%'")
    return {name for (name,) in found}

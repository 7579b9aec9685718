"""Sessions and their messages: kept, found, forked and removed. No message is ever overwritten.

A session is a tree of messages; its head says which path of it is shown. Another answer, or another wording of a
question, is a child of the same parent. Knows no terminal and no template.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localllm.errors import Fix, HistoryError
from localllm.history import rescue, search
from localllm.history.database import PATIENCE_S, DamagedError, Database, LockedError
from localllm.history.records import PINNED, Conversation, Hit, Message, Said, Session, State, clean

LAST = "last"
_ID_SYLLABLES = 3  # half a million ids that can be said and typed
_ID = re.compile(r"[a-z0-9-]{1,40}")
_COPY = " (copy)"
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"
_SAID = ("role", "content", "state", "model", "created", "fields", "facts")  # of a message, wherever it goes
_Row = Mapping[str, Any]

# The messages that a session shows, from its head up; `depth` counts them.
_SHOWN = """
    WITH RECURSIVE shown (number, depth) AS (
        SELECT number, 0 FROM messages WHERE number = ?
        UNION ALL
        SELECT messages.parent, depth + 1 FROM shown JOIN messages ON messages.number = shown.number
        WHERE messages.parent IS NOT NULL
    )
    SELECT messages.* FROM shown JOIN messages USING (number) ORDER BY depth DESC
"""
_COUNTED = """
    WITH RECURSIVE listed AS (SELECT * FROM sessions ORDER BY touched DESC LIMIT ?),
    shown (session, message) AS (
        SELECT number, head FROM listed WHERE head IS NOT NULL
        UNION ALL
        SELECT shown.session, messages.parent FROM shown JOIN messages ON messages.number = shown.message
        WHERE messages.parent IS NOT NULL
    )
    SELECT listed.*, count(shown.message) AS count FROM listed LEFT JOIN shown ON shown.session = listed.number
    GROUP BY listed.number ORDER BY listed.touched DESC
"""


class GoneError(HistoryError):
    """The session was removed, by another process or another command."""


@dataclass(frozen=True)
class Removed:
    """A session that was removed. session, messages: its rows. latest: `touched` of the session that then stood in
    front of the list, 0 where none was left."""

    conversation: Conversation
    session: _Row
    messages: tuple[_Row, ...]
    latest: int


class History:
    """The history in one file. A method raises HistoryError where the file refuses, and then has changed nothing.

    num_rescued: chats that a damaged file, in whose place this one was begun, still had.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.num_rescued = 0
        try:
            if database.moved_to is not None:
                self._rescue(database.moved_to)
            self._settle()
        except BaseException:
            database.close()
            raise

    @classmethod
    def open(cls, path: Path, *, patience_s: float = PATIENCE_S) -> History:
        """Open to write; the file is made where there is none. patience_s: how long another process is awaited."""
        return cls(Database(path, writable=True, patience_s=patience_s))

    @classmethod
    def open_to_read(cls, path: Path) -> History:
        """`open`, and where the file cannot be written, `peek`."""
        try:
            return cls.open(path)
        except LockedError:
            raise
        except HistoryError as error:
            try:
                path.stat()
            except OSError:
                raise error from None
            return cls.peek(path)

    @classmethod
    def peek(cls, path: Path) -> History:
        """Open to read alone; nothing is written, and nothing mended."""
        return cls(Database(path, writable=False))

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def moved_to(self) -> Path | None:
        """Where a damaged file was put, in whose place this one was begun."""
        return self._database.moved_to

    def close(self) -> None:
        self._database.close()

    @property
    def identity(self) -> os.stat_result:
        """Of the file, which another one of the same name does not share."""
        return self._database.identity

    def is_in_place(self) -> bool:
        return self._database.is_in_place()

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block whose changes are written as a whole, or not at all."""
        with self._database.writing():
            yield

    # Sessions

    def begin(self, title: str, model: str | None, system: str | None) -> Session:
        with self._database.writing() as connection:
            return self._session(_insert_session(connection, _blank(title, model, system)))

    def sessions(self, limit: int = -1) -> list[tuple[Session, int]]:
        """Return the sessions, the latest in front, each with the number of messages it shows."""
        return [(_as_session(row), row["count"]) for row in self._database.rows(_COUNTED, (limit,))]

    def count(self) -> int:
        return int(self._database.rows("SELECT count(*) FROM sessions")[0][0])

    def find(self, word: str) -> Session:
        """Return the session with this id, the only one whose id begins so or whose title has this text, or `last`.

        Raises HistoryError that names the candidates where it is none or several.
        """
        like = search.like(word)
        if not word.strip():
            found = []
        elif word == LAST:
            found = self._where("1 ORDER BY touched DESC LIMIT 1")
        else:
            found = (
                self._where("id = ?", word.casefold())
                or self._where("id LIKE ? ESCAPE '\\'", f"{like}%")
                or self._where("title LIKE ? ESCAPE '\\'", f"%{like}%")
            )
        if len(found) == 1:
            return found[0]
        if found:
            shown = ", ".join(f"{session.id} ({session.title})" for session in found[:5])
            why = f"it fits {shown}" + (f" and {len(found) - 5} more" if len(found) > 5 else "")
            raise HistoryError(f"{word[:80]!r} is more than one chat", why=why, fix=Fix.command("sessions", "list"))
        if count := self.count():
            why = f"no saved chat has this id or title ({count} in all)"
            raise HistoryError(f"there is no chat {word[:80]!r}", why=why, fix=Fix.command("sessions", "list"))
        raise HistoryError("no chat is saved yet", why=f"{self._database.path} has none", fix=Fix.command("chat"))

    def refresh(self, session: Session) -> Session:
        """Return the session as it is now. Raises GoneError."""
        found = self._where("number = ? AND uid = ?", session.number, session.uid)
        if not found:
            raise _gone(session)
        return found[0]

    def update(self, session: Session, *, title: str, model: str | None, system: str | None) -> None:
        """Change title, model and system message. Raises GoneError."""
        self._set(session, title=clean(title), model=clean(model), system=clean(system))

    def rename(self, session: Session, title: str) -> Session:
        """Give the session another title; its place in the list stays. Raises GoneError."""
        return self._set(session, title=clean(title))

    def pin(self, session: Session, is_pinned: bool) -> Session:
        """Pin the session, or take the pin away; its place in the list stays. Raises GoneError."""
        with self._database.writing():
            facts = {name: fact for name, fact in self.refresh(session).facts.items() if name != PINNED}
            return self._set(session, facts=json.dumps({**facts, PINNED: True} if is_pinned else facts))

    def _set(self, session: Session, **values: Any) -> Session:
        with self._database.writing() as connection:
            self.refresh(session)
            changes = ", ".join(f"{name} = ?" for name in values)
            connection.execute(f"UPDATE sessions SET {changes} WHERE number = ?", (*values.values(), session.number))
            return self._session(session.number)

    def show(self, session: Session, head: int | None) -> None:
        """Make `head` the message that is shown last. Raises GoneError."""
        with self._database.writing() as connection:
            _touch(connection, session, head)

    def fork(self, session: Session, head: int | None) -> Session:
        """Return a copy, named so in its title, of what leads to the message `head` of another session."""
        with self._database.writing() as connection:
            title = f"{session.title.removesuffix(_COPY)}{_COPY}" if session.title else ""
            copy = replace(_blank(title, session.model, session.system), facts={"forked_from": session.id})
            number, parent = _insert_session(connection, copy), None
            for message in self._path(head):
                parent = _insert_message(connection, number, parent, _said(message, secrets.token_hex(8)))
            connection.execute("UPDATE sessions SET head = ? WHERE number = ?", (parent, number))
            return self._session(number)

    def remove(self, sessions: Sequence[Session]) -> None:
        """Delete the sessions with all their messages, also from the index and the log."""
        with self._database.writing() as connection:
            for session in sessions:
                _delete(connection, session)
        self._database.forget_deleted()

    def take_out(self, session: Session) -> Removed:
        """`remove` one; returns what `put_back` needs to undo that. Raises GoneError."""
        with self._database.writing() as connection:
            conversation = self.conversation(session)
            (row,) = self._database.rows("SELECT * FROM sessions WHERE number = ?", (session.number,))
            messages = self._database.rows(
                "SELECT * FROM messages WHERE session = ? ORDER BY number", (session.number,)
            )
            others = self._database.rows("SELECT max(touched) FROM sessions WHERE number <> ?", (session.number,))
            _delete(connection, session)
        self._database.forget_deleted()
        return Removed(conversation, dict(row), tuple(map(dict, messages)), others[0][0] or 0)

    def put_back(self, removed: Removed) -> Session:
        """Undo `take_out`: every branch, id, pin and place in the list is as it was, also for whoever has it open.

        Where something has its place meanwhile (it was imported, or the file is another one), it is added as by an
        import.
        """
        row = removed.session
        with self._database.writing() as connection:
            taken = self._where("number = ? OR uid = ? OR id = ?", row["number"], row["uid"], row["id"])
            held = "SELECT 1 FROM messages WHERE number = ?"
            if taken or any(connection.execute(held, (each["number"],)).fetchone() for each in removed.messages):
                return self.add(removed.conversation)[0]
            # Those that were gone on with since stay in front of it, though they began to count below it.
            ahead = max(0, row["touched"] - removed.latest)
            connection.execute("UPDATE sessions SET touched = touched + ? WHERE touched > ?", (ahead, removed.latest))
            _insert(connection, "sessions", row)
            for message in removed.messages:
                _insert(connection, "messages", message)
            return self._session(row["number"])

    # Messages

    def append(
        self,
        session: Session,
        parent: int | None,
        role: str,
        content: str,
        *,
        state: State = "complete",
        model: str | None = None,
        fields: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> int:
        """Keep a message behind `parent` and show it last; returns its number. Raises GoneError.

        The disk has it when this returns, unless it is still being written.
        """
        said = Said(secrets.token_hex(8), None, role, content, state, model, time.time(), fields or {}, facts or {})
        is_begun = state == "writing"  # as `write` goes on with it
        with self._database.writing(synced=not is_begun, patience_s=0 if is_begun else None) as connection:
            self.refresh(session)
            number = _insert_message(connection, session.number, parent, said)
            _touch(connection, session, number)
            return number

    def write(self, message: int, content: str) -> None:
        """Keep an answer as far as it has come. Does not wait for others: the next sentence brings this one along."""
        with self._database.writing(synced=False, patience_s=0) as connection:
            connection.execute(
                "UPDATE messages SET content = ?, state = 'writing' WHERE number = ?", (clean(content), message)
            )

    def finish(self, message: int, content: str, state: State, facts: Mapping[str, Any]) -> None:
        """Keep an answer that has ended; the disk has it when this returns."""
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE messages SET content = ?, state = ?, facts = ? WHERE number = ?",
                (clean(content), state, json.dumps(facts), message),
            )

    def path(self, session: Session) -> list[Message]:
        """Return the messages that the session shows, in order."""
        return self._path(session.head)

    def branch(self, message: int) -> list[Message]:
        """Return what leads to the message, and on from it what was said last."""
        found = self._path(message)
        statement = "SELECT * FROM messages WHERE parent = ? ORDER BY number DESC LIMIT 1"
        while rows := self._database.rows(statement, (found[-1].number,)) if found else []:
            found.append(_as_message(rows[0]))
        return found

    def wordings(self, message: int) -> list[int]:
        """Return the messages that stand where this one does, it among them, in the order in which they were said."""
        statement = (
            "SELECT other.number FROM messages AS other JOIN messages AS one ON other.session = one.session "
            "AND other.parent IS one.parent WHERE one.number = ? ORDER BY other.number"
        )
        return [row["number"] for row in self._database.rows(statement, (message,))]

    def tree(self, session: Session) -> list[Message]:
        """Return every message of the session, in the order in which they were said."""
        rows = self._database.rows("SELECT * FROM messages WHERE session = ? ORDER BY number", (session.number,))
        return list(map(_as_message, rows))

    def questions(self, limit: int) -> list[str]:
        """Return the questions, the latest first; each text once."""
        found = self._database.rows(
            "SELECT content, max(number) AS latest FROM messages WHERE role = 'user' AND content <> '' "
            "GROUP BY content ORDER BY latest DESC LIMIT ?",
            (limit,),
        )
        return [row["content"] for row in found]

    def search(self, query: str, limit: int) -> list[Hit]:
        """Return titles and messages with all words of `query`, the latest first; a phrase is in double quotes."""
        found = search.numbers(self._database, "sessions", query, limit)
        # What another process removes meanwhile is left out.
        hits = [Hit(session, None) for number in found for session in self._where("number = ?", number)]
        for number in search.numbers(self._database, "messages", query, limit - len(hits)):
            for row in self._database.rows("SELECT * FROM messages WHERE number = ?", (number,)):
                hits += [Hit(session, _as_message(row)) for session in self._where("number = ?", row["session"])]
        return hits

    # Conversations on their way

    def conversation(self, session: Session) -> Conversation:
        """Return the whole session, every branch, for another file."""
        session = self.refresh(session)
        messages = self.tree(session)
        uids: dict[int | None, str] = {message.number: message.uid for message in messages}
        said = tuple(_said(message, message.uid, uids.get(message.parent)) for message in messages)
        return Conversation(
            session.uid, session.id, session.title, session.model, session.system, session.created, session.updated,
            uids.get(session.head), said, session.facts,
        )  # fmt: skip

    def add(self, conversation: Conversation) -> tuple[Session, int]:
        """Add a conversation, or what it has more than the one that is here; returns how many messages were new, or
        are whole now."""
        with self._database.writing() as connection:
            found = self._where("uid = ?", conversation.uid)
            number = found[0].number if found else _insert_session(connection, conversation)
            here = self._database.rows("SELECT uid, number, state FROM messages WHERE session = ?", (number,))
            numbers: dict[str | None, int] = {row["uid"]: row["number"] for row in here}
            cut = {row["uid"] for row in here if row["state"] != "complete"}
            num_mended = 0
            for said in conversation.messages:
                uid = clean(said.uid)
                if uid not in numbers:
                    parent = numbers[clean(said.parent)] if said.parent is not None else None
                    numbers[uid] = _insert_message(connection, number, parent, said)
                elif uid in cut and said.state == "complete":
                    self.finish(numbers[uid], said.content, said.state, said.facts)
                    num_mended += 1
            num_new = len(numbers) - len(here)
            head = numbers[clean(conversation.head)] if conversation.head is not None else None
            # Of a chat that went on in both places the one here stays shown.
            if not found or (num_new and found[0].head in {message.number for message in self._path(head)}):
                connection.execute(
                    "UPDATE sessions SET head = ?, updated = ? WHERE number = ?", (head, conversation.updated, number)
                )
            return self._session(number), num_new + num_mended

    def _rescue(self, damaged: Path) -> None:
        found = rescue.conversations(damaged)
        with suppress(HistoryError):
            with self.together():
                for conversation in found:
                    self.add(conversation)
            self.num_rescued = len(found)

    def _settle(self) -> None:
        """Answers that a kill cut short are interrupted ones. One that another process is writing becomes one that is
        being written again with its next sentence. Where the file cannot be written now, they can still be read."""
        if self._database.writable and self._database.rows("SELECT 1 FROM messages WHERE state = 'writing' LIMIT 1"):
            try:
                with self._database.writing() as connection:
                    connection.execute("UPDATE messages SET state = 'interrupted' WHERE state = 'writing'")
            except DamagedError:
                raise
            except HistoryError:
                pass

    def _path(self, head: int | None) -> list[Message]:
        return list(map(_as_message, self._database.rows(_SHOWN, (head,))))

    def _where(self, condition: str, *values: Any) -> list[Session]:
        return list(map(_as_session, self._database.rows(f"SELECT * FROM sessions WHERE {condition}", values)))

    def _session(self, number: int) -> Session:
        return self._where("number = ?", number)[0]


def _blank(title: str, model: str | None, system: str | None) -> Conversation:
    now = time.time()
    return Conversation(secrets.token_hex(8), "", title, model, system, now, now, None, ())


def _insert(connection: sqlite3.Connection, table: str, row: _Row) -> int:
    places = ", ".join("?" for _ in row)
    values = [clean(value) if isinstance(value, str) else value for value in row.values()]
    done = connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", values)
    assert done.lastrowid is not None
    return done.lastrowid


def _insert_session(connection: sqlite3.Connection, conversation: Conversation) -> int:
    wanted = conversation.id if _ID.fullmatch(conversation.id) and conversation.id != LAST else ""
    while not wanted or connection.execute("SELECT 1 FROM sessions WHERE id = ?", (wanted,)).fetchone():
        wanted = "".join(secrets.choice(_CONSONANTS) + secrets.choice(_VOWELS) for _ in range(_ID_SYLLABLES))
    names = ("uid", "title", "model", "system", "created", "updated")
    row = {name: getattr(conversation, name) for name in names}
    touched = connection.execute("SELECT coalesce(max(touched), 0) + 1 FROM sessions").fetchone()[0]
    facts = json.dumps(conversation.facts)
    return _insert(connection, "sessions", {"id": wanted, **row, "facts": facts, "touched": touched})


def _insert_message(connection: sqlite3.Connection, session: int, parent: int | None, said: Said) -> int:
    values = {name: getattr(said, name) for name in ("uid", *_SAID)}
    values |= {"fields": json.dumps(said.fields), "facts": json.dumps(said.facts)}
    return _insert(connection, "messages", {"session": session, "parent": parent, **values})


def _delete(connection: sqlite3.Connection, session: Session) -> None:
    connection.execute("DELETE FROM messages WHERE session = ?", (session.number,))
    connection.execute("DELETE FROM sessions WHERE number = ?", (session.number,))


def _touch(connection: sqlite3.Connection, session: Session, head: int | None) -> None:
    done = connection.execute(
        "UPDATE sessions SET head = ?, updated = ?, touched = (SELECT max(touched) + 1 FROM sessions) WHERE number = ?",
        (head, time.time(), session.number),
    )
    if not done.rowcount:
        raise _gone(session)


def _as_session(row: sqlite3.Row) -> Session:
    names = ("number", "id", "uid", "title", "model", "system", "created", "updated", "head")
    return Session(**{name: row[name] for name in names}, facts=json.loads(row["facts"]))


def _as_message(row: sqlite3.Row) -> Message:
    names = ("number", "parent", "uid", "role", "content", "state", "model", "created")
    values = {name: row[name] for name in names}
    return Message(**values, fields=json.loads(row["fields"]), facts=json.loads(row["facts"]))


def _said(message: Message, uid: str, parent: str | None = None) -> Said:
    return Said(uid, parent, **{name: getattr(message, name) for name in _SAID})


def _gone(session: Session) -> GoneError:
    what = f"the chat {session.id} is not in the history any more"
    return GoneError(what, why="it was removed", fix=Fix.command("sessions", "list"))

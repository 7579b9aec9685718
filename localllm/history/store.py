"""Sessions and their messages: what is kept, found, forked and removed. Nothing that was said is ever overwritten.

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
from pathlib import Path
from typing import Any

from localllm.errors import Fix, HistoryError
from localllm.history import removal, rescue, search
from localllm.history.database import PATIENCE_S, DamagedError, Database, LockedError
from localllm.history.records import PINNED, Conversation, Hit, Message, Said, Session, State, clean
from localllm.history.removal import Removed

LAST = "last"
_ID_SYLLABLES = 3  # half a million ids that can be said and typed
_ID = re.compile(r"[a-z0-9-]{1,40}")
_COPY = " (copy)"
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"

# The messages that a session shows, from its head up; `depth` counts them.
_SHOWN = """
    WITH RECURSIVE shown (number, depth) AS (
        SELECT number, 0 FROM messages WHERE number = ?
        UNION ALL
        SELECT messages.parent, depth + 1 FROM shown JOIN messages ON messages.number = shown.number
        WHERE messages.parent IS NOT NULL
    )
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


class History:
    """The history in one file. A method raises HistoryError where the file refuses, and then has changed nothing.

    num_rescued: chats that a damaged file, in whose place this one was begun, still had.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.num_rescued = 0
        try:
            if database.moved_to is not None:
                self.num_rescued = self._rescue(database.moved_to)
            self._settle()
        except BaseException:
            database.close()
            raise

    @classmethod
    def open(cls, path: Path, *, patience_s: float = PATIENCE_S) -> History:
        """To be written into; the file is made where there is none. patience_s: how long another process is awaited."""
        return cls(Database(path, writable=True, patience_s=patience_s))

    @classmethod
    def open_to_read(cls, path: Path) -> History:
        """As `open`, and where the file cannot be written, to read alone."""
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
        """To read alone; nothing is written, and nothing mended."""
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
        """Whether the file is still where it was opened."""
        return self._database.is_in_place()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is written inside is written as a whole, or not at all."""
        with self._database.writing():
            yield

    # Sessions

    def begin(self, title: str, model: str | None, system: str | None) -> Session:
        """A new session, empty."""
        now = time.time()
        blank = Conversation(secrets.token_hex(8), "", title, model, system, now, now, None, ())
        with self._database.writing() as connection:
            return self._session(_insert_session(connection, blank))

    def sessions(self, limit: int = -1) -> list[tuple[Session, int]]:
        """The sessions, the one that was gone on with last in front, each with the number of messages it shows."""
        return [(_as_session(row), row["count"]) for row in self._database.rows(_COUNTED, (limit,))]

    def count(self) -> int:
        """How many sessions there are."""
        return int(self._database.rows("SELECT count(*) FROM sessions")[0][0])

    def find(self, word: str) -> Session:
        """The session with this id, the only one whose id begins so or whose title has this text, or `last`.

        Raises HistoryError that names the candidates where it is none or several.
        """
        if not word.strip():
            found = []
        elif word == LAST:
            found = self._where("1 ORDER BY touched DESC LIMIT 1")
        else:
            like = search.like(word)
            found = (
                self._where("id = ?", word.casefold())
                or self._where("id LIKE ? ESCAPE '\\'", f"{like}%")
                or self._where("title LIKE ? ESCAPE '\\'", f"%{like}%")
            )
        if len(found) == 1:
            return found[0]
        raise _ambiguous(word, found) if found else self._absent(word)

    def refresh(self, session: Session) -> Session:
        """The session as it is now. Raises GoneError."""
        found = self._where("number = ? AND uid = ?", session.number, session.uid)
        if not found:
            raise _gone(session.id)
        return found[0]

    def update(self, session: Session, *, title: str, model: str | None, system: str | None) -> None:
        """Changes what is said about the session. Raises GoneError."""
        with self._database.writing() as connection:
            values = (clean(title), clean(model), clean(system), session.number)
            done = connection.execute("UPDATE sessions SET title = ?, model = ?, system = ? WHERE number = ?", values)
            if not done.rowcount:
                raise _gone(session.id)

    def rename(self, session: Session, title: str) -> Session:
        """Gives it another title; its place in the list stays. Raises GoneError."""
        with self._database.writing() as connection:
            self.refresh(session)
            connection.execute("UPDATE sessions SET title = ? WHERE number = ?", (clean(title), session.number))
            return self._session(session.number)

    def pin(self, session: Session, is_pinned: bool) -> Session:
        """Pins it, or takes the pin away; its place in the list stays. Raises GoneError."""
        with self._database.writing() as connection:
            facts = {name: fact for name, fact in self.refresh(session).facts.items() if name != PINNED}
            facts |= {PINNED: True} if is_pinned else {}
            connection.execute("UPDATE sessions SET facts = ? WHERE number = ?", (json.dumps(facts), session.number))
            return self._session(session.number)

    def show(self, session: Session, head: int | None) -> None:
        """Makes `head` the message that is shown last. Raises GoneError."""
        with self._database.writing() as connection:
            _touch(connection, session, head)

    def fork(self, session: Session, head: int | None) -> Session:
        """A new session that begins with what leads to the message `head` of another: a copy, which outlives it, and
        says in its title that it is one."""
        with self._database.writing() as connection:
            facts = {"forked_from": session.id}
            now, title = time.time(), _of_copy(session.title)
            copy = Conversation(
                secrets.token_hex(8), "", title, session.model, session.system, now, now, None, (), facts
            )
            number, parent = _insert_session(connection, copy), None
            for message in self._path(head):
                said = Said(secrets.token_hex(8), None, **_told_by(message))
                parent = _insert_message(connection, number, parent, said)
            connection.execute("UPDATE sessions SET head = ? WHERE number = ?", (parent, number))
            return self._session(number)

    def remove(self, sessions: Sequence[Session]) -> None:
        """Deletes them with all that was said in them, also from the index and the log."""
        with self._database.writing() as connection:
            for session in sessions:
                removal.delete(connection, session.number)
        self._database.forget_deleted()

    def take_out(self, session: Session) -> Removed:
        """Deletes it as `remove` does; returns what `put_back` needs to undo that. Raises GoneError."""
        with self._database.writing() as connection:
            removed = removal.rows_of(connection, self.conversation(session), session.number)
            removal.delete(connection, session.number)
        self._database.forget_deleted()
        return removed

    def put_back(self, removed: Removed) -> Session:
        """Undoes `take_out`: every branch, id, pin and place in the list is as it was, also for whoever has it open.

        Where something has its place meanwhile, it is taken in as an import would be.
        """
        with self._database.writing() as connection:
            if removal.put_back(connection, removed):
                return self._session(removed.session["number"])
            return self.add(removed.conversation)[0]

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
        """Keeps a message behind `parent` and shows it last; returns its number. Raises GoneError.

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
        """Keeps an answer as far as it has come. Does not wait for others: the next sentence brings this one along."""
        with self._database.writing(synced=False, patience_s=0) as connection:
            connection.execute(
                "UPDATE messages SET content = ?, state = 'writing' WHERE number = ?", (clean(content), message)
            )

    def finish(self, message: int, content: str, state: State, facts: Mapping[str, Any]) -> None:
        """Keeps an answer that has ended; the disk has it when this returns."""
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE messages SET content = ?, state = ?, facts = ? WHERE number = ?",
                (clean(content), state, json.dumps(facts), message),
            )

    def path(self, session: Session) -> list[Message]:
        """The messages that the session shows, in order."""
        return self._path(session.head)

    def branch(self, message: int) -> list[Message]:
        """What leads to the message, and on from it what was said last."""
        found = self._path(message)
        statement = "SELECT * FROM messages WHERE parent = ? ORDER BY number DESC LIMIT 1"
        while rows := self._database.rows(statement, (found[-1].number,)) if found else []:
            found.append(_as_message(rows[0]))
        return found

    def wordings(self, message: int) -> list[int]:
        """The messages that stand where this one does, it among them, in the order in which they were said."""
        statement = (
            "SELECT other.number FROM messages AS other JOIN messages AS one ON other.session = one.session "
            "AND other.parent IS one.parent WHERE one.number = ? ORDER BY other.number"
        )
        return [row["number"] for row in self._database.rows(statement, (message,))]

    def tree(self, session: Session) -> list[Message]:
        """Every message of the session, in the order in which they were said."""
        rows = self._database.rows("SELECT * FROM messages WHERE session = ? ORDER BY number", (session.number,))
        return [_as_message(row) for row in rows]

    def questions(self, limit: int) -> list[str]:
        """What was asked, the latest first; each text once."""
        found = self._database.rows(
            "SELECT content, max(number) AS latest FROM messages WHERE role = 'user' AND content <> '' "
            "GROUP BY content ORDER BY latest DESC LIMIT ?",
            (limit,),
        )
        return [row["content"] for row in found]

    def search(self, query: str, limit: int) -> list[Hit]:
        """Titles and messages with all words of `query`, the latest first; words in double quotes are one phrase."""
        numbers = search.sessions(self._database, query, limit)
        # What another process removes meanwhile is left out.
        hits = [Hit(session, None) for number in numbers for session in self._where("number = ?", number)]
        for number, message in search.messages(self._database, query, limit - len(hits)):
            for row in self._database.rows("SELECT * FROM messages WHERE number = ?", (message,)):
                hits += [Hit(session, _as_message(row)) for session in self._where("number = ?", number)]
        return hits

    # Conversations on their way

    def conversation(self, session: Session) -> Conversation:
        """The whole session, every branch, for another file."""
        session = self.refresh(session)
        messages = self.tree(session)
        uids = {message.number: message.uid for message in messages}
        said = tuple(
            Said(message.uid, uids[message.parent] if message.parent is not None else None, **_told_by(message))
            for message in messages
        )
        head = uids.get(session.head) if session.head is not None else None
        return Conversation(
            session.uid, session.id, session.title, session.model, session.system, session.created, session.updated,
            head, said, session.facts,
        )  # fmt: skip

    def add(self, conversation: Conversation) -> tuple[Session, int]:
        """Takes a conversation in, or what it has more than the one that is here; how many messages were new, or are
        whole now."""
        with self._database.writing() as connection:
            found = self._where("uid = ?", conversation.uid)
            number = found[0].number if found else _insert_session(connection, conversation)
            before = found[0].head if found else None
            numbers, cut = _numbers(connection, number)
            num_known, num_mended = len(numbers), 0
            for said in conversation.messages:
                uid = clean(said.uid)
                if uid not in numbers:
                    parent = numbers[clean(said.parent)] if said.parent is not None else None
                    numbers[uid] = _insert_message(connection, number, parent, said)
                elif uid in cut and said.state == "complete":
                    self.finish(numbers[uid], said.content, said.state, said.facts)
                    num_mended += 1
            head = numbers[clean(conversation.head)] if conversation.head is not None else None
            # Of a chat that went on in both places the one here stays shown.
            if not found or (len(numbers) > num_known and before in {message.number for message in self._path(head)}):
                connection.execute(
                    "UPDATE sessions SET head = ?, updated = ? WHERE number = ?", (head, conversation.updated, number)
                )
            return self._session(number), len(numbers) - num_known + num_mended

    def _rescue(self, damaged: Path) -> int:
        """Takes over what can be read of a damaged file; how many chats."""
        found = rescue.conversations(damaged)
        with suppress(HistoryError), self.together():
            for conversation in found:
                self.add(conversation)
            return len(found)
        return 0

    def _path(self, head: int | None) -> list[Message]:
        statement = _SHOWN + "SELECT messages.* FROM shown JOIN messages USING (number) ORDER BY depth DESC"
        return [_as_message(row) for row in self._database.rows(statement, (head,))]

    def _where(self, condition: str, *values: Any) -> list[Session]:
        return [_as_session(row) for row in self._database.rows(f"SELECT * FROM sessions WHERE {condition}", values)]

    def _session(self, number: int) -> Session:
        return self._where("number = ?", number)[0]

    def _absent(self, word: str) -> HistoryError:
        count = self.count()
        if not count:
            return HistoryError("no chat is kept yet", why=f"{self._database.path} has none", fix=Fix.command("chat"))
        why = f"none of the {count} that are kept has such an id or title"
        return HistoryError(f"there is no chat {word[:80]!r}", why=why, fix=Fix.command("sessions", "list"))

    def _settle(self) -> None:
        """Answers that a kill cut short are interrupted ones. One that another process is writing becomes one that is
        being written again with its next sentence. Where the file cannot be written now, they can still be read."""
        unfinished = self._database.rows("SELECT 1 FROM messages WHERE state = 'writing' LIMIT 1")
        if unfinished and self._database.writable:
            try:
                with self._database.writing() as connection:
                    connection.execute("UPDATE messages SET state = 'interrupted' WHERE state = 'writing'")
            except DamagedError:
                raise
            except HistoryError:
                pass


def _of_copy(title: str) -> str:
    return f"{title.removesuffix(_COPY)}{_COPY}" if title else ""


def _insert_session(connection: sqlite3.Connection, conversation: Conversation) -> int:
    wanted = conversation.id if _ID.fullmatch(conversation.id) and conversation.id != LAST else ""
    taken = "SELECT 1 FROM sessions WHERE id = ?"
    while not wanted or connection.execute(taken, (wanted,)).fetchone():
        wanted = "".join(secrets.choice(_CONSONANTS) + secrets.choice(_VOWELS) for _ in range(_ID_SYLLABLES))
    texts = (conversation.uid, conversation.title, conversation.model, conversation.system)
    times = (conversation.created, conversation.updated)
    values = (wanted, *map(clean, texts), *times, json.dumps(conversation.facts))
    done = connection.execute(
        "INSERT INTO sessions (id, uid, title, model, system, created, updated, facts, touched) "
        "SELECT ?, ?, ?, ?, ?, ?, ?, ?, coalesce(max(touched), 0) + 1 FROM sessions",
        values,
    )
    assert done.lastrowid is not None
    return done.lastrowid


def _insert_message(connection: sqlite3.Connection, session: int, parent: int | None, said: Said) -> int:
    texts = (said.uid, said.role, said.content, said.state, said.model)
    others = (said.created, json.dumps(said.fields), json.dumps(said.facts))
    values = (session, parent, *map(clean, texts), *others)
    done = connection.execute(
        "INSERT INTO messages (session, parent, uid, role, content, state, model, created, fields, facts) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        values,
    )
    assert done.lastrowid is not None
    return done.lastrowid


def _touch(connection: sqlite3.Connection, session: Session, head: int | None) -> None:
    done = connection.execute(
        "UPDATE sessions SET head = ?, updated = ?, touched = (SELECT max(touched) + 1 FROM sessions) WHERE number = ?",
        (head, time.time(), session.number),
    )
    if not done.rowcount:
        raise _gone(session.id)


def _numbers(connection: sqlite3.Connection, session: int) -> tuple[dict[str | None, int], set[str]]:
    """Of each message by its uid, and the uids of those that are not whole."""
    found = connection.execute("SELECT uid, number, state FROM messages WHERE session = ?", (session,)).fetchall()
    return {row["uid"]: row["number"] for row in found}, {row["uid"] for row in found if row["state"] != "complete"}


def _as_session(row: sqlite3.Row) -> Session:
    names = ("number", "id", "uid", "title", "model", "system", "created", "updated", "head")
    return Session(**{name: row[name] for name in names}, facts=json.loads(row["facts"]))


def _as_message(row: sqlite3.Row) -> Message:
    names = ("number", "parent", "uid", "role", "content", "state", "model", "created")
    values = {name: row[name] for name in names}
    return Message(**values, fields=json.loads(row["fields"]), facts=json.loads(row["facts"]))


def _told_by(message: Message) -> dict[str, Any]:
    names = ("role", "content", "state", "model", "created", "fields", "facts")
    return {name: getattr(message, name) for name in names}


def _gone(name: str) -> GoneError:
    return GoneError(
        f"the chat {name} is not in the history any more", why="it was removed", fix=Fix.command("sessions", "list")
    )


def _ambiguous(word: str, found: Sequence[Session]) -> HistoryError:
    shown = ", ".join(f"{session.id} ({session.title})" for session in found[:5])
    why = f"it fits {shown}" + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    return HistoryError(f"{word[:80]!r} is more than one chat", why=why, fix=Fix.command("sessions", "list"))

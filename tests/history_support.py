"""Histories for tests: a conversation, a look at what is kept, and a crash that leaves what a kill would."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from localllm.history import History, Session

SENTENCES = tuple(f"The fox went {number} miles. " for number in range(6))


def said(history: History, session: Session) -> list[tuple[str, str, str]]:
    """(role, content, state) of what the session shows."""
    path = history.path(history.refresh(session))
    return [(message.role, message.content, message.state) for message in path]


def ask(history: History, question: str = "Where did the fox go?") -> tuple[Session, int]:
    """A new session with a question; the question's number."""
    session = history.begin(question, "tiny", None)
    return session, history.append(session, None, "user", question)


def titles(history: History) -> list[str]:
    """Of the sessions, the one that was gone on with last first."""
    return [session.title for session, _ in history.sessions()]


def tables(path: Path) -> list[list[Any]]:
    """All that the file holds of sessions and messages."""
    with closing(sqlite3.connect(path)) as raw:
        return [raw.execute(f"SELECT * FROM {name} ORDER BY number").fetchall() for name in ("sessions", "messages")]


def crashed(path: Path, folder: Path) -> Path:
    """The file as a kill at this moment would leave it to the next process."""
    folder.mkdir(parents=True)
    for suffix in ("", "-wal"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            shutil.copy(source, folder / source.name)
    return folder / path.name


def in_child(work: Callable[[int], None]) -> tuple[int, bytes]:
    """Runs `work` in a copy of this process; its wait status, and what it wrote to the descriptor that it was given."""
    return ended(*begun(work))


def begun(work: Callable[[int], None]) -> tuple[int, int]:
    """`work` in a copy of this process: its id, and where what it writes can be read."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reader)
            work(writer)
            os._exit(0)
        finally:
            os._exit(9)
    os.close(writer)
    return process, reader


def ended(process: int, reader: int) -> tuple[int, bytes]:
    """Waits for what `begun` began; its wait status, and what it wrote."""
    with os.fdopen(reader, "rb") as stream:
        written = stream.read()
    return os.waitpid(process, 0)[1], written

"""The history behind a job queue. Knows no widgets.

Each job opens the file anew, so that it is never in the way of others who write it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from localllm.chat.attachments import typed_part
from localllm.chat.recorder import exported, form_of, opened_history, proposed_name
from localllm.chat.text_file import ExistsError, replace_file, typed_path, write_new
from localllm.errors import HistoryError, UsageError
from localllm.history import History, Removed, Session, history_file, nothing_is_kept
from localllm.history import Message as SavedMessage
from localllm.tui.job_queue import JobQueue

_MOST_FOUND = 200  # hits that are listed
_MOST_SHOWN = 40  # messages of a preview
_BEFORE = 1  # messages in front of one that was found
_MOST_ASKED, _LONGEST_ASKED = 500, 4000  # questions, characters, for the arrows and the search

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ChatRow:
    """A chat in a list. message: the one in which words were found, None for the chat itself."""

    session: Session
    num_messages: int | None = None
    message: SavedMessage | None = None

    @property
    def key(self) -> tuple[str, int | None]:
        return self.session.uid, self.message.number if self.message is not None else None


@dataclass(frozen=True)
class ChatRows:
    """All chats in their order, or the hits of a search. is_cut: there are more."""

    rows: tuple[ChatRow, ...]
    is_cut: bool = False


@dataclass(frozen=True)
class ChatExcerpt:
    """Messages of a chat. num_before: in front of them. at: the one to show, None for the last. is_shown: the hit is on
    the path that the chat shows."""

    row: ChatRow
    messages: tuple[SavedMessage, ...]
    num_before: int
    at: int | None
    is_shown: bool = True


class HistoryWorker:
    """Queries and changes of the history, done in order. A query that is cancelled before its turn is skipped; a change
    is made also where nobody waits for it.

    Removed chats can be restored as long as this object lives, the last one first.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        """warn: called with a warning, from the worker's thread."""
        self._warn = warn
        self._removed: list[Removed] = []
        self._jobs = JobQueue()
        self.run = self._jobs.run  # the body of a thread worker
        self.close = self._jobs.close

    async def find(self, query: str, most: int = -1) -> ChatRows:
        """The chats with hits of `query`; for an empty query all chats, or the latest `most` of them."""

        def find() -> ChatRows:
            if nothing_is_kept():
                return ChatRows(())
            with opened_history(self._warn) as history:
                if query.strip():
                    hits = history.search(query, _MOST_FOUND)
                    rows = [ChatRow(hit.session, None, hit.message) for hit in hits]
                    return ChatRows(tuple(rows), len(hits) == _MOST_FOUND)
                rows = sorted(
                    (ChatRow(*found) for found in history.sessions(most)), key=lambda row: not row.session.is_pinned
                )
                return ChatRows(tuple(rows), 0 <= most < history.count())

        return await self._jobs.result(find, can_be_skipped=True)

    async def excerpt(self, row: ChatRow) -> ChatExcerpt:
        """The messages around a hit, or the last ones of a chat. Raises GoneError."""

        def read() -> ChatExcerpt:
            with opened_history(self._warn) as history:
                path = history.path(history.refresh(row.session))
            if row.message is None:
                first = max(0, len(path) - _MOST_SHOWN)
                return ChatExcerpt(row, tuple(path[first:]), first, None)
            index = next((index for index, message in enumerate(path) if message.number == row.message.number), None)
            if index is None:
                return ChatExcerpt(row, (row.message,), 0, 0, is_shown=False)
            first = max(0, index - _BEFORE)
            return ChatExcerpt(row, tuple(path[first : first + _MOST_SHOWN]), first, index - first)

        return await self._jobs.result(read, can_be_skipped=True)

    async def refresh(self, session: Session) -> Session:
        return await self._change(lambda history: history.refresh(session))

    async def rename(self, session: Session, title: str) -> Session:
        return await self._change(lambda history: history.rename(session, title))

    async def pin(self, session: Session, is_pinned: bool) -> Session:
        return await self._change(lambda history: history.pin(session, is_pinned))

    async def delete(self, session: Session) -> None:
        await self._change(lambda history: self._removed.append(history.take_out(session)))

    async def restore(self) -> Session | None:
        """Put the chat back that was deleted last; None where there is none."""

        def restore() -> Session | None:
            if not self._removed:
                return None
            with opened_history(self._warn, makes=True) as history:
                session = history.put_back(self._removed[-1])
            self._removed.pop()
            return session

        return await self._jobs.result(restore)

    async def export(self, row: ChatRow, path: Path, *, overwrites: bool = False) -> tuple[Path, bool]:
        """Write the chat; into a folder, as a file named after its title. Returns the file, and whether it was written:
        an existing one is not unless `overwrites`. Raises UsageError."""

        def write(history: History) -> tuple[Path, bool]:
            try:
                file = typed_path(str(path))
                file = file / f"{proposed_name(row.session.title)}.md" if file.is_dir() else file
            except (ValueError, OSError) as error:  # a NUL
                fix = "another folder, or name"
                raise UsageError(f"{str(path)!r} cannot be written", why=str(error), fix=fix) from None
            text = exported(history, [history.refresh(row.session)], form_of(file))
            try:
                (replace_file if overwrites else write_new)(file, text)
            except ExistsError:
                return file, False
            return file, True

        return await self._change(write)

    async def _change(self, change: Callable[[History], _Result]) -> _Result:
        def run() -> _Result:
            with opened_history(self._warn) as history:
                return change(history)

        return await self._jobs.result(run)


def past_questions() -> tuple[str, ...]:
    """The questions of all saved chats, the latest first, without those too long to be written again."""
    try:
        if nothing_is_kept():
            return ()
        with History.peek(history_file()) as history:
            found = history.questions(_MOST_ASKED)
    except HistoryError:  # the next job that writes reports it
        return ()
    return tuple(typed for text in found if len(typed := typed_part(text)) <= _LONGEST_ASKED)

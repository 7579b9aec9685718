"""The history behind a job queue: each request posts its result. Knows no widgets.

Each job opens the file anew, so that it is never in the way of others who write it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from textual.message import Message

from localllm.errors import BugError, HistoryError, LocalLLMError, UsageError
from localllm.frontend.exporting import ExistsError, exported, proposed_name, replace_file, write_new
from localllm.frontend.keeping import moved_text
from localllm.frontend.text_file import typed_path
from localllm.history import History, Removed, Session, history_file, nothing_is_kept
from localllm.history import Message as SavedMessage
from localllm.tui.job_queue import JobQueue
from localllm.tui.messages import JobFailed, Noted, Post

_MOST_FOUND = 200  # hits that are listed
_FIRST = 200  # chats that are listed before all are: a screenful, where thousands take a quarter of a second
_MOST_SHOWN = 40  # messages of a preview
_BEFORE = 1  # messages in front of one that was found
_MOST_ASKED, _LONGEST_ASKED = 500, 4000  # questions, characters, for the arrows and the search


@dataclass(frozen=True)
class ChatRow:
    """A chat in a list. message: the one in which words were found, None for the chat itself."""

    session: Session
    num_messages: int | None = None
    message: SavedMessage | None = None

    @property
    def key(self) -> tuple[str, int | None]:
        return self.session.uid, self.message.number if self.message is not None else None


@dataclass
class ChatsListed(Message):
    """All chats in their order, or the hits of `query`.

    is_cut: there are more.
    is_first: these are the latest; the whole list follows.
    """

    query: str
    rows: tuple[ChatRow, ...]
    is_cut: bool = False
    is_first: bool = False


@dataclass
class ChatPreviewed(Message):
    """Messages of a chat.

    num_before: messages in front of them.
    at: the one to show, None for the last.
    is_shown: the hit is on the path that the chat shows.
    """

    row: ChatRow
    messages: tuple[SavedMessage, ...]
    num_before: int
    at: int | None
    is_shown: bool = True


@dataclass
class ChatChecked(Message):
    """The row's chat exists and can be opened."""

    row: ChatRow


@dataclass
class ChatChanged(Message):
    """A chat has another title or pin."""

    session: Session


@dataclass
class ChatDeleted(Message):
    """A chat was removed, which can be undone."""

    session: Session


@dataclass
class ChatRestored(Message):
    """A removal was undone; session: None where there was none to undo."""

    session: Session | None


@dataclass
class ChatExported(Message):
    path: Path


@dataclass
class ExportRefused(Message):
    """Nothing was exported: the file exists."""

    row: ChatRow
    path: Path


class HistoryWorker:
    """Requests return at once; their results are posted from the worker's thread.

    Removed chats can be restored as long as this object lives, the last one first.
    """

    def __init__(self) -> None:
        self._removed: list[Removed] = []
        self._latest: Counter[str] = Counter()
        self._jobs = JobQueue()
        self.run = self._jobs.run  # the body of a thread worker
        self.close = self._jobs.close

    def find(self, query: str, post: Post) -> None:
        """ChatsListed: all chats for an empty query; only for the latest request."""
        self._do(lambda: _listed(query, post), post, latest="find")

    def preview(self, row: ChatRow, post: Post) -> None:
        """ChatPreviewed; only for the latest request."""
        self._do(lambda: _previewed(row, post), post, latest="preview")

    def check(self, row: ChatRow, post: Post) -> None:
        """ChatChecked."""
        self._change(lambda history: ChatChecked(replace(row, session=history.refresh(row.session))), post)

    def rename(self, session: Session, title: str, post: Post) -> None:
        """ChatChanged."""
        self._change(lambda history: ChatChanged(history.rename(session, title)), post)

    def pin(self, session: Session, is_pinned: bool, post: Post) -> None:
        """ChatChanged."""
        self._change(lambda history: ChatChanged(history.pin(session, is_pinned)), post)

    def delete(self, session: Session, post: Post) -> None:
        """ChatDeleted."""

        def change(history: History) -> Message:
            self._removed.append(history.take_out(session))
            return ChatDeleted(session)

        self._change(change, post)

    def restore(self, post: Post) -> None:
        """ChatRestored: the chat that was deleted last."""

        def job() -> Message:
            if not self._removed:
                return ChatRestored(None)
            with _opened(post, makes=True) as history:
                session = history.put_back(self._removed[-1])
            self._removed.pop()
            return ChatRestored(session)

        self._do(job, post)

    def export(self, row: ChatRow, path: Path, post: Post, *, overwrites: bool = False) -> None:
        """ChatExported, or ExportRefused where the file exists and is not to be overwritten."""

        def change(history: History) -> Message:
            file = _file(path, row.session.title)
            text = exported(history, history.refresh(row.session), file)
            try:
                (replace_file if overwrites else write_new)(file, text)
            except ExistsError:
                return ExportRefused(row, file)
            return ChatExported(file)

        self._change(change, post)

    def _change(self, change: Callable[[History], Message], post: Post) -> None:
        def job() -> Message:
            with _opened(post) as history:
                return change(history)

        self._do(job, post)

    def _do(self, job: Callable[[], Message], post: Post, *, latest: str = "") -> None:
        """Queue a job and post its result. latest: a kind of job of which only the last request runs."""
        self._latest[latest] += 1
        number = self._latest[latest]

        def run() -> None:
            if latest and self._latest[latest] != number:
                return
            try:
                post(job())
            except LocalLLMError as error:
                post(JobFailed(error))
            except Exception as error:
                post(JobFailed(BugError(f"this is a bug in localllm: {type(error).__name__}", why=str(error))))

        self._jobs.add(run)


@contextmanager
def _opened(post: Post, *, makes: bool = False) -> Iterator[History]:
    """The history; made where there is none and `makes`. Raises HistoryError."""
    if not makes and nothing_is_kept():
        raise HistoryError("no chat is kept any more", why=f"there is no {history_file()}", fix="localllm chat")
    with History.open_to_read(history_file()) as history:
        if history.moved_to is not None:
            post(Noted(moved_text(history.moved_to, history.num_rescued), "warning"))
        yield history


def _listed(query: str, post: Post) -> ChatsListed:
    if nothing_is_kept():
        return ChatsListed(query, ())
    with _opened(post) as history:
        if query.strip():
            hits = history.search(query, _MOST_FOUND)
            rows = tuple(ChatRow(hit.session, None, hit.message) for hit in hits)
            return ChatsListed(query, rows, len(hits) == _MOST_FOUND)
        if history.count() > _FIRST:
            post(ChatsListed(query, _rows(history, _FIRST), is_first=True))
        return ChatsListed(query, _rows(history, -1))


def _rows(history: History, limit: int) -> tuple[ChatRow, ...]:
    """The latest first, but pinned ones above them."""
    found = [ChatRow(*one) for one in history.sessions(limit)]
    return tuple(sorted(found, key=lambda row: not row.session.is_pinned))


def _previewed(row: ChatRow, post: Post) -> ChatPreviewed:
    """Raises GoneError."""
    with _opened(post) as history:
        path = history.path(history.refresh(row.session))
    if row.message is None:
        first = max(0, len(path) - _MOST_SHOWN)
        return ChatPreviewed(row, tuple(path[first:]), first, None)
    index = next((index for index, message in enumerate(path) if message.number == row.message.number), None)
    if index is None:
        return ChatPreviewed(row, (row.message,), 0, 0, is_shown=False)
    first = max(0, index - _BEFORE)
    return ChatPreviewed(row, tuple(path[first : first + _MOST_SHOWN]), first, index - first)


def _file(path: Path, title: str) -> Path:
    """The file to write; in a folder, one named after the title. Raises UsageError."""
    try:
        file = typed_path(str(path))
        return file / f"{proposed_name(title)}.md" if file.is_dir() else file
    except (ValueError, OSError) as error:  # a NUL
        fix = "another folder, or name"
        raise UsageError(f"{str(path)!r} cannot be written", why=str(error), fix=fix) from None


def past_questions() -> tuple[str, ...]:
    """The questions of all saved chats, the latest first, without those too long to be written again."""
    try:
        if nothing_is_kept():
            return ()
        with History.peek(history_file()) as history:
            found = history.questions(_MOST_ASKED)
    except HistoryError:  # the next job that writes reports it
        return ()
    return tuple(text for text in found if len(text) <= _LONGEST_ASKED)

"""The history on a thread of its own: what it is asked for it does in order, and posts what comes of it.

Each job opens the file anew, so that it is never in the way of others who write it. Knows no widgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from textual.message import Message

from localllm.errors import BugError, HistoryError, LocalLLMError, UsageError
from localllm.frontend.exporting import ExistsError, exported, proposed_name, replace_file, write_new
from localllm.frontend.keeping import moved_text
from localllm.frontend.text_file import typed_path
from localllm.history import History, Removed, Session, history_file, nothing_is_kept
from localllm.history import Message as Kept
from localllm.tui.job_queue import JobQueue
from localllm.tui.messages import JobFailed, Noted

_MOST_FOUND = 200  # hits that are listed
_FIRST = 200  # chats that are listed before all are: a screenful, where thousands take a quarter of a second
_MOST_SHOWN = 40  # messages of a preview
_BEFORE = 1  # messages in front of one that was found

Hear = Callable[[Message], object]
_Job = Callable[[Hear], object]


@dataclass(frozen=True)
class ChatRow:
    """A chat in a list. num_messages: that it shows. message: in which words were found, None for the chat itself."""

    session: Session
    num_messages: int | None = None
    message: Kept | None = None

    @property
    def key(self) -> tuple[str, int | None]:
        return self.session.uid, self.message.number if self.message is not None else None


@dataclass
class ChatsListed(Message):
    """What there is, in its order: all chats, or what was found of `query`. is_cut: there is more. is_first: these are
    the latest, the whole list is on its way."""

    query: str
    rows: tuple[ChatRow, ...]
    is_cut: bool = False
    is_first: bool = False


@dataclass
class ChatPreviewed(Message):
    """Messages of a chat. num_before: that it has in front of them. at: which of them is to be seen; None: the last."""

    row: ChatRow
    messages: tuple[Kept, ...]
    num_before: int
    at: int | None
    is_shown: bool = True  # what was found is on the path that the chat shows


@dataclass
class ChatChecked(Message):
    """The row's chat is there to be opened."""

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
    """Nothing was exported: the file is there already."""

    row: ChatRow
    path: Path


class HistoryWorker:
    """What was removed can be put back as long as this is there, the last one first."""

    def __init__(self) -> None:
        self._removed: list[Removed] = []
        self._asked: Counter[str] = Counter()
        self._jobs = JobQueue("archive")
        self._jobs.begin()

    def close(self, timeout_s: float) -> None:
        """Ends the thread once all is done that was asked for."""
        self._jobs.close(timeout_s)

    # Each returns at once, and has `hear` told of what comes of it, from the archive's thread

    def find(self, query: str, hear: Hear) -> None:
        """Listed: all chats where `query` is empty; by the last query alone that was asked for."""
        self._do_last("find", lambda tell: tell(_listed(query, tell)), hear)

    def preview(self, row: ChatRow, hear: Hear) -> None:
        """Previewed, the last alone that was asked for."""
        self._do_last("preview", lambda tell: tell(_previewed(row, tell)), hear)

    def check(self, row: ChatRow, hear: Hear) -> None:
        """Checked, if it is still there."""

        def job(tell: Hear) -> None:
            with _opened(tell) as history:
                session = history.refresh(row.session)
            tell(ChatChecked(ChatRow(session, row.num_messages, row.message)))

        self._do(job, hear)

    def rename(self, session: Session, title: str, hear: Hear) -> None:
        """Changed."""
        self._do(lambda tell: _changed(lambda history: history.rename(session, title), tell), hear)

    def pin(self, session: Session, is_pinned: bool, hear: Hear) -> None:
        """Changed."""
        self._do(lambda tell: _changed(lambda history: history.pin(session, is_pinned), tell), hear)

    def take_out(self, session: Session, hear: Hear) -> None:
        """TakenOut."""

        def job(tell: Hear) -> None:
            with _opened(tell) as history:
                self._removed.append(history.take_out(session))
            tell(ChatDeleted(session))

        self._do(job, hear)

    def put_back(self, hear: Hear) -> None:
        """PutBack: the last one that was taken out."""

        def job(tell: Hear) -> None:
            session = None
            if self._removed:
                with _opened(tell, makes=True) as history:
                    session = history.put_back(self._removed[-1])
                self._removed.pop()
            tell(ChatRestored(session))

        self._do(job, hear)

    def export(self, row: ChatRow, path: Path, hear: Hear, *, overwrites: bool = False) -> None:
        """Exported, or Refused where the file is there and is not to be overwritten."""

        def job(tell: Hear) -> None:
            file = _file(path, row.session.title)
            with _opened(tell) as history:
                text = exported(history, history.refresh(row.session), file)
            try:
                (replace_file if overwrites else write_new)(file, text)
            except ExistsError:
                tell(ExportRefused(row, file))
            else:
                tell(ChatExported(file))

        self._do(job, hear)

    # Inside

    def _do(self, job: _Job, hear: Hear) -> None:
        self._jobs.do(lambda: _try(job, hear))

    def _do_last(self, kind: str, job: _Job, hear: Hear) -> None:
        """Does it unless another one of its kind was asked for meanwhile."""
        self._asked[kind] += 1
        number = self._asked[kind]

        def unless_another(tell: Hear) -> None:
            if self._asked[kind] == number:
                job(tell)

        self._do(unless_another, hear)


def _try(job: _Job, hear: Hear) -> None:
    try:
        job(hear)
    except LocalLLMError as error:
        hear(JobFailed(error))
    except Exception as error:
        hear(JobFailed(BugError(f"this is a bug in localllm: {type(error).__name__}", why=str(error))))


@contextmanager
def _opened(tell: Hear, *, makes: bool = False) -> Iterator[History]:
    """makes: where there is none. Raises HistoryError."""
    if not makes and nothing_is_kept():
        raise HistoryError("no chat is kept any more", why=f"there is no {history_file()}", fix="localllm chat")
    with History.open_to_read(history_file()) as history:
        if history.moved_to is not None:
            tell(Noted(moved_text(history.moved_to, history.num_rescued), "warning"))
        yield history


def _listed(query: str, tell: Hear) -> ChatsListed:
    if nothing_is_kept():
        return ChatsListed(query, ())
    with _opened(tell) as history:
        if query.strip():
            hits = history.search(query, _MOST_FOUND)
            rows = tuple(ChatRow(hit.session, None, hit.message) for hit in hits)
            return ChatsListed(query, rows, len(hits) == _MOST_FOUND)
        if history.count() > _FIRST:
            tell(ChatsListed(query, _rows(history, _FIRST), is_first=True))
        return ChatsListed(query, _rows(history, -1))


def _rows(history: History, limit: int) -> tuple[ChatRow, ...]:
    """The latest first, but pinned ones above them."""
    found = [ChatRow(*one) for one in history.sessions(limit)]
    return tuple(sorted(found, key=lambda row: not row.session.is_pinned))


def _previewed(row: ChatRow, tell: Hear) -> ChatPreviewed:
    """Raises GoneError."""
    with _opened(tell) as history:
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
    """In a folder, a file with a name made of the title. Raises UsageError."""
    try:
        file = typed_path(str(path))
        return file / f"{proposed_name(title)}.md" if file.is_dir() else file
    except (ValueError, OSError) as error:  # a NUL
        fix = "another folder, or name"
        raise UsageError(f"{str(path)!r} cannot be written", why=str(error), fix=fix) from None


def _changed(change: Callable[[History], Session], tell: Hear) -> None:
    with _opened(tell) as history:
        tell(ChatChanged(change(history)))

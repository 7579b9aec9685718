"""The saved chats: search, read, open, rename, pin, delete and export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from textual import events, getters, on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Input, Static

from localllm.errors import UsageError
from localllm.frontend.exporting import proposed_name
from localllm.frontend.text import one_line
from localllm.history import GoneError, Session
from localllm.tui import history_worker, messages
from localllm.tui.history_worker import HistoryWorker
from localllm.tui.keys import KeyNames
from localllm.tui.screens.dialogs import LineDialog
from localllm.tui.widgets.chat_list import ChatList
from localllm.tui.widgets.chat_preview import ChatPreview
from localllm.tui.widgets.key_bar import KeyBar
from localllm.tui.widgets.notice import Notice

if TYPE_CHECKING:
    from localllm.tui.screens.chat import ChatScreen

_SEARCH_S = 0.15  # after the last letter
_PREVIEW_S = 0.1  # after the last step through the list
_WIDE = 110  # columns, from which on list and preview have room beside each other
_ENDINGS = (".md", ".json")


class ChatsScreen(Screen[None]):
    CSS = """
    ChatsScreen {
        & > #head { height: 1; background: $panel; }
        & #title { width: 1fr; height: 1; padding: 0 1; color: $text-muted; }
        & #head KeyBar { width: 12; }
        & > Input { height: 1; border: none; padding: 0 1; background: $surface; }
        & > Input:focus { border: none; background: $boost; }
        & #empty { padding: 1 2; color: $text-muted; width: 1fr; height: 1fr; display: none; }
        & ChatPreview { width: 1fr; display: none; }
        &.-wide ChatPreview { display: block; }
        &.-wide.-turned ChatPreview { display: none; }
        &.-narrow.-turned ChatPreview { display: block; border-left: none; }
        &.-narrow.-turned ChatList, &.-empty ChatList { display: none; }
        &.-empty #empty { display: block; }
    }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_WIDE, "-wide")]
    BINDINGS = [
        Binding("enter", "open", "go on with the chat", id="chats.open"),
        Binding("slash,ctrl+f", "search", "search titles and messages", id="chats.search"),
        Binding("r", "rename", "give it another title", id="chats.rename"),
        Binding("p", "pin", "pin it above the others, or not", id="chats.pin"),
        Binding("d,delete", "delete", "delete it", id="chats.delete"),
        Binding("u", "undo", "bring the last deleted one back", id="chats.undo"),
        Binding("e", "export", "write it into a file", id="chats.export"),
        Binding("n", "new", "new conversation", id="chats.new"),
        Binding("space", "turn", "read it, or hide what was said", id="chats.preview"),
        Binding("escape", "back", "back", id="chats.back"),
    ]
    AUTO_FOCUS = "ChatList"

    chats = getters.query_one(ChatList)
    notice = getters.query_one(Notice)
    preview = getters.query_one(ChatPreview)
    field = getters.query_one(Input)

    def __init__(self, chat: ChatScreen, archive: HistoryWorker) -> None:
        super().__init__()
        self._chat = chat
        self._history = archive
        self._query = ""
        self._is_cut = False  # there are more than are listed
        self._leaving: set[str] = set()  # uids of sessions that are being removed
        self._delays: dict[str, Timer] = {}
        self._previewed: tuple[str, int | None] | None = None

    def compose(self) -> ComposeResult:
        with Horizontal(id="head"):
            yield Static("", id="title")
            yield KeyBar({"chats.back": "back"})
        yield Input(placeholder="search titles and messages (/)")
        with Horizontal():
            yield ChatList()
            yield Static("", id="empty")
            yield ChatPreview()
        yield Notice()
        yield KeyBar(
            {
                "chats.open": "open", "chats.delete": "delete", "chats.undo": "undo", "chats.rename": "rename",
                "chats.export": "export", "chats.pin": "pin", "chats.new": "new", "chats.preview": "read",
            }
        )  # fmt: skip

    def on_mount(self) -> None:
        self._title("reading …")
        self._list()

    def _title(self, text: str) -> None:
        self.query_one("#title", Static).update(Content(f"chats  {text}"))

    def _post_result(self, message: Message) -> None:
        """Take a result on the history's thread; after this screen was left the chat shows it."""
        worker = self._chat.worker
        if isinstance(message, history_worker.ChatDeleted):
            taken = message.session
            worker.do(lambda: worker.forget(taken.id))
        elif isinstance(message, history_worker.ChatRestored) and message.session is not None:
            back = message.session
            worker.do(lambda: worker.recall(back.uid))
        if not self.post_message(message):
            self._chat.post_message(_as_note(message, self._chat.worker.key_names))

    def _list(self) -> None:
        self._history.find(self._query, self._post_result)

    def _after(self, name: str, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` once no other of its name has come for `delay_s`."""
        if name in self._delays:
            self._delays[name].stop()
        self._delays[name] = self.set_timer(delay_s, action)

    # The list

    @on(history_worker.ChatsListed)
    def _on_listed(self, message: history_worker.ChatsListed) -> None:
        if message.query != self._query or (message.is_first and self.chats.rows):
            return
        rows = [row for row in message.rows if row.session.uid not in self._leaving]
        self.chats.open_id = self._chat.session_id
        self.chats.show(rows, self._query)
        self._previewed = None
        if not message.is_first:
            self._is_cut = message.is_cut
            self._show_count()

    def on_descendant_focus(self) -> None:
        if self._query:  # the title names what a key does there
            self._show_count()

    def _show_count(self) -> None:
        count = len(self.chats.rows)
        if self._query:
            chats = len({row.session.uid for row in self.chats.rows})
            places = f"the latest {count:,} places" if self._is_cut else f"{count:,} place{'' if count == 1 else 's'}"
            more = "; more words find fewer" if self._is_cut else ""
            keys = "  (tab: the list and its keys)" if count and self.field.has_focus else ""
            self._title(f"{places} in {chats:,} chat{'' if chats == 1 else 's'}{more}{keys}")
        else:
            self._title(f"{count:,} kept")
        empty = self.query_one("#empty", Static)
        none = "nothing was found" if self._query else "no chat is kept yet: what is said is, unless it is private"
        empty.update(Content(none))
        self.set_class(not count, "-empty")

    @on(Input.Changed)
    def _on_typed(self) -> None:
        self._after("search", _SEARCH_S, self._search)

    def _search(self) -> None:
        self._query = self.field.value.strip()
        self._list()

    @on(ChatList.Highlighted)
    def _on_highlighted(self, event: ChatList.Highlighted) -> None:
        if event.row is None:
            self.preview.clear()
        else:
            self._after("preview", _PREVIEW_S, self._read)

    def _read(self) -> None:
        row = self.chats.row
        if row is not None and self.preview.display and row.key != self._previewed:
            self._previewed = row.key
            self._history.preview(row, self._post_result)

    @on(history_worker.ChatPreviewed)
    def _on_previewed(self, message: history_worker.ChatPreviewed) -> None:
        row = self.chats.row
        if row is not None and row.key == message.row.key:
            self.preview.show(message, self._query)

    def on_resize(self, event: events.Resize) -> None:
        self._after("preview", _PREVIEW_S, self._read)

    def on_key(self, event: events.Key) -> None:
        """Move in the list while the field has the focus."""
        if self.field.has_focus and event.key in ("up", "down", "pageup", "pagedown"):
            event.stop()
            step = -1 if event.key.endswith("up") else 1
            (self.chats.action_page if event.key.startswith("page") else self.chats.action_move)(step)

    # Results

    @on(messages.JobFailed)
    def _on_failed(self, message: messages.JobFailed) -> None:
        self.notice.tell(message.error)
        if self._leaving or isinstance(message.error, GoneError):
            self._leaving.clear()
            self._list()

    @on(messages.Noted)
    def _on_told(self, message: messages.Noted) -> None:
        self.notice.note(message.text, is_warning=message.severity == "warning")

    @on(history_worker.ChatChecked)
    def _on_checked(self, message: history_worker.ChatChecked) -> None:
        session, found = message.row.session, message.row.message
        number = found.number if found is not None else None
        if session.id != self._chat.session_id or number is not None:
            self._chat.worker.do(lambda: self._chat.worker.open(session.id, number))
        self.dismiss()

    @on(history_worker.ChatChanged)
    def _on_changed(self, message: history_worker.ChatChanged) -> None:
        self._list()

    @on(history_worker.ChatDeleted)
    def _on_taken_out(self, message: history_worker.ChatDeleted) -> None:
        self._leaving.discard(message.session.uid)
        self.notice.note(
            f"deleted: {message.session.title} ({self._chat.worker.key_names['chats.undo']} brings it back)"
        )

    @on(history_worker.ChatRestored)
    def _on_put_back(self, message: history_worker.ChatRestored) -> None:
        session = message.session
        if session is None:
            self.notice.note("nothing was deleted here that could be brought back")
            return
        self.notice.note(f"back again: {session.title}")
        self._list()

    @on(history_worker.ChatExported)
    def _on_exported(self, message: history_worker.ChatExported) -> None:
        self.notice.note(f"wrote {message.path}")

    @on(history_worker.ExportRefused)
    def _on_refused(self, message: history_worker.ExportRefused) -> None:
        self._ask_to_overwrite(message.row, message.path)

    # Keys

    @on(Input.Submitted)
    @on(ChatList.Opened)
    def action_open(self) -> None:
        row = self.chats.row
        if row is None:
            return
        if row.message is None and row.session.id == self._chat.session_id:
            self.dismiss()
        elif self._is_free():
            self._history.check(row, self._post_result)

    def action_new(self) -> None:
        if self._is_free():
            self._chat.worker.do(self._chat.worker.new)
            self.dismiss()

    def _is_free(self) -> bool:
        if self._chat.is_answering:
            self.notice.note(self._chat.worker.answers.busy_text)
        return not self._chat.is_answering

    def action_search(self) -> None:
        self.field.focus()

    def action_turn(self) -> None:
        self.toggle_class("-turned")
        self.call_after_refresh(self._turned)

    def _turned(self) -> None:
        (self.chats if self.chats.display else self.preview).focus()
        self._previewed = None
        self._read()

    def action_back(self) -> None:
        field = self.field
        if self.has_class("-turned") and self.has_class("-narrow"):
            self.action_turn()
        elif field.value or field.has_focus:
            field.value = ""
            self.chats.focus()
        elif self.notice.error is not None:
            self.notice.close()
        else:
            self.dismiss()

    def action_pin(self) -> None:
        if (session := self._session) is not None:
            self._history.pin(session, not session.is_pinned, self._post_result)

    def action_delete(self) -> None:
        if (session := self._session) is not None:
            self._leaving.add(session.uid)
            self.chats.drop(session.uid)
            self._show_count()
            self._history.delete(session, self._post_result)

    def action_undo(self) -> None:
        self._history.restore(self._post_result)

    @work
    async def action_rename(self) -> None:
        if (session := self._session) is None:
            return
        title = await self.app.push_screen_wait(LineDialog("another title", session.title))
        if title is None:
            return
        title = " ".join(title.split())
        self._history.rename(session, title, self._post_result)
        if session.id == self._chat.session_id:  # which would else give it its own again
            self._chat.worker.do(lambda: self._chat.worker.rename(title))

    @work
    async def action_export(self) -> None:
        if (row := self.chats.row) is None:
            return
        hint = "in this folder; .md is to be read, .json has every branch and can be imported"
        name = f"{proposed_name(row.session.title)}{_ENDINGS[0]}"
        path = await self.app.push_screen_wait(LineDialog("write the chat into", name, hint, endings=_ENDINGS))
        if path is not None:
            self._history.export(row, Path(path), self._post_result)

    @work
    async def _ask_to_overwrite(self, row: history_worker.ChatRow, path: Path) -> None:
        title = f"{one_line(str(path))} is there already"
        hint = "accept, and what is in it is lost; or another name"
        wanted = await self.app.push_screen_wait(LineDialog(title, str(path), hint, endings=_ENDINGS))
        if wanted is not None:
            self._history.export(row, Path(wanted), self._post_result, overwrites=Path(wanted) == path)

    @property
    def _session(self) -> Session | None:
        return self.chats.row.session if self.chats.row is not None else None


def _as_note(message: Message, key_names: KeyNames) -> Message:
    """The result for a screen that has no list."""
    match message:
        case history_worker.ChatExported(path=path):
            return messages.Noted(f"wrote {path}")
        case history_worker.ExportRefused(path=path):
            fix = f"another name: {path.with_stem(f'{path.stem}-2')}"
            return messages.JobFailed(UsageError(f"{str(path)!r} is there already", why="it would be lost", fix=fix))
        case history_worker.ChatDeleted(session=session):
            way = f"{key_names['app.chats']}, and {key_names['chats.undo']} there"
            return messages.Noted(f"deleted: {session.title} ({way}, brings it back)")
    return message

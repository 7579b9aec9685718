"""The saved chats: search, read, open, rename, pin, delete and export."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from textual import events, getters, messages, on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Input, Static

from localllm.chat.recorder import proposed_name
from localllm.chat.text import one_line
from localllm.errors import UsageError
from localllm.history import GoneError, Session
from localllm.runtime.selection import told_of
from localllm.tui.history_worker import ChatRow, ChatRows, HistoryWorker
from localllm.tui.screens.chat import ChatScreen
from localllm.tui.screens.dialogs import LineDialog
from localllm.tui.widgets.bars import KeyBar
from localllm.tui.widgets.chat_list import ChatList, ChatPreview
from localllm.tui.widgets.status import Notice

_SEARCH_S = 0.15  # after the last letter
_FIRST = 200  # chats that are listed before all are: a screenful, where thousands take a quarter of a second
_PREVIEW_S = 0.1  # after the last step through the list
_WIDE = 110  # columns, from which on list and preview have room beside each other
_ENDINGS = (".md", ".json")


class ChatsScreen(Screen[None]):
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_WIDE, "-wide")]
    BINDINGS = [
        Binding("enter", "open", "continue the chat", id="chats.open"),
        Binding("slash,ctrl+f", "search", "search titles and messages", id="chats.search"),
        Binding("r", "rename", "rename it", id="chats.rename"),
        Binding("p", "pin", "pin or unpin it", id="chats.pin"),
        Binding("d,delete", "delete", "delete it", id="chats.delete"),
        Binding("u", "undo", "restore the last deleted chat", id="chats.undo"),
        Binding("e", "export", "export it to a file", id="chats.export"),
        Binding("n", "new", "new conversation", id="chats.new"),
        Binding("space", "turn", "show or hide its messages", id="chats.preview"),
        Binding("escape", "back", "back", id="chats.back"),
    ]
    AUTO_FOCUS = "ChatList"

    chats = getters.query_one(ChatList)
    notice = getters.query_one(Notice)
    preview = getters.query_one(ChatPreview)
    field = getters.query_one(Input)

    def __init__(self, chat: ChatScreen, history: HistoryWorker) -> None:
        super().__init__()
        self._chat = chat
        self._worker = chat.worker
        self._history = history
        self._query = ""
        self._is_open = True
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
                "chats.preview": "read", "chats.pin": "pin", "chats.export": "export", "chats.new": "new",
                "app.help": "help", "app.leave": "quit",
            }
        )  # fmt: skip

    def on_mount(self) -> None:
        self._title("reading …")
        self._list()

    async def on_prune(self, event: messages.Prune) -> None:
        """Cancel the workers before the widgets go that they look for; Textual does so after."""
        self._is_open = False
        self.workers.cancel_node(self)

    def _title(self, text: str) -> None:
        self.query_one("#title", Static).update(Content(f"chats  {text}"))

    def _run(self, job: Coroutine[Any, Any, None]) -> None:
        """Run a job to its end also where this screen is left; its error is shown."""

        async def run() -> None:
            try:
                await job
            except Exception as error:
                known = told_of(error, None, self._worker.resolved)
                self._notice_now.show_error(known)
                if self._is_open and (self._leaving or isinstance(known, GoneError)):
                    self._leaving.clear()
                    self._list()

        self.app.run_worker(run(), group="history")

    @property
    def _notice_now(self) -> Notice:
        """The notice of this screen, or of the chat once this screen was left."""
        return self.notice if self._is_open else self._chat.notice

    def _after(self, name: str, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` once no other of its name has come for `delay_s`."""
        if name in self._delays:
            self._delays[name].stop()
        self._delays[name] = self.set_timer(delay_s, action)

    # The list

    @work(exclusive=True, group="list")
    async def _list(self) -> None:
        try:
            if not self.chats.rows and not self._query:
                first = await self._history.find("", _FIRST)
                if not first.is_cut:
                    self._show(first)
                    return
                self._show_rows(first)
            self._show(await self._history.find(self._query))
        except Exception as error:
            self.notice.show_error(told_of(error, None, self._worker.resolved))

    def _show(self, found: ChatRows) -> None:
        self._show_rows(found)
        self._is_cut = found.is_cut
        self._show_count()

    def _show_rows(self, found: ChatRows) -> None:
        self.chats.open_id = self._chat.session_id
        self.chats.show([row for row in found.rows if row.session.uid not in self._leaving], self._query)
        self._previewed = None

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
            self._title(f"{count:,} saved")
        empty = self.query_one("#empty", Static)
        none = "nothing was found" if self._query else "no chat is saved yet: chats are saved unless they are private"
        empty.update(Content(none))
        self.set_class(not count, "-empty")

    def on_input_changed(self) -> None:
        def search() -> None:
            self._query = self.field.value.strip()
            self._list()

        self._after("search", _SEARCH_S, search)

    def on_chat_list_highlighted(self) -> None:
        if self.chats.row is None:
            self.preview.clear()
        else:
            self._after("preview", _PREVIEW_S, self._read)

    def _read(self) -> None:
        row = self.chats.row
        if row is not None and self.preview.display and row.key != self._previewed:
            self._previewed = row.key
            self._preview(row)

    @work(exclusive=True, group="preview")
    async def _preview(self, row: ChatRow) -> None:
        try:
            found = await self._history.excerpt(row)
        except Exception as error:
            self.notice.show_error(told_of(error, None, self._worker.resolved))
            if isinstance(error, GoneError):
                self._list()
            return
        if self.chats.row is not None and self.chats.row.key == row.key:
            self.preview.show(found, self._query)

    def on_resize(self, event: events.Resize) -> None:
        self._after("preview", _PREVIEW_S, self._read)

    def on_key(self, event: events.Key) -> None:
        """Move in the list while the field has the focus."""
        if self.field.has_focus and event.key in ("up", "down", "pageup", "pagedown"):
            event.stop()
            step = -1 if event.key.endswith("up") else 1
            (self.chats.action_page if event.key.startswith("page") else self.chats.action_move)(step)

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
            self._run(self._open(row))

    async def _open(self, row: ChatRow) -> None:
        session = await self._history.refresh(row.session)
        number = row.message.number if row.message is not None else None
        if session.id != self._chat.session_id or number is not None:
            self._worker.do(lambda: self._worker.open(session.id, number))
        if self._is_open:
            self.dismiss()

    def action_new(self) -> None:
        if self._is_free():
            self._worker.do(lambda: self._worker.command("clear"))
            self.dismiss()

    def _is_free(self) -> bool:
        if self._chat.is_answering:
            self.notice.note(self._worker.answers.busy_text)
        return not self._chat.is_answering

    def action_search(self) -> None:
        self.field.focus()

    def action_turn(self) -> None:
        def turned() -> None:
            (self.chats if self.chats.display else self.preview).focus()
            self._previewed = None
            self._read()

        self.toggle_class("-turned")
        self.call_after_refresh(turned)

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
            self._run(self._change(self._history.pin(session, not session.is_pinned)))

    async def _change(self, change: Awaitable[Session]) -> None:
        await change
        if self._is_open:
            self._list()

    def action_delete(self) -> None:
        if (session := self._session) is not None:
            self._leaving.add(session.uid)
            self.chats.drop(session.uid)
            self._show_count()
            self._run(self._delete(session))

    async def _delete(self, session: Session) -> None:
        await self._history.delete(session)
        self._worker.do(lambda: self._worker.forget(session.id))
        self._leaving.discard(session.uid)
        keys = self._worker.key_names
        way = keys["chats.undo"] if self._is_open else f"{keys['app.chats']}, and {keys['chats.undo']} there,"
        self._notice_now.note(f"deleted: {session.title} ({way} brings it back)")

    def action_undo(self) -> None:
        self._run(self._restore())

    async def _restore(self) -> None:
        session = await self._history.restore()
        if session is None:
            self._notice_now.note("nothing was deleted here that could be brought back")
            return
        self._worker.do(lambda: self._worker.recall(session.uid))
        self._notice_now.note(f"back again: {session.title}")
        if self._is_open:
            self._list()

    @work
    async def action_rename(self) -> None:
        if (session := self._session) is None:
            return
        title = await self.app.push_screen_wait(LineDialog("another title", session.title))
        if title is None:
            return
        title = " ".join(title.split())
        self._run(self._change(self._history.rename(session, title)))
        if session.id == self._chat.session_id:  # which would else give it its own again
            self._worker.do(lambda: self._worker.command("title", title))

    @work
    async def action_export(self) -> None:
        if (row := self.chats.row) is None:
            return
        hint = "in this folder; .md is to be read, .json has every branch and can be imported"
        name = f"{proposed_name(row.session.title)}{_ENDINGS[0]}"
        path = await self.app.push_screen_wait(LineDialog("write the chat into", name, hint, endings=_ENDINGS))
        if path is not None:
            self._run(self._export(row, Path(path)))

    async def _export(self, row: ChatRow, path: Path, *, overwrites: bool = False) -> None:
        file, is_written = await self._history.export(row, path, overwrites=overwrites)
        if is_written:
            self._notice_now.note(f"wrote {file}")
        elif self._is_open:
            self._ask_to_overwrite(row, file)
        else:
            fix = f"another name: {file.with_stem(f'{file.stem}-2')}"
            raise UsageError(f"{str(file)!r} is there already", why="it would be lost", fix=fix)

    @work
    async def _ask_to_overwrite(self, row: ChatRow, path: Path) -> None:
        title = f"{one_line(str(path))} is there already"
        hint = "accept, and what is in it is lost; or another name"
        wanted = await self.app.push_screen_wait(LineDialog(title, str(path), hint, endings=_ENDINGS))
        if wanted is not None:
            self._run(self._export(row, Path(wanted), overwrites=Path(wanted) == path))

    @property
    def _session(self) -> Session | None:
        return self.chats.row.session if self.chats.row is not None else None

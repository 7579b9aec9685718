"""The saved chats beside the conversation, where there is room for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual import events, getters, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static

from localllm.errors import LocalLLMError
from localllm.tui.history_worker import ChatRow, HistoryWorker
from localllm.tui.view_state import ViewState
from localllm.tui.widgets.bars import KeyBar
from localllm.tui.widgets.chat_list import ChatList

_MOST_LISTED = 200


class SideList(ChatList):
    """A click or enter opens a chat. Without the focus the open chat alone is marked."""

    BINDINGS = [Binding("enter", "open", "open", show=False)]

    def action_open(self) -> None:
        if self.row is not None:
            self.post_message(self.Opened())

    def on_click(self, event: events.Click) -> None:
        event.prevent_default()
        if self.go_to_line(event.y):
            self.action_open()


class Sidebar(Vertical):
    """Hidden by its class -hidden where it is not wanted, and -empty where there is no chat."""

    chats = getters.query_one(SideList)

    @dataclass
    class Listed(Message):
        """rows: the chats as they are now."""

        rows: Sequence[ChatRow]

    def __init__(self, history: HistoryWorker) -> None:
        super().__init__(classes="-empty")
        self._history = history

    def compose(self) -> ComposeResult:
        yield Static("chats", classes="heading")
        yield SideList()
        yield KeyBar({"chat.new": "new", "chat.list": "hide"})

    def on_mount(self) -> None:
        self.set_class(not ViewState.load().lists_chats, "-hidden")

    @work(exclusive=True, group="chats")
    async def list_chats(self, session_id: str | None) -> None:
        """Show the saved chats as they are now. session_id: of the open one; None where it is not saved yet."""
        self.chats.open_id = session_id
        try:
            rows = (await self._history.find("", _MOST_LISTED)).rows
        except LocalLLMError:  # the screen of chats reports it
            rows = ()
        self.set_class(not rows, "-empty")
        self.chats.show(rows, "")
        self.post_message(self.Listed(rows))

    def toggle(self, *, is_saved: bool) -> None:
        """Hide or show it. is_saved: also at the next start."""
        self.toggle_class("-hidden")
        if is_saved:
            ViewState(lists_chats=not self.has_class("-hidden")).save()

    def others(self) -> list[ChatRow]:
        """The chats that are not open, the latest first."""
        found = (row for row in self.chats.rows if row.session.id != self.chats.open_id)
        return sorted(found, key=lambda row: row.session.updated, reverse=True)

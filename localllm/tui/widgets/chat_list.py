"""The saved chats, one a row: only the visible rows are drawn, so that thousands cost what a screenful does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual

from localllm.chat.text import format_ago, one_line, visible
from localllm.history import search
from localllm.tui.history_worker import ChatRow

_WHEN = 10  # columns of "59 min ago" and "2026-11-21"
_COUNT = 5
_MODEL = 24  # at most
_WITH_COUNT, _WITH_MODEL = 56, 70  # columns of the list, from which on there is room for these
_PIN, _OPEN = "★", "▸"
_ROLES = {"user": "you", "assistant": "model"}


class ChatList(ScrollView, can_focus=True):
    DEFAULT_CSS = """
    ChatList {
        height: 1fr; width: 1fr; background: $background; scrollbar-size-vertical: 1; overflow-x: hidden;
        & > .chat-list--cursor { background: $block-cursor-blurred-background; }
        &:focus > .chat-list--cursor {
            background: $block-cursor-background; color: $block-cursor-foreground; text-style: $block-cursor-text-style;
        }
        & > .chat-list--hover { background: $block-hover-background; }
    }
    """
    COMPONENT_CLASSES = {"chat-list--cursor", "chat-list--hover"}
    BINDINGS = [
        Binding("up", "move(-1)", "chat above", show=False),
        Binding("down", "move(1)", "chat below", show=False),
        Binding("pageup", "page(-1)", "a page up", show=False),
        Binding("pagedown", "page(1)", "a page down", show=False),
        Binding("home", "move_to(0)", "to the first", show=False),
        Binding("end", "move_to(-1)", "to the last", show=False),
    ]
    cursor: reactive[int] = reactive(0)
    hovered: reactive[int | None] = reactive(None)

    @dataclass
    class Highlighted(Message):
        """Another chat is chosen; row: None where there is none."""

        row: ChatRow | None

    class Opened(Message):
        """The chosen chat was clicked once more."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[ChatRow] = []
        self._query = ""
        self._model_columns = 0
        self.open_id: str | None = None  # of the session in the chat screen

    @property
    def row(self) -> ChatRow | None:
        """The chosen row."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    @property
    def row_height(self) -> int:
        """Lines of a row: a hit has its excerpt below it."""
        return 2 if self._query else 1

    def show(self, rows: Sequence[ChatRow], query: str) -> None:
        """Show the rows; the chosen one stays chosen. query: the words of a search, "" for all chats."""
        chosen, before = self.row, self._query
        self.rows, self._query = list(rows), query
        models = {row.session.model for row in rows}
        self._model_columns = min(_MODEL, max((Content(_short(model)).cell_length for model in models), default=0))
        keys = {row.key: number for number, row in enumerate(rows)}
        self._resize()
        if chosen is None and not query:
            self._choose(next((number for number, row in enumerate(rows) if row.session.id == self.open_id), 0))
        elif chosen is None or (query and query != before):
            self._choose(0)
        else:
            stays = self.cursor if query == before else 0
            self._choose(keys.get(chosen.key, keys.get((chosen.session.uid, None), stays)))

    def drop(self, uid: str) -> None:
        """Remove a chat with all its hits; the next one is chosen."""
        above = sum(row.session.uid == uid for row in self.rows[: self.cursor])
        self.rows = [row for row in self.rows if row.session.uid != uid]
        self._resize()
        self._choose(self.cursor - above)

    def _choose(self, at: int) -> None:
        self.set_reactive(ChatList.cursor, max(0, min(at, len(self.rows) - 1)))
        self._to_cursor()
        self.post_message(self.Highlighted(self.row))
        self.refresh()

    def _resize(self) -> None:
        self.virtual_size = Size(0, len(self.rows) * self.row_height)

    # Choosing

    def validate_cursor(self, cursor: int) -> int:
        return max(0, min(cursor, len(self.rows) - 1))

    def watch_cursor(self) -> None:
        self._to_cursor()
        self.post_message(self.Highlighted(self.row))

    def _to_cursor(self) -> None:
        region = Region(0, self.cursor * self.row_height, 1, self.row_height)
        self.scroll_to_region(region, animate=False, force=True)

    def action_move(self, step: int) -> None:
        self.cursor += step

    def action_page(self, step: int) -> None:
        self.cursor += step * max(1, self.size.height // self.row_height - 1)

    def action_move_to(self, at: int) -> None:
        self.cursor = at if at >= 0 else len(self.rows) + at

    def _row_at(self, y: int) -> int | None:
        at = (y + self.scroll_offset.y) // self.row_height
        return at if 0 <= at < len(self.rows) else None

    def on_click(self, event: events.Click) -> None:
        at = self._row_at(event.y)
        if at is None:
            return
        if at == self.cursor and event.chain > 1:
            self.post_message(self.Opened())
        self.cursor = at

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self.hovered = self._row_at(event.y)

    def on_leave(self) -> None:
        self.hovered = None

    # Drawing

    def render_line(self, y: int) -> Strip:
        columns = self.scrollable_content_region.width
        at, line = divmod(y + self.scroll_offset.y, self.row_height)
        if at >= len(self.rows):
            return Strip.blank(columns, self.rich_style)
        style = self.visual_style
        if at == self.cursor:
            style = self.get_visual_style("chat-list--cursor")
        elif at == self.hovered:
            style = self.get_visual_style("chat-list--hover")
        content = self._line(self.rows[at], line, columns)
        return Visual.to_strips(self, content, columns, 1, style, pad=True)[0]

    def _line(self, row: ChatRow, line: int, columns: int) -> Content:
        if line == 0:
            return self._title_line(row, columns)
        if row.message is None:
            return Content.styled("   in the title", "dim")
        found = highlighted(visible(one_line(search.excerpt(row.message.content, self._query))), self._query)
        role = _ROLES.get(row.message.role, row.message.role)
        return (Content.styled(f"   {visible(one_line(role))}: ", "dim") + found).truncate(columns, ellipsis=True)

    def _title_line(self, row: ChatRow, columns: int) -> Content:
        """Pin, title, number of messages, model and time, as far as there is room."""
        session = row.session
        then = row.message.created if row.message is not None else session.updated
        right = Content(format_ago(then, time.time()).rjust(_WHEN))
        if columns >= _WITH_MODEL:
            room = min(self._model_columns, columns // 5)
            model = Content(_short(session.model)).truncate(room, ellipsis=True, pad=True)
            right = model + "  " + right
        if columns >= _WITH_COUNT and row.num_messages is not None:
            right = Content(f"{row.num_messages:,}".rjust(_COUNT)) + "  " + right
        mark = (_PIN if session.is_pinned else " ") + (_OPEN if session.id == self.open_id else " ")
        title = highlighted(visible(one_line(session.title)), self._query)
        room = max(1, columns - right.cell_length - len(mark) - 3)
        left = Content(mark) + " " + title.truncate(room, ellipsis=True, pad=True)
        return left + " " + right.stylize("dim") + " "


def highlighted(text: str, query: str) -> Content:
    """The text with the words of `query` marked."""
    content = Content(text)
    for begin, end in search.places(text, query):
        content = content.stylize("bold underline", begin, end)
    return content


def _short(model: str | None) -> str:
    """The model's name; only the last part of a folder."""
    return visible(one_line(PurePath(model).name if model is not None and model.startswith("/") else model or ""))

"""The saved chats, and the messages of one to read. Only the visible rows are drawn: thousands cost what few do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import PurePath

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual
from textual.widgets import Static

from localllm.chat.attachments import folded
from localllm.chat.text import format_ago, one_line, visible
from localllm.chat.thoughts import split
from localllm.config import format_time
from localllm.history import Message as SavedMessage
from localllm.history import search
from localllm.tui.history_worker import ChatExcerpt, ChatRow

_WHEN = 10  # columns of "59 min ago" and "2026-11-21"
_COUNT = 5
_MODEL = 24  # at most
_WITH_AGE, _WITH_COUNT, _WITH_MODEL = 40, 56, 70  # columns of the list, from which on there is room for these
_PIN, _OPEN = "★", "▸"
_ROLES = {"user": "you", "assistant": "model"}


class ChatList(ScrollView, can_focus=True):
    COMPONENT_CLASSES = {"chat-list--cursor"}
    BINDINGS = [
        Binding("up", "move(-1)", "chat above", show=False),
        Binding("down", "move(1)", "chat below", show=False),
        Binding("pageup", "page(-1)", "a page up", show=False),
        Binding("pagedown", "page(1)", "a page down", show=False),
        Binding("home", "move_to(0)", "to the first", show=False),
        Binding("end", "move_to(-1)", "to the last", show=False),
    ]
    cursor: reactive[int] = reactive(0)

    class Highlighted(Message):
        """Another chat is chosen, or none."""

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
        self.post_message(self.Highlighted())
        self.refresh()

    def _resize(self) -> None:
        self.virtual_size = Size(0, len(self.rows) * self.row_height)

    # Choosing

    def validate_cursor(self, cursor: int) -> int:
        return max(0, min(cursor, len(self.rows) - 1))

    def watch_cursor(self) -> None:
        self._to_cursor()
        self.post_message(self.Highlighted())

    def _to_cursor(self) -> None:
        region = Region(0, self.cursor * self.row_height, 1, self.row_height)
        self.scroll_to_region(region, animate=False, force=True)

    def action_move(self, step: int) -> None:
        self.cursor += step

    def action_page(self, step: int) -> None:
        self.cursor += step * max(1, self.size.height // self.row_height - 1)

    def action_move_to(self, at: int) -> None:
        self.cursor = at if at >= 0 else len(self.rows) + at

    def on_click(self, event: events.Click) -> None:
        before = self.cursor
        if self.go_to_line(event.y) and self.cursor == before and event.chain > 1:
            self.post_message(self.Opened())

    def go_to_line(self, y: int) -> bool:
        """Choose the chat on a line of the widget; False where there is none."""
        at = (y + self.scroll_offset.y) // self.row_height
        if at < len(self.rows):
            self.cursor = at
        return at < len(self.rows)

    # Drawing

    def render_line(self, y: int) -> Strip:
        columns = self.scrollable_content_region.width
        at, line = divmod(y + self.scroll_offset.y, self.row_height)
        if at >= len(self.rows):
            return Strip.blank(columns, self.rich_style)
        style = self.get_visual_style("chat-list--cursor") if at == self.cursor else self.visual_style
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
        session = row.session
        then = row.message.created if row.message is not None else session.updated
        right = Content(format_ago(then, time.time()).rjust(_WHEN) if columns >= _WITH_AGE else "")
        if columns >= _WITH_MODEL:
            room = min(self._model_columns, columns // 5)
            model = Content(_short(session.model)).truncate(room, ellipsis=True, pad=True)
            right = model + "  " + right
        if columns >= _WITH_COUNT and row.num_messages is not None:
            right = Content(f"{row.num_messages:,}".rjust(_COUNT)) + "  " + right
        mark = Content((_PIN if session.is_pinned else " ") + (_OPEN if session.id == self.open_id else " "))
        title = highlighted(visible(one_line(session.title)), self._query)
        if session.id == self.open_id:
            mark, title = mark.stylize("$text-accent"), title.stylize("bold")
        room = max(1, columns - right.cell_length - len(mark) - 3)
        left = mark + " " + title.truncate(room, ellipsis=True, pad=True)
        return left + " " + right.stylize("dim") + " "


def highlighted(text: str, query: str) -> Content:
    """The text with the words of `query` marked."""
    content = Content(text)
    for begin, end in search.places(text, query):
        content = content.stylize("bold underline", begin, end)
    return content


def _short(model: str | None) -> str:
    return visible(one_line(PurePath(model).name if model is not None and model.startswith("/") else model or ""))


_MOST = 3000  # characters of a message
_BEFORE = 400  # of those in front of a word that was found


class ChatPreview(VerticalScroll):
    def compose(self) -> ComposeResult:
        yield Static("", id="about")
        yield Static("", id="before")
        yield Static("", id="rest")

    def show(self, found: ChatExcerpt, query: str) -> None:
        """Show the messages from the hit on, or the end of the chat."""
        at = found.at or 0
        parts = [_said(message, query) for message in found.messages]
        self._part("#about").update(Content("\n").join(_about(found)) + "\n")
        self._part("#before").update(Content("\n").join(parts[:at]))
        self._part("#before").display = bool(parts[:at])
        self._part("#rest").update(Content("\n").join(parts[at:]))
        if found.at is None:
            self.call_after_refresh(self.scroll_end, animate=False, immediate=True)
        else:
            rest = self._part("#rest")
            self.call_after_refresh(self.scroll_to_widget, rest, animate=False, top=True, immediate=True)

    def clear(self) -> None:
        for name in ("#about", "#before", "#rest"):
            self._part(name).update("")

    def _part(self, name: str) -> Static:
        return self.query_one(name, Static)


def _about(found: ChatExcerpt) -> list[Content]:
    session = found.row.session
    facts = (format_time(session.updated), session.model or "", session.id)
    lines = [
        Content.styled(visible(one_line(session.title)), "bold"),
        Content.styled("  ".join(one_line(fact) for fact in facts if fact), "$foreground-muted"),
    ]
    if not found.is_shown:
        lines.append(Content.styled("in a branch that the chat does not show any more", "$text-warning"))
    if found.num_before:
        lines.append(Content.styled(f"↑ {found.num_before:,} earlier messages", "$foreground-muted"))
    return lines


def _said(message: SavedMessage, query: str) -> Content:
    """A message: only the part around the first hit of a long one, and an answer without its thought."""
    text = message.content
    if message.role == "assistant" and not query:
        text = split(text, is_thinking=message.begins_in_thought)[1].strip() or text
    elif message.role == "user" and not query:
        text = folded(text)
    places = search.places(text, query)
    first = max(0, places[0][0] - _BEFORE) if places and len(text) > _MOST else 0
    shown = ("…" if first else "") + text[first : first + _MOST] + ("…" if first + _MOST < len(text) else "")
    role = {"user": "you", "assistant": "model"}.get(message.role, message.role)
    style = "bold $text-primary" if message.role == "user" else "bold $text-accent"
    return Content.styled(one_line(role), style) + "\n" + highlighted(visible(shown.strip("\n")), query) + "\n"

"""The messages of a saved chat, to read before it is opened."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localllm.chat.text import one_line, visible
from localllm.chat.thoughts import split
from localllm.config import format_time
from localllm.history import Message, search
from localllm.tui.history_worker import ChatExcerpt
from localllm.tui.widgets.chat_list import highlighted

_MOST = 3000  # characters of a message
_BEFORE = 400  # of those in front of a word that was found


class ChatPreview(VerticalScroll):
    DEFAULT_CSS = """
    ChatPreview {
        padding: 0 1; border-left: solid $border-blurred; scrollbar-size-vertical: 1;
        &:focus { border-left: solid $border; }
        & > Static { height: auto; width: 1fr; }
    }
    """

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
        self.call_after_refresh(self._to_end if found.at is None else self._to_found)

    def clear(self) -> None:
        for name in ("#about", "#before", "#rest"):
            self._part(name).update("")

    def _part(self, name: str) -> Static:
        return self.query_one(name, Static)

    def _to_end(self) -> None:
        self.scroll_end(animate=False, immediate=True)

    def _to_found(self) -> None:
        self.scroll_to_widget(self._part("#rest"), animate=False, top=True, immediate=True)


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


def _said(message: Message, query: str) -> Content:
    """A message: only the part around the first hit of a long one, and an answer without its thought."""
    text = message.content
    if message.role == "assistant" and not query:
        text = split(text, is_thinking=message.begins_in_thought)[1].strip() or text
    places = search.places(text, query)
    first = max(0, places[0][0] - _BEFORE) if places and len(text) > _MOST else 0
    shown = ("…" if first else "") + text[first : first + _MOST] + ("…" if first + _MOST < len(text) else "")
    role = {"user": "you", "assistant": "model"}.get(message.role, message.role)
    style = "bold $text-primary" if message.role == "user" else "bold $text-accent"
    return Content.styled(one_line(role), style) + "\n" + highlighted(visible(shown.strip("\n")), query) + "\n"

"""The full-screen chat: the conversation's thread, the screens, themes and keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from textual.app import App
from textual.binding import Binding
from textual.message import Message

from localllm.config import ResolvedSettings
from localllm.errors import UsageError
from localllm.frontend.keeping import Resumed
from localllm.frontend.selection import Selection
from localllm.tui import messages
from localllm.tui.desk import Desk
from localllm.tui.loading import Serve, serve
from localllm.tui.screens.chat import ChatScreen
from localllm.tui.widgets.composer import Composer
from localllm.tui.widgets.message_view import MessageView

if TYPE_CHECKING:
    from textual.dom import DOMNode

Away = AbstractContextManager[None]


@dataclass(frozen=True)
class Start:
    """What the chat begins with. resolved: the settings under which models are chosen later. extra: sampling parameters
    that are no settings. system: that was typed in the place of a resumed chat's own. draft: what was typed before the
    screen was there."""

    selection: Selection
    resolved: ResolvedSettings
    resumed: Resumed | None = None
    system: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    theme: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    draft: str = ""
    shows_statistics: bool = False


class ChatApp(App[None]):
    TITLE = "localllm"
    CSS = """
    Screen { background: $background; }
    """
    BINDINGS = [
        Binding("f1", "help", "help", id="app.help"),
        Binding("f2", "plan", "plan", id="app.plan"),
        Binding("f3", "models", "models", id="app.models"),
        Binding("f4", "chats", "chats", id="app.chats"),
        Binding("ctrl+q", "leave", "leave", id="app.leave", priority=True),
    ]
    ENABLE_COMMAND_PALETTE = True

    def __init__(self, start: Start, serve: Serve = serve, away: Callable[[], Away] = nullcontext) -> None:
        """away: entered while another program has the terminal."""
        super().__init__()
        self._start = start
        self._loop: asyncio.AbstractEventLoop | None = None
        self.away = away
        self.desk = Desk(start.resolved, dict(start.extra), serve, self._hear)
        self.chat = ChatScreen(self.desk, shows_statistics=start.shows_statistics)
        self.failure: Exception | None = None

    @property
    def time(self) -> float:
        """Seconds, never set back."""
        return time.monotonic()

    def on_mount(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._start.theme is not None:
            self.theme = self._start.theme
        self.set_keymap(dict(self._start.keys))
        self.push_screen(self.chat)
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        """Once the first picture is there: torch's import holds Python's lock for long stretches."""
        start = self._start
        if start.draft:
            self.chat.composer.write(start.draft)
        self.desk.do(lambda: self.desk.begin(start.selection, start.resumed, start.system))

    def _hear(self, message: Message) -> None:
        """From the conversation's thread: the chat's handlers take it, whichever screen is shown."""
        self.chat.post_message(message)

    def leave(self) -> None:
        """Ends the program. What was said is kept."""
        self.exit()

    def leave_soon(self) -> None:
        """`leave`, from a handler of signals."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.leave)

    def action_leave(self) -> None:
        self.leave()

    def action_help(self) -> None:
        from localllm.tui.screens.help import HelpScreen

        self.push_screen(HelpScreen(rooms(), self._start.keys))

    def action_plan(self) -> None:
        from localllm.tui.screens.plan import PlanScreen

        selection = self.desk.selection
        if selection is None:
            self.chat.notice.note("there is no model yet")
        else:
            self.push_screen(PlanScreen(self.desk, selection))

    def action_models(self) -> None:
        self.chat.notice.note("not there yet")

    def action_chats(self) -> None:
        self.chat.notice.note("not there yet")

    def choose_theme(self, name: str) -> None:
        if not name:
            self.search_themes()
        elif name in self.available_themes:
            self.theme = name
        else:
            known = ", ".join(sorted(self.available_themes))
            self.chat.post_message(
                messages.Failed(UsageError(f"there is no theme {name[:40]!r}", why=f"known are {known}", fix="/theme"))
            )

    def _handle_exception(self, error: Exception) -> None:
        """What nobody foresaw ends the screen; whoever started it tells of it, in four lines."""
        self.failure = self.failure or error
        super()._handle_exception(error)

    def _fatal_error(self) -> None:
        """In the place of a traceback with the values of all variables, the conversation's among them."""
        self._close_messages_no_wait()


def rooms() -> dict[str, type[DOMNode]]:
    """What has keys of its own, by the title under which the help has them."""
    from localllm.tui.screens.plan import PlanScreen

    found: dict[str, Any] = {
        "Everywhere": ChatApp,
        "Chat": ChatScreen,
        "Writing": Composer,
        "A message (ctrl+up)": MessageView,
        "Plan (F2)": PlanScreen,
    }
    return found

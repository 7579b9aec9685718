"""The full-screen chat: the conversation's thread, the screens, themes and keys."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from textual import on
from textual.app import SystemCommand
from textual.binding import Binding
from textual.message import Message
from textual.screen import Screen

from localllm.config import ResolvedSettings
from localllm.errors import UsageError
from localllm.frontend.keeping import Resumed
from localllm.frontend.selection import Selection
from localllm.tui import drafts, messages
from localllm.tui.chat_worker import ChatWorker
from localllm.tui.commands import COMMANDS
from localllm.tui.download_worker import DownloadChanged, DownloadWorker
from localllm.tui.fit_worker import FitFound, FitMeasuring, FitWorker
from localllm.tui.history_worker import HistoryWorker
from localllm.tui.key_names import KeyNames
from localllm.tui.key_queue import KeyQueue
from localllm.tui.model_loader import Serve, serve
from localllm.tui.screens.chat import ChatScreen

if TYPE_CHECKING:
    from localllm.tui.screens.models import ModelsScreen

DARK, LIGHT = "textual-dark", "textual-light"
_DRAFT_S = 1.0  # between two looks whether there is something new to keep of what is being written
_STOP_S = 1.0  # in which pulls and conversions may end where they are; what they have is kept in any case

Away = AbstractContextManager[None]
_ALONE_S = 2.0  # between two looks whether the terminal is still there


@dataclass(frozen=True)
class Start:
    """What the chat begins with. resolved: the settings under which models are chosen later. extra: sampling parameters
    that are no settings. system: that was typed in the place of a resumed chat's own. draft: what was typed before the
    screen was there. follows_terminal: the theme is to be as the terminal is, which may say so later."""

    selection: Selection
    resolved: ResolvedSettings
    resumed: Resumed | None = None
    system: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    theme: str = DARK
    keys: Mapping[str, str] = field(default_factory=dict)
    draft: str = ""
    shows_statistics: bool = False
    follows_terminal: bool = False


class ChatApp(KeyQueue):
    TITLE = "localllm"
    BINDINGS = [
        Binding("f1", "help", "help", id="app.help"),
        Binding("f2", "plan", "plan", id="app.plan"),
        Binding("f3", "models", "models", id="app.models"),
        Binding("f4", "chats", "chats", id="app.chats"),
        Binding("ctrl+q", "leave", "leave", id="app.leave", show=False, priority=True),
    ]
    ENABLE_COMMAND_PALETTE = True
    CSS = """
    Screen:inline { height: 75vh; min-height: 16; border: none; }
    """

    def __init__(self, start: Start, serve: Serve = serve, away: Callable[[], Away] = nullcontext) -> None:
        """away: entered while another program has the terminal."""
        super().__init__()
        self.animation_level = "none"  # each frame of a scroll is a picture more over ssh
        self._start = start
        self._loop: asyncio.AbstractEventLoop | None = None
        self.away = away
        self.worker = ChatWorker(start.resolved, dict(start.extra), serve, self._hear, KeyNames(start.keys))
        self.history = HistoryWorker()
        self.chat = ChatScreen(self.worker, start.draft, shows_statistics=start.shows_statistics)
        self.downloads = DownloadWorker(self.post_message)
        self.fits = FitWorker(self.post_message, lambda: self.chat.is_busy or self.downloads.is_running)
        self._models_screen: ModelsScreen | None = None
        self.failure: Exception | None = None
        self.unsent = ""  # what stands in the composer
        self._kept_draft = ""
        self._first_theme = start.theme

    @property
    def keys(self) -> Mapping[str, str]:
        """The user's own, by a binding's id."""
        return self._start.keys

    @property
    def time(self) -> float:
        """Seconds, never set back."""
        return time.monotonic()

    def on_mount(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.theme = self._start.theme
        self.set_keymap(dict(self._start.keys))
        self.push_screen(self.chat)
        self.call_after_refresh(self._begin)
        if not self._start.selection.private:
            self.set_interval(_DRAFT_S, self._keep_draft)
        if not self.is_headless:
            self.set_interval(_ALONE_S, self._leave_if_alone)

    def _begin(self) -> None:
        """Once the first picture is there: torch's import holds Python's lock for long stretches."""
        self.worker.begin_with(self._start.selection, self._start.resumed, self._start.system)

    def _hear(self, message: Message) -> None:
        """From the conversation's thread: the chat's handlers take it, whichever screen is shown."""
        self.chat.post_message(message)

    def _keep_draft(self) -> None:
        """What is being written survives a kill."""
        if self.unsent != self._kept_draft:
            self.run_worker(self.keep_draft, thread=True, group="draft")

    def keep_draft(self) -> None:
        """Keeps what is being written for the next start, if it is not. Of a private chat nothing is."""
        if self.unsent != self._kept_draft and not self._start.selection.private:
            self._kept_draft = self.unsent
            drafts.save(self._kept_draft)

    def leave(self) -> None:
        """Ends the program. What was said is kept."""
        self.exit()

    def _leave_if_alone(self) -> None:
        """Leaves where the terminal is gone, and no signal told of it: reading from it would spin for ever."""
        if not os.isatty(sys.__stdin__.fileno() if sys.__stdin__ is not None else 0):
            self.leave()

    def leave_soon(self) -> None:
        """`leave`, from a handler of signals."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.leave)

    def on_unmount(self) -> None:
        self.fits.close()
        self.downloads.close(_STOP_S)

    @property
    def _models(self) -> ModelsScreen | None:
        """None also where it is not there yet, or goes with everything else."""
        models = self._models_screen
        is_there = self.is_running and models is not None and models in self.screen_stack and models.is_mounted
        return models if is_there else None

    @on(FitFound)
    def _on_verdict(self, message: FitFound) -> None:
        if (models := self._models) is not None:
            models.judged(message.name)

    @on(FitMeasuring)
    def _on_measuring(self, message: FitMeasuring) -> None:
        if (models := self._models) is not None:
            models.tell_measuring(message.text)

    @on(messages.BackgroundReported)
    def _on_background(self, message: messages.BackgroundReported) -> None:
        if self._start.follows_terminal:
            before, self._first_theme = self._first_theme, LIGHT if message.is_light else DARK
            self.theme = self._first_theme if self.theme == before else self.theme

    @on(DownloadChanged)
    def _on_transfer(self, message: DownloadChanged) -> None:
        """On the screen of the models where it is open; else the chat tells how it ended."""
        transfer = message.transfer
        self.downloads.settle(transfer)
        if (models := self._models) is not None:
            models.follow(transfer)
        elif not self.is_running:
            return
        elif transfer.state == "ended":
            self.chat.notice.note(f"{transfer.told} ({self.worker.key_names['app.models']}: models)")
        elif transfer.error is not None and transfer.state == "failed":
            self.chat.notice.tell(transfer.error)

    def action_leave(self) -> None:
        self.leave()

    def action_help(self) -> None:
        from localllm.tui.key_scopes import rooms
        from localllm.tui.screens.help import HelpScreen

        self.push_screen(HelpScreen(rooms(), self._start.keys))

    def action_plan(self) -> None:
        from localllm.tui.screens.plan import PlanScreen

        selection = self.worker.selection
        if isinstance(self.screen, PlanScreen):
            self.screen.dismiss()
        elif selection is None:
            self.chat.notice.note("there is no model yet")
        else:
            self.push_screen(PlanScreen(self.worker, selection))

    def action_models(self) -> None:
        """Shows them; where they are shown, goes back."""
        from localllm.tui.screens.models import ModelsScreen

        if isinstance(self.screen, ModelsScreen):
            self.pop_screen()
        elif self._models_screen not in self.screen_stack:
            self._models_screen = ModelsScreen(self.chat, self.downloads, self.fits)
            self.push_screen(self._models_screen)

    def action_chats(self) -> None:
        from localllm.tui.screens.chats import ChatsScreen

        if isinstance(self.screen, ChatsScreen):
            self.screen.dismiss()
        else:
            self.push_screen(ChatsScreen(self.chat, self.history))

    def get_system_commands(self, screen: Screen[Any]) -> Iterator[SystemCommand]:
        """The palette: every slash command, by what it does."""
        for name, command in COMMANDS.items():
            yield SystemCommand(f"/{name} {command.parameters}".strip(), command.summary, partial(self._command, name))

    def _command(self, name: str) -> None:
        """Does it, or where something has to stand behind it, begins it in the composer."""
        while self.screen is not self.chat:
            self.pop_screen()
        if COMMANDS[name].parameters and not COMMANDS[name].parameters.startswith("["):
            self.chat.composer.put_away()
            self.chat.composer.write(f"/{name} ")
            self.chat.composer.focus()
        else:
            self.chat.take_command(f"/{name}")

    def choose_theme(self, name: str) -> None:
        if not name:
            self.search_themes()
        elif name in self.available_themes:
            self.theme = name
        elif name == "auto":
            self.theme = self._first_theme
        else:
            known = ", ".join(sorted(self.available_themes))
            self.chat.post_message(
                messages.JobFailed(
                    UsageError(f"there is no theme {name[:40]!r}", why=f"known are {known}", fix="/theme")
                )
            )

    def _handle_exception(self, error: Exception) -> None:
        """What nobody foresaw ends the screen; whoever started it tells of it, in four lines."""
        self.failure = self.failure or error
        super()._handle_exception(error)

    def _fatal_error(self) -> None:
        """In the place of a traceback with the values of all variables, the conversation's among them."""
        self._close_messages_no_wait()

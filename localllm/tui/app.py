"""The full-screen chat: its workers, screens, themes and keys."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from textual import events, on, work
from textual.app import App, SystemCommand
from textual.message import Message
from textual.screen import Screen
from textual.worker import WorkerFailed

from localllm.chat.recorder import Resumed
from localllm.config import ResolvedSettings
from localllm.errors import CardFaultError, LocalLLMError, UsageError
from localllm.runtime.selection import Selection
from localllm.tui import drafts, messages
from localllm.tui.chat_worker import ChatWorker
from localllm.tui.commands import COMMANDS
from localllm.tui.download_worker import DownloadChanged, DownloadWorker
from localllm.tui.history_worker import HistoryWorker
from localllm.tui.job_queue import DaemonExecutor, Job
from localllm.tui.keys import EVERYWHERE, KeyNames
from localllm.tui.model_loader import Serve, serve
from localllm.tui.plan_worker import FitFound, FitMeasuring, FitWorker
from localllm.tui.screens.chat import ChatScreen
from localllm.tui.themes import DARK, LIGHT, OWN, THEMES

if TYPE_CHECKING:
    from localllm.tui.screens.models import ModelsScreen

_DRAFT_S = 1.0  # between two looks at whether the draft has changed
_STOP_S = 1.0  # for downloads to stop; their files stay in any case
_ALONE_S = 2.0  # between two looks at whether the terminal is still there
_ROUNDS = 4  # of a key, from the widget to the app: one that sends takes three, as each of its messages makes the next
_STUCK_S = 0.5  # for a round; a widget that goes away takes the message with it


@dataclass(frozen=True)
class Start:
    """The beginning of a chat. resolved: the settings for models chosen later. system: typed in place of a resumed
    chat's own message. extra: sampling parameters that are no settings. draft: what was typed before the screen was
    there. follows_terminal: the theme is the terminal's, which may report it later."""

    selection: Selection
    resolved: ResolvedSettings
    resumed: Resumed | None = None
    system: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    theme: str = DARK.name
    keys: Mapping[str, str] = field(default_factory=dict)
    draft: str = ""
    shows_statistics: bool = False
    follows_terminal: bool = False


class ChatApp(App[None]):
    """Keys act in the order in which they are pressed, also when many come at once: over ssh, or on a busy machine.

    Textual hands each key to the focused widget and asks the bindings when it has come back from there: a letter behind
    a key that sends, opens or moves the focus would be written before that has happened.
    """

    TITLE = "localllm"
    CSS_PATH = "chat.tcss"
    BINDINGS = [*EVERYWHERE]
    ENABLE_COMMAND_PALETTE = True

    def __init__(
        self, start: Start, serve: Serve = serve, away: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """away: entered while another program has the terminal."""
        super().__init__()
        self.animation_level = "none"  # each frame of a scroll is a picture more over ssh
        self.failure: Exception | None = None
        self._start = start
        self._pressed: asyncio.Queue[events.Key | events.Paste] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._saved_draft = ""
        self._first_theme = start.theme

        def post(message: Message) -> None:
            """Post to the chat, whichever screen is shown."""
            self.chat.post_message(message)

        names = KeyNames(start.keys)
        self.worker = ChatWorker(start.resolved, dict(start.extra), serve, post, names, self._start_thread)
        self.history = HistoryWorker(lambda text: self.call_later(self._warn, text))
        self.chat = ChatScreen(self.worker, self.history, start.draft, away, shows_statistics=start.shows_statistics)
        self.downloads = DownloadWorker(self.post_message, self._start_thread)
        self.fits = FitWorker(self, lambda: self.chat.is_busy or self.downloads.is_running)
        self._models_screen: ModelsScreen | None = None

    def on_mount(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(DaemonExecutor())
        for theme in OWN:
            self.register_theme(theme)
        self.theme = self._start.theme
        self.set_keymap(dict(self._start.keys))
        self.push_screen(self.chat)
        self._hand_on_keys()
        self._start_thread(self.history.run)
        self.call_after_refresh(self._begin)
        if not self._start.selection.private:
            self.set_interval(_DRAFT_S, self._save_draft_soon)
        if not self.is_headless:
            self.set_interval(_ALONE_S, self._leave_if_alone)

    @dataclass
    class Round(Message):
        """Takes the way of a key, behind it."""

        done: asyncio.Event

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.InputEvent | events.Paste) and not self.screen_stack:
            return  # the program is ending
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            self._pressed.put_nowait(event)
        else:
            await super().on_event(event)

    @work(group="keys")
    async def _hand_on_keys(self) -> None:
        while True:
            event = await self._pressed.get()
            if not self.screen_stack:
                return
            focused, is_written = self.focused, isinstance(event, events.Paste)
            if isinstance(event, events.Key) and event.is_printable and focused is not None:
                is_written = focused.check_consume_key(event.key, event.character)
            await super().on_event(event)
            for _ in range(0 if is_written else _ROUNDS):
                done = asyncio.Event()
                target = self.focused or self.screen if self.screen_stack else self
                if not target.post_message(self.Round(done)):
                    self.post_message(self.Round(done))
                try:
                    await asyncio.wait_for(done.wait(), _STUCK_S)
                except TimeoutError:
                    break

    @on(Round)
    def _on_round(self, message: Round) -> None:
        message.done.set()

    def _begin(self) -> None:
        """Begin once the first picture is there: torch's import holds Python's lock for long stretches."""
        start = self._start
        self._start_thread(partial(self.worker.run, start.selection, start.resumed, start.system))

    def _start_thread(self, work: Job) -> None:
        self.call_later(self.run_worker, work, thread=True)

    def _warn(self, text: str) -> None:
        """Show a warning on the present screen, or the chat below a dialog."""
        getattr(self.screen, "notice", self.chat.notice).note(text, is_warning=True)

    @property
    def unsent(self) -> str:
        return self.chat.unsent

    def _save_draft_soon(self) -> None:
        """Save the draft, which then survives a kill."""
        if self.unsent != self._saved_draft:
            self.run_worker(self.save_draft, thread=True, group="draft")

    def save_draft(self) -> None:
        """Save a changed draft for the next start, unless the chat is private."""
        if self.unsent != self._saved_draft and not self._start.selection.private:
            self._saved_draft = self.unsent
            drafts.save(self._saved_draft)

    def leave(self) -> None:
        """End the program. The conversation is saved."""
        self.exit()

    def on_job_failed(self, message: messages.JobFailed) -> None:
        self._leave_at_fault(message.error)

    def on_model_failed(self, message: messages.ModelFailed) -> None:
        self._leave_at_fault(message.error)

    def _leave_at_fault(self, error: LocalLLMError) -> None:
        """Leave where a GPU has failed this process: every answer would end so, of every model."""
        if isinstance(error, CardFaultError):
            self.failure = error
            self.leave()

    def _leave_if_alone(self) -> None:
        """Leave where the terminal is gone without a signal: reading from it would spin for ever."""
        if not os.isatty(sys.__stdin__.fileno() if sys.__stdin__ is not None else 0):
            self.leave()

    def leave_soon(self) -> None:
        """`leave`, from a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.leave)

    def on_unmount(self) -> None:
        self.downloads.close(_STOP_S)

    def close(self, timeout_s: float) -> None:
        """Save the draft and end the workers, after the screen is gone."""
        self.save_draft()
        self.worker.close(timeout_s)
        self.history.close(timeout_s)

    @property
    def _models(self) -> ModelsScreen | None:
        """The models' screen; None while it is not mounted."""
        models = self._models_screen
        return models if self.is_running and models in self.screen_stack and models.is_mounted else None

    def on_fit_found(self, message: FitFound) -> None:
        if (models := self._models) is not None:
            models.show_fit(message.name)

    def on_fit_measuring(self, message: FitMeasuring) -> None:
        if (models := self._models) is not None:
            models.show_measuring(message.text)

    def on_background_reported(self, message: messages.BackgroundReported) -> None:
        if self._start.follows_terminal:
            before, self._first_theme = self._first_theme, (LIGHT if message.is_light else DARK).name
            self.theme = self._first_theme if self.theme == before else self.theme

    def on_download_changed(self, message: DownloadChanged) -> None:
        """Show it on the models' screen where that is open; else the chat notes how it ended."""
        download = message.download
        self.downloads.settle(download)
        if (models := self._models) is not None:
            models.show_download(download)
        elif not self.is_running:
            return
        elif download.state == "ended":
            self.chat.notice.note(f"{download.result} ({self.worker.key_names['app.models']}: models)")
        elif download.error is not None and download.state == "failed":
            self.chat.notice.show_error(download.error)

    def action_leave(self) -> None:
        self.leave()

    def action_help(self) -> None:
        from localllm.tui.key_scopes import key_scopes
        from localllm.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(key_scopes(), self._start.keys, self.chat.status.parts))

    def action_plan(self) -> None:
        from localllm.tui.screens.plan import PlanScreen

        if isinstance(self.screen, PlanScreen):
            self.screen.dismiss()
        else:
            self.push_screen(PlanScreen(self.worker, self.worker.selection or self._start.selection))

    def action_models(self) -> None:
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
        """The palette: every slash command, by its summary."""
        for name, command in COMMANDS.items():
            yield SystemCommand(f"/{name} {command.parameters}".strip(), command.summary, partial(self._command, name))

    def _command(self, name: str) -> None:
        """Run a command, or begin it in the composer where it needs a parameter."""
        while self.screen is not self.chat:
            self.pop_screen()
        if COMMANDS[name].parameters and not COMMANDS[name].parameters.startswith("["):
            self.chat.composer.put_away()
            self.chat.composer.write(f"/{name} ")
            self.chat.composer.focus()
        else:
            self.chat.take_command(f"/{name}")

    def action_theme(self, name: str) -> None:
        if not name:
            self.search_themes()
        elif name in ("auto", *THEMES):
            self.theme = THEMES.get(name, self._first_theme)
            if name != self.worker.resolved.settings.theme:
                self.chat.notice.note(f"until you leave; `localllm config set theme {name}` keeps it")
        else:
            known = ", ".join(["auto", *sorted(THEMES)])
            self.chat.notice.show_error(
                UsageError(f"there is no theme {name[:40]!r}", why=f"known are {known}", fix="/theme")
            )

    def _handle_exception(self, error: Exception) -> None:
        """End the screen at an unforeseen error, which the caller of `run` reports in four lines."""
        cause = error.error if isinstance(error, WorkerFailed) else error
        self.failure = self.failure or (cause if isinstance(cause, Exception) else error)
        super()._handle_exception(error)

    def _fatal_error(self) -> None:
        """Replaces a traceback with the values of all variables, the conversation's among them."""
        self._close_messages_no_wait()

"""The conversation: its messages, the answer that streams, and the composer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from textual import getters, work
from textual.app import ComposeResult, SuspendNotSupported
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, Static

from localllm.chat import slash
from localllm.chat.answer import statistics
from localllm.chat.attachments import typed_part
from localllm.chat.context import usage_lines
from localllm.chat.text import one_line, visible
from localllm.errors import LocalLLMError
from localllm.history import Session, content_of
from localllm.tui import messages
from localllm.tui.chat_worker import ChatWorker
from localllm.tui.code_copy import CodeCopy
from localllm.tui.commands import COMMANDS
from localllm.tui.drafts import edited, no_terminal
from localllm.tui.history_worker import HistoryWorker
from localllm.tui.job_queue import Job
from localllm.tui.widgets.bars import KeyBar
from localllm.tui.widgets.columns import Column, Columns
from localllm.tui.widgets.composer import Composer, ComposerPanel
from localllm.tui.widgets.message_view import MessageView
from localllm.tui.widgets.sidebar import Sidebar
from localllm.tui.widgets.status import Activity, AnswerRun, Notice, Status
from localllm.tui.widgets.transcript import Transcript
from localllm.tui.widgets.welcome import NUM_CHATS, Welcome, residence

_LEAVE_S = 3.0  # in which a second Ctrl-C leaves
_BETWEEN_ANSWERS = ("undo", "clear", "fork", "load", "adapter")  # commands that change what a prompt is
_WIDE = 120  # columns, from which on the chats are listed beside the conversation
_QUIET: Any = {"show": False, "priority": True}  # before the composer, and not among the keys at the bottom


class ChatScreen(Screen[None]):
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_WIDE, "-wide")]
    BINDINGS = [
        Binding("escape", "stop", "stop", id="chat.stop"),
        Binding("escape", "close", "close", id="chat.close", show=False),
        Binding("ctrl+c", "interrupt", "copy what is selected, stop, or leave", id="chat.interrupt", **_QUIET),
        Binding("ctrl+d", "leave", "leave", id="chat.leave", **_QUIET),
        Binding("ctrl+up", "select(-1)", "earlier message", id="chat.earlier", **_QUIET),
        Binding("ctrl+down", "select(1)", "later message", id="chat.later", **_QUIET),
        Binding("pageup", "page(-1)", "scroll up", id="chat.page_up", **_QUIET),
        Binding("pagedown", "page(1)", "scroll down", id="chat.page_down", **_QUIET),
        Binding("ctrl+home", "go('home')", "to the first message", id="chat.home", **_QUIET),
        Binding("ctrl+end", "go('end')", "to the last message", id="chat.end", **_QUIET),
        Binding("ctrl+t", "thoughts", "unfold or fold thoughts", id="chat.thoughts", **_QUIET),
        Binding("ctrl+n", "new", "new chat", id="chat.new", priority=True),
        Binding("ctrl+s", "list", "list the chats beside this one, or not", id="chat.list", **_QUIET),
        Binding("ctrl+o", "latest", "go on with the latest other chat", id="chat.latest", **_QUIET),
        Binding("f5", "regenerate", "regenerate the answer", id="chat.regenerate", **_QUIET),
        Binding("f6", "continue", "continue the answer", id="chat.continue", **_QUIET),
        Binding("f7", "code", "code blocks", id="chat.code", **_QUIET),
    ]
    AUTO_FOCUS = "Composer"

    transcript = getters.query_one(Transcript)
    panel = getters.query_one(ComposerPanel)
    composer = getters.query_one(Composer)
    notice = getters.query_one(Notice)
    activity = getters.query_one(Activity)
    status = getters.query_one(Status)
    sidebar = getters.query_one(Sidebar)

    def __init__(
        self,
        worker: ChatWorker,
        history: HistoryWorker,
        draft: str,
        away: Callable[[], AbstractContextManager[None]],
        *,
        shows_statistics: bool = False,
    ) -> None:
        """draft: the composer's first text. away: entered while another program has the terminal."""
        super().__init__()
        self.worker = worker
        self._history = history
        self.unsent = ""  # the text in the composer
        self._away = away
        self._busy = f"an answer is being written: {worker.key_names['chat.stop']} stops it"
        self._draft = draft
        self._shows_statistics = shows_statistics
        self._listed: tuple[object, ...] = ()  # of this chat, as the list of chats has it
        self._turns: tuple[messages.Turn, ...] = ()
        self._loaded: tuple[str, str] | None = None  # the model's name, and the format of its weights
        self._is_answering = self._is_asked = self._is_loading = False
        self._interrupted_at = 0.0
        self.session_id: str | None = None  # of the saved chat; None while nothing is saved

    def compose(self) -> ComposeResult:
        yield Static("", id="title")
        with Columns():
            yield Sidebar(self._history)
            with Column():
                yield Transcript(self.worker.key_names, shows_thoughts=self.worker.resolved.settings.show_thoughts)
                with Column(classes="foot"):
                    yield Activity()
                    yield Notice()
                    yield ComposerPanel(self._draft, self.worker.key_names)
        yield Status()
        with Horizontal(id="keys"):
            yield Footer(show_command_palette=False, compact=True)
            yield KeyBar({"app.help": "help", "app.leave": "quit"})

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def is_answering(self) -> bool:
        """Return whether an answer streams or is requested."""
        return self._is_answering or self._is_asked

    @property
    def is_busy(self) -> bool:
        """Return whether a model loads or computes."""
        return self.is_answering or self._is_loading

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self.is_answering if action == "stop" else True

    # Messages of the conversation's worker

    def on_chat_started(self, message: messages.ChatStarted) -> None:
        self.composer.remember([*self.composer.asked, *message.asked])
        self.transcript.welcome.show_machine(message.machine)

    def on_model_loading(self, message: messages.ModelLoading) -> None:
        self._is_loading = True
        self._loaded = None
        self.status.facts = None
        self.status.model_text = one_line(message.text)
        self.activity.progress(message.text, message.done, message.total)
        self._welcome_model("is being loaded" + (f" {message.done / message.total:.0%}" if message.total else ""))

    def on_model_ready(self, message: messages.ModelReady) -> None:
        self._is_loading = False
        if self.status.facts is None:
            self.activity.clear()
        self.status.facts = message.facts
        self._loaded = message.name, message.facts.weights
        self._show_model()
        state = f"is ready, with a context of {message.facts.ctx:,} tokens"
        self.transcript.welcome.show_model(message.name, state, residence(message.facts))

    def _show_model(self) -> None:
        """Show the loaded model and its adapters: "tiny int4 + fox:0.5"."""
        if self._loaded is not None:
            self.status.model_text = one_line(" + ".join((" ".join(self._loaded), *self.panel.adapters)))

    def on_model_failed(self, message: messages.ModelFailed) -> None:
        self._is_loading = False
        self._loaded = None
        self.activity.clear()
        self.status.model_text = f"no model ({self.worker.key_names['app.models']} chooses one)"
        self.notice.show_error(message.error)
        self._welcome_model("is not loaded")

    def _welcome_model(self, state: str) -> None:
        if (selection := self.worker.selection) is not None:
            self.transcript.welcome.show_model(selection.files.name, state)

    async def on_conversation_changed(self, message: messages.ConversationChanged) -> None:
        self.session_id = message.session_id
        self.panel.adapters = message.adapters
        self._show_model()
        listed = message.session_id, message.title, len(message.turns)
        if listed != self._listed:  # not for each word that is saved
            self._listed = listed
            self.sidebar.list_chats(self.session_id)
        if self._turns and not (message.turns and message.turns[0] is self._turns[0]):  # another conversation
            self.notice.clear()
            self.status.run_now = AnswerRun()
        self._turns = message.turns
        if self.panel.editing is not None and not any(turn is self.panel.editing for turn in message.turns):
            self.panel.leave_edit()
        await self.transcript.show(message.turns, message.ending, message.thinking)
        is_unsaved = bool(message.turns) and message.session_id is None
        note = "  private: nothing is saved" if message.is_private else "  not saved" if is_unsaved else ""
        title = visible(one_line(message.title or "new conversation"))
        self.query_one("#title", Static).update(Content(f"localllm  {title}{note}"))
        self.panel.attach(message.attached)

    def on_question_returned(self, message: messages.QuestionReturned) -> None:
        if not self.composer.text:
            self.composer.write(message.text)
        else:
            self.notice.note("the question was taken back: the arrow up brings it into the composer")

    async def on_go_to(self, message: messages.GoTo) -> None:
        view = await self.transcript.go_to(message.index)
        if message.is_chosen and view is not None:
            self.set_focus(view)

    async def on_answer_started(self, message: messages.AnswerStarted) -> None:
        self._is_answering = True
        self.status.run_now = AnswerRun()
        self.worker.answers.throttle.begin()
        view = await self.transcript.begin_answer(is_thinking=message.is_thinking)
        self.activity.progress("reading the prompt")
        if message.said:
            await view.append(message.said)
        self.refresh_bindings()

    def on_prefill_progress(self, message: messages.PrefillProgress) -> None:
        if message.done < message.total:
            text = f"reading the prompt: {message.done:,} of {message.total:,} tokens"
            self.activity.progress(text, message.done, message.total)

    async def on_answer_delta(self, message: messages.AnswerDelta) -> None:
        self.worker.answers.throttle.drawn()
        self.activity.clear()
        if self.transcript.live is not None:
            await self.transcript.live.append(message.text)
        self.status.run_now = AnswerRun(message.num_tokens, message.elapsed_s)

    async def on_answer_ended(self, message: messages.AnswerEnded) -> None:
        self._is_answering = False
        self.notice.withdraw(self._busy)  # a question that waited for a model is done before it is answered
        self.activity.clear()
        view = self.transcript.live
        finished = message.finished
        is_whole = finished is not None and finished.finish_reason in ("stop", "length")
        if view is None or not (message.text or is_whole):
            await self.transcript.drop_answer()
            if finished is not None:
                key = self.worker.key_names["chat.regenerate"]
                self.notice.note(f"stopped before the first word: {key} asks again")
        else:
            await view.end()
            if self._shows_statistics:
                view.show_meta(figures=self._statistics())
        if finished is not None:
            self.status.run_now = AnswerRun(finished.usage.completion_tokens, 0.0, finished)
        self.refresh_bindings()

    def on_request_done(self) -> None:
        self._is_asked = False
        self.notice.withdraw(self._busy)
        self.refresh_bindings()

    def on_usage_counted(self, message: messages.UsageCounted) -> None:
        self.status.usage = message.usage

    def on_noted(self, message: messages.Noted) -> None:
        self.notice.note(message.text, is_warning=message.severity == "warning")

    def on_job_failed(self, message: messages.JobFailed) -> None:
        self.notice.show_error(message.error)

    # The composer

    async def on_composer_panel_finished(self, event: ComposerPanel.Finished) -> None:
        welcome = self.transcript.welcome
        if welcome.display and welcome.choose(event.text.strip()):
            self.panel.take()
        elif event.text.startswith("/") and self.panel.editing is None:
            self.take_command(event.text)
        elif self.is_answering:
            self.notice.note(self._busy)
        else:
            self.notice.close_error()
            question, text = self.panel.take(), event.text.strip()
            await self.transcript.go_end()
            self._answer(lambda: self.worker.say(text) if question is None else self.worker.edit(question, text))

    # Other chats, and the examples of an empty one

    def on_screen_resume(self) -> None:
        self.sidebar.list_chats(self.session_id)

    def on_sidebar_listed(self, event: Sidebar.Listed) -> None:
        self.transcript.welcome.show_chats(self.sidebar.others()[:NUM_CHATS])

    async def on_welcome_asked(self, event: Welcome.Asked) -> None:
        self.set_focus(self.composer)
        self.composer.put_away()
        await self.on_composer_panel_finished(ComposerPanel.Finished(event.prompt))

    def on_welcome_opened(self, event: Welcome.Opened) -> None:
        self._open(event.session)

    def on_chat_list_opened(self) -> None:
        if (row := self.sidebar.chats.row) is not None:
            self._open(row.session)

    def action_latest(self) -> None:
        if others := self.sidebar.others():
            self._open(others[0].session)
        else:
            self.notice.note("there is no other chat")

    def _open(self, session: Session) -> None:
        self.set_focus(self.composer)
        if session.id != self.session_id:
            self.unless_answering(lambda: self.worker.open(session.id))

    def action_list(self) -> None:
        if self.size.width < _WIDE:
            key = self.worker.key_names["app.chats"]
            self.notice.note(
                f"the list of chats takes {_WIDE} columns, here are {self.size.width}; {key} shows it alone"
            )
            return
        self.set_focus(self.composer)
        selection = self.worker.selection
        self.sidebar.toggle(is_saved=selection is not None and not selection.private)

    def on_text_area_changed(self) -> None:
        self.unsent = self.panel.unsent

    def action_edit(self) -> None:
        try:
            with self.app.suspend(), self._away():
                try:  # inside: the screen comes back by what stands behind the `with`
                    self.composer.write(edited(self.composer.whole))
                except LocalLLMError as error:
                    self.notice.show_error(error)
        except SuspendNotSupported:
            self.notice.show_error(no_terminal())
        self.refresh(layout=True)

    def take_command(self, line: str) -> None:
        """Run a slash command. The arrow up brings a typed one back."""
        self.notice.clear()
        if self.composer.text.startswith("/"):
            self.composer.put_away()
            self.unsent = self.panel.unsent  # at once: /bye leaves before the composer tells of its change
        try:
            name, rest = slash.split_command(line.strip(), COMMANDS)
            if (action := self._actions.get(name)) is not None:
                action(rest)
            elif name in _BETWEEN_ANSWERS:
                self.unless_answering(lambda: self.worker.command(name, rest))
            else:
                self.worker.do(lambda: self.worker.command(name, rest))
        except LocalLLMError as error:
            self.notice.show_error(error)

    @property
    def _actions(self) -> Mapping[str, Callable[[str], object]]:
        """The actions of the screen's own commands, given the text behind them. Actions raise LocalLLMError."""
        worker, do, usage = self.worker, self.worker.do, self.status.usage
        return {
            "help": lambda _: self._run("help"),
            "regen": lambda _: self.action_regenerate(),
            "continue": lambda _: self.action_continue(),
            "edit": lambda _: self.begin_edit(self.num_turns - 1),
            "copy": self._copies.copy_command,
            "code": lambda rest: self._copies.save_command(rest) if rest else self.action_code(),
            "model": lambda name: self.unless_answering(lambda: worker.use(name)) if name else self._run("models"),
            "sessions": lambda name: self.unless_answering(lambda: worker.open(name)) if name else self._run("chats"),
            "plan": lambda _: self._run("plan"),
            "export": lambda path: do(lambda: worker.export(path)),
            "show": lambda _: do(worker.note_all),
            "stats": lambda _: self.notice.note(self._statistics() or "there is no answer yet"),
            "tokens": lambda _: self.notice.lines(usage_lines(usage) if usage else ["there is no model yet"]),
            "theme": lambda name: self._run(f"theme({name!r})"),
            "bye": lambda _: self._run("leave"),
        }

    def _run(self, action: str) -> None:
        self.call_later(self.run_action, f"app.{action}")

    def _statistics(self) -> str:
        last = self.worker.last_answer
        return statistics(last) if last is not None and last.finished is not None else ""

    # Keys

    def action_stop(self) -> None:
        self.worker.answers.stop()

    def action_close(self) -> None:
        """Close what is open, and go back to the composer."""
        if not self.panel.close():
            self.set_focus(self.composer)  # beside a notice, too: what is typed next is not meant for a message's keys
            self.notice.close()

    def action_interrupt(self) -> None:
        """Copy the selection; else stop the answer, else empty the composer, else leave at the second press."""
        selected = self.get_selected_text()
        composer = self.composer
        if selected or (composer.has_focus and composer.selected_text):
            self._copies.copy(selected or composer.selected_text, "the selection")
            self.clear_selection()
        elif self.is_answering:
            self.worker.answers.stop()
        elif self.panel.editing is not None:
            self.panel.leave_edit()
        elif composer.text:
            composer.put_away()
        elif time.monotonic() - self._interrupted_at < _LEAVE_S:
            self._run("leave")
        else:
            self._interrupted_at = time.monotonic()
            self.notice.note("Ctrl-C again leaves; so do /bye and Ctrl-D", for_s=_LEAVE_S)

    def action_leave(self) -> None:
        if self.composer.text and self.composer.has_focus:
            self.composer.action_delete_right()
        else:
            self._run("leave")

    def action_select(self, step: int) -> None:
        """Focus the message before or after; behind the last one is the composer."""
        if not self.transcript.select(step):
            self.set_focus(self.composer)

    def action_page(self, step: int) -> None:
        self.transcript.page(step)

    async def action_go(self, where: str) -> None:
        await (self.transcript.go_home() if where == "home" else self.transcript.go_end())

    def action_thoughts(self) -> None:
        self.transcript.toggle_thoughts()

    def action_new(self) -> None:
        self.unless_answering(lambda: self.worker.command("clear"))

    def action_regenerate(self) -> None:
        self.unless_answering(self.worker.regenerate, self._answer)

    def action_continue(self) -> None:
        self.unless_answering(self.worker.go_on, self._answer)

    def action_code(self) -> None:
        """Pick among all code blocks, from the first of the latest answer that has one."""
        self._pick_code(self.transcript.codes.num_before_latest)

    def unless_answering(self, job: Job, do: Callable[[Job], None] | None = None) -> None:
        """Queue a job by `do` (by default `worker.do`), unless an answer is under way."""
        if self.is_answering:
            self.notice.note(self._busy)
        else:
            self.notice.close_error()
            (do or self.worker.do)(job)

    def _answer(self, job: Job) -> None:
        """Queue a job that asks for an answer; until it is done nothing else is asked, and esc stops it."""
        self._is_asked = True
        self.worker.answer(job)
        self.refresh_bindings()

    # Messages

    def action_want(self, what: str) -> None:
        """Copy, edit, fork or answer anew the chosen message, show another wording of it, or its code blocks."""
        around = () if self.focused is None else self.focused.ancestors_with_self
        view = next((each for each in around if isinstance(each, MessageView)), None)
        if view is None:
            return
        match what:
            case "copy":
                self._copies.copy(view.copy_text, "the message")
            case "code":
                before = self.transcript.codes.num_before
                has_code = before(view.index + 1) > before(view.index)
                self._pick_code(before(view.index)) if has_code else self.notice.note("there is no code block in it")
            case "fork":
                self.set_focus(self.composer)
                self.unless_answering(lambda: self.worker.fork_at(view.index + 1))
            case "edit":
                self.begin_edit(view.index)
            case "other" if view.turn is not None:
                turn = view.turn
                self.unless_answering(lambda: self.worker.turn_over(turn))
            case "regenerate":
                self.set_focus(self.composer)
                if view.index >= len(self._turns) - 2:
                    self.action_regenerate()
                else:
                    self.notice.note("the last answer alone can be had anew; fork here (f) goes on from this one")

    def begin_edit(self, index: int) -> None:
        index = min(index, len(self._turns) - 1)  # an answer that is being written is none of them
        while index >= 0 and self._turns[index]["role"] != "user":
            index -= 1
        if index < 0 or self.is_answering:
            self.notice.note(self._busy if index >= 0 else "there is no question")
        else:
            self.panel.edit(self._turns[index], typed_part(content_of(self._turns[index])[0]))

    @work
    async def _pick_code(self, first: int) -> None:
        await self._copies.pick(first)

    @property
    def _copies(self) -> CodeCopy:
        return CodeCopy(self.app, self.worker, self.transcript.codes, self.notice)

"""The conversation: what was said, what is being said, and where the next message is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textual import on, work
from textual.app import ComposeResult, SuspendNotSupported
from textual.binding import Binding
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, Static, TextArea

from localllm.errors import LocalLLMError
from localllm.frontend import slash
from localllm.frontend.answer import statistics
from localllm.frontend.text import one_line, printable, visible
from localllm.frontend.thinking import kept_apart
from localllm.history import content_of
from localllm.tui import messages
from localllm.tui.commands import COMMANDS
from localllm.tui.drafts import edited
from localllm.tui.markdown_render import code_blocks
from localllm.tui.screens.slash_commands import SlashCommands
from localllm.tui.widgets.composer import Composer
from localllm.tui.widgets.composer_panel import ComposerPanel
from localllm.tui.widgets.message_view import MessageView, Thought
from localllm.tui.widgets.notice import Activity, Notice
from localllm.tui.widgets.status import AnswerRun, Status
from localllm.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from localllm.tui.app import ChatApp
    from localllm.tui.chat_worker import ChatWorker
    from localllm.tui.job_queue import Job

_LEAVE_S = 3.0  # in which a second Ctrl-C leaves
_QUIET: Any = {"show": False, "priority": True}  # before the composer, and not among the keys at the bottom


class ChatScreen(Screen[None]):
    CSS = """
    ChatScreen {
        & > #title { height: 1; padding: 0 1; background: $panel; color: $text-muted; }
        &.-low Suggestions, &.-low Composer { max-height: 4; }
        &.-low Notice { max-height: 6; }
        &.-narrow.-high Status { height: 3; }
        &.-narrow FooterKey.-command-palette { display: none; }
    }
    """
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]
    BINDINGS = [
        Binding("escape", "stop", "stop", id="chat.stop"),
        Binding("escape", "close", "close", id="chat.close", show=False),
        Binding("ctrl+c", "interrupt", "copy what is selected, stop, or leave", id="chat.interrupt", **_QUIET),
        Binding("ctrl+d", "leave", "leave", id="chat.leave", **_QUIET),
        Binding("ctrl+up", "select(-1)", "earlier message", id="chat.earlier", **_QUIET),
        Binding("ctrl+down", "select(1)", "later message", id="chat.later", **_QUIET),
        Binding("pageup", "page(-1)", "scroll up", id="chat.page_up", **_QUIET),
        Binding("pagedown", "page(1)", "scroll down", id="chat.page_down", **_QUIET),
        Binding("ctrl+home", "home", "to the first message", id="chat.home", **_QUIET),
        Binding("ctrl+end", "end", "to the last message", id="chat.end", **_QUIET),
        Binding("ctrl+t", "thoughts", "unfold or fold thoughts", id="chat.thoughts", **_QUIET),
        Binding("ctrl+n", "new", "new conversation", id="chat.new", **_QUIET),
        Binding("f5", "regenerate", "answer again", id="chat.regenerate", **_QUIET),
        Binding("f6", "continue", "go on with the answer", id="chat.continue", **_QUIET),
        Binding("f7", "code", "code blocks", id="chat.code", **_QUIET),
    ]
    AUTO_FOCUS = "Composer"

    def __init__(self, worker: ChatWorker, draft: str, *, shows_statistics: bool = False) -> None:
        """draft: what stands in the composer before the first key can come."""
        super().__init__()
        self.worker = worker
        self._busy = f"an answer is being written: {worker.key_names['chat.stop']} stops it"
        self._draft = draft
        self._shows_statistics = shows_statistics
        self._turns: tuple[messages.Turn, ...] = ()
        self._thinking: frozenset[int] = frozenset()  # which of them are answers that begin in a thought
        self._is_answering = False
        self._is_asked = False
        self._is_loading = False
        self._interrupted_at = 0.0
        self._session_id: str | None = None
        self._commands = SlashCommands(self)

    def compose(self) -> ComposeResult:
        yield Static("", id="title")
        yield Transcript(self.worker.key_names, shows_thoughts=self.worker.shows_thoughts)
        yield Activity()
        yield Notice()
        yield ComposerPanel(self._draft, self.worker.key_names)
        yield Status()
        yield Footer(show_command_palette=True, compact=True)

    @property
    def chat_app(self) -> ChatApp:
        from localllm.tui.app import ChatApp

        assert isinstance(self.app, ChatApp)
        return self.app

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def writing(self) -> ComposerPanel:
        return self.query_one(ComposerPanel)

    @property
    def composer(self) -> Composer:
        return self.writing.composer

    @property
    def notice(self) -> Notice:
        return self.query_one(Notice)

    @property
    def status(self) -> Status:
        return self.query_one(Status)

    @property
    def num_turns(self) -> int:
        """Messages of the conversation."""
        return len(self._turns)

    @property
    def is_answering(self) -> bool:
        """Whether an answer is written, or asked for."""
        return self._is_answering or self._is_asked

    @property
    def is_busy(self) -> bool:
        """Whether a model is loaded or computes."""
        return self.is_answering or self._is_loading

    @property
    def session_id(self) -> str | None:
        """The kept chat's; None where nothing is kept (yet)."""
        return self._session_id

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self.is_answering if action == "stop" else True

    # What the conversation's thread tells

    @on(messages.ChatStarted)
    def _on_begun(self, message: messages.ChatStarted) -> None:
        self.composer.remember([*self.composer.asked, *message.asked])
        self.transcript.welcome.machine = message.machine

    @on(messages.ModelLoading)
    def _on_loading(self, message: messages.ModelLoading) -> None:
        self._is_loading = True
        self.status.facts = None
        self.status.model_text = one_line(message.text)
        self.query_one(Activity).progress(message.text, message.done, message.total)

    @on(messages.ModelReady)
    def _on_ready(self, message: messages.ModelReady) -> None:
        self._is_loading = False
        if self.status.facts is None:
            self.query_one(Activity).clear()
        self.status.facts = message.facts
        self.transcript.welcome.model = message.facts.name

    @on(messages.ModelFailed)
    def _on_model_failed(self, message: messages.ModelFailed) -> None:
        self._is_loading = False
        self.query_one(Activity).clear()
        self.status.model_text = f"no model ({self.worker.key_names['app.models']} chooses one)"
        self.notice.tell(message.error)

    @on(messages.ConversationChanged)
    async def _on_shown(self, message: messages.ConversationChanged) -> None:
        self._session_id = message.session_id
        if self._turns and not (message.turns and message.turns[0] is self._turns[0]):  # another conversation
            self.notice.clear()
            self.status.run_now = AnswerRun()
        self._turns, self._thinking = message.turns, message.thinking
        if self.writing.editing is not None and not any(turn is self.writing.editing for turn in message.turns):
            self.writing.leave_edit()
        await self.transcript.show(message.turns, message.ending, message.thinking)
        private = "  private: nothing is kept" if message.is_private else ""
        if message.turns and message.session_id is None and not message.is_private:
            private = "  not kept"
        title = message.title or "new conversation"
        self.query_one("#title", Static).update(Content(f"localllm  {visible(one_line(title))}{private}"))
        self.writing.attach(message.attached)

    @on(messages.QuestionReturned)
    def _on_taken_back(self, message: messages.QuestionReturned) -> None:
        if not self.composer.text:
            self.composer.write(message.text)
        else:
            self.notice.note("the question was taken back: the arrow up brings it into the composer")

    @on(messages.GoTo)
    async def _on_go_to(self, message: messages.GoTo) -> None:
        view = await self.transcript.go_to(message.index)
        if message.is_chosen and view is not None:
            self.set_focus(view)

    @on(messages.AnswerStarted)
    async def _on_began(self, message: messages.AnswerStarted) -> None:
        self._is_answering = True
        self.status.run_now = AnswerRun()
        self.worker.answering.pace.begin()
        view = await self.transcript.begin_answer(is_thinking=message.is_thinking)
        self.query_one(Activity).progress("reading the prompt")
        if message.said:
            await view.hear(message.said)
        self.refresh_bindings()

    @on(messages.PrefillProgress)
    def _on_prefilled(self, message: messages.PrefillProgress) -> None:
        if message.done < message.total:
            text = f"reading the prompt: {message.done:,} of {message.total:,} tokens"
            self.query_one(Activity).progress(text, message.done, message.total)

    @on(messages.AnswerDelta)
    async def _on_said(self, message: messages.AnswerDelta) -> None:
        self.worker.answering.pace.heard()
        self.query_one(Activity).clear()
        view = self.transcript.live
        if view is not None:
            await view.hear(message.text)
        self.status.run_now = AnswerRun(message.num_tokens, message.elapsed_s)

    @on(messages.AnswerEnded)
    async def _on_ended(self, message: messages.AnswerEnded) -> None:
        self._is_answering = False
        self.notice.withdraw(self._busy)  # what was asked before there was a model is settled before it is answered
        self.query_one(Activity).clear()
        view = self.transcript.live
        if view is not None and not message.text and message.finished is not None:
            is_blank = message.finished.finish_reason not in ("stop", "length")
            view = None if is_blank else view
        if view is None or (message.finished is None and not message.text):
            await self.transcript.drop_answer()
            if message.finished is not None:
                self.notice.note(
                    f"stopped before the first word: {self.worker.key_names['chat.regenerate']} asks again"
                )
        else:
            await view.end()
            last = self.worker.answering.last
            if self._shows_statistics and last is not None and last.finished is not None:
                view.tell(statistics(last))
        if message.finished is not None:
            self.status.run_now = AnswerRun(message.finished.usage.completion_tokens, 0.0, message.finished)
        self.refresh_bindings()

    @on(messages.RequestDone)
    def _on_settled(self) -> None:
        self._is_asked = False
        self.notice.withdraw(self._busy)
        self.refresh_bindings()

    @on(messages.UsageCounted)
    def _on_counted(self, message: messages.UsageCounted) -> None:
        self.status.usage = message.usage

    @on(messages.Noted)
    def _on_told(self, message: messages.Noted) -> None:
        self.notice.note(message.text, is_warning=message.severity == "warning")

    @on(messages.JobFailed)
    def _on_failed(self, message: messages.JobFailed) -> None:
        self.notice.tell(message.error)

    # The composer

    @on(ComposerPanel.Finished)
    async def _on_finished(self, event: ComposerPanel.Finished) -> None:
        if event.text.startswith("/") and self.writing.editing is None:
            self.take_command(event.text)
        elif self.is_answering:
            self.notice.note(self._busy)
        else:
            self.notice.close_error()
            question, text = self.writing.take(), event.text.strip()
            await self.transcript.go_end()
            self._answer(lambda: self.worker.say(text) if question is None else self.worker.edit(question, text))

    @on(TextArea.Changed)
    def _on_written(self) -> None:
        self.chat_app.unsent = self.writing.unsent

    @on(ComposerPanel.ModeChanged)
    def _on_mode_changed(self) -> None:
        self.refresh_bindings()

    @on(Composer.Edit)
    def _on_edit(self) -> None:
        try:
            with self.app.suspend(), self.chat_app.away():
                try:  # inside: the screen comes back by what stands behind the `with`
                    self.composer.write(edited(self.composer.whole))
                except LocalLLMError as error:
                    self.notice.tell(error)
        except SuspendNotSupported:
            why = "it cannot be lent to another program"
            self.notice.tell(LocalLLMError("an editor has no place on this terminal", why=why, fix="localllm chat"))
        self.refresh(layout=True)

    def take_command(self, line: str) -> None:
        """Does what a line says that begins with a slash. The arrow up brings a typed one back."""
        self.notice.clear()
        if self.composer.text.startswith("/"):
            self.composer.put_away()
        try:
            name, rest = slash.split_command(line.strip(), COMMANDS)
            getattr(self._commands, f"do_{name}")(rest)
        except LocalLLMError as error:
            self.notice.tell(error)

    # Keys

    def action_stop(self) -> None:
        self.worker.answering.stop()

    def action_close(self) -> None:
        """Closes what is open, and comes back to the composer."""
        if not self.writing.close() and not self.notice.close():
            self.set_focus(self.composer)

    def action_interrupt(self) -> None:
        """Copies what is selected; else stops the answer, else empties the composer, else leaves at the second time."""
        selected = self.get_selected_text()
        composer = self.composer
        if selected or (composer.has_focus and composer.selected_text):
            self.copy(selected or composer.selected_text, "the selection")
            self.clear_selection()
        elif self.is_answering:
            self.worker.answering.stop()
        elif self.writing.editing is not None:
            self.writing.leave_edit()
        elif composer.text:
            composer.put_away()
        elif self.chat_app.time - self._interrupted_at < _LEAVE_S:
            self.chat_app.leave()
        else:
            self._interrupted_at = self.chat_app.time
            self.notice.note("Ctrl-C again leaves; so do /bye and Ctrl-D", for_s=_LEAVE_S)

    def action_leave(self) -> None:
        if self.composer.text and self.composer.has_focus:
            self.composer.action_delete_right()
        else:
            self.chat_app.leave()

    def action_select(self, step: int) -> None:
        """Focuses the message before or after; behind the last one is the composer."""
        views = self.transcript.views
        at = next((number for number, view in enumerate(views) if view.has_focus), len(views))
        target = at + step
        if 0 <= target < len(views):
            views[target].focus()
        elif target >= len(views):
            self.set_focus(self.composer)
        else:
            self.transcript.scroll_home(animate=False)

    def action_page(self, step: int) -> None:
        transcript = self.transcript
        transcript.scroll_relative(y=step * max(1, transcript.size.height - 2), animate=False)

    async def action_home(self) -> None:
        await self.transcript.go_home()

    async def action_end(self) -> None:
        await self.transcript.go_end()

    def action_thoughts(self) -> None:
        thoughts = self.query(Thought)
        is_open = not any(thought.is_open for thought in thoughts)
        for thought in thoughts:
            thought.is_open = is_open

    def action_new(self) -> None:
        self.unless_answering(self.worker.new)

    def action_regenerate(self) -> None:
        self.unless_answering(self.worker.regenerate, self._answer)

    def action_continue(self) -> None:
        self.unless_answering(self.worker.go_on, self._answer)

    def action_code(self) -> None:
        self.pick_code(self.answer_text)

    def unless_answering(self, job: Job, do: Callable[[Job], None] | None = None) -> None:
        """do: as `worker.do`, the default."""
        if self.is_answering:
            self.notice.note(self._busy)
        else:
            self.notice.close_error()
            (do or self.worker.do)(job)

    def _answer(self, job: Job) -> None:
        """Has it done; until it is, nothing else is asked, and esc stops it."""
        self._is_asked = True
        self.worker.answer(job)
        self.refresh_bindings()

    # Messages

    @on(MessageView.Wanted)
    def _on_wanted(self, event: MessageView.Wanted) -> None:
        view = event.view
        match event.what:
            case "copy":
                self.copy(view.said, "the message")
            case "code":
                self.pick_code(view.said)
            case "fork":
                self.set_focus(self.composer)
                self.unless_answering(lambda: self.worker.fork(view.index + 1))
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
            return
        self.writing.edit(self._turns[index], content_of(self._turns[index])[0])

    def copy(self, text: str, what: str) -> None:
        """To the clipboard, by the terminal (OSC 52); without control characters, which a paste could make obeyed."""
        self.app.copy_to_clipboard(printable(text))
        self.notice.note(f"copied {what}: {len(text):,} characters")

    @property
    def answer_text(self) -> str:
        """Of the last answer, without what was thought."""
        index = next((i for i, turn in reversed([*enumerate(self._turns)]) if turn["role"] == "assistant"), None)
        if index is None:
            return ""
        return kept_apart(content_of(self._turns[index])[0], is_thinking=index in self._thinking)[1]

    @work
    async def pick_code(self, text: str) -> None:
        from localllm.tui.screens.dialogs import CodeDialog

        blocks = code_blocks(text)
        if not blocks:
            self.notice.note("there is no code block")
            return
        picked = await self.app.push_screen_wait(CodeDialog(blocks))
        if picked is None:
            return
        number, path = picked
        if path is None:
            self.copy(blocks[number].code, f"code block {number + 1}")
        else:
            self.save_code(blocks[number].code, path)

    def save_code(self, code: str, path: str) -> None:
        self.worker.do(lambda: self.worker.save_code(code, path))

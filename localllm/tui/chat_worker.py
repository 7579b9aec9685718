"""The conversation behind a job queue: its worker does the jobs in order, and posts their results.

Nothing here waits for a model that loads: a question that comes meanwhile is stored, and answered then.
Knows no widgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm.chat import slash
from localllm.chat.adapters import shown, shown_each
from localllm.chat.answer import Answer
from localllm.chat.attachments import Attachment
from localllm.chat.context import ContextUsage
from localllm.chat.fixes import mended_in_chat
from localllm.chat.pending_turn import PendingTurn
from localllm.chat.recorder import Resumed, export_chat, look_up
from localllm.chat.session import ChatSession
from localllm.chat.text_file import typed_path, write_new
from localllm.config import ResolvedSettings
from localllm.engine.engine_info import LoadedEngine
from localllm.errors import BugError, ContextOverflowError, LocalLLMError, UsageError
from localllm.runtime.engine_handle import EngineHandle
from localllm.runtime.fit_check import machine_line
from localllm.runtime.plan_request import with_changes
from localllm.runtime.selection import Selection, selected, told_of
from localllm.tui import messages
from localllm.tui.answer_worker import AnswerWorker
from localllm.tui.history_worker import past_questions
from localllm.tui.job_queue import Job, JobQueue
from localllm.tui.keys import KeyNames
from localllm.tui.messages import Post, Turn
from localllm.tui.model_loader import ModelLoader, Serve

if TYPE_CHECKING:
    from localllm.offload.planner.plan import Plan

_MOST_NOTED = 3  # lines of a command, each by itself


class ChatWorker:
    def __init__(
        self,
        resolved: ResolvedSettings,
        extra: dict[str, Any],
        serve: Serve,
        post: Post,
        key_names: KeyNames,
        start: Callable[[Job], object],
    ) -> None:
        """resolved: the settings for models chosen later. extra: sampling parameters that are no settings.

        start: starts a thread worker.
        """
        self.key_names = key_names
        self.resolved = resolved
        self._extra = extra
        self._post = post
        self._jobs = JobQueue()
        self._begun: ChatSession | None = None
        self._loader = ModelLoader(serve, post, start)
        self._is_another = False  # the model was chosen in the chat
        self._waiting: Turn | None = None  # the question for a model that loads
        self._typed = ""  # the last question, without its attached files
        self._sent_with: list[Attachment] = []  # those files
        self.usage: ContextUsage | None = None  # the last that was posted
        self.answers = AnswerWorker(post, key_names)

    # Notices of the session (the protocol `Notifier`)

    def note(self, text: str) -> None:
        self._post(messages.Noted(text))

    def warn(self, text: str) -> None:
        self._post(messages.Noted(text, "warning"))

    # Requests of the screen; each but `run` returns at once

    def run(self, selection: Selection, resumed: Resumed | None, system: str | None) -> None:
        """Begin the first conversation, then do all jobs. The body of a thread worker."""
        self._jobs.run(lambda: self._try(lambda: self.begin(selection, resumed, system)))

    def do(self, job: Job) -> None:
        """Queue a job; its error is posted."""
        self._jobs.add(lambda: self._try(job))

    def answer(self, job: Job) -> None:
        """Queue a job that asks for an answer, which can be stopped from now on. RequestDone is posted at its end."""
        self.answers.expect()

        def until_done() -> None:
            try:
                job()
            finally:
                self._post(messages.RequestDone())

        self.do(until_done)

    def close(self, timeout_s: float) -> None:
        """End the worker and the engine; the conversation is saved."""
        self.answers.stop()
        self._jobs.add(lambda: self._begun.close() if self._begun is not None else None)
        self._jobs.close(timeout_s)
        if self._loader.handle is not None:
            self._loader.handle.close(timeout_s=timeout_s if self._engine is not None else 0)

    # Read from any thread: true now, and maybe not a moment later

    @property
    def session(self) -> ChatSession:
        """The conversation. Changed by jobs alone."""
        assert self._begun is not None
        return self._begun

    @property
    def selection(self) -> Selection | None:
        """The model of the conversation, loaded or not."""
        return None if self._begun is None else self._begun.selection

    @property
    def model_name(self) -> str | None:
        """The name by which the loaded or loading model is found from any folder; None without one."""
        return None if self._loader.handle is None else self.session.selection.model_name

    @property
    def is_loading(self) -> bool:
        return self._loader.handle is not None and self._engine is None

    @property
    def plan(self) -> Plan | None:
        """The plan the model was placed by, or None."""
        return None if (engine := self._engine) is None else engine.current_plan

    @property
    def host_bytes(self) -> int:
        """The host memory of the loaded model in this process."""
        return 0 if (engine := self._engine) is None or engine.current_plan is None else engine.facts().host_bytes

    @property
    def last_answer(self) -> Answer | None:
        return None if self._begun is None else self._begun.answer

    @property
    def _engine(self) -> LoadedEngine | None:
        return None if self._begun is None else self._begun.engine

    # Jobs

    def begin(self, selection: Selection, resumed: Resumed | None, system: str | None) -> None:
        """Begin the first conversation: a new one, or a resumed one."""
        self._begun = session = ChatSession(selection, self, self._extra, resumed, system)
        if resumed is not None:
            self.answers.resume(resumed)
        self._show()
        try:
            self._load(selection)
        except Exception as error:
            self._post(messages.ModelFailed(self._known_error(error)))
        if resumed is not None:
            resumed.under_its_adapters(selection, self.warn)  # once more: what was said before the screen is not seen
        if resumed is not None and session.recorder.is_private:
            self.note("private: new messages are not saved, and the saved chat stays as it is")
        self._post(messages.ChatStarted(past_questions(), machine_line()))

    def command(self, name: str, rest: str = "") -> None:
        """Run a slash command that is the same on every front end. Its lines are noted unless the screen shows the
        change."""
        dialogue = self.session.dialogue
        before = [*dialogue.turns], [*dialogue.attached]
        lines = slash.run(self.session, name, rest)
        self.session.recorder.sync()
        self._show_and_count()
        if before == (dialogue.turns, dialogue.attached):
            for line in lines if len(lines) <= _MOST_NOTED else ["; ".join(lines)]:
                self.note(line)

    def note_all(self) -> None:
        """Note the model, the system message and the settings, for `/show`."""
        files = self.session.selection.files
        self.note(f"model {files.name} in {files.gguf or files.directory}")
        self.note(f"adapters: {shown(self.session.adapters) or 'none'}")
        self.command("system")
        self.command("set")

    def say(self, text: str) -> None:
        self._remember(text)
        with self._returning_question():
            self.session.put_question(text)
        self.session.recorder.sync()
        self._show()
        self._reply()

    def regenerate(self) -> None:
        """Answer the last question again; the history has both answers."""
        if self._loader.handle is None:
            fix = f"{self.key_names['app.models']} chooses one"
            raise UsageError("there is no model", why="none is loaded", fix=fix)
        self._reply_to(self.session.regenerating())

    def edit(self, question: Turn, text: str) -> None:
        """Replace a question and answer it; the history has both branches."""
        self._remember(text)
        with self._returning_question():
            change = self.session.editing(question, text)
        self._reply_to(change)

    def go_on(self) -> None:
        if self._engine is None:
            raise UsageError("there is no model yet", why="it is being loaded", fix="wait for it, or /model NAME")
        self._answer(self.session.go_on)

    def fork_at(self, length: int) -> None:
        """Continue in a copy of the first `length` messages."""
        if (name := self.session.recorder.fork()) is not None:
            self.session.dialogue.cut(length)
            self.session.recorder.sync()
        self._show_and_count()
        self.note(
            f"continuing in a copy: {name}"
            if name is not None
            else "there is nothing to copy: the chat has no question"
        )

    def open(self, word: str, message: int | None = None, *, is_chosen: bool = False) -> None:
        """Open a saved conversation with the loaded model. message: the number of the one to go to; is_chosen: as in
        `GoTo`."""
        session, resumed = self.session, look_up(self, word, message)
        is_another = session.open(resumed)
        self.answers.resume(resumed)
        self._show_and_count()
        if is_another:
            session.resume_adapters(resumed)
            self._show()
        if (before := resumed.session.model) not in (None, session.selection.model_name):
            self.note(f"this chat was held with {before}: /model {before} goes on with that")
        self._warn_of_length()
        if message is not None:
            session.recorder.sync()  # the branch with it is what the chat shows from now on
            self._post(messages.GoTo([number for _, number in resumed.turns].index(message), is_chosen))

    def turn_over(self, turn: Turn) -> None:
        """Show another wording of a question, or another answer, with the messages behind it."""
        number, at, count = self.session.recorder.next_wording(turn)
        if count > 1:
            self.open(self.session.recorder.session_id or "", number, is_chosen=True)
            self.note(f"{at} of {count}")
        else:
            anew, edit = self.key_names["chat.regenerate"], self.key_names["message.edit"]
            self.note(f"there is no other: {anew} answers anew, {edit} on a question writes it anew")

    def forget(self, session_id: str) -> None:
        """The session was removed from the history: this one goes on unsaved."""
        if self.session.recorder.session_id == session_id:
            self.session.recorder.sync()
            self._show()

    def recall(self, uid: str) -> None:
        """The session was put back into the history: this one is saved again."""
        if self.session.recorder.come_back(uid):
            self.note("this chat is saved again")
        self._show()

    def use(self, word: str | None, changes: dict[str, Any] | None = None) -> None:
        """Load another model, or this one with `changes` of its settings, as a file would have them."""
        resolved = with_changes(self.resolved, changes or {})
        selection = selected(resolved, self.session.selection.word if word is None else word)
        self._load(selection)  # first: where it cannot be, all stays as it is
        self.resolved = resolved
        self.session.use_model(selection)
        self._is_another = True

    def save_code(self, code: str, path: str) -> None:
        write_new(typed_path(path), code)
        self.note(f"wrote {path}: {len(code):,} characters")

    def export(self, path: str) -> None:
        """Write the saved chat: as Markdown, or as JSON with every branch."""
        session_id = self.session.recorder.session_id
        if session_id is None:
            raise UsageError("/export needs a saved chat", why="this one is not", fix="/save chat.json")
        self.session.recorder.sync()
        export_chat(session_id, typed_path(path))
        self.note(f"wrote {path}")

    # Inside

    def _try(self, job: Job) -> None:
        try:
            job()
        except Exception as error:
            self._post(messages.JobFailed(self._known_error(error)))

    def _known_error(self, error: Exception) -> LocalLLMError:
        begun = self._begun
        resolved = self.resolved if begun is None else begun.dialogue.resolved
        known = told_of(error, None if begun is None else begun.selection.files, resolved)
        if isinstance(known, BugError):
            return known
        if any(fix.runs("pull") for fix in known.fixes):
            known.fix = f"{self.key_names['app.models']}, and {self.key_names['models.pull']} there", *known.fixes
        known = mended_in_chat(known)
        if isinstance(known, ContextOverflowError) and self._sent_with:
            known.fix = "/detach", *known.fixes
        return known

    def _show_and_count(self) -> None:
        self._show()
        self._count()

    def _show(self) -> None:
        dialogue, recorder = self.session.dialogue, self.session.recorder
        turns = tuple(dialogue.turns)
        attached = tuple((file.path, self.session.described(file)) for file in dialogue.attached)
        thinking = frozenset(i for i, turn in enumerate(turns) if dialogue.begins_in_thought(turn))
        about = recorder.title, recorder.session_id, recorder.is_private
        ending = self.answers.ending_of(turns)
        adapters = shown_each(self.session.adapters)
        self._post(messages.ConversationChanged(turns, *about, attached, ending, thinking, adapters))

    def _count(self, num_said: int = 0) -> None:
        """Post the use of the context. num_said: tokens of a continued answer, which is not a turn meanwhile."""
        if self._engine is not None:
            usage = self.session.usage()
            parts = {**usage.parts, "answer": usage.parts.get("answer", 0) + num_said}
            self.usage = replace(usage, used=usage.used + num_said, parts=parts)
            self._post(messages.UsageCounted(self.usage))

    def _warn_of_length(self) -> None:
        if self._engine is not None and (too_long := self.session.too_long()) is not None:
            self.warn(too_long)

    # Models

    def _load(self, selection: Selection) -> None:
        """Begin to load in place of the current model. Raises what can be known at once."""
        self._loader.begin(selection, lambda handle, found: self.do(lambda: self._loaded(handle, found)))
        self.answers.tok_s = None  # of the model before

    def _loaded(self, handle: EngineHandle, found: LoadedEngine | Exception) -> None:
        if handle is not self._loader.handle:  # another was chosen meanwhile, which has closed this one
            return
        try:
            if isinstance(found, Exception):
                raise found
            self.session.use_engine(handle, found)
            self.session.drop_unfit_adapters()
        except Exception as error:  # it cannot be loaded, or has no template
            handle.close()
            self._loader.handle = None
            self._post(messages.ModelFailed(self._known_error(error)))
            return
        name, facts = self.session.selection.files.name, found.facts()
        self.answers.facts = facts
        self._post(messages.ModelReady(name, facts))
        self._show_and_count()
        if self._is_another:
            about = f"{facts.weights} weights, {facts.kv} keys and values, {facts.ctx:,} tokens"
            self.note(f"loaded {self.session.shown_model}: {about}")
            self._warn_of_length()
        turns = self.session.dialogue.turns
        if turns and turns[-1] is self._waiting:
            self._reply()

    # Answers

    def _remember(self, question: str) -> None:
        """Remember what is typed and attached of a question, which is returned where it is refused."""
        self._typed, self._sent_with = question, [*self.session.dialogue.attached]

    @contextmanager
    def _returning_question(self) -> Iterator[None]:
        """Return what was typed where a file that it names cannot be attached."""
        try:
            yield
        except LocalLLMError:
            self._post(messages.QuestionReturned(self._typed))
            raise

    def _reply_to(self, change: AbstractContextManager[None]) -> None:
        try:
            with change:
                self._show()
                self._reply()
        finally:
            self.session.recorder.sync()
            self._show()

    def _reply(self) -> None:
        if self._engine is not None:
            self._answer(self.session.ask)
            return
        self._waiting = self.session.dialogue.turns[-1]
        if self._loader.handle is None:
            self.warn(f"there is no model: the question waits until {self.key_names['app.models']} has chosen one")

    def _answer(self, prepare: Callable[[], PendingTurn]) -> None:
        session, dialogue = self.session, self.session.dialogue
        before = list(dialogue.turns)
        try:
            pending = prepare()
            if pending.said:
                self._show()
            self.answers.write(session, pending, partial(self._count, pending.num_said_ids))
        finally:
            if dialogue.is_answered and not any(dialogue.turns[-1] is old for old in before):
                self.answers.settle(session)
            session.recorder.sync()
            self._show_and_count()
            question = before[-1] if before else None
            if question and question["role"] == "user" and not any(turn is question for turn in dialogue.turns):
                dialogue.attached = [*self._sent_with]  # it was taken back: what was typed and attached is returned
                self._show()
                self._post(messages.QuestionReturned(self._typed))
        self.answers.report(session)

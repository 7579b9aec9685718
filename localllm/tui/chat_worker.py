"""The conversation behind a job queue: its worker does the jobs in order, and posts their results.

Nothing here waits for a model that loads: a question that comes meanwhile is stored, and answered then.
Knows no widgets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm.chat.context import ContextUsage
from localllm.chat.dialogue import Dialogue
from localllm.chat.export import export_chat, write_new
from localllm.chat.recorder import Keeper, Resumed, keeper_of, look_up
from localllm.chat.session import Asked, Talk, mended_in_chat
from localllm.chat.text_file import read_text_file, typed_path
from localllm.config import ResolvedSettings, shown_setting
from localllm.engine.engine_info import LoadedEngine
from localllm.errors import BugError, ContextOverflowError, LocalLLMError, UsageError
from localllm.runtime.engine_handle import EngineHandle
from localllm.runtime.machine_line import machine_line
from localllm.runtime.plan_request import with_changes
from localllm.runtime.selection import Selection, locate, told_of, with_defaults
from localllm.tui import messages
from localllm.tui.answer_worker import AnswerWorker
from localllm.tui.history_worker import past_questions
from localllm.tui.job_queue import Job, JobQueue
from localllm.tui.keys import KeyNames
from localllm.tui.messages import Post, Turn
from localllm.tui.model_loader import ModelLoader, Serve

if TYPE_CHECKING:
    from localllm.offload.planner.plan import Plan


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
        """resolved: the settings for models chosen later. extra: sampling parameters that are no settings. start:
        starts a thread worker."""
        self.key_names = key_names
        self.resolved = resolved
        self._extra = extra
        self._post = post
        self._jobs = JobQueue()
        self._dialogue = Dialogue(resolved, resolved.settings.system)
        self._attached: list[tuple[str, int]] = []
        self._sent_with: tuple[list[tuple[str, int]], list[str]] = [], []  # the files of the last question
        self.selection: Selection | None = None  # of the conversation, loaded or not
        self._keeper: Keeper | None = None
        self._loader = ModelLoader(serve, post, start)
        self._talk: Talk | None = None
        self._system: str | None = None  # of a new conversation
        self._waits = False  # the last question, for a model that loads
        self.usage: ContextUsage | None = None  # the last that was posted
        self._is_another = False  # the model was chosen in the chat
        self._typed = ""  # the last question, without its attached files
        self.answers = AnswerWorker(post, key_names)

    # Notes of what saves the conversation (the protocol `Teller`)

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
        self._jobs.add(self._leave)
        self._jobs.close(timeout_s)
        if self._loader.service is not None:
            self._loader.service.close(timeout_s=0 if self._talk is None else timeout_s)

    # Read from any thread: true now, and maybe not a moment later

    @property
    def model_name(self) -> str | None:
        """The name by which the loaded or loading model is found from any folder; None without one."""
        return None if self.selection is None or self._loader.service is None else self.selection.model_name

    @property
    def is_loading(self) -> bool:
        return self._loader.service is not None and self._talk is None

    @property
    def plan(self) -> Plan | None:
        """The plan the model was placed by, or None."""
        talk = self._talk
        return None if talk is None else talk.engine.current_plan

    @property
    def host_bytes(self) -> int:
        """The host memory of the loaded model in this process."""
        talk = self._talk
        return 0 if talk is None or talk.engine.current_plan is None else talk.engine.facts().host_bytes

    # Jobs

    def begin(self, selection: Selection, resumed: Resumed | None, system: str | None) -> None:
        """Begin the first conversation: a new one, or a resumed one."""
        self.selection = selection
        self._system = selection.settings.system if system is None else system
        self._dialogue = Dialogue(selection.resolved, self._system)
        if resumed is not None:
            resumed.restore(self._dialogue, system)
            self.answers.resume(resumed)
        self._keeper = keeper_of(self, selection, resumed)
        self._show()
        try:
            self._load(selection)
        except Exception as error:
            self._post(messages.ModelFailed(self._known_error(error)))
        if resumed is not None and self._kept.is_private:
            self.note("private: what is said now is not kept, and the kept chat stays as it is")
        self._post(messages.ChatStarted(past_questions(), machine_line()))

    def say(self, text: str) -> None:
        self._ask(text)
        self._kept.sync(self._dialogue)
        self._show()
        self._reply()

    def regenerate(self) -> None:
        """Answer the last question again; the history has both answers."""
        before = list(self._dialogue.turns)
        if self._loader.service is None:
            fix = f"{self.key_names['app.models']} chooses one"
            raise UsageError("there is no model", why="none is loaded", fix=fix)
        if not (self._dialogue.take_back_answer() or self._dialogue.is_asked):
            raise UsageError("there is no answer yet", why="nothing was asked", fix="write a message first")
        self._show()
        self._or_else(before, self._reply)

    def edit(self, question: Turn, text: str) -> None:
        """Replace a question and answer it; the history has both branches."""
        before = list(self._dialogue.turns)
        index = next((index for index, turn in enumerate(before) if turn is question), None)
        if index is None:
            raise UsageError("the question is not there any more", why="the chat shows others", fix="write it anew")
        self._dialogue.cut(index)
        self._ask(text)
        self._show()
        self._or_else(before, self._reply)

    def go_on(self) -> None:
        """Continue the last answer where it ends."""
        if self._talk is None:
            raise UsageError("there is no model yet", why="it is being loaded", fix="wait for it, or /model NAME")
        self._answered(self._talk.go_on)

    def undo(self) -> None:
        if self._dialogue.take_back_question():
            self._kept.sync(self._dialogue)
            self._show_and_count()
        else:
            self.note("there is nothing to take back")

    def fork(self, length: int | None = None) -> None:
        """Go on in a copy of the conversation, or of its first `length` messages."""
        name = self._kept.fork(self._dialogue)
        if length is not None and name is not None:
            self._dialogue.cut(length)
            self._kept.sync(self._dialogue)
        self._show_and_count()
        self.note(f"a copy: {name}" if name is not None else "there is nothing to copy: no question stands")

    def new(self) -> None:
        self._kept.catch_up(self._dialogue)
        self._dialogue.clear()
        self._dialogue.system = self._system
        self._attached.clear()
        self._kept.begin_anew()
        self._waits = False
        self._show_and_count()

    def open(self, word: str, message: int | None = None, *, is_chosen: bool = False) -> None:
        """Open a saved conversation with the loaded model. message: the number of the one to go to; is_chosen: as in
        `GoTo`."""
        resumed = look_up(self, word, message)
        keeper = keeper_of(self, self._chosen, resumed)
        self._kept.catch_up(self._dialogue)
        self._kept.close()
        self._dialogue.clear()
        self._attached.clear()
        resumed.restore(self._dialogue, None)
        self._keeper = keeper
        self._waits = False
        self.answers.resume(resumed)
        if self._talk is not None:
            self._talk = Talk(self._talk.files, self._talk.engine, self._dialogue, self._kept, self._extra)
        self._show_and_count()
        if (before := resumed.session.model) not in (None, self._chosen.model_name):
            self.note(f"this chat was held with {before}: /model {before} goes on with that")
        if self._talk is not None and (too_long := self._talk.too_long()) is not None:
            self.warn(too_long)
        if message is not None:
            self._kept.sync(self._dialogue)  # the branch with it is what the chat shows from now on
            self._post(messages.GoTo([number for _, number in resumed.turns].index(message), is_chosen))

    def turn_over(self, turn: Turn) -> None:
        """Show another wording of a question, or another answer, with the messages behind it."""
        number, at, count = self._kept.next_wording(turn)
        if count > 1:
            self.open(self._kept.session_id or "", number, is_chosen=True)
            self.note(f"{at} of {count}")
        else:
            anew, edit = self.key_names["chat.regenerate"], self.key_names["message.edit"]
            self.note(f"there is no other: {anew} answers anew, {edit} on a question writes it anew")

    def forget(self, session_id: str) -> None:
        """The session was removed from the history: this one goes on unsaved."""
        if self._kept.session_id == session_id:
            self._kept.sync(self._dialogue)
            self._show()

    def recall(self, uid: str) -> None:
        """The session was put back into the history: this one is saved again."""
        self._kept.come_back(self._dialogue, uid)
        self._show()

    def use(self, word: str | None, changes: dict[str, Any] | None = None) -> None:
        """Load another model, or this one with `changes` of its settings, as a file would have them."""
        resolved = with_changes(self.resolved, changes or {})
        word = word if word is not None else self._chosen.model_name
        selection = with_defaults(resolved, locate(resolved, word))
        self._load(selection)  # first: where it cannot be, all stays as it is
        self.resolved = resolved
        self._dialogue.use(selection.resolved)
        self._kept.use_model(selection.model_name)
        self._is_another = True

    def set(self, key: str, value: str) -> None:
        if key == "think" and self._talk is not None:
            self.think(value)
        else:
            self.note(f"{key} = {shown_setting(self._dialogue.set(key, value))}")

    def think(self, effort: str) -> None:
        if self._talk is not None:
            self.note(self._talk.think(effort))
        elif effort:  # whether a model can be had so is known when it is there
            self.set("think", effort)
        else:
            self.note_settings("think")

    def system(self, text: str) -> None:
        if text:
            self._dialogue.system = self._system = None if text == "-" else text
            self._kept.sync(self._dialogue)
        self.note(f"system message: {self._dialogue.system or 'none'}")
        self._count()

    def rename(self, text: str) -> None:
        self.note(f"title: {self._kept.rename(self._dialogue, text)}")
        self._show()

    def attach(self, path: str) -> None:
        self._attached.append((path, self._dialogue.attach(typed_path(path))))
        self._show()

    def detach(self) -> None:
        """Remove the files that wait for the next question."""
        self._attached.clear()
        self._dialogue.attached.clear()
        self._show()

    def save(self, path: str) -> None:
        self._dialogue.save(typed_path(path), overwrite=False)
        self.note(f"wrote {path}")

    def load(self, path: str) -> None:
        """Go on from messages in a file."""
        from localllm.text.chat_template import parse_messages_file

        text = read_text_file(typed_path(path), "/load")
        self._kept.catch_up(self._dialogue)
        self._dialogue.load(list(parse_messages_file(text).messages))
        self._attached.clear()
        self._kept.begin_anew()
        self._kept.sync(self._dialogue)
        self._waits = False
        self._show_and_count()

    def save_code(self, code: str, path: str) -> None:
        """Write a code block into a new file."""
        write_new(typed_path(path), code)
        self.note(f"wrote {path}: {len(code):,} characters")

    def export(self, path: str) -> None:
        """Write the saved chat: as Markdown, or as JSON with every branch."""
        if self._kept.session_id is None:
            raise UsageError("/export needs a chat that is kept", why="this one is not", fix="/save chat.json")
        self._kept.sync(self._dialogue)
        export_chat(self._kept.session_id, typed_path(path))
        self.note(f"wrote {path}")

    def note_settings(self, key: str = "") -> None:
        """Note one setting, or all that can be set. Raises as `Dialogue.settable`."""
        settings, names = self._dialogue.resolved.settings, self._dialogue.settable(key)
        self.note(", ".join(f"{name} {shown_setting(getattr(settings, name))}" for name in names))

    def note_all(self) -> None:
        """Note the model, the system message and the settings, for `/show`."""
        files = self._chosen.files
        self.note(f"model {files.name} in {files.directory}")
        self.note(f"system message: {self._dialogue.system or 'none'}")
        self.note_settings()

    # Inside

    @property
    def _kept(self) -> Keeper:
        assert self._keeper is not None
        return self._keeper

    @property
    def _chosen(self) -> Selection:
        assert self.selection is not None
        return self.selection

    def _try(self, job: Job) -> None:
        try:
            job()
        except Exception as error:
            self._post(messages.JobFailed(self._known_error(error)))

    def _leave(self) -> None:
        if self._keeper is not None:
            self._keeper.catch_up(self._dialogue)
            self._keeper.close()

    def _known_error(self, error: Exception) -> LocalLLMError:
        """The error as the chat shows it."""
        known = told_of(error, None if self.selection is None else self.selection.files, self._dialogue.resolved)
        if isinstance(known, BugError):
            return known
        if known.fix.startswith("localllm pull "):
            known.fix = f"{self.key_names['app.models']}, and {self.key_names['models.pull']} there; or {known.fix}"
        known = mended_in_chat(known)
        if isinstance(known, ContextOverflowError) and self._sent_with[0]:
            known.fix = f"/detach, {known.fix}"
        return known

    def _ask(self, text: str) -> None:
        self._sent_with = list(self._attached), list(self._dialogue.attached)
        self._dialogue.ask(text)
        self._attached.clear()
        self._typed = text

    def _or_else(self, before: list[dict[str, Any]], job: Job) -> None:
        """Do a job; where it fails before the new question stands, the turns are as `before`."""
        question = self._dialogue.turns[-1]
        try:
            job()
        except LocalLLMError:
            if not any(turn is question for turn in self._dialogue.turns):
                self._dialogue.turns[:] = before
            raise
        finally:
            self._kept.sync(self._dialogue)
            self._show()

    def _show_and_count(self) -> None:
        self._show()
        self._count()

    def _show(self) -> None:
        keeper, turns = self._kept, tuple(self._dialogue.turns)
        self._post(
            messages.ConversationChanged(
                turns,
                keeper.title or keeper.title_for(self._dialogue),
                keeper.session_id,
                keeper.is_private,
                tuple(self._attached),
                self.answers.ending_of(turns),
                frozenset(i for i, turn in enumerate(turns) if self._dialogue.begins_in_thought(turn)),
            )
        )

    # Models

    def _load(self, selection: Selection) -> None:
        """Begin to load in place of the current model. Raises what can be known at once."""
        self._loader.begin(selection, lambda service, found: self.do(lambda: self._loaded(service, found)))
        self.selection, self._talk = selection, None
        self.answers.forget_model()

    def _loaded(self, service: EngineHandle, found: LoadedEngine | Exception) -> None:
        if service is not self._loader.service:  # another was chosen meanwhile, which has closed this one
            return
        try:
            if isinstance(found, Exception):
                raise found
            talk = Talk(self._chosen.files, found, self._dialogue, self._kept, self._extra)
        except Exception as error:  # it cannot be loaded, or has no template
            service.close()
            self._loader.service = None
            self._post(messages.ModelFailed(self._known_error(error)))
            return
        self._talk = talk
        name, facts = self._chosen.files.name, talk.engine.facts()
        self._post(messages.ModelReady(name, facts))
        self._count()
        if self._is_another:
            self.note(f"loaded {name}: {facts.weights} weights, {facts.kv} keys and values, {facts.ctx:,} tokens")
            if (too_long := talk.too_long()) is not None:
                self.warn(too_long)
        if self._waits and self._dialogue.is_asked:
            self._reply()

    # Answers

    def _reply(self) -> None:
        if self._talk is None:
            self._waits = True
            if self._loader.service is None:
                self.warn(f"there is no model: the question waits until {self.key_names['app.models']} has chosen one")
            return
        self._waits = False
        self._answered(self._talk.ask)

    def _answered(self, ask: Callable[[], Asked]) -> None:
        talk, service = self._talk, self._loader.service
        assert talk is not None and service is not None
        before = list(self._dialogue.turns)
        try:
            asked = self.answers.prepare(ask)
            if asked.said:
                self._show()
            self.answers.write(talk, service, asked, partial(self._count, asked.num_said_ids))
        finally:
            turn = self._dialogue.turns[-1] if self._dialogue.turns else None
            if turn is not None and turn["role"] == "assistant" and not any(turn is old for old in before):
                self.answers.settle(talk, turn)
            self._kept.sync(self._dialogue)
            self._show_and_count()
            self._give_back(before[-1:])
        self.answers.report(talk)

    def _give_back(self, question: list[dict[str, Any]]) -> None:
        """Return what was typed and attached of a question that was taken back."""
        stands = any(turn is question[0] for turn in self._dialogue.turns) if question else True
        if not stands and question[0]["role"] == "user":
            self._attached, self._dialogue.attached = self._sent_with
            self._show()
            self._post(messages.QuestionReturned(self._typed))

    def _count(self, num_said: int = 0) -> None:
        """Post the use of the context. num_said: tokens of a continued answer, which is no turn meanwhile."""
        if self._talk is not None:
            usage = self._talk.usage()
            parts = {**usage.parts, "answer": usage.parts.get("answer", 0) + num_said}
            self.usage = replace(usage, used=usage.used + num_said, parts=parts)
            self._post(messages.UsageCounted(self.usage))

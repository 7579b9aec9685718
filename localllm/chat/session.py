"""A chat with a model: its messages and settings, its record in the history, its questions and answers.

Knows engines, dialogues and the history. Knows no terminal: front ends show what its methods return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cache.page_folder import PAGE_TOKENS
from localllm.chat.adapters import lasting, left_out, shown, under_another, with_adapters
from localllm.chat.answer import Answer, context_used
from localllm.chat.attachments import Attachment, FileReader, kept_files
from localllm.chat.context import (
    REMEDIES,
    ContextMeter,
    ContextUsage,
    Fullness,
    can_be_longer,
    chat_request,
    context_usage,
    is_cut_by_context,
    offer_policies,
    text_of,
)
from localllm.chat.dialogue import Dialogue, Message
from localllm.chat.miss_report import explain
from localllm.chat.pending_turn import PendingTurn
from localllm.chat.recorder import AnswerRecording, Notifier, Resumed, recorder_of
from localllm.chat.text_file import read_text_file, typed_path
from localllm.chat.thoughts import (
    THOUGHT_MARKS,
    Effort,
    answer_ids,
    begins_in_thought,
    effort_of,
    thinking_of,
)
from localllm.chat.tool_words import adapted
from localllm.config import shown_setting
from localllm.errors import (
    ContextOverflowError,
    EngineGoneError,
    LocalLLMError,
    SettingsError,
    TemplateError,
    UsageError,
)
from localllm.runtime.selection import Selection
from localllm.settings import OF_KV, EngineConfig
from localllm.text.eviction import without

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.engine.request import AdapterRef
    from localllm.runtime.engine_handle import EngineHandle, RequestStream
    from localllm.text.chat_template import ChatInput

_SWITCH = "/set overflow"  # chooses a policy in a chat


class ChatSession:
    """Used by one thread at a time. Its model may be loaded later, or replaced; what needs one is called behind
    `use_engine`.

    engine: None until the model is loaded.
    pending: the last question.
    answer: its answer, None until it has ended.
    """

    def __init__(
        self,
        selection: Selection,
        notifier: Notifier,
        extra: Mapping[str, Any],
        resumed: Resumed | None = None,
        system: str | None = None,
    ) -> None:
        """extra: sampling parameters that are no settings. system: a typed message in place of the chat's own."""
        self.selection = selection
        self._notifier = notifier
        self._extra = extra
        self._system = selection.settings.system if system is None else system  # of a new conversation
        self.dialogue = Dialogue(lasting(selection.resolved), self._system)
        if resumed is not None:
            resumed.restore(self.dialogue, system)
        self.recorder = recorder_of(self.dialogue, notifier, selection, resumed)
        self._resumed = resumed  # for as long as its first model answers
        self._handle: EngineHandle | None = None
        self.engine: LoadedEngine | None = None
        self.pending: PendingTurn | None = None
        self.answer: Answer | None = None
        self._reset()

    def _reset(self) -> None:
        self._meter = ContextMeter()
        self._noted = ""  # the last notice about the setting `think`
        self._files = FileReader(self.engine, self._notifier.note)
        # What the loaded engine computed last, by the adapters it did so with: keys and values belong to these.
        self._computed: dict[tuple[AdapterRef, ...], tuple[int, ...]] = {}

    # The model

    @property
    def _loaded(self) -> LoadedEngine:
        assert self.engine is not None
        return self.engine

    def use_engine(self, handle: EngineHandle, engine: LoadedEngine) -> None:
        """Take the engine that answers from now on. Raises TemplateError where it has no template."""
        _ = engine.template
        self._handle, self.engine = handle, engine
        self._reset()
        if self._resumed is not None:
            self._count_as_computed(self._resumed)

    def use_model(self, selection: Selection) -> None:
        """Take another model, which is still to be loaded. A preset brings its adapters, and those of the one before
        leave. Its system message is that of new conversations, and of this one before its first question."""
        before, self.selection = self.selection, selection
        self.engine = self.pending = self._resumed = None
        self._reset()
        self.dialogue.use(lasting(selection.resolved))
        if selection.word != before.word:
            self.dialogue.resolved = under_another(self.dialogue.resolved, before.preset, selection.preset)
        self.recorder.use_model(selection.model_name)
        if (system := selection.settings.system) != before.settings.system:
            self._system = system
            if not self.dialogue.turns:
                self.dialogue.system = system

    # Adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters of the next answers, as the setting names them."""
        return self.dialogue.resolved.settings.adapter

    @property
    def shown_model(self) -> str:
        """The model with its adapters: "tiny + fox:0.5"."""
        return " + ".join(filter(None, (self.selection.files.name, shown(self.adapters))))

    @property
    def _adapter_refs(self) -> tuple[AdapterRef, ...]:
        return Selection(self.selection.files, self.dialogue.resolved).adapters()

    def use_adapters(self, texts: Sequence[str]) -> str:
        """Compute the next answers with these, and return what that costs: "1,240 tokens of this chat are computed
        anew"; "" for an empty chat. Raises what is wrong with one of them; those before stay then."""
        before = self.dialogue.resolved
        self.dialogue.resolved = with_adapters(before, texts)
        try:
            self.check_adapters()
            return self._cost_of_adapters() if self.engine is not None and self.dialogue.turns else ""
        except LocalLLMError:
            self.dialogue.resolved = before
            raise

    def check_adapters(self) -> None:
        """Raise what is wrong with one of the adapters, for the loaded model where there is one."""
        from localllm.engine.request import Request

        if (refs := self._adapter_refs) and self.engine is not None:
            self.engine.check(Request((0,), adapters=refs))

    def drop_unfit_adapters(self) -> None:
        """Go on without the adapters that the loaded model cannot have; a warning names each."""
        resolved = self.dialogue.resolved
        wanted, origin = self.adapters, resolved.origins["adapter"]
        kept: list[str] = []
        for text in wanted:
            self.dialogue.resolved = resolved.overlaid({"adapter": ((*kept, text), origin)})
            try:
                self.check_adapters()
            except EngineGoneError:
                raise
            except LocalLLMError as error:
                self._notifier.warn(left_out(text, error))
            else:
                kept.append(text)
        if len(kept) < len(wanted):
            self.dialogue.resolved = resolved.overlaid({"adapter": (tuple(kept), origin)})

    def _cost_of_adapters(self) -> str:
        """Return how many tokens of the chat have no keys and values of the present adapters yet."""
        ids = self._encode(without(self.dialogue.messages, self.dialogue.num_out))
        known = self._computed.get(self._adapter_refs, ())
        pairs = zip(ids, known, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(known)))
        num_known = same - same % PAGE_TOKENS
        anew = f"{len(ids) - num_known:,} tokens of this chat are computed anew"
        return f"{anew}, the first {num_known:,} were computed with the same before" if num_known else anew

    def _count_as_computed(self, resumed: Resumed) -> None:
        """Take what a saved chat had for computed with the adapters of its last answer: the cache outlives engines."""
        if resumed.adapters is None or resumed.session.model != self.selection.model_name:
            return
        num_new = len(self.dialogue.turns) - len(resumed.turns)  # asked while the model was loading
        messages = self.dialogue.messages
        with suppress(LocalLLMError):  # one is gone, or the template refuses the chat: then nothing is known
            resolved = with_adapters(self.dialogue.resolved, resumed.adapters)
            refs = Selection(self.selection.files, resolved).adapters()
            self._computed[refs] = tuple(self._encode(messages[: len(messages) - num_new]))

    def resume_adapters(self, resumed: Resumed) -> None:
        """Go on with the adapters of the last answer of a chat that was opened, where this model gave it."""
        before, texts = self.adapters, resumed.adapters_for(self.selection.model_name, self._notifier.warn)
        if texts is None:
            return
        self.dialogue.resolved = with_adapters(self.dialogue.resolved, texts)
        if self.engine is not None:
            self.drop_unfit_adapters()
        if self.adapters != before:
            self._notifier.note(f"adapters: {shown(self.adapters) or 'none'}, as of its last answer")

    # Questions and answers

    def ask(self) -> PendingTurn:
        """Prepare the last question, with the messages before it.

        Raises ContextOverflowError, TemplateError or UsageError; the question is then taken back.
        """
        try:
            return self._pending("")
        except LocalLLMError:
            self.dialogue.take_back_question()
            raise

    def go_on(self) -> PendingTurn:
        """Prepare the last question with the beginning of its answer, which is the last turn and is taken back.

        Raises UsageError where the last turn is not an answer, and as `ask`; the answer then stays.
        """
        turns = self.dialogue.turns
        if not self.dialogue.is_answered or not isinstance(turns[-1].get("content"), str):
            fix = "/regen" if turns else "write a message first"
            raise UsageError("there is no answer to go on with", why="the last message is none", fix=fix)
        answer = turns.pop()
        try:
            return self._pending(self._begun(answer["content"]))
        except LocalLLMError:
            turns.append(answer)
            raise

    def submit(self, pending: PendingTurn) -> RequestStream:
        """Begin the answer."""
        assert self._handle is not None
        return self._handle.submit(pending.request)

    @contextmanager
    def answering(self, pending: PendingTurn) -> Iterator[AnswerRecording]:
        """Record the answer to a question, as `ChatRecorder.answering` does; the block takes its events."""
        answer = pending.answer()
        try:
            with self.recorder.answering(answer) as record:
                yield record
                if answer.finished is not None and answer.finished.error is not None:
                    raise answer.finished.error
        except ContextOverflowError as error:  # it could not grow
            offer_policies(error, ["evict"], _SWITCH)
            raise
        finally:
            self.answer = answer
            if answer.finished is not None:
                self._computed[pending.request.adapters] = (*pending.request.prompt_ids, *answer.token_ids)

    @contextmanager
    def regenerating(self) -> Iterator[None]:
        """Take the last answer back; the block asks for another. Raises UsageError where nothing was asked."""
        before = list(self.dialogue.turns)
        if self.dialogue.is_answered:
            self.dialogue.turns.pop()
        elif not self.dialogue.is_asked:
            raise UsageError("there is no answer yet", why="nothing was asked", fix="write a message first")
        with self._restoring(before):
            yield

    def editing(self, question: Mapping[str, Any], text: str) -> AbstractContextManager[None]:
        """Ask another question in place of this turn; the block asks for its answer. Its files stay as they were read,
        but for those that it named and names no more. Raises UsageError, then nothing is changed."""
        index = next((index for index, turn in enumerate(self.dialogue.turns) if turn is question), None)
        if index is None:
            raise UsageError("the question is not there any more", why="the chat shows others", fix="write it anew")
        files = [*self.dialogue.attached, *kept_files(text_of(self.dialogue.turns[index]), text)]
        return self._replacing(index, text, [*files, *self._files.read_named(text, files, grows=self._grows)])

    @contextmanager
    def _replacing(self, index: int, text: str, files: list[Attachment]) -> Iterator[None]:
        before = list(self.dialogue.turns)
        self.dialogue.cut(index)
        self.dialogue.attached = files
        self.dialogue.ask(text)
        with self._restoring(before):
            yield

    @contextmanager
    def _restoring(self, before: list[Message]) -> Iterator[None]:
        """Restore the turns where the block's question, the last turn now, is refused."""
        question = self.dialogue.turns[-1] if self.dialogue.turns else None
        try:
            yield
        except LocalLLMError:
            if not any(turn is question for turn in self.dialogue.turns):
                self.dialogue.turns[:] = before
            raise

    def _pending(self, said: str) -> PendingTurn:
        dialogue, tokenizer = self.dialogue, self._loaded.tokenizer
        tail = answer_ids(self._loaded.template, tokenizer, said, is_final=self._effort.is_off)
        selection = Selection(self.selection.files, dialogue.resolved)
        sampling = selection.sampling(self._extra)

        def encode(messages: Sequence[Message]) -> list[int]:
            return [*self._encode(messages), *tail]

        request, fitted = chat_request(
            self._loaded,
            sampling,
            dialogue.messages,
            encode,
            self._policy,
            _SWITCH,
            floor=dialogue.num_out,
            looks=dialogue.has_room,
            opens_turn=not said,
            adapters=selection.adapters(),
        )
        dialogue.leave(fitted.floor)
        given = self._given(without(dialogue.messages, fitted.floor))
        why = partial(explain, self._loaded, given, request.prompt_ids, num_out=fitted.floor)
        num_said = len(tail) if said else 0
        in_front = request.prompt_ids[: len(request.prompt_ids) - num_said]
        thinking = thinking_of(self._loaded.template, tokenizer, in_front, said)
        request = replace(request, shown_ids=thinking.shown_ids)
        note = self._effort.note if self._effort.note != self._noted else ""
        self._noted = self._effort.note
        self.answer = None
        is_switched = self.pending is not None and self.pending.request.adapters != request.adapters
        self.pending = PendingTurn(request, fitted.evicted, why, said, num_said, thinking, note, is_switched)
        return self.pending

    def _begun(self, said: str) -> str:
        """Return the beginning of an answer without the mark of a thought that the template opens itself."""
        opened = next((mark for mark in THOUGHT_MARKS if said.startswith(mark)), None)
        if opened is None or not begins_in_thought(self._loaded.tokenizer, self._encode(self.dialogue.messages)):
            return said
        return said.removeprefix(opened).lstrip("\n")

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        from localllm.text.chat_template import encode_chat

        return encode_chat(self._loaded.template, self._loaded.tokenizer, self._given(messages))

    def _given(self, messages: Sequence[Message]) -> ChatInput:
        """Return messages as the chat template is given them."""
        from localllm.text.chat_template import ChatInput

        chat = ChatInput(self.dialogue.given(messages))
        return self._effort.told(adapted(self._loaded.template, chat))

    @property
    def _effort(self) -> Effort:
        return effort_of(self.dialogue.resolved, self._loaded.template)

    # The context

    @property
    def _policy(self) -> str:
        return self.dialogue.resolved.settings.overflow

    @property
    def _grows(self) -> bool:
        return self._policy == "grow"

    @property
    def _policy_now(self) -> str:
        """The policy as far as the model allows: a context of the greatest length grows no more."""
        return "stop" if self._grows and not can_be_longer(self._loaded) else self._policy

    def fullness(self) -> Fullness | None:
        """Return the notice about the context after the last answer, if there is one."""
        finished = None if self.answer is None else self.answer.finished
        if finished is None or finished.ctx is None:
            return None
        policy = self._policy_now
        note = self._meter.note(context_used(finished), finished.ctx, policy)
        if is_cut_by_context(finished, finished.ctx):
            larger = ", or start with a larger --ctx" if can_be_longer(self._loaded) else ""
            remedy = f"{REMEDIES['stop']}{larger}" if policy == "stop" else REMEDIES[policy]
            return Fullness(f"the context of {finished.ctx} tokens is full: {remedy}", is_full=True)
        return None if note is None else Fullness(note, is_full=False)

    def can_go_on(self) -> bool:
        """Return whether the context lets the last answer be continued."""
        finished = None if self.answer is None else self.answer.finished
        is_full = finished is not None and finished.ctx is not None and is_cut_by_context(finished, finished.ctx)
        return not is_full or self._policy_now != "stop"

    def usage(self) -> ContextUsage:
        """Return how the context is used now."""
        num_out = self.dialogue.num_out if self._policy == "evict" else 0
        given = self.dialogue.given(without(self.dialogue.messages, num_out))
        tokenize = self._loaded.tokenizer.encode

        def count(text: str) -> int:
            return len(tokenize(text))

        try:
            used = len(self._encode(given)) if given else 0
        except TemplateError:  # of a system message alone, which some templates refuse
            used = count("".join(text_of(message) for message in given))
        usage = context_usage(given, used, self._loaded.ctx, count, num_out)
        finished = None if self.answer is None else self.answer.finished
        return usage if finished is None else replace(usage, num_evicted=finished.usage.evicted_tokens)

    def too_long(self) -> str | None:
        """Return the notice about a chat that leaves no context for a question: one that began elsewhere."""
        usage = self.usage()
        if usage.used < usage.limit or self._policy_now == "grow":
            return None
        return f"this chat has {usage.used:,} tokens, the context {usage.limit:,}: {REMEDIES[self._policy_now]}"

    def cache_lines(self) -> list[str]:
        """Return how much of the last prompt was found in the cache, and why not more."""
        if self.pending is None or self.answer is None or self.answer.finished is None:
            return ["there is no answer yet"]
        finished = self.answer.finished
        cached, total = finished.usage.cached_tokens, finished.usage.prompt_tokens
        line = f"{cached} of the last prompt's {total} tokens were found, the others computed"
        if self.pending.is_switched:
            return [f"{line}: the adapters were switched, and what was computed with others is not used"]
        explanation = self.pending.explained(finished)
        return [line] if explanation is None else [line, str(explanation)]

    # The conversation

    def clear(self) -> None:
        """Begin a new conversation."""
        self.recorder.catch_up()
        self.dialogue.clear()
        self.dialogue.system = self._system
        self.recorder.begin_anew()

    def open(self, resumed: Resumed) -> bool:
        """Put a saved chat in place of the present one, and return whether it is another."""
        self.recorder.catch_up()
        self.recorder.close()
        is_another = self.recorder.session_id != resumed.session.id
        waiting = list(self.dialogue.attached)
        self.dialogue.clear()
        resumed.restore(self.dialogue, None)
        self.dialogue.attached.extend(waiting)  # before the next question, which is now one of this chat
        self.recorder = recorder_of(self.dialogue, self._notifier, self.selection, resumed)
        self._reset()
        self._resumed = resumed
        if self.engine is not None:
            self._count_as_computed(resumed)
        return is_another

    def load(self, path: str) -> int:
        """Continue from messages in a file, and return their number. Raises UsageError."""
        from localllm.text.chat_template import parse_messages_file

        text = read_text_file(typed_path(path), "/load")
        self.recorder.catch_up()
        self.dialogue.load(list(parse_messages_file(text).messages))
        self.recorder.begin_anew()
        return len(self.dialogue.turns)

    def save(self, path: str, *, overwrite: bool = False) -> Path:
        """Write the messages into a file, and return its path. Raises UsageError, ExistsError."""
        file = typed_path(path or "chat.json")
        self.dialogue.save(file, overwrite=overwrite)
        return file

    def attach(self, paths: Sequence[str]) -> None:
        """Put files in front of the next question: all, or none. Raises UsageError."""
        self.dialogue.attached += self._files.read(paths, self.dialogue.attached, grows=self._grows)

    def put_question(self, text: str) -> None:
        """Add a question, behind the attached files and those that it names by `@path`. Raises UsageError for one that
        cannot be attached; nothing is added then."""
        self.dialogue.attached += self._files.read_named(text, self.dialogue.attached, grows=self._grows)
        self.dialogue.ask(text)

    def described(self, file: Attachment) -> str:
        """Return what a file costs, and how it was read: "1,240 tokens, 12 pages"."""
        return self._files.described(file)

    def set_system(self, text: str | None) -> None:
        """Replace the system message of this conversation and the next ones."""
        self.dialogue.system = self._system = text

    def settings_lines(self, key: str = "") -> list[str]:
        """Return one setting, or all that can be set and those of keys and values that are not as usual. Raises as
        `Dialogue.settable`."""
        settings = self.dialogue.resolved.settings
        lines = [f"{name} = {shown_setting(getattr(settings, name))}" for name in self.dialogue.settable(key)]
        if key:
            return lines
        from localllm.engine.model_options import idle_with

        idle = {} if self.engine is None else idle_with(self.engine.config, settings.engine)
        values = {name: getattr(settings, name) for name in OF_KV if name not in idle}
        fixed = {name: value for name, value in values.items() if value != getattr(EngineConfig, name)}
        return [*lines, *(f"{name} = {value} (since the chat began)" for name, value in fixed.items())]

    def think(self, effort: str) -> None:
        """Change how much is thought before the next answers; "-": as at first.

        Raises UsageError for an unknown effort, and for one that the loaded model cannot have.
        """
        before = self.dialogue.resolved
        try:
            self.dialogue.set("think", effort)
            if self.engine is not None:
                effort_of(self.dialogue.resolved, self.engine.template, "/think")
        except SettingsError as error:
            raise UsageError(f"/think knows no {effort[:80]!r}", why=error.why, fix="/think on") from None
        except LocalLLMError:
            self.dialogue.resolved = before
            raise

    def save_preset(self, name: str) -> Path:
        """Save the model, the system message and the settings that were typed, or are a preset's, as a preset; return
        its file. Raises UsageError for a name that is taken, or cannot be one."""
        from localllm.runtime.presets import PRESET_SETTINGS, save_preset

        resolved = self.dialogue.resolved
        chosen = [key for key in PRESET_SETTINGS if resolved.origins[key].kind in ("flag", "preset")]
        own = {"model": self.selection.model_name, "system": self.dialogue.system}
        try:
            return save_preset(
                name, {**{key: getattr(resolved.settings, key) for key in chosen}, **own}, replaces=False
            )
        except UsageError as error:  # of a command line
            error.fix = "/preset save NAME, with another name"
            raise

    def close(self) -> None:
        """Record what was missed, and close the history."""
        self.recorder.catch_up()
        self.recorder.close()

"""A conversation with a loaded model: the next question as the context has room for it, and its answer as it is kept.

Knows engines, dialogues and the history. Knows no terminal: what an answer looks like is its caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm.chat.answer import Answer, context_used
from localllm.chat.context import (
    REMEDIES,
    ContextUsage,
    Conversation,
    Meter,
    can_be_longer,
    context_usage,
    is_cut_by_context,
    offer_policies,
    text_of,
)
from localllm.chat.dialogue import Dialogue, Message
from localllm.chat.miss_report import NEW, Explanation, explain
from localllm.chat.recorder import Keeper, kept_answer
from localllm.chat.thoughts import (
    NO_THOUGHTS,
    THOUGHT_MARKS,
    Effort,
    Thinking,
    answer_ids,
    begins_in_thought,
    effort_of,
    thinking_of,
)
from localllm.errors import ContextOverflowError, LocalLLMError, SettingsError, TemplateError, UsageError
from localllm.runtime.selection import Selection
from localllm.text.eviction import without

if TYPE_CHECKING:
    from localllm.cache.miss_reason import CacheMiss
    from localllm.engine.engine_info import LoadedEngine
    from localllm.engine.events import FinishedEvent
    from localllm.engine.request import Request
    from localllm.hub import ModelFiles
    from localllm.text.eviction import Evicted

_SWITCH = "/set overflow"  # what a policy is chosen with in a chat


@dataclass(frozen=True)
class Asked:
    """A question on its way. evicted: what left the context for it. explain: why its prompt was not found whole. said:
    the beginning of the answer, which is gone on with: the last num_said_ids of the prompt. thinking: how thoughts are
    told apart. note: what is to be told of a setting, once."""

    request: Request
    evicted: Evicted
    explain: Callable[[CacheMiss], Explanation]
    said: str = ""
    num_said_ids: int = 0
    thinking: Thinking = NO_THOUGHTS
    note: str = ""

    @property
    def is_thinking(self) -> bool:
        """Whether the answer begins in a thought, which the template has opened."""
        return self.thinking.is_thinking and not self.thinking.is_harmony

    def told_of_cache(self, finished: FinishedEvent) -> str:
        """How much of the prompt was found among what was computed before, and why not more."""
        text = f"{finished.usage.cached_tokens} of the last prompt's {finished.usage.prompt_tokens} tokens were found"
        explanation = None if finished.miss is None else self.explain(finished.miss)
        return text if explanation is None or explanation.cause == NEW else f"{text}; {explanation}"


@dataclass(frozen=True)
class Fullness:
    """What is to be told of a context that is nearly full. is_full: the answer was cut for it."""

    text: str
    is_full: bool


class Talk:
    """Of one thread at a time. extra: sampling parameters that are no settings."""

    def __init__(
        self, files: ModelFiles, engine: LoadedEngine, dialogue: Dialogue, keeper: Keeper, extra: Mapping[str, Any]
    ) -> None:
        _ = engine.template  # raises TemplateError where there is none to talk through
        self.files = files
        self.engine = engine
        self.dialogue = dialogue
        self.keeper = keeper
        self._extra = extra
        self._meter = Meter()
        self._noted = ""  # of the setting `think`

    @property
    def policy(self) -> str:
        """The setting `overflow`."""
        return self.dialogue.resolved.settings.overflow

    @property
    def _policy_now(self) -> str:
        """The policy, as far as the model goes along: a context as long as it can be grows no more."""
        return "stop" if self.policy == "grow" and not can_be_longer(self.engine) else self.policy

    def ask(self) -> Asked:
        """The last question, with what was said before it.

        Raises ContextOverflowError, TemplateError or UsageError where it cannot be asked; it is then taken back.
        """
        try:
            return self._asked("")
        except LocalLLMError:
            self.dialogue.take_back_question()
            raise

    def go_on(self) -> Asked:
        """The last question with the beginning of its answer, which is the last turn and is taken back.

        Raises UsageError where the last turn is none, and as `ask`; the answer then stays.
        """
        turns = self.dialogue.turns
        if not turns or turns[-1]["role"] != "assistant" or not isinstance(turns[-1].get("content"), str):
            fix = "/regen" if turns else "write a message first"
            raise UsageError("there is no answer to go on with", why="the last message is none", fix=fix)
        answer = turns.pop()
        try:
            return self._asked(self._begun(answer["content"]))
        except LocalLLMError:
            turns.append(answer)
            raise

    def _begun(self, said: str) -> str:
        """The beginning of an answer without the mark of a thought that the template opens itself."""
        opened = next((mark for mark in THOUGHT_MARKS if said.startswith(mark)), None)
        if opened is None or not begins_in_thought(self.engine.tokenizer, self.encode(self.dialogue.messages)):
            return said
        return said.removeprefix(opened).lstrip("\n")

    def _asked(self, said: str) -> Asked:
        from localllm.text.chat_template import ChatInput

        dialogue, tokenizer = self.dialogue, self.engine.tokenizer
        tail = answer_ids(self.engine.template, tokenizer, said, is_final=self._effort.is_off)
        sampling = Selection(self.files, dialogue.resolved).sampling(self._extra)

        def encode(messages: Sequence[Message]) -> list[int]:
            return [*self.encode(messages), *tail]

        conversation = Conversation(
            dialogue.messages,
            encode,
            self.policy,
            _SWITCH,
            dialogue.num_out,
            looks=dialogue.has_room,
            opens_turn=not said,
        )
        request, fitted = conversation.request(self.engine, sampling)
        dialogue.leave(fitted.floor)
        given = self._effort.told(ChatInput(dialogue.given(without(dialogue.messages, fitted.floor))))
        why = partial(explain, self.engine, given, request.prompt_ids, num_out=fitted.floor)
        num_said = len(tail) if said else 0
        in_front = request.prompt_ids[: len(request.prompt_ids) - num_said]
        thinking = thinking_of(self.engine.template, tokenizer, in_front, said)
        request = replace(request, shown_ids=thinking.shown_ids)
        note = self._effort.note if self._effort.note != self._noted else ""
        self._noted = self._effort.note
        return Asked(request, fitted.evicted, why, said, num_said, thinking, note)

    @property
    def _effort(self) -> Effort:
        """How much is to be thought now, as far as this model can be had so."""
        return effort_of(self.dialogue.resolved, self.engine.template)

    def answer(self, asked: Asked, show: Callable[[Callable[[str], None]], Answer]) -> Answer:
        """The answer that `show` brings about, kept as `kept_answer` has it. Raises the error that ended it."""
        try:
            return kept_answer(self.dialogue, self.keeper, show, is_thinking=asked.is_thinking)
        except ContextOverflowError as error:  # it could not grow
            offer_policies(error, ["evict"], _SWITCH)
            raise

    def fullness(self, finished: FinishedEvent) -> Fullness | None:
        """What is to be told after an answer, if anything is."""
        if finished.ctx is None:
            return None
        policy = self._policy_now
        note = self._meter.note(context_used(finished), finished.ctx, policy)
        if is_cut_by_context(finished, finished.ctx):
            larger = ", or start with a larger --ctx" if can_be_longer(self.engine) else ""
            remedy = f"{REMEDIES['stop']}{larger}" if policy == "stop" else REMEDIES[policy]
            return Fullness(f"the context of {finished.ctx} tokens is full: {remedy}", is_full=True)
        return None if note is None else Fullness(note, is_full=False)

    def has_room_behind(self, finished: FinishedEvent) -> bool:
        """Whether an answer that ended so can be gone on with."""
        is_full = finished.ctx is not None and is_cut_by_context(finished, finished.ctx)
        return not is_full or self._policy_now != "stop"

    def usage(self) -> ContextUsage:
        """Who has how much of the context now."""
        num_out = self.dialogue.num_out if self.policy == "evict" else 0
        given = self.dialogue.given(without(self.dialogue.messages, num_out))
        tokenize = self.engine.tokenizer.encode

        def count(text: str) -> int:
            return len(tokenize(text))

        try:
            used = len(self.encode(given)) if given else 0
        except TemplateError:  # of a system message alone, which some templates refuse
            used = count("".join(text_of(message) for message in given))
        return context_usage(given, used, self.engine.ctx, count, num_out)

    def too_long(self) -> str | None:
        """What is to be told of a conversation that has no room for another question: one that began elsewhere."""
        usage = self.usage()
        if usage.used < usage.limit or self._policy_now == "grow":
            return None
        return f"this chat has {usage.used:,} tokens, the context {usage.limit:,}: {REMEDIES[self._policy_now]}"

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a prompt."""
        given, effort = self.dialogue.given(messages), self._effort
        if not effort.variables:
            return self.engine.encode(given)
        from localllm.text.chat_template import ChatInput, encode_chat

        return encode_chat(self.engine.template, self.engine.tokenizer, effort.told(ChatInput(given)))

    def think(self, effort: str) -> str:
        """Changes how much is thought before the next answers, "-" as at first; what is to be told of it. "": as it is.
        Raises UsageError for what is no such choice, and for what this model cannot be had to."""
        if effort:
            before = self.dialogue.resolved
            try:
                self.dialogue.set("think", effort)
                effort_of(self.dialogue.resolved, self.engine.template, "/think")
            except SettingsError as error:
                raise UsageError(f"/think knows no {effort[:80]!r}", why=error.why, fix="/think on") from None
            except LocalLLMError:
                self.dialogue.resolved = before
                raise
        return f"thinking: {self.dialogue.resolved.settings.think or 'as the model does'}"


def mended_in_chat(error: LocalLLMError) -> LocalLLMError:
    """The error with a fix that can be typed in a chat."""
    if error.fix.startswith("--"):
        error.fix = f"start again with {error.fix}"
    match error:
        case ContextOverflowError():
            *others, last = error.fix.split(", or ")
            error.fix = f"{', '.join(['/undo', '/clear', *others])}, or {last}"
        case SettingsError():
            error.fix = "/set shows every setting"
        case TemplateError():
            error.fix = "/undo, /clear, or /system -"
        case UsageError() if not error.fix:
            error.fix = "/help"
    return error

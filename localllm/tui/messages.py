"""The messages of the conversation's thread to the screen. They are values: none changes once it is posted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from textual.message import Message

from localllm.chat.context import ContextUsage
from localllm.engine.engine_info import EngineFacts
from localllm.engine.events import FinishedEvent
from localllm.errors import LocalLLMError

Turn = Mapping[str, Any]
Post = Callable[[Message], object]


@dataclass
class ModelLoading(Message):
    """The progress of a load. done, total: bytes; 0 where they are not known."""

    text: str
    done: int = 0
    total: int = 0


@dataclass
class ModelReady(Message):
    name: str
    facts: EngineFacts


@dataclass
class ModelFailed(Message):
    error: LocalLLMError


@dataclass
class ConversationChanged(Message):
    """The conversation as it is now. Turns that did not change are the same objects.

    attached: names of files that wait for the next question, and what they cost. ending: why the last answer ends where
    it does; "" for a complete one. thinking: the turns that are answers beginning in a thought. adapters: of the next
    answers, as they are shown.
    """

    turns: tuple[Turn, ...]
    title: str
    session_id: str | None
    is_private: bool
    attached: tuple[tuple[str, str], ...] = ()
    ending: str = ""
    thinking: frozenset[int] = frozenset()
    adapters: tuple[str, ...] = ()


@dataclass
class ChatStarted(Message):
    """asked: the questions of saved chats, the latest first. machine: a line about this machine."""

    asked: tuple[str, ...]
    machine: str


@dataclass
class QuestionReturned(Message):
    """A question could not be answered."""

    text: str


@dataclass
class GoTo(Message):
    """Show the message at `index` among the turns. is_chosen: the next key is for it."""

    index: int
    is_chosen: bool = False


@dataclass
class AnswerStarted(Message):
    """said: the beginning that is continued. is_thinking: the template has opened a thought."""

    said: str
    is_thinking: bool


@dataclass
class PrefillProgress(Message):
    done: int
    total: int


@dataclass
class AnswerDelta(Message):
    """The next words. num_tokens: of the answer so far, in `elapsed_s` since its first."""

    text: str
    num_tokens: int
    elapsed_s: float


@dataclass
class AnswerEnded(Message):
    """finished: None where an error ended it before the engine did."""

    text: str
    finished: FinishedEvent | None
    seed: int | None = None


@dataclass
class RequestDone(Message):
    """The question is answered, or waits for a model, or was refused."""


@dataclass
class UsageCounted(Message):
    usage: ContextUsage


@dataclass
class Noted(Message):
    text: str
    severity: Literal["information", "warning"] = "information"


@dataclass
class BackgroundReported(Message):
    """The terminal has reported its colour, late."""

    is_light: bool


@dataclass
class JobFailed(Message):
    error: LocalLLMError

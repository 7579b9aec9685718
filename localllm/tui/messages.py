"""What the conversation's thread tells the screen. Values: nothing in them changes once they are posted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from textual.message import Message

if TYPE_CHECKING:
    from localllm.engine.events import FinishedEvent
    from localllm.errors import LocalLLMError
    from localllm.frontend.context import ContextUsage

Turn = Mapping[str, Any]


@dataclass(frozen=True)
class ModelFacts:
    """A loaded model. ledger, limits: bytes of each owner, and of all, in each tier. bound_by: what a step waits for.
    streamed_bytes: read from the disk at every step."""

    name: str
    weights: str
    kv: str
    ctx: int
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    bound_by: str = ""
    streamed_bytes: int = 0


@dataclass
class ModelLoading(Message):
    """A model is on its way. done, total: bytes; 0 where that is not known."""

    text: str
    done: int = 0
    total: int = 0


@dataclass
class ModelReady(Message):
    facts: ModelFacts


@dataclass
class ModelFailed(Message):
    error: LocalLLMError


@dataclass
class ConversationChanged(Message):
    """The conversation as it is now. Turns that did not change are the same objects."""

    turns: tuple[Turn, ...]
    title: str
    session_id: str | None
    is_private: bool
    system: str | None = None
    attached: tuple[tuple[str, int], ...] = ()  # names of files that wait, and their characters
    ending: str = ""  # of the last answer, why it ends where it does; of one that is whole nothing
    thinking: frozenset[int] = frozenset()  # which turns are answers that begin in a thought


@dataclass
class ChatStarted(Message):
    """What is known before a model is there. asked: before, the latest first. machine: in a line."""

    asked: tuple[str, ...]
    machine: str


@dataclass
class QuestionReturned(Message):
    """A question that could not be answered, as it was typed."""

    text: str


@dataclass
class GoTo(Message):
    """A message of the conversation, by its place among the turns, is to be seen. is_chosen: the next key is for it."""

    index: int
    is_chosen: bool = False


@dataclass
class AnswerStarted(Message):
    """said: the beginning that is gone on with. is_thinking: the template has opened a thought."""

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
    """What was asked is answered, or waits for a model, or was refused."""


@dataclass
class UsageCounted(Message):
    usage: ContextUsage


@dataclass
class Noted(Message):
    """Something to read."""

    text: str
    severity: Literal["information", "warning"] = "information"


@dataclass
class BackgroundReported(Message):
    """The terminal says, after a while, what colour it has."""

    is_light: bool


@dataclass
class JobFailed(Message):
    """What was wanted could not be done."""

    error: LocalLLMError

"""A question that is ready for the model: of a chat, or of one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.chat.answer import Answer
from localllm.chat.context import evicted_text
from localllm.chat.miss_report import Explanation
from localllm.chat.thoughts import NO_THOUGHTS, Thinking

if TYPE_CHECKING:
    from localllm.cache.miss_reason import CacheMiss
    from localllm.chat.compression import Compression
    from localllm.engine.events import FinishedEvent
    from localllm.engine.request import Request
    from localllm.text.eviction import Evicted


@dataclass(frozen=True)
class PendingTurn:
    """A question on its way to the model.

    evicted: turns that left the context for it.
    explain: gives the reason why its prompt was not found whole in the cache.
    said: the beginning of an answer that is continued, the last num_said_ids of the prompt.
    thinking: how thoughts are told apart.
    note: a notice about a setting, given once.
    is_switched: the answer before was computed with other adapters.
    compression: words that have left its text.
    """

    request: Request
    evicted: Evicted
    explain: Callable[[CacheMiss], Explanation]
    said: str = ""
    num_said_ids: int = 0
    thinking: Thinking = NO_THOUGHTS
    note: str = ""
    is_switched: bool = False
    compression: Compression | None = None

    @property
    def notices(self) -> list[str]:
        """The notices before the answer."""
        return [*([evicted_text(self.evicted)] if self.evicted.turns else []), *([self.note] if self.note else [])]

    def answer(self) -> Answer:
        """Return the answer before its first event."""
        begun = [self.said] if self.said else []
        return Answer(len(self.request.prompt_ids), self.request.sampling.seed, begun, thinking=self.thinking)

    def explained(self, finished: FinishedEvent) -> Explanation | None:
        """Return the reason why the prompt was not found whole; None where nothing more is known."""
        return None if finished.miss is None else self.explain(finished.miss)

"""What drafts the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.engine.sequence import Sequence as Running


@dataclass(frozen=True)
class Draft:
    """A proposal of what follows a sequence."""

    token_ids: tuple[int, ...] = ()
    source: str = ""  # as fine as it tells how often it is accepted: "skip", "ngram-4"


NO_DRAFT = Draft()


class Lookup(Protocol):
    """Drafts that take next to no time: made in every step, and compared with the text verified or not."""

    name: str

    def read(self, sequences: Sequence[Running]) -> None:
        """Index the text so far: for a long prompt that takes longer than to look."""
        ...

    def offers(self, sequences: Sequence[Running], limits: Sequence[int]) -> list[Draft]:
        """Return for each sequence at most so many tokens."""
        ...

    def hindsight(self, sequence: Running, since: int, limit: int) -> Iterator[tuple[Draft, Sequence[int]]]:
        """Yield what it would have offered behind some of the tokens from `since` on, with what was sampled there."""
        ...

    def forget(self, sequence: Running) -> None:
        """Drop what is held for a sequence that has ended."""
        ...


class Drafter(Protocol):
    """Drafts that take passes of a model."""

    @property
    def name(self) -> str: ...

    @property
    def is_ready(self) -> bool:
        """Whether it can draft now, as the model is placed."""
        ...

    def num_unread(self, sequences: Sequence[Running]) -> int:
        """Return the tokens of these that `read` would have to compute."""
        ...

    def read(self, sequences: Sequence[Running], is_cancelled: Callable[[], bool]) -> None:
        """Prefill the text so far, which may take many passes. Raises as a forward does."""
        ...

    def propose(
        self,
        sequences: Sequence[Running],
        limits: Sequence[int],
        least: float,
        is_cancelled: Callable[[], bool],
    ) -> list[Draft]:
        """Return for each sequence at most so many tokens, up to one whose probability of being accepted, together with
        those before it, is below `least`. Raises as a forward does; no sequence has changed then."""
        ...

    def forget(self, sequence: Running) -> None:
        """Drop what is held for a sequence that has ended."""
        ...

    def close(self) -> None: ...

"""What guesses the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.engine.sequence import Sequence as Running


@dataclass(frozen=True)
class Draft:
    """Guesses of what follows a sequence. source: what they came from, as finely as that tells how often they are
    right: "skip", "ngram-4". others: what follows else, if not even the first is right."""

    token_ids: tuple[int, ...] = ()
    source: str = ""
    others: tuple[int, ...] = ()


NO_DRAFT = Draft()


class Lookup(Protocol):
    """Guesses that take next to no time: they are made at every step, and what would have become of them is seen
    whether or not they were verified."""

    name: str

    def read(self, sequences: Sequence[Running]) -> None:
        """What has been said so far is known: of a long prompt that takes longer than to look."""
        ...

    def offers(self, sequences: Sequence[Running], limits: Sequence[int]) -> list[Draft]:
        """For each sequence at most so many tokens."""
        ...

    def hindsight(self, sequence: Running, since: int, limit: int) -> Iterator[tuple[Draft, Sequence[int]]]:
        """What it would have offered behind some of the tokens from `since` on, each with what was said there."""
        ...

    def forget(self, sequence: Running) -> None:
        """As `Drafter` has it."""
        ...


class Drafter(Protocol):
    """Guesses that take passes of a model."""

    @property
    def name(self) -> str: ...

    @property
    def is_ready(self) -> bool:
        """Whether it can guess now, as the model is placed."""
        ...

    def num_unread(self, sequences: Sequence[Running]) -> int:
        """Tokens of these that `read` would have to compute."""
        ...

    def read(self, sequences: Sequence[Running], cancelled: Callable[[], bool]) -> None:
        """What has been said so far is known to it: of a prompt that may take many passes. Raises as a forward does."""
        ...

    def propose(
        self,
        sequences: Sequence[Running],
        limits: Sequence[int],
        least: float,
        cancelled: Callable[[], bool],
    ) -> list[Draft]:
        """For each sequence at most so many tokens; fewer where the next one is likely to be right, together with those
        before it, with a probability below `least`. Raises as a forward does; no sequence has changed then."""
        ...

    def forget(self, sequence: Running) -> None:
        """It has ended: what was kept for it is given back."""
        ...

    def close(self) -> None:
        """Nothing is asked any more."""
        ...

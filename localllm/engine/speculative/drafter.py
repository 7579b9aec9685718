"""What drafts the next tokens of sequences by passes of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.engine.sequence import Sequence as Running


@dataclass(frozen=True)
class Draft:
    """A proposal of what follows a sequence."""

    token_ids: tuple[int, ...] = ()
    source: str = ""  # as fine as it tells how often it is accepted: "skip", "ngram-4"


NO_DRAFT = Draft()


class Drafter:
    """Drafts that take passes of a model; this one has read all that the engine has, and holds nothing."""

    name: str

    @property
    def is_ready(self) -> bool:
        """Whether it can draft now, as the model is placed."""
        return True

    def num_unread(self, _sequences: Sequence[Running]) -> int:
        """Return the tokens of these that `read` would have to compute."""
        return 0

    def read(self, sequences: Sequence[Running], is_cancelled: Callable[[], bool]) -> None:
        """Prefill the text so far, which may take many passes. Raises as a forward does."""

    def propose(
        self, sequences: Sequence[Running], limits: Sequence[int], least: float, is_cancelled: Callable[[], bool]
    ) -> list[Draft]:
        """Return for each sequence at most so many tokens, up to one whose probability of being accepted, together with
        those before it, is below `least`. Raises as a forward does; no sequence has changed then."""
        raise NotImplementedError

    def forget(self, sequence: Running) -> None:
        """Drop what is held for a sequence that has ended."""

    def close(self) -> None:
        """Give back what is held for all."""

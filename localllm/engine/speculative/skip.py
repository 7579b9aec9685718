"""The model itself without some of its blocks: those that would have to be fetched, or that it can do without.

It shares the sequences' keys and values: what it writes for its guesses, the pass that verifies them writes over. While
it guesses, what is streamed for that pass is already on its way. (Draft & Verify, arXiv:2309.08168; SWIFT,
arXiv:2410.06916.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localllm.engine.runner import ModelRunner
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.draft_loop import Confidence, guesses
from localllm.engine.speculative.drafter import Draft
from localllm.models.layout import HEAD


class SkipDrafter:
    name = "skip"

    def __init__(self, runner: Callable[[], ModelRunner], skipped: Callable[[], frozenset[str]]) -> None:
        """runner: of the model as it is placed now. skipped: names of what is left out."""
        self._runner = runner
        self._skipped = skipped
        self._confidence = Confidence()

    @property
    def is_ready(self) -> bool:
        """Not where the head is streamed, or no block stays."""
        skipped = self._skipped()
        return bool(skipped) and HEAD not in skipped and len(skipped) < len(self._runner().model.blocks)

    def num_unread(self, _sequences: Sequence[Running]) -> int:
        return 0

    def read(self, sequences: Sequence[Running], cancelled: Callable[[], bool]) -> None:
        """What the model has read it has."""

    def propose(
        self, sequences: Sequence[Running], limits: Sequence[int], least: float, cancelled: Callable[[], bool]
    ) -> list[Draft]:
        kvs, runner = [kv for sequence in sequences if (kv := sequence.kv) is not None], self._runner()
        reduced = runner.guessing(self._skipped())
        found = guesses(reduced, sequences, kvs, limits, self._confidence, least, cancelled=cancelled)
        return [Draft(tuple(token for token, _ in draft), self.name) for draft in found]

    def forget(self, sequence: Running) -> None:
        self._confidence.forget(sequence)

    def close(self) -> None:
        """It has nothing of its own."""

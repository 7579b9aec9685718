"""The model itself without the blocks that are slow to come by.

It shares the sequences' keys and values: what it writes for its drafts, the pass that verifies them writes over. While
it drafts, what is streamed for that pass is already on its way. (Draft & Verify, arXiv:2309.08168.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from localllm.engine.runner import ModelRunner
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.draft_loop import Confidence, draft_tokens
from localllm.engine.speculative.drafter import Draft, Drafter
from localllm.layers.mlp import SplitMLP
from localllm.models.decoder import Decoder
from localllm.models.layout import HEAD


def slow_blocks(model: Decoder) -> frozenset[str]:
    """Return the names of what is streamed, or computed elsewhere than the rest."""
    apart = {block.name for block in model.blocks if block.device != model.device or isinstance(block.body, SplitMLP)}
    return model.stream.names | apart


class SkipDrafter(Drafter):
    name = "skip"

    def __init__(self, runner: Callable[[], ModelRunner], skipped: Callable[[], frozenset[str]] | None = None) -> None:
        """runner: of the model as it is placed now.
        skipped: names of what is left out; None: the slow blocks."""
        self._runner = runner
        self._skipped = skipped or self._slow_blocks
        self._slow: tuple[weakref.ref[Decoder], frozenset[str]] | None = None  # of the model that was asked about last
        self._confidence = Confidence()

    @property
    def is_ready(self) -> bool:
        """Not where the head is streamed, or no block stays."""
        skipped = self._skipped()
        return bool(skipped) and HEAD not in skipped and len(skipped) < len(self._runner().model.blocks)

    def _slow_blocks(self) -> frozenset[str]:
        model = self._runner().model
        if self._slow is None or self._slow[0]() is not model:
            self._slow = weakref.ref(model), slow_blocks(model)
        return self._slow[1]

    def propose(
        self, sequences: Sequence[Running], limits: Sequence[int], least: float, is_cancelled: Callable[[], bool]
    ) -> list[Draft]:
        kvs, runner = [kv for sequence in sequences if (kv := sequence.kv) is not None], self._runner()
        reduced = runner.drafting(self._skipped())
        found = draft_tokens(reduced, sequences, kvs, limits, self._confidence, least, is_cancelled=is_cancelled)
        return [Draft(tuple(token for token, _ in draft), self.name) for draft in found]

    def forget(self, sequence: Running) -> None:
        self._confidence.forget(sequence)

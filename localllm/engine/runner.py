"""One step of the model over the scheduled chunks: ids to logits. Knows the model, not the requests' fate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.cache.contiguous import ContiguousKV
from localllm.errors import FETCH_ANEW, NonFiniteError
from localllm.layers.batch import Batch, Segment
from localllm.models.cpu_step import CpuStep
from localllm.models.decoder import Block, Decoder

# Of a native step that is not stopped between blocks: it takes hardly longer than one of one row, and stopping 44 times
# costs 0.4 ms of 13.
SINGLE_CALL_ROWS = 16


class StepCancelledError(Exception):
    """The forward was given up between two blocks; no cache has advanced."""


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` tokens of a sequence: those after the ones that `kv` holds."""

    token_ids: Sequence[int]  # the whole sequence so far
    kv: ContiguousKV
    num_tokens: int


class ModelRunner:
    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.cpu_step = CpuStep(model) if CpuStep.supports(model) else None

    @torch.inference_mode()
    def forward(
        self, chunks: Sequence[Chunk], *, cancelled: Callable[[], bool] = lambda: False, all_logits: bool = False
    ) -> Tensor:
        """Logits, fp32 [chunks, V], after the last token of each chunk (of every token, if all); caches have advanced.

        `cancelled` is asked between blocks, of a native step of a few rows only before it begins; raises
        StepCancelledError when it says so.
        """

        def give_up(_block: Block, _x: Tensor) -> None:
            if cancelled():
                raise StepCancelledError

        if cancelled():
            raise StepCancelledError
        batch = self._batch(chunks, all_logits)
        is_single_call = self.cpu_step is not None and len(batch) <= SINGLE_CALL_ROWS
        logits = self._logits(batch, None if is_single_call else give_up)
        for chunk in chunks:
            chunk.kv.advance(chunk.num_tokens)
        return logits

    def _logits(self, batch: Batch, on_block: Callable[[Block, Tensor], None] | None) -> Tensor:
        if self.cpu_step is not None:
            return self.cpu_step.logits(batch, on_block)
        return self.model.logits(self.model.hidden_states(batch, on_block)[batch.logit_rows])

    def _batch(self, chunks: Sequence[Chunk], all_logits: bool) -> Batch:
        device = self.model.device
        token_ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for chunk in chunks:
            past, begin = chunk.kv.length, len(token_ids)
            token_ids += chunk.token_ids[past : past + chunk.num_tokens]
            positions += range(past, past + chunk.num_tokens)
            segments.append(Segment(begin, len(token_ids), chunk.kv, rope_length=len(chunk.token_ids)))
        rows = range(len(token_ids)) if all_logits else [segment.end - 1 for segment in segments]
        at = torch.tensor(positions, device=device)
        return Batch(
            token_ids=torch.tensor(token_ids, device=device),
            positions=at,
            segments=tuple(segments),
            logit_rows=torch.tensor(list(rows), device=device),
            rotations=tuple(rotary(at, segments) for rotary in self.model.rotaries),
        )

    @torch.inference_mode()
    def locate_non_finite(self, chunk: Chunk) -> NonFiniteError:
        """Run the chunk just computed once more, looking at every block, and name the first that went wrong."""
        chunk.kv.trim(chunk.kv.length - chunk.num_tokens)
        culprit = "the head"

        def look(block: Block, x: Tensor) -> None:
            nonlocal culprit
            if not bool(x.isfinite().all()):
                culprit = f"block {block.name}"
                raise StepCancelledError

        batch = self._batch([chunk], all_logits=True)
        try:
            if not bool(self.model.embed(batch.token_ids).isfinite().all()):
                culprit = "the embedding"
            else:
                self._logits(batch, look)
        except StepCancelledError:
            pass
        dtype = str(self.model.dtype).removeprefix("torch.")
        return NonFiniteError(
            f"the model computed a NaN or an infinity in {culprit}",
            why=f"in {dtype}, at token {chunk.kv.length + chunk.num_tokens} of the sequence; no text was made from it",
            fix=FETCH_ANEW if self.model.dtype is torch.float32 else "--weights auto --dtype fp32",
        )

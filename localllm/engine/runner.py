"""One step of the model over the scheduled chunks: ids to logits. Knows the model, not the requests' fate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.cache.paged_kv import PagedKV
from localllm.errors import FETCH_ANEW, NonFiniteError
from localllm.kernels.cpu_gemv import MAX_ROWS
from localllm.kernels.spare import require_spare_memory
from localllm.layers.batch import Batch, Segment
from localllm.models.cpu_step import CpuStep
from localllm.models.decoder import Block, Decoder
from localllm.models.load import Progress
from localllm.offload.plan import NEVER

# Of a native step that is not stopped between blocks: it takes hardly longer than one of one row, and stopping 44 times
# costs 0.4 ms of 13.
SINGLE_CALL_ROWS = 16
# Tokens of a prompt that are computed at once: the matrices are read once for all of them, and what is between two
# matrices still fits into the caches.
BATCH_ROWS = 512


class StepCancelledError(Exception):
    """The forward was given up between two blocks; no cache has advanced."""


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` tokens of a sequence: those after the ones that `kv` holds."""

    token_ids: Sequence[int]  # the whole sequence so far
    kv: PagedKV
    num_tokens: int


@dataclass(frozen=True)
class _Part:
    """The tokens [begin, end) of a chunk's sequence."""

    chunk: Chunk
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


def _parts(chunk: Chunk, num_tokens: int) -> Iterator[_Part]:
    """The tokens of a chunk in order, so many at a time."""
    end = chunk.kv.length + chunk.num_tokens
    for begin in range(chunk.kv.length, end, num_tokens):
        yield _Part(chunk, begin, min(begin + num_tokens, end))


class ModelRunner:
    def __init__(
        self, model: Decoder, batch_rows: int = BATCH_ROWS, many: Decoder | None = None, many_rows: int = NEVER
    ) -> None:
        """batch_rows: tokens that are computed at once; what a chunk has beyond them follows block by block.

        many: the same model as it computes a forward of `many_rows` tokens or more, where that is another one.
        """
        self.model = model
        self.batch_rows = batch_rows
        self.many = model if many is None else many
        self.many_rows = many_rows
        self.cpu_step = CpuStep(model) if CpuStep.supports(model) else None

    def shrink(self, batch_rows: int) -> None:
        """Compute fewer tokens at once from now on, in less memory."""
        self.batch_rows = batch_rows
        self.cpu_step = None if self.cpu_step is None else CpuStep(self.model)

    @torch.inference_mode()
    def forward(
        self,
        chunks: Sequence[Chunk],
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Progress = lambda _done, _total: None,
        all_logits: bool = False,
    ) -> Tensor:
        """Logits, fp32 [chunks, V], after the last token of each chunk (of every token, if all); caches have advanced.

        `cancelled` is asked between blocks, of a native step of a few rows only before it begins; raises
        StepCancelledError when it says so. There `progress` hears of how many runs of a block are done, and of all.
        Raises MemoryError.
        """
        if cancelled():
            raise StepCancelledError
        require_spare_memory()
        for chunk in chunks:
            chunk.kv.prepare(chunk.kv.length + chunk.num_tokens)
        batches = self._batches(chunks, all_logits)
        num_runs, num_done = len(batches) * len(self.model.blocks), 0

        def between_blocks(_block: Block, _x: Tensor) -> None:
            nonlocal num_done
            if cancelled():
                raise StepCancelledError
            num_done += 1
            progress(num_done, num_runs)

        is_single_call = self.cpu_step is not None and sum(map(len, batches)) <= SINGLE_CALL_ROWS
        logits = self._logits(batches, None if is_single_call else between_blocks)
        for chunk in chunks:
            chunk.kv.advance(chunk.num_tokens)
        return logits

    def _logits(self, batches: Sequence[Batch], on_block: Callable[[Block, Tensor], None] | None) -> Tensor:
        if self.many is not self.model and sum(map(len, batches)) >= self.many_rows:
            return self.many.forward(batches, on_block)
        return (self.model.forward if self.cpu_step is None else self.cpu_step.logits)(batches, on_block)

    def _batches(self, chunks: Sequence[Chunk], all_logits: bool) -> list[Batch]:
        """The chunks in order, in as few batches as may be: short ones side by side, a long one over several."""
        # The operators' matrix products keep a row's bits up to MAX_ROWS rows, the native step's for any number.
        together = MAX_ROWS if self.cpu_step is None else self.batch_rows
        groups: list[list[_Part]] = []
        for part in (part for chunk in chunks for part in _parts(chunk, self.batch_rows)):
            if groups and sum(map(len, groups[-1])) + len(part) <= together:
                groups[-1].append(part)
            else:
                groups.append([part])
        return [self._batch(group, all_logits) for group in groups]

    def _batch(self, parts: Sequence[_Part], all_logits: bool) -> Batch:
        device = self.model.device
        token_ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        for part in parts:
            chunk, begin = part.chunk, len(token_ids)
            token_ids += chunk.token_ids[part.begin : part.end]
            positions += range(part.begin, part.end)
            segments.append(Segment(begin, len(token_ids), chunk.kv, past=part.begin, rope_length=len(chunk.token_ids)))
            if all_logits:
                rows += range(begin, len(token_ids))
            elif part.end == chunk.kv.length + chunk.num_tokens:
                rows.append(len(token_ids) - 1)
        at = torch.tensor(positions, device=device)
        return Batch(
            token_ids=torch.tensor(token_ids, device=device),
            positions=at,
            segments=tuple(segments),
            logit_rows=torch.tensor(rows, dtype=torch.int64, device=device),
            rotations=tuple(rotary(at, segments) for rotary in self.model.rotaries),
        )

    @torch.inference_mode()
    def locate_non_finite(self, chunk: Chunk) -> NonFiniteError:
        """Run the chunk just computed once more, looking at every block, and name the first that went wrong."""
        end = chunk.kv.length
        chunk = replace(chunk, num_tokens=end - chunk.kv.trim(end - chunk.num_tokens))
        chunk.kv.prepare(end)
        culprit = "the head"

        def look(block: Block, x: Tensor) -> None:
            nonlocal culprit
            if not bool(x.isfinite().all()):
                culprit = f"block {block.name}"
                raise StepCancelledError

        batches = self._batches([chunk], all_logits=True)
        try:
            if not all(bool(self.model.embedded(batch).isfinite().all()) for batch in batches):
                culprit = "the embedding"
            else:
                self._logits(batches, look)
        except StepCancelledError:
            pass
        dtype = str(self.model.dtype).removeprefix("torch.")
        return NonFiniteError(
            f"the model computed a NaN or an infinity in {culprit}",
            why=f"in {dtype}, at token {chunk.kv.length + chunk.num_tokens} of the sequence; no text was made from it",
            fix=FETCH_ANEW if self.model.dtype is torch.float32 else "--weights auto --dtype fp32",
        )

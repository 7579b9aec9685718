"""One step of the model over the scheduled chunks: ids to logits. Knows the model, not the requests' fate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localllm.cache.paged_kv import PagedKV
from localllm.engine.events import ignore
from localllm.engine.memory import is_out_of_memory
from localllm.engine.placement import BATCH_ROWS as BATCH_ROWS
from localllm.engine.sampler import PlainDraw
from localllm.engine.step_types import Chunk, StepCancelledError
from localllm.errors import FETCH_ANEW, Fix, LocalLLMError, NonFiniteError
from localllm.kernels.cpu_gemv import MAX_ROWS
from localllm.kernels.cpu_jit import require_spare_memory
from localllm.kernels.gpu.ready import give_up, why_not
from localllm.layers.batch import Batch
from localllm.layers.rotary import Rotary
from localllm.layers.segment import KVStore, Segment
from localllm.models.cpu_program import CpuProgram
from localllm.models.decoder import Block, Decoder, without
from localllm.models.gpu_graphs import Graphs
from localllm.models.load import Progress
from localllm.offload.placement import NEVER

# Of a native step that is not stopped between blocks: it takes hardly longer than one of one row, and stopping 44 times
# costs 0.4 ms of 13.
SINGLE_CALL_ROWS = 16


if TYPE_CHECKING:
    from localllm.models.gpu_program import Drawn, GpuProgram


def operators_compute(reason: str) -> str:
    return f"torch's operators compute, which takes several times as long, for our kernels do not: {reason}"


@dataclass(frozen=True)
class _Part:
    """The tokens [begin, end) of a chunk's sequence."""

    chunk: Chunk
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass
class Ahead:
    """A step of one token for each of these sequences, which a GPU begins before the host has seen the tokens before
    them. Whoever does not want it forgets it: no sequence has advanced."""

    kvs: Sequence[PagedKV]
    lengths: Sequence[int]  # tokens that the sequences hold before it
    draws: Sequence[PlainDraw]
    drawn: Drawn
    last_ids: Sequence[int] | None  # each sequence's last token, once the host knows it

    @classmethod
    def begun(
        cls,
        step: GpuProgram,
        rotaries: tuple[Rotary, ...],
        kvs: Sequence[PagedKV],
        draws: Sequence[PlainDraw],
        last: Sequence[int] | Drawn,
    ) -> Ahead:
        """Begin the step. last: each sequence's last token, or where it is sampled. Raises as `PagedKV.prepare`."""
        lengths = [kv.length for kv in kvs]
        for kv in kvs:
            kv.prepare(kv.length + 1)
        last_ids = last if isinstance(last, Sequence) else None
        batch = Batch(
            token_ids=torch.tensor(last_ids or [0] * len(kvs)),
            positions=torch.tensor(lengths),
            segments=tuple(Segment(i, i + 1, kv, kv.length, kv.length + 1) for i, kv in enumerate(kvs)),
            logit_rows=torch.arange(len(kvs)),
            rotaries=rotaries,
        )
        previous = None if isinstance(last, Sequence) else last.on_device
        at_next = [draw.at(length + 1) for draw, length in zip(draws, lengths, strict=True)]
        return cls(kvs, lengths, draws, step.draw(batch, at_next, previous), last_ids)

    def is_of(self, kvs: Sequence[PagedKV], last_ids: Sequence[int], draws: Sequence[PlainDraw]) -> bool:
        """Return whether it is the step that follows these tokens."""
        return (
            len(kvs) == len(self.kvs)
            and all(
                own is kv and length == kv.length for own, length, kv in zip(self.kvs, self.lengths, kvs, strict=True)
            )
            and list(draws) == list(self.draws)
            and list(last_ids) == list(self.last_ids or ())
        )


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        batch_rows: int = BATCH_ROWS,
        prefill_model: Decoder | None = None,
        many_rows: int = NEVER,
        *,
        note: Callable[[str], None] = ignore,
        graphs: Graphs | None = None,
    ) -> None:
        """Compute a model.

        batch_rows: tokens that are computed at once; what a chunk has beyond them follows block by block.
        prefill_model: the same model as it computes a forward of `many_rows` tokens or more, where that is another one.
        note: called where our kernels fail.
        graphs: of a GPU, which another runner of the model has, too.
        """
        self.model = model
        self.batch_rows = batch_rows
        self.prefill_model = model if prefill_model is None else prefill_model
        self.many_rows = many_rows
        self.cpu_program = CpuProgram(model) if CpuProgram.supports(model) else None
        self.graphs = graphs or Graphs(model.device)
        self.gpu_program = _gpu_program(model, self.graphs)
        self._gpu_prefill = (
            self.gpu_program if self.prefill_model is model else _gpu_program(self.prefill_model, self.graphs)
        )
        # Takes the hidden states of each forward's tokens, in front of the final norm, [T, hidden].
        self.on_states: Callable[[Sequence[Chunk], Tensor], None] | None = None
        self._ahead: Ahead | None = None
        self._reduced: tuple[frozenset[str], ModelRunner] | None = None
        self._note = note

    @torch.inference_mode()
    def warm_up(self, new_kv: Callable[[int], PagedKV]) -> None:
        """Compile, and bring to a GPU, all that forwards will launch: the first ones would wait for it.

        new_kv: makes the cache of a sequence of so many tokens.
        """
        steps = [step for step in dict.fromkeys((self.gpu_program, self._gpu_prefill)) if step is not None]
        if not steps:
            return
        from localllm.models.gpu_warm import TOKENS, warm_up

        try:
            with closing(new_kv(TOKENS)) as kv:
                kv.prepare(TOKENS)
                for step in steps:
                    warm_up(step.decoder, kv)
        except Exception as error:
            if not is_out_of_memory(error):  # a prompt for which there is too little makes do with less
                self._give_up_kernels(error)

    @property
    def is_fused(self) -> bool:
        """Whether a GPU computes some of it by our kernels."""
        return self.gpu_program is not None or self._gpu_prefill is not None

    def resize(self, batch_rows: int, many_rows: int) -> None:
        """Compute fewer tokens at once from now on, in less memory, or more. What was begun ahead is dropped: keys and
        values may move."""
        if batch_rows != self.batch_rows and self.cpu_program is not None:
            self.cpu_program = CpuProgram(self.model)
        self.batch_rows, self.many_rows, self._ahead = batch_rows, many_rows, None
        if self._reduced is not None:
            self._reduced[1].resize(batch_rows, NEVER)

    @torch.inference_mode()
    def forward(
        self,
        chunks: Sequence[Chunk],
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Progress = ignore,
        advances: bool = True,
        see: Callable[[Block, Tensor], None] | None = None,
    ) -> Tensor:
        """Return logits, fp32 [R, V], after the last token of each chunk and after the one before each drafted token;
        after every token of a chunk that has `all_logits`. Caches have advanced, if `advances`.

        `cancelled` is asked between blocks, for a native step of a few rows only before it begins; StepCancelledError
        is raised when it says so. There `progress` is called with how many runs of a block are done, and with all, and
        `see` with each block and what it has computed. Raises MemoryError.
        """
        if cancelled():
            raise StepCancelledError
        require_spare_memory()
        num_tokens = sum(chunk.num_rows - chunk.num_drafted for chunk in chunks)
        for chunk in chunks:
            chunk.kv.prepare(chunk.end)
        batches = self._batches(chunks)
        num_runs, num_done = len(batches) * len(self.model.blocks), 0

        def between_blocks(block: Block, x: Tensor) -> None:
            nonlocal num_done
            if cancelled():
                raise StepCancelledError
            if see is not None:
                see(block, x)
            num_done += 1
            progress(num_done, num_runs)

        has_step = self.cpu_program is not None or self.gpu_program is not None
        is_single_call = see is None and has_step and sum(map(len, batches)) <= SINGLE_CALL_ROWS
        on_block = None if is_single_call else between_blocks
        on_states = None if self.on_states is None else partial(self.on_states, chunks)
        try:
            logits = self._logits(batches, num_tokens, on_block, on_states, sees_each=see is not None)
        except BaseException:
            for chunk in chunks:
                chunk.kv.recover()
            raise
        if advances:
            for chunk in chunks:
                chunk.kv.advance(chunk.num_tokens)
        return logits

    @torch.inference_mode()
    def forward_with_states(
        self, chunks: Sequence[Chunk], *, cancelled: Callable[[], bool], progress: Progress
    ) -> tuple[Tensor, Tensor]:
        """Return what `forward` does, and the hidden states of all tokens behind the final norm, fp32 [T, hidden];
        caches have not advanced."""
        if len({self._needs_operators(chunk.kv) for chunk in chunks}) > 1:  # `see` counts on one run of the blocks
            each = [self.forward_with_states([chunk], cancelled=cancelled, progress=progress) for chunk in chunks]
            return torch.cat([logits for logits, _ in each]), torch.cat([states for _, states in each])
        states: list[Tensor] = []
        first, last = self.model.blocks[0].name, self.model.blocks[-1].name

        def see(block: Block, x: Tensor) -> None:
            if block.name == first:
                states.clear()  # of kernels that failed on the way, for which the operators stepped in
            elif block.name == last:
                norm = self.model.final_norm
                states.append(norm(x.to(norm.weight.device).float()))

        logits = self.forward(chunks, cancelled=cancelled, progress=progress, advances=False, see=see)
        return logits, torch.cat(states)

    def _logits(
        self,
        batches: Sequence[Batch],
        num_tokens: int,
        on_block: Callable[[Block, Tensor], None] | None,
        on_states: Callable[[Tensor], None] | None = None,
        *,
        sees_each: bool = True,
    ) -> Tensor:
        """num_tokens: without drafted ones, which change nothing of who computes the others. sees_each: whether
        on_block must see what each block has computed."""
        keys = [self._needs_operators(batch.segments[0].kv) for batch in batches]
        compute = partial(self._logits_of_run, num_tokens=num_tokens, on_block=on_block, sees_each=sees_each)
        if len({*keys}) == 1:
            return compute(batches, on_states=on_states, by_operators=keys[0])
        logits: list[Tensor] = []
        states: list[Tensor] = []
        for key, run in groupby(zip(keys, batches, strict=True), lambda pair: pair[0]):
            own = [batch for _, batch in run]
            logits.append(compute(own, on_states=lambda x: states.append(x.clone()), by_operators=key))
        if on_states is not None:
            on_states(torch.cat(states))
        return torch.cat(logits)

    def _logits_of_run(
        self,
        batches: Sequence[Batch],
        *,
        num_tokens: int,
        on_block: Callable[[Block, Tensor], None] | None,
        on_states: Callable[[Tensor], None] | None,
        sees_each: bool,
        by_operators: bool,
    ) -> Tensor:
        is_many = self.prefill_model is not self.model and num_tokens >= self.many_rows
        gpu_program = self._gpu_prefill if is_many else self.gpu_program
        if gpu_program is not None and not by_operators:
            try:
                return gpu_program.logits(batches, on_block, sees_each=sees_each)
            except Exception as error:
                self._give_up_kernels(error)
                if any(segment.changes_state for batch in batches for segment in batch.segments):
                    raise StepCancelledError from error  # some layers hold these tokens: the sequences begin anew
        if is_many:
            return self.prefill_model.forward(batches, on_block, on_states)
        if self.cpu_program is None or by_operators:
            return self.model.forward(batches, on_block, on_states)
        return self.cpu_program.logits(batches, on_block, on_states)

    def _needs_operators(self, kv: KVStore) -> bool:
        """Return whether our kernels do not compute the adapters of a sequence, so that torch's operators compute all
        of it."""
        if self.cpu_program is not None:
            return any(each.adapter.needs_operators for each in kv.adapters)
        programs = [program for program in (self.gpu_program, self._gpu_prefill) if program is not None]
        return bool(kv.adapters) and not (programs and all(program.adds(kv.adapters) for program in programs))

    def _batches(self, chunks: Sequence[Chunk]) -> list[Batch]:
        """Return the chunks in order, in as few batches as may be: short ones side by side, a long one over several."""
        # The operators' matrix products keep a row's bits up to MAX_ROWS rows, a GPU's step up to FEW_ROWS, the native
        # step's for any number.
        few = SINGLE_CALL_ROWS if self._is_ours(chunks) else MAX_ROWS
        few = few if self.cpu_program is None else self.batch_rows
        groups: list[list[_Part]] = []
        for chunk in chunks:
            by_operators = self._needs_operators(chunk.kv)
            together = MAX_ROWS if by_operators else few
            num_tokens = together if chunk.num_drafted else self.batch_rows
            begins = [(begin, end) for first, end in chunk.runs for begin in range(first, end, num_tokens)]
            for part in (_Part(chunk, begin, min(begin + num_tokens, end)) for begin, end in begins):
                is_alike = bool(groups) and self._needs_operators(groups[-1][0].chunk.kv) == by_operators
                # What is around moved pages has no bits to keep.
                most = self.batch_rows if groups and groups[-1][0].chunk is chunk else together
                if is_alike and sum(map(len, groups[-1])) + len(part) <= most:
                    groups[-1].append(part)
                else:
                    groups.append([part])
        return [self._batch(group) for group in groups]

    def _batch(self, parts: Sequence[_Part]) -> Batch:
        token_ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        for part in parts:
            chunk, begin = part.chunk, len(token_ids)
            token_ids += chunk.token_ids[part.begin : part.end]
            positions += range(part.begin, part.end)
            segments += self._segments(part, begin)
            first = max(part.begin, chunk.end - chunk.num_logits)
            rows += range(begin + first - part.begin, len(token_ids))
        return Batch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            segments=tuple(segments),
            logit_rows=torch.tensor(rows, dtype=torch.int64),
            rotaries=self.model.rotaries,
        )

    def _segments(self, part: _Part, begin: int) -> Iterator[Segment]:
        """Return the segments of a part whose first row is `begin`. The operators' attention computes drafted tokens
        one by one, as it would without them: its sums are others for several rows."""
        chunk, length = part.chunk, len(part.chunk.token_ids)
        by_operators = self._needs_operators(chunk.kv) or (self.cpu_program is None and not self._is_ours([chunk]))
        is_apart = chunk.num_drafted and by_operators
        for first, last in ((i, i + 1) for i in range(part.begin, part.end)) if is_apart else ((part.begin, part.end),):
            yield Segment(begin + first - part.begin, begin + last - part.begin, chunk.kv, first, length)

    @property
    def begins_ahead(self) -> bool:
        """Whether `draw` can begin the next step before the last one's token is known."""
        return self.gpu_program is not None and self.gpu_program.is_whole

    def _is_ours(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether our kernels of a GPU compute every block of these chunks."""
        kvs = [chunk.kv for chunk in chunks]
        if self.gpu_program is None or any(map(self._needs_operators, kvs)):
            return False
        return self.gpu_program.computes_all(kvs)

    def without(self, names: frozenset[str]) -> ModelRunner:
        """Return a runner of the model without these blocks; the last one asked for is cached. names: must include
        every streamed block."""
        if self._reduced is not None and self._reduced[0] != names:
            if (program := self._reduced[1].gpu_program) is not None:
                self.graphs.forget(program.name_in_graphs)
            self._reduced = None
        if self._reduced is None:
            reduced = ModelRunner(without(self.model, names), self.batch_rows, note=self._note, graphs=self.graphs)
            self._reduced = names, reduced
        return self._reduced[1]

    def draws(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether `draw` can sample the tokens behind these chunks: graphs know no adapters, and no pages that
        rest elsewhere."""
        is_step = all(chunk.num_tokens == 1 + chunk.num_drafted for chunk in chunks)
        is_step = is_step and sum(chunk.num_tokens for chunk in chunks) <= SINGLE_CALL_ROWS
        kvs = [chunk.kv for chunk in chunks]
        if not is_step or self.gpu_program is None or any(kv.adapters for kv in kvs):
            return False
        if any(chunk.kv.rests_elsewhere(chunk.end) for chunk in chunks):
            return False
        return self.gpu_program.has_pages(kvs)

    @torch.inference_mode()
    def draw(self, chunks: Sequence[Chunk], draws: Sequence[PlainDraw], *, goes_on: bool) -> list[list[int]] | None:
        """Return the tokens behind each of these chunks, one for each of its tokens, sampled on the device; caches have
        advanced. A token is NOT_FINITE of `kernels.gpu.sample` where the logits are no numbers. Return None, and
        nothing has advanced, where our kernels fail.

        goes_on: the next call will very likely ask for what follows these tokens. That is begun before they are waited
            for, so that the device computes while the host does whatever is to be done with them.

        Raises MemoryError.
        """
        assert self.gpu_program is not None
        require_spare_memory()
        if any(chunk.num_drafted for chunk in chunks):
            return self._draw_drafted(self.gpu_program, chunks, draws)
        tokens = self._draw_next(self.gpu_program, chunks, draws, goes_on=goes_on)
        return None if tokens is None else [[token] for token in tokens]

    def _draw_drafted(
        self, step: GpuProgram, chunks: Sequence[Chunk], draws: Sequence[PlainDraw]
    ) -> list[list[int]] | None:
        for chunk in chunks:
            chunk.kv.prepare(chunk.end)
        (batch,) = self._batches(chunks)
        positions = [range(chunk.begin + 1, chunk.end + 1) for chunk in chunks]
        at_rows = [draw.at(position) for draw, rows in zip(draws, positions, strict=True) for position in rows]
        try:
            tokens = iter(step.draw(batch, at_rows).tokens())
        except Exception as error:
            self._give_up_kernels(error)
            return None
        for chunk in chunks:
            chunk.kv.advance(chunk.num_tokens)
        return [list(islice(tokens, chunk.num_tokens)) for chunk in chunks]

    def _draw_next(
        self, step: GpuProgram, chunks: Sequence[Chunk], draws: Sequence[PlainDraw], *, goes_on: bool
    ) -> list[int] | None:
        kvs = [chunk.kv for chunk in chunks]
        last_ids = [chunk.token_ids[-1] for chunk in chunks]
        ahead, self._ahead = self._ahead, None
        if ahead is None or not ahead.is_of(kvs, last_ids, draws):
            try:
                ahead = Ahead.begun(step, self.model.rotaries, kvs, draws, last_ids)
            except Exception as error:
                self._give_up_kernels(error)
                return None
        for kv in kvs:
            kv.advance(1)
        if goes_on and step.is_whole and not any(kv.rests_elsewhere(kv.length + 1) for kv in kvs):
            # Whatever ends that, the next call meets it in its turn: this one's tokens are on their way.
            with suppress(Exception):
                self._ahead = Ahead.begun(step, self.model.rotaries, kvs, draws, ahead.drawn)
        tokens = ahead.drawn.tokens()
        if self._ahead is not None:
            self._ahead.last_ids = tokens
        return tokens

    def _give_up_kernels(self, error: Exception) -> None:
        """Let torch's operators compute from now on: this card does not take a kernel, say. Raises errors with which
        they would do no better."""
        if is_out_of_memory(error) or isinstance(error, LocalLLMError | StepCancelledError):
            raise error
        self.gpu_program = self._gpu_prefill = self._ahead = None
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # raises where the card's context is gone: nothing computes then
        said = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {said[-1]}"
        give_up(self.model.device, reason)
        self._note(operators_compute(reason))

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

        batches = self._batches([chunk])
        try:
            if not all(bool(self.model.embedded(batch).isfinite().all()) for batch in batches):
                culprit = "the embedding"
            else:
                self._logits(batches, chunk.num_tokens, look)
        except StepCancelledError:
            pass
        dtype = str(self.model.dtype).removeprefix("torch.")
        fixes = [FETCH_ANEW if self.model.dtype is torch.float32 else Fix.flag("--weights", "auto", "--dtype", "fp32")]
        names = " and ".join(each.adapter.name for each in chunk.kv.adapters)
        if names:
            fixes.insert(
                0,
                Fix.advice(f"go on without {names}, or with a smaller scale: {chunk.kv.adapters[0].adapter.name}:0.1"),
            )
        return NonFiniteError(
            f"the model computed a NaN or an infinity in {culprit}{f' with {names}' if names else ''}",
            why=f"in {dtype}, at token {chunk.kv.length + chunk.num_tokens} of the sequence; no text was made from it",
            fix=fixes,
        )


def _gpu_program(model: Decoder, graphs: Graphs) -> GpuProgram | None:
    """Return None where the model is on no GPU, or on one that our kernels are not right on."""
    if why_not(model.device):
        return None
    from localllm.models.gpu_program import GpuProgram  # imports Triton, which not every system has

    return GpuProgram(model, graphs) if GpuProgram.supports(model) else None

"""What drafts the next tokens of sequences by passes of a model, each with the noise that sampling at its place will
have: the model itself without its slow blocks (Draft & Verify, arXiv:2309.08168), or a second, smaller one of the same
tokenizer (Leviathan et al., arXiv:2211.17192; with the same noise every agreement is an acceptance)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from localllm.cache.paged_kv import PagedKV
from localllm.cache.prefix import PrefixCache
from localllm.engine.events import ignore
from localllm.engine.kv_allocator import snapshot_borders
from localllm.engine.memory import is_out_of_memory
from localllm.engine.runner import ModelRunner
from localllm.engine.sampler import next_token_with_margin
from localllm.engine.sequence import Sequence as Running
from localllm.engine.step_types import Chunk
from localllm.layers.mlp import SplitMLP
from localllm.models.decoder import Decoder
from localllm.models.layout import HEAD

# The margin by which a token won, in doublings from an eighth on: its acceptance is learnt for each grade.
_GRADES = 8
_KEPT = 0.98  # of what was learnt, at each new token: some fifty count
_PRIOR_WEIGHT = 4.0

_CHUNK_TOKENS = 512  # of a prompt that are computed at once
_AT_ONCE = 8  # tokens behind which the first one is drafted in the same pass: those that the last verification gave


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


class Confidence:
    """How often drafted tokens that won by a margin were accepted."""

    def __init__(self) -> None:
        self._drafted: dict[int, tuple[int, list[tuple[int, float]]]] = {}  # by request: where, and what, the last time
        # Before anything is known: a coin's throw where two tokens were level, nearly certain where none came close.
        self._rates = [
            (_PRIOR_WEIGHT * (0.5 + 0.48 * grade / (_GRADES - 1)), _PRIOR_WEIGHT) for grade in range(_GRADES)
        ]

    def of(self, margin: float) -> float:
        accepted, total = self._rates[_grade(margin)]
        return accepted / total

    def drafted(self, sequence: Running, draft: list[tuple[int, float]]) -> None:
        self._drafted[sequence.request_id] = len(sequence.token_ids), draft

    def learn(self, sequence: Running) -> None:
        """Learn from the last draft, as far as it was accepted, and from the first token that was not."""
        first, draft = self._drafted.pop(sequence.request_id, (0, []))
        for (token, margin), own in zip(draft, sequence.token_ids[first:], strict=False):
            accepted, total = self._rates[_grade(margin)]
            self._rates[_grade(margin)] = (_KEPT * accepted + (token == own), _KEPT * total + 1)
            if token != own:
                return

    def forget(self, sequence: Running) -> None:
        self._drafted.pop(sequence.request_id, None)


def _sampled(row: Tensor, sequence: Running, token_ids: Sequence[int]) -> tuple[int, float] | None:
    """Return None where there is no token: logits are no numbers, or a mask allows nothing behind drafts that may be
    wrong. Whether the answer itself fails of it, its own sampling decides."""
    try:
        token, margin = next_token_with_margin(row, sequence, token_ids)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
    return None if math.isnan(margin) else (token, margin)


def _grade(margin: float) -> int:
    if margin < 0.125:
        return 0
    return min(_GRADES - 1, 1 + int(math.log2(min(margin, 1e9) / 0.125)))


def draft_tokens(
    runner: ModelRunner,
    sequences: Sequence[Running],
    kvs: Sequence[PagedKV],
    limits: Sequence[int],
    confidence: Confidence,
    least: float,
    *,
    is_cancelled: Callable[[], bool],
    vocab_size: int | None = None,
    firsts: Sequence[int] | None = None,
    before: Callable[[Sequence[Chunk]], None] = ignore,
) -> list[list[tuple[int, float]]]:
    """Return tokens with their margins.

    kvs: what the runner's model has computed of each sequence, all but its last token or the last few; they do not
        advance.
    limits, least: as `Drafter.propose` has them.
    vocab_size: of the logits that these stand for, where a model pads its own to another size.
    firsts: the token of each sequence that is the first one in its kv.
    before: is told of the chunks of each pass.
    """
    drafts: list[list[tuple[int, float]]] = [[] for _ in sequences]
    sure = [1.0] * len(sequences)
    live = [index for index, limit in enumerate(limits) if limit > 0]
    for sequence in sequences:
        confidence.learn(sequence)
    while live:
        chunks = []
        for index in live:
            token_ids = [*sequences[index].token_ids, *(token for token, _ in drafts[index])]
            token_ids = token_ids[0 if firsts is None else firsts[index] :]
            begin = len(token_ids) - 1 if drafts[index] else kvs[index].length
            chunks.append(Chunk(token_ids, kvs[index], len(token_ids) - begin, num_ahead=begin - kvs[index].length))
        before(chunks)
        rows = runner.forward(chunks, cancelled=is_cancelled, advances=False)
        if vocab_size is not None and rows.shape[-1] != vocab_size:
            rows = functional.pad(rows, (0, vocab_size - rows.shape[-1]), value=-math.inf)
        for index, row in zip(live, rows, strict=True):
            so_far = [*sequences[index].token_ids, *(token for token, _ in drafts[index])]
            token = _sampled(row, sequences[index], so_far)
            if token is None:
                sure[index] = -1.0
                continue
            drafts[index].append(token)
            sure[index] *= confidence.of(token[1])
        live = [index for index in live if len(drafts[index]) < limits[index] and sure[index] >= max(least, 0.0)]
    for sequence, draft in zip(sequences, drafts, strict=True):
        confidence.drafted(sequence, draft)
    return drafts


def slow_blocks(model: Decoder) -> frozenset[str]:
    """Return the names of what is streamed, or computed elsewhere than the rest."""
    apart = {block.name for block in model.blocks if block.device != model.device or isinstance(block.body, SplitMLP)}
    return model.stream.names | apart


class SkipDrafter(Drafter):
    """The model itself without the blocks that are slow to come by.

    It shares the sequences' keys and values: what it writes for its drafts, the pass that verifies them writes over.
    While it drafts, what is streamed for that pass is already on its way.
    """

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
        """Not where the head is streamed, no block stays, or each layer needs the states that all before it carried."""
        skipped, model = self._skipped(), self._runner().model
        return bool(skipped) and HEAD not in skipped and len(skipped) < len(model.blocks) and model.config.altup is None

    def _slow_blocks(self) -> frozenset[str]:
        model = self._runner().model
        if self._slow is None or self._slow[0]() is not model:
            self._slow = weakref.ref(model), slow_blocks(model)
        return self._slow[1]

    def propose(
        self, sequences: Sequence[Running], limits: Sequence[int], least: float, is_cancelled: Callable[[], bool]
    ) -> list[Draft]:
        kvs, runner = [kv for sequence in sequences if (kv := sequence.kv) is not None], self._runner()
        reduced = runner.without(self._skipped())
        found = draft_tokens(reduced, sequences, kvs, limits, self._confidence, least, is_cancelled=is_cancelled)
        return [Draft(tuple(token for token, _ in draft), self.name) for draft in found]

    def forget(self, sequence: Running) -> None:
        self._confidence.forget(sequence)


class ModelDrafter(Drafter):
    def __init__(
        self,
        name: str,
        runner: Callable[[], ModelRunner],
        new_kv: Callable[[int], PagedKV],
        *,
        prefix: PrefixCache | None = None,
        ctx: int = 1 << 62,
        sequences: int = 1,
        vocab_size: int | None = None,
    ) -> None:
        """Draft with a model.

        new_kv: makes the cache of a sequence of so many tokens.
        prefix: finds what was computed for earlier ones.
        ctx: tokens that it can attend to; it drafts no further.
        sequences: for how many there is room at once.
        vocab_size: of the logits that its own stand for; None: as many as it has.
        """
        self.name = name
        self._runner, self._new_kv, self._prefix = runner, new_kv, prefix
        self._ctx, self._sequences, self._vocab_size = ctx, sequences, vocab_size
        self._confidence = Confidence()
        self._kvs: dict[int, PagedKV] = {}  # by request; what they hold is right: they advance over no draft

    def num_unread(self, sequences: Sequence[Running]) -> int:
        held = {request_id: kv.length for request_id, kv in self._kvs.items()}
        return sum(len(sequence.token_ids) - held.get(sequence.request_id, 0) for sequence in sequences)

    def read(self, sequences: Sequence[Running], is_cancelled: Callable[[], bool]) -> None:
        """Prefill all but the last few tokens, at least one of them."""
        runner = self._runner()
        for sequence in sequences:
            kv = self._kvs.get(sequence.request_id)
            if len(sequence.token_ids) >= self._ctx or (kv is None and len(self._kvs) >= self._sequences):
                continue
            if kv is None:
                kv = self._kvs[sequence.request_id] = self._new_kv(min(sequence.max_length, self._ctx))
                if self._prefix is not None:
                    self._prefix.attach(kv, sequence.token_ids, cancelled=is_cancelled)
                    if kv.state is not None:
                        kv.state.watch(snapshot_borders(sequence.request.prompt_ids))
            # A recurrent state takes in no more tokens at once than a step may take back.
            at_once = _AT_ONCE if kv.state is None else 1
            while (rest := len(sequence.token_ids) - kv.length) > at_once:
                chunk = Chunk(sequence.token_ids, kv, min(rest - 1, _CHUNK_TOKENS))
                runner.forward([chunk], cancelled=is_cancelled)
            self._seal(sequence, kv)

    def _seal(self, sequence: Running, kv: PagedKV, *, ends: bool = False) -> None:
        if self._prefix is not None:
            self._prefix.seal(kv, sequence.token_ids)
            self._prefix.keep_snapshots(kv, sequence.token_ids, ends=ends)

    def propose(
        self, sequences: Sequence[Running], limits: Sequence[int], least: float, is_cancelled: Callable[[], bool]
    ) -> list[Draft]:
        drafts = [NO_DRAFT] * len(sequences)
        limits = [
            min(limit, self._ctx - len(sequence.token_ids)) for sequence, limit in zip(sequences, limits, strict=True)
        ]
        known = [sequence.request_id in self._kvs for sequence in sequences]
        asked = [index for index, limit in enumerate(limits) if limit > 0 and known[index]]
        own, most = [sequences[index] for index in asked], [limits[index] for index in asked]
        kvs = [self._kvs[sequence.request_id] for sequence in own]
        found = draft_tokens(
            self._runner(),
            own,
            kvs,
            most,
            self._confidence,
            least,
            is_cancelled=is_cancelled,
            vocab_size=self._vocab_size,
        )
        for index, kv, draft in zip(asked, kvs, found, strict=True):
            kv.advance(len(sequences[index].token_ids) - kv.length)
            drafts[index] = Draft(tuple(token for token, _ in draft), self.name)
        return drafts

    def forget(self, sequence: Running) -> None:
        self._confidence.forget(sequence)
        kv = self._kvs.pop(sequence.request_id, None)
        if kv is not None:
            self._seal(sequence, kv, ends=True)
            kv.close()

    def close(self) -> None:
        for kv in self._kvs.values():
            kv.close()
        self._kvs.clear()

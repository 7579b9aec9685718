"""A second, smaller model of the same tokenizer, with keys and values of its own (Leviathan et al., arXiv:2211.17192;
here it samples with the noise of the first one, which makes every agreement an acceptance)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localllm.cache.paged_kv import PagedKV
from localllm.cache.prefix import PrefixCache
from localllm.engine.runner import ModelRunner
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.draft_loop import Confidence, draft_tokens
from localllm.engine.speculative.drafter import NO_DRAFT, Draft, Drafter
from localllm.engine.step_types import Chunk

_CHUNK_TOKENS = 512  # of a prompt that are computed at once
_AT_ONCE = 8  # tokens behind which the first one is drafted in the same pass: those that the last verification gave


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
            while (rest := len(sequence.token_ids) - kv.length) > _AT_ONCE:
                chunk = Chunk(sequence.token_ids, kv, min(rest - 1, _CHUNK_TOKENS))
                runner.forward([chunk], cancelled=is_cancelled)
            self._seal(sequence, kv)

    def _seal(self, sequence: Running, kv: PagedKV) -> None:
        if self._prefix is not None:
            self._prefix.seal(kv, sequence.token_ids)

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
            self._seal(sequence, kv)
            kv.close()

    def close(self) -> None:
        for kv in self._kvs.values():
            kv.close()
        self._kvs.clear()

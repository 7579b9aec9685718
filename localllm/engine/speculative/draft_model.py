"""A second, smaller model of the same tokenizer, that has read what the first one has (Leviathan et al.,
arXiv:2211.17192; here its draws share the noise of the first one's, which makes every agreement an acceptance)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localllm.cache.paged_kv import PagedKV
from localllm.engine.runner import Chunk, ModelRunner
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.chain import Confidence, guesses
from localllm.engine.speculative.drafter import Draft

_CHUNK_TOKENS = 512  # of a prompt that are read at once
_AT_ONCE = 8  # tokens behind which the first guess is made in the same pass: those that the last verification gave


class ModelDrafter:
    is_ready = True

    def __init__(
        self,
        name: str,
        runner: Callable[[], ModelRunner],
        new_kv: Callable[[int], PagedKV],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """new_kv: room for a sequence of so many tokens. close: what the model holds open."""
        self.name = name
        self._runner, self._new_kv, self._close = runner, new_kv, close
        self._confidence = Confidence()
        self._kvs: dict[int, PagedKV] = {}  # by request; what they hold is right: they advance over no guess

    def propose(self, sequences: Sequence[Running], limits: Sequence[int], least: float) -> list[Draft]:
        runner = self._runner()
        kvs = [self._read(runner, sequence) for sequence in sequences]
        found = guesses(runner, sequences, kvs, limits, self._confidence, least)
        for sequence, kv, draft in zip(sequences, kvs, found, strict=True):
            if draft:
                kv.advance(len(sequence.token_ids) - kv.length)
        return [Draft(tuple(token for token, _ in draft), self.name) for draft in found]

    def _read(self, runner: ModelRunner, sequence: Running) -> PagedKV:
        """All of it but the last few tokens, at least one of them."""
        kv = self._kvs.get(sequence.request_id)
        if kv is None:
            kv = self._kvs[sequence.request_id] = self._new_kv(sequence.max_length)
        while (rest := len(sequence.token_ids) - kv.length) > _AT_ONCE:
            runner.forward([Chunk(sequence.token_ids, kv, min(rest - 1, _CHUNK_TOKENS))])
        return kv

    def forget(self, sequence: Running) -> None:
        self._confidence.forget(sequence)
        kv = self._kvs.pop(sequence.request_id, None)
        if kv is not None:
            kv.close()

    def close(self) -> None:
        for kv in self._kvs.values():
            kv.close()
        self._kvs.clear()
        self._close()

"""Compiled grammars of one model, the latest ones: the next request with the same finds its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits

from localllm.errors import GrammarError
from localllm.text.grammar.constraint import Constraint
from localllm.text.grammar.definition import defined
from localllm.text.grammar.grammar import Grammar
from localllm.text.grammar.vocabulary import Vocabulary
from localllm.text.grammar.worker import Worker
from localllm.text.tokenizer import Tokenizer

MAX_KEPT = 32
MAX_KEPT_BYTES = 1 << 20  # of their definitions
# Answers that share what the lexer has learnt: the first masks of one cost 50 us each, of the next 3. Its states are
# counted over all of them, and are limited: after so many it begins anew.
_SHARED_BY = 16
_LIMITS = {"max_lexer_states": 100_000, "verbose_errors": False}  # 200 MB of states at most


_Key = tuple[Grammar, int | None]  # with the spaces that are dropped in front


@dataclass
class _Compiled:
    definition: str
    matcher: LLMatcher
    num_answers: int = 0

    def retire(self) -> None:
        """No further answer shares it."""
        self.num_answers = _SHARED_BY


class Grammars:
    """Safe to use from several threads; each `Constraint` belongs to one."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int], size: int, *, looks_ahead: bool = False) -> None:
        """size: of the model's logits. looks_ahead: the CPU has time for what may follow while the model computes."""
        self._tokenizer, self._eos_ids, self._size = tokenizer, eos_ids, size
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[_Key, _Compiled | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._worker = Worker() if looks_ahead else None
        self._making = threading.Lock()  # the vocabulary: once

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def check(self, grammar: Grammar, leading_spaces: int | None = 0) -> None:
        """Compiles it, where it is not kept or was used often. Takes up to a second. leading_spaces: that decoding
        drops of the answer, as `Detokenizer.leading_spaces` has it. Raises GrammarError for one that cannot be
        honoured, as often as it is asked for."""
        key = (grammar, leading_spaces)
        kept = self._found(key)
        if isinstance(kept, GrammarError):
            raise GrammarError(kept.what, why=kept.why, fix=kept.fix)
        if kept is None:
            try:
                vocabulary = self._of_model()
                definition = defined(grammar, leading_spaces=leading_spaces or 0)
                self._keep(key, _Compiled(definition, _matcher(vocabulary, definition)))
            except GrammarError as error:
                self._keep(key, GrammarError(error.what, why=error.why, fix=error.fix))
                raise
        elif kept.num_answers >= _SHARED_BY:
            self._keep(key, _Compiled(kept.definition, _matcher(self._of_model(), kept.definition)))

    def constraint(self, grammar: Grammar, leading_spaces: int | None = 0) -> Constraint:
        """For one answer. Raises as `check`."""
        self.check(grammar, leading_spaces)
        kept = self._found((grammar, leading_spaces))
        if not isinstance(kept, _Compiled):  # others came in between, and it was the oldest
            return self.constraint(grammar, leading_spaces)
        kept.num_answers += 1
        return Constraint(kept.matcher, self._size, self._worker, kept.retire)

    def close(self) -> None:
        """No answer is on its way."""
        if self._worker is not None:
            self._worker.close()

    def _of_model(self) -> Vocabulary:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._eos_ids, self._size)
            return self._vocabulary

    def _found(self, key: _Key) -> _Compiled | GrammarError | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: _Key, compiled: _Compiled | GrammarError) -> None:
        with self._lock:
            self._kept[key] = compiled
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT or (len(self._kept) > 1 and self._num_bytes() > MAX_KEPT_BYTES):
                self._kept.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(len(grammar.source) for grammar, _ in self._kept)


def _matcher(vocabulary: Vocabulary, definition: str) -> LLMatcher:
    """At its beginning. Raises GrammarError where the grammar is fine for bytes and not for these tokens."""
    matcher = LLMatcher(vocabulary.tokens, definition, log_level=0, limits=LLParserLimits(**_LIMITS))  # type: ignore[arg-type]
    if matcher.is_error():
        why = matcher.get_error().replace("<non-verbose/>", "").strip()
        raise GrammarError("the grammar cannot be used with this model", why=why)
    return matcher

"""Cache the compiled grammars of one model, so that the next request with the same one finds it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from localllm.errors import GrammarError
from localllm.text.grammar.constraint import Constraint
from localllm.text.grammar.definition import defined
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer import Tokenizer

MAX_CACHED = 32
MAX_CACHED_CHARS = 1 << 20  # of their sources
# Answers that share the states of one lexer: the first masks of one cost 50 us each, of the next 3. The states are
# counted over all of them, and are limited: after so many answers the lexer begins anew.
_SHARED_BY = 16
_LIMITS = {"max_lexer_states": 100_000, "verbose_errors": False}  # 200 MB of states at most

_CACHED_SPLITS = 1024  # of texts that a grammar leaves no choice about: names of properties, and what is between them

_Key = tuple[Grammar, int | None]  # with the spaces that are dropped in front


@dataclass
class _Compiled:
    definition: str
    matcher: LLMatcher
    num_answers: int = 0

    def retire(self) -> None:
        """Let no further answer share it."""
        self.num_answers = _SHARED_BY


class Grammars:
    """Safe to use from several threads; each `Constraint` belongs to one."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int], size: int, *, looks_ahead: bool = False) -> None:
        """size: of the model's logits. looks_ahead: the CPU has time for a mask while the model computes."""
        self._tokenizer, self._eos_ids, self._size = tokenizer, eos_ids, size
        self._vocabulary: LLTokenizer | None = None
        self._cached: OrderedDict[_Key, _Compiled | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "localllm-grammar") if looks_ahead else None

    def __len__(self) -> int:
        """Return the number of cached grammars."""
        return len(self._cached)

    def check(self, grammar: Grammar, leading_spaces: int | None = 0) -> None:
        """Compile a grammar, where it is not cached or was used often. Takes up to a second.

        leading_spaces: that decoding drops of the answer, as `Detokenizer.leading_spaces` has it.
        Raises GrammarError for one that cannot be honoured, as often as it is asked for.
        """
        self._checked((grammar, leading_spaces))

    def constraint(self, grammar: Grammar, leading_spaces: int | None = 0) -> Constraint:
        """Return the constraint of one answer. Raises as `check`."""
        compiled = self._checked((grammar, leading_spaces))
        compiled.num_answers += 1
        return Constraint(compiled.matcher, self._size, self._worker, compiled.retire)

    def close(self) -> None:
        """End the worker, when no answer is on its way."""
        if self._worker is not None:
            self._worker.shutdown()

    def _checked(self, key: _Key) -> _Compiled:
        with self._lock:
            cached = self._cached.get(key)
            if cached is not None:
                self._cached.move_to_end(key)
        if isinstance(cached, GrammarError):
            raise GrammarError(cached.what, why=cached.why, fix=cached.fixes)
        if cached is not None and cached.num_answers < _SHARED_BY:
            return cached
        try:
            vocabulary = self._vocabulary_of_model()
            definition = cached.definition if cached else defined(key[0], leading_spaces=key[1] or 0)
            matcher = LLMatcher(vocabulary, definition, log_level=0, limits=LLParserLimits(**_LIMITS))  # type: ignore[arg-type]
            if matcher.is_error():  # a grammar of bytes does not fit these tokens
                why = matcher.get_error().replace("<non-verbose/>", "").strip()
                raise GrammarError("the grammar cannot be used with this model", why=why)
        except GrammarError as error:
            self._cache(key, GrammarError(error.what, why=error.why, fix=error.fixes))
            raise
        compiled = _Compiled(definition, matcher)
        self._cache(key, compiled)
        return compiled

    def _vocabulary_of_model(self) -> LLTokenizer:
        """Return the tokens of the model. Takes half a second for 150,000 of them.

        Ids that the tokenizer lacks are never allowed. Raises GrammarError for a tokenizer whose tokens have no bytes
        of their own.
        """
        with self._vocabulary_lock:
            if self._vocabulary is None:
                if self._tokenizer.leading_spaces is None:
                    raise GrammarError(
                        "this model's answers cannot be held to a grammar",
                        why="the tokenizer of this model decodes a token by its neighbours: what one adds to a text is "
                        "not known",
                        fix="take another model",
                    )
                # A model without one gets an id behind its own: a grammar may end there, and no token says so.
                ends = sorted(token_id for token_id in self._eos_ids if token_id < self._size) or [self._size]
                tokens = _Tokens(self._tokenizer, self._size, ends)
                tokens.greedy = LLTokenizer(tokens, n_vocab=len(tokens.tokens), eos_token=ends)  # type: ignore[arg-type]
                self._vocabulary = tokens.greedy
            return self._vocabulary

    def _cache(self, key: _Key, compiled: _Compiled | GrammarError) -> None:
        with self._lock:
            self._cached[key] = compiled
            self._cached.move_to_end(key)
            while len(self._cached) > MAX_CACHED or (
                len(self._cached) > 1 and sum(len(grammar.source) for grammar, _ in self._cached) > MAX_CACHED_CHARS
            ):
                self._cached.popitem(last=False)


class _Tokens:
    """The attributes that llguidance reads of a tokenizer, by these names."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(max(size, ends[-1] + 1))]
        self.special_token_ids = sorted({*(each for each in tokenizer.special_ids if each < size), *ends})
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.greedy: LLTokenizer | None = None
        self._tokenizer = tokenizer
        self._split = lru_cache(_CACHED_SPLITS)(self._found)

    def __call__(self, text: str) -> list[int]:
        return list(self._split(text))

    def _found(self, text: str) -> Sequence[int]:
        """Return ids whose bytes are the text's, as the tokenizer splits it in the middle of another one."""
        # Some put a blank in front: it is taken for the text's own, or left out with a token that never merges.
        for prefixed in (text, text.removeprefix(" "), "\x01" + text):
            ids = self._tokenizer.encode(prefixed)
            surplus = sum(len(self.tokens[each]) for each in ids) - len(text.encode())
            while ids and surplus > 0:
                surplus -= len(self.tokens[ids.pop(0)])
            if surplus == 0 and b"".join(self.tokens[each] for each in ids) == text.encode():
                return ids
        assert self.greedy is not None
        return self.greedy.greedy_tokenize(text)

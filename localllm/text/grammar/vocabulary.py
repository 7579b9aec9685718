"""Give llguidance the tokens of a model: the bytes of each, the special ones, and how a text is split into them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from llguidance import LLTokenizer

from localllm.errors import GrammarError
from localllm.text.tokenizer import Tokenizer

_CACHED_SPLITS = 1024  # of texts that a grammar leaves no choice about: names of properties, and what is between them


class Vocabulary:
    """The tokens of one model. Takes half a second for 150,000 of them.

    size: of the model's logits; ids that the tokenizer lacks are never allowed.
    Raises GrammarError for a tokenizer whose tokens have no bytes of their own.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int], size: int) -> None:
        if tokenizer.leading_spaces is None:
            why = "the tokenizer of this model decodes a token by its neighbours: what one adds to a text is not known"
            raise GrammarError("this model's answers cannot be held to a grammar", why=why, fix="take another model")
        self.size = size
        ends = sorted(token_id for token_id in eos_ids if token_id < size)
        # A model without one gets an id behind its own: a grammar may end there, and no token says so.
        tokens = _Tokens(tokenizer, size, ends or [size])
        self.tokens = LLTokenizer(tokens, n_vocab=len(tokens.tokens), eos_token=ends or [size])  # type: ignore[arg-type]
        tokens.greedy = self.tokens


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

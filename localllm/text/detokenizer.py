"""Decode token ids while they arrive: never half a character, and the pieces add up to the decode of all of them.

Knows nothing about stop strings or about where the tokens come from.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from copy import copy

from localllm.text.tokenizer import Tokenizer

_CONTEXT = 8  # tokens that decide about the space in front of the next one


class Detokenizer:
    """Decodes one sequence. The cost of a token does not grow with the text before it."""

    def __init__(
        self, tokenizer: Tokenizer, shown_ids: AbstractSet[int] = frozenset(), behind: Sequence[int] = ()
    ) -> None:
        """Decode one sequence.

        shown_ids: special tokens that are written out; the others have no text.
        behind: the tokens that this sequence goes on from, whose own text is not returned.
        """
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spaces_to_drop = tokenizer.leading_spaces
        self._window: list[int] = []  # only for tokenizers whose tokens have no bytes of their own
        self._emitted = 0  # characters of the window's text that were returned
        if self._spaces_to_drop is None:
            self._window = [index for index in behind if index not in tokenizer.special_ids][-_CONTEXT:]
            self._emitted = len(tokenizer.decode(self._window))
            return
        for index in behind:
            if not self._spaces_to_drop:  # after the first token that is any text
                break
            self.push(index)
        self._decoder.reset()

    @property
    def leading_spaces(self) -> int | None:
        """The spaces that are dropped if the next token begins with them; None as in `Tokenizer.leading_spaces`."""
        return self._spaces_to_drop

    def push(self, index: int) -> str:
        """Return the text that became certain with the token `index`: often one word, sometimes nothing."""
        if index in self._tokenizer.special_ids:
            if index not in self._shown_ids:
                return ""
            # No character before it can still be completed.
            before, self._spaces_to_drop = self.finish(), self._spaces_to_drop and 0
            self._decoder.reset()
            return before + self._tokenizer.token_text(index)
        if self._spaces_to_drop is None:
            return self._push_to_window(index)
        data = self._tokenizer.token_bytes(index)
        if self._spaces_to_drop and data:
            dropped = min(self._spaces_to_drop, len(data) - len(data.lstrip(b" ")))
            self._spaces_to_drop = self._spaces_to_drop - dropped if dropped == len(data) else 0
            data = data[dropped:]
        return self._decoder.decode(data)

    def copy(self) -> Detokenizer:
        """Return another one that has decoded the same and goes on by itself."""
        other = copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        other._decoder.setstate(self._decoder.getstate())
        other._window = list(self._window)
        return other

    def finish(self) -> str:
        """Return the text still held back; the beginning of a character that never ended becomes one U+FFFD."""
        if self._spaces_to_drop is None:
            text = self._tokenizer.decode(self._window)[self._emitted :]
            self._window.clear()
            self._emitted = 0
            return text
        return self._decoder.decode(b"", final=True)

    def _push_to_window(self, index: int) -> str:
        """Decode a few tokens of context with the new one: they decide about spaces between words."""
        self._window.append(index)
        text = self._tokenizer.decode(self._window)
        if text.endswith("\ufffd") and len(self._window) < 2 * _CONTEXT:
            return ""
        new, self._emitted = text[self._emitted :], len(text)
        if len(self._window) >= 2 * _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            self._emitted = len(self._tokenizer.decode(self._window))
        return new

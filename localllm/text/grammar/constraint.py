"""One answer on its way through a grammar: which tokens may follow those that were said, guessed and taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile

import numpy
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from localllm.errors import GrammarError
from localllm.text.grammar.worker import Work, Worker

_KEPT_MASKS = 64  # of the latest places: guesses and what verifies them ask for the same ones; 19 kB of 152,000 tokens
# What is added to the logits of eight tokens for each byte of a mask: 60 us of 152,000 tokens, and 70 for the addition,
# where torch's masked_fill takes 260.
_BITS = numpy.unpackbits(numpy.arange(256, dtype=numpy.uint8)[:, None], axis=1, bitorder="little")
_ADDED = numpy.where(_BITS == 1, 0, -numpy.inf).astype(numpy.float32)


class Constraint:
    """Of the same tokens it says always the same, in whatever order it is asked. What it is asked about lies close to
    what it was asked about before, as a rule: the parser goes on from there, and back where it has to.

    Used by one thread, and by its worker meanwhile.
    """

    def __init__(self, matcher: LLMatcher, size: int, worker: Worker | None, spent: Callable[[], None]) -> None:
        """matcher: at its beginning. size: of the logits. worker: looks ahead, where there is one. spent: called at
        a limit that it shares with others."""
        self._start, self._size, self._worker, self._spent = matcher, size, worker, spent
        self._ahead: Work | None = None
        self._begin()

    def held(self, logits: Tensor, token_ids: Sequence[int]) -> Tensor:
        """fp32 logits [V] with -inf where a token may not follow these. Raises GrammarError where none may: behind what
        the grammar forbids, behind its end, and where the parser meets a limit."""
        self._settle()
        added = torch.from_numpy(_ADDED.take(self._mask(token_ids), axis=0).reshape(-1)[: self._size])
        return logits + added.to(logits.device)

    def allows(self, token_ids: Sequence[int], token_id: int) -> bool:
        """Whether this one may follow these, behind which none is forced, as `held` has it: in 3 us, where a mask takes
        20 to 2,000."""
        return bool(self._can_follow(token_ids) and self._matcher.validate_tokens([token_id]))

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """What may follow these is going to be asked."""
        if self._worker is None:
            return
        self._settle()
        self._ahead = Work(lambda: self._try_mask(token_ids))
        self._worker.give(self._ahead)

    def cut(self, token_ids: Sequence[int], guesses: Sequence[int]) -> tuple[int, ...]:
        """As many of these guesses as may follow."""
        if not guesses or not self._can_follow(token_ids):
            return ()
        return tuple(guesses[: self._matcher.validate_tokens(list(guesses))])

    def forced(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must follow, as far as there is no choice. Of several ways to write a text `held` leaves that
        one, too."""
        return tuple(self._matcher.compute_ff_tokens()) if self._can_follow(token_ids) else ()

    def has_ended(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing may follow any more."""
        return self._can_follow(token_ids) and bool(self._matcher.is_stopped())

    def is_met(self, token_ids: Sequence[int]) -> bool:
        """Whether an answer of these tokens is one that the grammar allows."""
        return self._can_follow(token_ids) and bool(self._matcher.is_accepting())

    def _settle(self) -> None:
        if self._ahead is not None:
            self._ahead.finish()
            self._ahead = None

    def _can_follow(self, token_ids: Sequence[int]) -> bool:
        """Where it cannot, `held` tells why."""
        self._settle()
        try:
            self._follow(token_ids)
        except GrammarError:
            return False
        return True

    def _try_mask(self, token_ids: Sequence[int]) -> None:
        with suppress(GrammarError):
            self._mask(token_ids)

    def _mask(self, token_ids: Sequence[int]) -> NDArray[numpy.uint8]:
        """A bit for each token, the lowest first."""
        length = len(token_ids)
        if not self._is_said(token_ids) or length not in self._masks:
            self._follow(token_ids)
            bits = numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8)
            self._require_well()
            whole, rest = divmod(self._size, 8)
            if not bits[:whole].any() and not (rest and bits[whole] & ((1 << rest) - 1)):
                raise _no_way_on(length)
            self._masks[length] = bits
            if len(self._masks) > _KEPT_MASKS:
                del self._masks[min(self._masks)]
        return self._masks[length]

    def _begin(self) -> None:
        self._matcher = self._start.deep_copy()
        self._said: list[int] = []
        self._masks: dict[int, NDArray[numpy.uint8]] = {}  # by how many tokens stand before

    def _is_said(self, token_ids: Sequence[int]) -> bool:
        """Whether the parser is behind these tokens, or has been on its way to where it is."""
        return len(token_ids) <= len(self._said) and self._said[: len(token_ids)] == list(token_ids)

    def _follow(self, token_ids: Sequence[int]) -> None:
        """The parser is behind these tokens and no others. Raises GrammarError where they cannot be said."""
        if self._matcher.is_error():
            self._begin()
        said = self._said
        if list(token_ids[: len(said)]) != said:
            pairs = zip(said, token_ids, strict=False)
            self._go_back(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        new = list(token_ids[len(said) :])
        num_taken = self._matcher.try_consume_tokens(new) if new else 0
        said += new[:num_taken]
        self._require_well()
        if num_taken < len(new):
            raise _no_way_on(len(said))

    def _go_back(self, length: int) -> None:
        """So many tokens were said."""
        self._matcher.rollback(len(self._said) - length)
        del self._said[length:]
        self._masks = {place: mask for place, mask in self._masks.items() if place <= length}

    def _require_well(self) -> None:
        if self._matcher.is_error():
            self._spent()
            why = self._matcher.get_error().replace("<non-verbose/>", "").strip()
            what = f"the grammar is too complex to go on with after {len(self._said)} tokens"
            raise GrammarError(what, why=why, fix="make it simpler, or ask for less at once")


def _no_way_on(num_tokens: int) -> GrammarError:
    why = f"the grammar has no answer that goes on so after {num_tokens} tokens"
    return GrammarError("the answer cannot go on as it must", why=why)

"""One answer on its way through a grammar: which tokens may follow those that were chosen, drafted and taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from itertools import takewhile

import numpy
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from localllm.errors import GrammarError

_CACHED_MASKS = 64  # of the latest places: drafts and their verification ask for the same; 19 kB of 152,000 tokens each
# What is added to the logits of eight tokens for each byte of a mask: 60 us of 152,000 tokens, and 70 for the addition,
# where torch's masked_fill takes 260.
_BITS = numpy.unpackbits(numpy.arange(256, dtype=numpy.uint8)[:, None], axis=1, bitorder="little")
_ADDED = numpy.where(_BITS == 1, 0, -numpy.inf).astype(numpy.float32)


class Constraint:
    """Answers the same of the same tokens, in whatever order it is asked.

    A question lies close to the one before, as a rule: the parser goes on from there, and back where it has to.
    Belongs to one thread, and to its worker meanwhile.
    """

    def __init__(self, matcher: LLMatcher, size: int, worker: Executor | None, retire: Callable[[], None]) -> None:
        """Follow one answer.

        matcher: at its beginning.
        size: of the logits.
        worker: one thread that looks ahead, where there is one.
        retire: called at a limit that the parser shares with other answers.
        """
        self._start, self._size, self._worker, self._retire = matcher, size, worker, retire
        self._ahead: Future[None] | None = None
        self._begin()

    def held(self, logits: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Return fp32 logits [V] with -inf where a token may not follow these.

        Raises GrammarError where none may: behind what the grammar forbids, behind its end, and where the parser meets
        a limit.
        """
        self._settle()
        added = torch.from_numpy(_ADDED.take(self._mask(token_ids), axis=0).reshape(-1)[: self._size])
        return logits + added.to(logits.device)

    def allows(self, token_ids: Sequence[int], token_id: int) -> bool:
        """Tell if this one may follow these, behind which none is forced: in 3 us, where a mask takes 20 to 2,000."""
        return bool(self._can_follow(token_ids) and self._matcher.validate_tokens([token_id]))

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """Begin to compute what may follow these, which is going to be asked."""
        if self._worker is not None:
            self._settle()
            self._ahead = self._worker.submit(self._try_mask, token_ids)

    def cut(self, token_ids: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
        """Return as many of these drafts as may follow."""
        if not drafts or not self._can_follow(token_ids):
            return ()
        return tuple(drafts[: self._matcher.validate_tokens(list(drafts))])

    def forced(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that must follow, as far as there is no choice.

        Of several ways to write a text `held` leaves this one, too.
        """
        return tuple(self._matcher.compute_ff_tokens()) if self._can_follow(token_ids) else ()

    def has_ended(self, token_ids: Sequence[int]) -> bool:
        """Tell if nothing may follow any more."""
        return self._can_follow(token_ids) and bool(self._matcher.is_stopped())

    def is_met(self, token_ids: Sequence[int]) -> bool:
        """Tell if an answer of these tokens is one that the grammar allows."""
        return self._can_follow(token_ids) and bool(self._matcher.is_accepting())

    def _settle(self) -> None:
        """Wait for the worker, unless it has not begun: on a busy machine its thread may come late."""
        if self._ahead is not None and not self._ahead.cancel():
            self._ahead.result()
        self._ahead = None

    def _can_follow(self, token_ids: Sequence[int]) -> bool:
        """Tell if these can be written; where not, `held` tells why."""
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
        """Return a bit for each token, the lowest first."""
        length = len(token_ids)
        if self._followed[:length] != list(token_ids) or length not in self._masks:
            self._follow(token_ids)
            bits = numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8)
            self._require_well()
            whole, rest = divmod(self._size, 8)
            if not bits[:whole].any() and not (rest and bits[whole] & ((1 << rest) - 1)):
                raise _no_way_on(length)
            self._masks[length] = bits
            if len(self._masks) > _CACHED_MASKS:
                del self._masks[min(self._masks)]
        return self._masks[length]

    def _begin(self) -> None:
        self._matcher = self._start.deep_copy()
        self._followed: list[int] = []  # the parser is behind these
        self._masks: dict[int, NDArray[numpy.uint8]] = {}  # by how many tokens stand before

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Bring the parser behind these tokens and no others. Raises GrammarError where they cannot be written."""
        if self._matcher.is_error():
            self._begin()
        followed = self._followed
        if list(token_ids[: len(followed)]) != followed:
            pairs = zip(followed, token_ids, strict=False)
            length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._matcher.rollback(len(followed) - length)
            del followed[length:]
            self._masks = {place: mask for place, mask in self._masks.items() if place <= length}
        new = list(token_ids[len(followed) :])
        num_taken = self._matcher.try_consume_tokens(new) if new else 0
        followed += new[:num_taken]
        self._require_well()
        if num_taken < len(new):
            raise _no_way_on(len(followed))

    def _require_well(self) -> None:
        if self._matcher.is_error():
            self._retire()
            why = self._matcher.get_error().replace("<non-verbose/>", "").strip()
            what = f"the grammar is too complex to go on with after {len(self._followed)} tokens"
            raise GrammarError(what, why=why, fix="make it simpler, or ask for less at once")


def _no_way_on(num_tokens: int) -> GrammarError:
    why = f"the grammar has no answer that goes on so after {num_tokens} tokens"
    return GrammarError("the answer cannot go on as it must", why=why)

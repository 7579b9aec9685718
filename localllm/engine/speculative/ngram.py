"""Drafts what followed the last tokens before, in the prompt or in the answer: free, and good at code, summaries,
quotations and lists (prompt lookup: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.drafter import NO_DRAFT, Draft

_LENGTHS = (3, 2)  # of the runs of tokens that are looked up, the more telling first
_PLACES = 4  # of such a run that are compared further back: the latest ones
_LOOKED_BACK = 8  # tokens at most, of those that came while nothing was offered
_MOST_COMPARED = 16  # tokens of a match; a longer one is not more certain
# Matches of so many tokens are as good as each other.
_GRADES = (2, 3, 4, 6, 10, _MOST_COMPARED)


class NgramLookup:
    """Drafts that take next to no time: made in every step, and compared with the text verified or not."""

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def read(self, sequences: Sequence[Running]) -> None:
        """Index the text so far: for a long prompt that takes longer than to look."""
        for sequence in sequences:
            index = self._indexes.setdefault(sequence.request_id, _Index())
            index.read(sequence.token_ids, len(sequence.token_ids))

    def offers(self, sequences: Sequence[Running], limits: Sequence[int]) -> list[Draft]:
        """Return for each sequence at most so many tokens."""
        drafts = []
        for sequence, limit in zip(sequences, limits, strict=True):
            index, token_ids = self._indexes.setdefault(sequence.request_id, _Index()), sequence.token_ids
            drafts.append(index.draft(token_ids, len(token_ids), limit) if limit > 0 else NO_DRAFT)
        return drafts

    def hindsight(self, sequence: Running, since: int, limit: int) -> Iterator[tuple[Draft, Sequence[int]]]:
        """Yield what it would have offered behind some of the tokens from `since` on, with what was sampled there."""
        index, token_ids = self._indexes.setdefault(sequence.request_id, _Index()), sequence.token_ids
        for end in range(max(since, len(token_ids) - _LOOKED_BACK), len(token_ids)):
            yield index.draft(token_ids, end, limit), token_ids[end : end + limit]

    def forget(self, sequence: Running) -> None:
        self._indexes.pop(sequence.request_id, None)


class _Index:
    """Where each run of tokens was seen in one sequence, which only ever becomes longer."""

    def __init__(self) -> None:
        self._places: list[dict[tuple[int, ...], list[int]]] = [{} for _ in _LENGTHS]
        self._num_read = 0  # tokens whose followers are known to the tables

    def draft(self, token_ids: Sequence[int], end: int, limit: int) -> Draft:
        """Return a draft behind the first `end` tokens, never fewer than the last time."""
        self.read(token_ids, end)
        found: dict[int, tuple[int, int]] = {}  # by the token that followed: how much matched there, and the place
        for length, places in zip(_LENGTHS, self._places, strict=True):
            for place in places.get(tuple(token_ids[end - length : end]), ()):
                matched = _common_suffix(token_ids, place, end)
                if matched >= found.get(token_ids[place], (0, 0))[0]:  # the latest of equals
                    found[token_ids[place]] = matched, place
        if not found:
            return NO_DRAFT
        longest, best = max(found.values())
        grade = max(grade for grade in _GRADES if grade <= longest)
        run = token_ids[best : min(best + limit, end)]  # one that reaches the end of the text repeats itself
        return Draft(tuple(run[i % len(run)] for i in range(limit)), f"ngram-{grade}")

    def read(self, token_ids: Sequence[int], end: int) -> None:
        """Index the runs that are followed by one of these tokens."""
        for length, places in zip(_LENGTHS, self._places, strict=True):
            for place in range(max(self._num_read, length), end):
                found = places.setdefault(tuple(token_ids[place - length : place]), [])
                found.append(place)
                if len(found) > _PLACES:
                    del found[0]
        self._num_read = max(self._num_read, end)


def _common_suffix(token_ids: Sequence[int], place: int, end: int) -> int:
    """Return how many tokens before `place` are those before `end`."""
    count = 0
    while count < min(place, _MOST_COMPARED) and token_ids[place - 1 - count] == token_ids[end - 1 - count]:
        count += 1
    return count

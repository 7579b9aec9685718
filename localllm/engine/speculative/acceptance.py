"""How often guesses come true, as it changes with the text."""

from __future__ import annotations

from collections.abc import Sequence

# Of what was seen, at each new observation: some ten count, so that a text that changes is noticed within a sentence.
_KEPT = 0.9
_KEPT_OF_ALL = 0.98
_PRIOR_WEIGHT = 3.0
# Before anything was seen, of the first guess.
_PRIORS = {"ngram-2": 0.4, "ngram-3": 0.5, "ngram-4": 0.6, "ngram-6": 0.7, "ngram-10": 0.8, "ngram-16": 0.9}
_PRIOR, _PRIOR_ELSE = 0.7, 0.3
ELSE = " else"  # behind a source: what is verified beside it


class Acceptance:
    """The share of guesses that are right, by their source and their place in the draft, where all before them were."""

    def __init__(self, of_all: Acceptance | None = None) -> None:
        """of_all: of all texts so far, from which this one's starts."""
        self._of_all = of_all
        self._kept = _KEPT_OF_ALL if of_all is None else _KEPT
        self._seen: dict[str, list[tuple[float, float]]] = {}  # right, and all told, of each place

    def rates(self, source: str, count: int) -> list[float]:
        """Of the first `count` places. One that this text has not told of is as in all texts; one that none has told of
        is as the place before."""
        seen, rates = self._seen.get(source, []), []
        priors = [] if len(seen) >= count or self._of_all is None else self._of_all.rates(source, count)
        for place in range(count):
            if place < len(seen):
                right, all_told = seen[place]
                rates.append(right / all_told)
            else:
                rates.append(priors[place] if priors else rates[-1] if rates else _prior(source))
        return rates

    def tokens(self, source: str, count: int) -> list[float]:
        """What a pass that verifies 0, 1, ... `count` guesses gives, on average."""
        expected, sure = [1.0], 1.0
        for rate in self.rates(source, count):
            sure *= rate
            expected.append(expected[-1] + sure)
        return expected

    def learn(self, source: str, guessed: Sequence[int], said: Sequence[int]) -> None:
        """said: what was drawn in place of the guesses, as far as that is known."""
        if self._of_all is not None:
            self._of_all.learn(source, guessed, said)
        seen = self._seen.setdefault(source, [])
        for place, (guess, token) in enumerate(zip(guessed, said, strict=False)):
            if place == len(seen):
                prior = self.rates(source, place + 1)[-1]
                seen.append((_PRIOR_WEIGHT * prior, _PRIOR_WEIGHT))
            right, all_told = seen[place]
            seen[place] = (self._kept * right + (guess == token), self._kept * all_told + 1)
            if guess != token:
                return


def _prior(source: str) -> float:
    return _PRIOR_ELSE if source.endswith(ELSE) else _PRIORS.get(source, _PRIOR)

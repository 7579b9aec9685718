"""Who guesses, and how many tokens: what is expected to give the most tokens a second, by what guesses were worth and
what steps took so far. What that costs where it is wrong comes out of a budget: never more than a small share of the
time, so that decoding is not slower than without guesses."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from localllm.engine.speculative.acceptance import ELSE, Acceptance
from localllm.engine.speculative.drafter import Draft
from localllm.engine.speculative.step_times import StepTimes

# Expected gains below are within what is known of the times: of a verification, and of a model's guesses before it.
_WORTH, _WORTH_GUESSING = 1.03, 1.1
_WORTH_BRANCHING = 1.01  # beside the same guesses without a branch
# Steps between two that are without guesses to measure them again, as few as cost this share of the time. Of each two
# the second counts: the first finds caches as guesses have left them.
_FEWEST_STEPS, _MOST_STEPS, _PLAIN_SHARE = 8, 64, 0.01
_PLAIN_STEPS = 2
_FIRST_PROBE, _LAST_PROBE = 16, 256  # steps between two tries of guesses that were not worth it
_PROBE_TOKENS = 2
_HOPELESS_STEPS = 4096  # after which even one of which right guesses would not pay is tried again
_UNKNOWN_SHARE = 0.5  # of a step, that one guess of a model is taken to cost before any was made
_LOSS_SHARE = 0.008  # of the time
_LOSS_STEPS = 2.0  # that may be lost before any time has passed
_GAIN_STEPS = 6.0  # that were gained before, at most, and may be lost again


@dataclass(frozen=True)
class Option:
    """What may be done in a step. counts: guesses for each sequence, at most. drafter: who makes those that are not
    offered already. are_offered: whether a sequence's are. tokens, seconds: expected."""

    counts: tuple[int, ...]
    are_offered: tuple[bool, ...]
    drafter: str | None
    tokens: float
    seconds: float
    least: float = 0.0  # as `Drafter.propose` has it
    others: int = 0  # guesses of a branch, where one sequence runs: what is offered else

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Situation:
    """Of each sequence: how guesses came true in its text, how many may be made, and what is offered at no cost."""

    acceptances: Sequence[Acceptance]
    limits: Sequence[int]
    offers: Sequence[Draft]
    most_rows: int  # of the step
    branches: bool = False  # there is room for other guesses beside those of a sequence
    unread: frozenset[str] = frozenset()  # drafters that would have much to read first: they are not tried out

    @property
    def most(self) -> int:
        """Guesses for each sequence."""
        return min(max(self.limits), self.most_rows // len(self.limits) - 1)


class Controller:
    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._guess_s: dict[tuple[str, int], deque[float]] = {}  # by drafter and sequences
        self._begun: set[tuple[str, int]] = set()
        self._num_steps = 0
        self._num_since_plain = self._num_plain = 0  # steps with guesses since one without; steps without, since then
        self._plain_every = _MOST_STEPS
        self._probed_at: dict[str, int] = {}
        self._probe_every: dict[str, int] = {}
        self._elapsed_s = self._lost_s = 0.0
        self.is_settled = False  # whether the last answer of `choose` was by what is known, and not to know more

    def choose(self, situation: Situation, drafters: Sequence[str]) -> Option | None:
        """drafters: those that take time, and can guess now. None: a step without guesses."""
        sequences = len(situation.limits)
        plain_s = self.times.plain_s(sequences)
        self.is_settled = False
        if plain_s is None or situation.most < 1 or self._measures_plain():
            return None
        self.is_settled = True
        plain_rate = sequences / plain_s
        best: Option | None = None
        has_offers = any(offer.token_ids for offer in situation.offers)
        for drafter in (*([None] if has_offers else []), *drafters):
            option = self._best_of(situation, drafter, plain_s)
            if option is None:
                continue
            if drafter is not None and option.rate <= plain_rate * _WORTH_GUESSING:
                option = self._probe(situation, drafter)
            elif option.rate <= plain_rate * _WORTH:
                continue
            if option is not None and (best is None or option.rate > best.rate):
                best = option
        if best is None or not self._can_be_lost(best.seconds - plain_s, plain_s):
            return None
        gained = max(0.0, 1 - plain_rate / best.rate)
        self._plain_every = int(min(max(gained * _PLAIN_STEPS / _PLAIN_SHARE, _FEWEST_STEPS), _MOST_STEPS))
        best = _until_unlikely(best, self._guess_cost(best, plain_s), max(plain_rate, best.rate) / sequences)
        return best if sequences > 1 else self._with_branch(best, situation)

    def learn(
        self, option: Option | None, rows: int, tokens: int, sequences: int, guess_s: float, step_s: float
    ) -> None:
        """rows: of the step, which gave so many tokens. guess_s: before it; step_s: its own."""
        follows_guess, self._num_steps = self._num_since_plain > 0, self._num_steps + 1
        if option is None and follows_guess:
            self._num_plain += 1
            if self._num_plain < _PLAIN_STEPS:
                return
            self._num_since_plain = self._num_plain = 0
        is_known = self.times.learn(sequences, rows, step_s)
        if option is None:
            if is_known:
                self._elapsed_s += guess_s + step_s
            return
        self._num_since_plain, self._num_plain = self._num_since_plain + 1, 0
        plain_s, seconds = self.times.plain_s(sequences), guess_s + step_s
        if plain_s is None:
            return
        if option.drafter is not None:
            self._learn_probe(option.drafter, paid=tokens * plain_s > sequences * seconds)
        if is_known:
            self._elapsed_s += seconds
            self._lost_s = max(self._lost_s + seconds - tokens / sequences * plain_s, -_GAIN_STEPS * plain_s)

    def learn_plain(self, sequences: int, count: int, seconds: float) -> None:
        """From so many steps of these sequences for which nobody looked for guesses."""
        self.times.learn(sequences, sequences, seconds / count)
        self._num_steps += count
        self._num_since_plain = self._num_plain = 0
        self._elapsed_s += seconds

    def forget_guesses(self, drafter: str) -> None:
        """They take another time from now on."""
        for known in [key for key in self._guess_s if key[0] == drafter]:
            del self._guess_s[known]
        self._begun = {key for key in self._begun if key[0] != drafter}

    @property
    def plain_s(self) -> float | None:
        """Of a step of one sequence without guesses, as it was measured."""
        return self.times.plain_s(1)

    def learn_guesses(self, drafter: str, sequences: int, count: int, seconds: float) -> None:
        """count: guesses that were made one after the other."""
        if (drafter, sequences) not in self._begun:  # the first ones also prepare what all others find ready
            self._begun.add((drafter, sequences))
            return
        self._guess_s.setdefault((drafter, sequences), deque(maxlen=9)).append(seconds / count)

    def _learn_probe(self, drafter: str, *, paid: bool) -> None:
        every = self._probe_every.get(drafter, _FIRST_PROBE)
        self._probe_every[drafter] = _FIRST_PROBE if paid else min(2 * every, _LAST_PROBE)
        self._probed_at[drafter] = self._num_steps

    def _probe(self, situation: Situation, drafter: str) -> Option | None:
        """A few guesses, now and then, of one that has not been worth it."""
        if drafter in situation.unread or self.is_hopeless(drafter, len(situation.limits), situation.most):
            return None
        since = self._num_steps - self._probed_at.get(drafter, -_LAST_PROBE)
        if since < self._probe_every.get(drafter, _FIRST_PROBE):
            return None
        return next(self._options(situation, drafter, [min(_PROBE_TOKENS, situation.most)]), None)

    def is_hopeless(self, drafter: str, sequences: int, most: int = _PROBE_TOKENS) -> bool:
        """Whether guesses would not pay even if all were right, as far as it is known what they take."""
        plain_s = self.times.plain_s(sequences)
        if plain_s is None or (drafter, sequences) not in self._guess_s:
            return False
        if self._num_steps - self._probed_at.get(drafter, self._num_steps) > _HOPELESS_STEPS:
            return False
        seconds = most * self._guess_time(drafter, sequences) + self.times.step_s(sequences, sequences * (1 + most))
        return (1 + most) * plain_s <= seconds * _WORTH

    def _can_be_lost(self, seconds: float, plain_s: float) -> bool:
        return self._lost_s + seconds <= _LOSS_STEPS * plain_s + _LOSS_SHARE * self._elapsed_s

    def _measures_plain(self) -> bool:
        return self._num_since_plain >= self._plain_every or self._num_plain > 0

    def _best_of(self, situation: Situation, drafter: str | None, plain_s: float) -> Option | None:
        """Of those that would not cost too much if they were all wrong."""
        options = self._options(situation, drafter, range(1, situation.most + 1))
        affordable = (option for option in options if self._can_be_lost(option.seconds - plain_s, plain_s))
        return max(affordable, key=lambda option: option.rate, default=None)

    def _options(self, situation: Situation, drafter: str | None, counts: Iterable[int]) -> Iterator[Option]:
        """For each count at most so many guesses for each sequence: those that are offered, or the drafter's where
        these are expected to be worth more."""
        triples = list(zip(situation.acceptances, situation.limits, situation.offers, strict=True))
        offered = [own.tokens(offer.source, min(limit, len(offer.token_ids))) for own, limit, offer in triples]
        guessed = offered if drafter is None else [own.tokens(drafter, limit) for own, limit, _ in triples]
        for count in counts:
            chosen: list[tuple[int, bool]] = []
            tokens, longest, num_guessed = 0.0, 0, 0
            for of_offer, of_drafter in zip(offered, guessed, strict=True):
                own, other = min(count, len(of_offer) - 1), min(count, len(of_drafter) - 1)
                is_offered = drafter is None or of_offer[own] >= of_drafter[other]
                chosen.append((own if is_offered else other, is_offered))
                tokens += max(of_offer[own], of_drafter[other])
                if not is_offered:
                    longest, num_guessed = max(longest, other), num_guessed + 1
            num_guesses = sum(own for own, _ in chosen)
            if not num_guesses or (drafter is not None and not num_guessed):
                continue
            seconds = self.times.step_s(len(chosen), len(chosen) + num_guesses)
            if drafter is not None:
                seconds += longest * self._guess_time(drafter, num_guessed)
            numbers, are_offered = zip(*chosen, strict=True)
            yield Option(numbers, are_offered, drafter, tokens, seconds)

    def _with_branch(self, option: Option, situation: Situation) -> Option:
        """Where the pass has room for them and they pay: other guesses, which count where not even the first of the
        draft is right. They are what a lookup found beside its best, or beside a drafter's."""
        most, rows, (acceptance,) = most_others(option, situation), 1 + option.counts[0], situation.acceptances
        if most < 1:
            return option
        source = situation.offers[0].source if option.drafter is None else option.drafter
        missed = 1 - acceptance.rates(source, 1)[0]
        gained = [tokens - 1 for tokens in acceptance.tokens(others_of(source), most)]
        options = (
            replace(
                option,
                others=count,
                tokens=option.tokens + missed * gained[count],
                seconds=option.seconds + self.times.step_s(1, rows + 1 + count) - self.times.step_s(1, rows),
            )
            for count in range(1, most + 1)
        )
        best = max(options, key=lambda each: each.rate)
        return best if best.rate > option.rate * _WORTH_BRANCHING else option

    def _guess_time(self, drafter: str, sequences: int) -> float:
        known = self._guess_s.get((drafter, sequences))
        if known:
            return statistics.median(known)
        plain_s = self.times.plain_s(sequences)
        others = [statistics.median(seconds) for (name, _), seconds in self._guess_s.items() if name == drafter]
        return max(others, default=_UNKNOWN_SHARE * (plain_s or 0.0))

    def _guess_cost(self, option: Option, plain_s: float) -> float:
        """What one guess more takes: to make it, and to verify it."""
        sequences, rows = len(option.counts), len(option.counts) + sum(option.counts)
        verifying = self.times.step_s(sequences, rows) - plain_s
        guessing = 0.0
        if option.drafter is not None:
            guessing = self._guess_time(option.drafter, sequences - sum(option.are_offered))
        return guessing + max(0.0, verifying) / sum(option.counts)


def _until_unlikely(option: Option, guess_s: float, rate: float) -> Option:
    """One guess more is worth its time as long as it gives more tokens in it than are had anyway."""
    least = min(0.95, guess_s * rate)
    return replace(option, least=least)


def others_of(source: str) -> str:
    """What is counted of guesses that are verified beside those of a source."""
    return source + ELSE


def most_others(option: Option, situation: Situation) -> int:
    """Guesses that a branch of the one sequence may have; 0 where nothing else is offered, or there may be none."""
    (offer,), rows = situation.offers, 1 + option.counts[0]
    others = offer.others if option.are_offered[0] else offer.token_ids
    return min(len(others), situation.most_rows - rows - 1, option.counts[0]) if situation.branches else 0


class FixedCount:
    """As many guesses as may be, at every step: for measurements and tests."""

    is_settled = False
    plain_s: float | None = None

    def is_hopeless(self, *_arguments: object) -> bool:
        return False

    def choose(self, situation: Situation, drafters: Sequence[str]) -> Option | None:
        most, drafter = situation.most, drafters[0] if drafters else None
        are_offered = tuple(bool(offer.token_ids) for offer in situation.offers)
        counts = tuple(
            max(0, min(most, limit, len(offer.token_ids) if offer.token_ids or drafter is None else limit))
            for limit, offer in zip(situation.limits, situation.offers, strict=True)
        )
        if not any(counts):
            return None
        option = Option(counts, are_offered, None if all(are_offered) else drafter, 1.0, 1.0)
        return replace(option, others=max(0, most_others(option, situation))) if len(counts) == 1 else option

    def learn(self, *_arguments: object) -> None:
        """It does the same whatever comes of it."""

    def learn_plain(self, *_arguments: object) -> None:
        """Nor does it rest."""

    def forget_guesses(self, *_arguments: object) -> None:
        """Nor does it matter what they cost."""

    def learn_guesses(self, *_arguments: object) -> None:
        """Nor does it matter what they cost."""


Chooser = Controller | FixedCount

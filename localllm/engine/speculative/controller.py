"""Decide in each step who drafts, and how many tokens.

The choice is the option with the most expected tokens a second, by how often drafts were accepted and by what steps
took so far. A wrong choice is paid from a budget, a small share of the time: decoding is not slower than without
drafts."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from localllm.engine.scheduler import Scheduled
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.drafter import Draft

# Expected gains below these are within the error of the times: of a verification, and of a model's drafting before it.
_WORTH, _WORTH_DRAFTING = 1.03, 1.1
# Steps between two without drafts that measure those again, as few as cost this share of the time. Of each two the
# second counts: the first finds caches as drafts have left them.
_FEWEST_STEPS, _MOST_STEPS, _PLAIN_SHARE = 8, 64, 0.01
_PLAIN_STEPS = 2
_FIRST_PROBE, _LAST_PROBE = 16, 256  # steps between two tries of a drafter that was not worth it
_PROBE_TOKENS = 2
_HOPELESS_STEPS = 4096  # after which even a drafter that cannot pay is tried again
_UNKNOWN_SHARE = 0.5  # of a step: what one token of a drafter is taken to cost before any was drafted
_LOSS_SHARE = 0.008  # of the time
_LOSS_STEPS = 2.0  # that may be lost before any time has passed
_GAIN_STEPS = 6.0  # that were gained before, at most, and may be lost again

# Of what was seen, at each new observation: some ten count, so that a text that changes is noticed within a sentence.
_KEPT, _KEPT_OF_ALL = 0.9, 0.98
_PRIOR_WEIGHT = 3.0
# The acceptance of a first token before anything was seen.
_PRIORS = {"ngram-2": 0.4, "ngram-3": 0.5, "ngram-4": 0.6, "ngram-6": 0.7, "ngram-10": 0.8, "ngram-16": 0.9}
_PRIOR = 0.7

_LAST_TIMES = 9  # steps whose median counts
_ROW_SHARE = 0.06  # by which a row more makes a step longer, where nobody knows: 8 rows of INT4 cost 1.4 x one

# In a cooldown nobody looks for drafts: looking takes no more than this share of the time. A text that changes is
# noticed after so many tokens.
_LOOKING_SHARE, _LONGEST_COOLDOWN = 0.005, 256
# Where a device begins steps before the last one's token is known, which it does in a cooldown alone.
_LEAST_ON_DEVICE = 16


class Acceptance:
    """The share of drafted tokens that are accepted, by source and place, where all before them were."""

    def __init__(self, of_all: Acceptance | None = None) -> None:
        """of_all: of all texts so far, from which this text's starts."""
        self._of_all = of_all
        self._kept = _KEPT_OF_ALL if of_all is None else _KEPT
        self._seen: dict[str, list[tuple[float, float]]] = {}  # accepted, and all, of each place

    def rates(self, source: str, count: int) -> list[float]:
        """Return the rates of the first `count` places.

        A place that this text has not seen is as in all texts; one that none has seen is as the place before.
        """
        seen, rates = self._seen.get(source, []), []
        priors = [] if len(seen) >= count or self._of_all is None else self._of_all.rates(source, count)
        for place in range(count):
            if place < len(seen):
                accepted, total = seen[place]
                rates.append(accepted / total)
            else:
                rates.append(priors[place] if priors else rates[-1] if rates else _PRIORS.get(source, _PRIOR))
        return rates

    def tokens(self, source: str, count: int) -> list[float]:
        """Return the tokens that a pass gives on average that verifies 0, 1, ... `count` drafted ones."""
        expected, sure = [1.0], 1.0
        for rate in self.rates(source, count):
            sure *= rate
            expected.append(expected[-1] + sure)
        return expected

    def learn(self, source: str, drafted: Sequence[int], sampled: Sequence[int]) -> None:
        """Compare a draft with what was sampled in its place, as far as that is known."""
        if self._of_all is not None:
            self._of_all.learn(source, drafted, sampled)
        seen = self._seen.setdefault(source, [])
        for place, (draft, token) in enumerate(zip(drafted, sampled, strict=False)):
            if place == len(seen):
                prior = self.rates(source, place + 1)[-1]
                seen.append((_PRIOR_WEIGHT * prior, _PRIOR_WEIGHT))
            accepted, total = seen[place]
            seen[place] = (self._kept * accepted + (draft == token), self._kept * total + 1)
            if draft != token:
                return


def unknown_growth(sequences: int, rows: int) -> float:
    return 1 + _ROW_SHARE * (rows - sequences)


class StepTimes:
    """Measured times of steps, by sequences and rows; those without drafts have as many rows as sequences."""

    def __init__(self, growth: Callable[[int, int], float] = unknown_growth) -> None:
        """growth: how much longer a step of these sequences and rows is thought to be than one without drafts."""
        self._growth = growth
        self._seconds: dict[int, dict[int, deque[float]]] = {}
        self._known: dict[int, tuple[list[int], list[float]]] = {}  # rows, ascending, and their medians, once asked
        self._begun: set[tuple[int, int]] = set()

    def learn(self, sequences: int, rows: int, seconds: float) -> bool:
        """Return whether it was counted: the first step of a kind also prepares what all others find ready."""
        if (sequences, rows) not in self._begun:
            self._begun.add((sequences, rows))
            return False
        own = self._seconds.setdefault(sequences, {})
        own.setdefault(rows, deque(maxlen=_LAST_TIMES)).append(seconds)
        self._known.pop(sequences, None)
        return True

    def plain_s(self, sequences: int) -> float | None:
        """Return what a step without drafts takes; None where none was measured yet."""
        if not self._seconds.get(sequences, {}).get(sequences):
            return None
        return self.step_s(sequences, sequences)

    def step_s(self, sequences: int, rows: int) -> float:
        """Return what a step takes. One without drafts must have been measured; others are taken from neighbours."""
        if sequences not in self._known:
            own = self._seconds[sequences]
            rows_known = sorted(own)
            self._known[sequences] = rows_known, [statistics.median(own[count]) for count in rows_known]
        known, medians = self._known[sequences]
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            return medians[at]
        before, before_s = known[at - 1], medians[at - 1]
        if at < len(known):
            share = (rows - before) / (known[at] - before)
            return before_s + share * (medians[at] - before_s)
        return before_s * self._growth(sequences, rows) / self._growth(sequences, before)


def cooldown_steps(looking_s: float, step_s: float, *, begins_ahead: bool) -> int:
    """Return the length of a cooldown, by what looking for drafts and a step took."""
    least = _LEAST_ON_DEVICE if begins_ahead else 0
    return min(_LONGEST_COOLDOWN, max(least, int(looking_s / (_LOOKING_SHARE * step_s))))


@dataclass
class Cooldown:
    """Steps in which nobody looks for drafts, since none was worth it: looking itself takes time."""

    sequences: Sequence[Running]
    num_left: int
    lengths: Sequence[int] = field(init=False)  # of the sequences before it
    num_steps: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.lengths = [len(sequence.token_ids) for sequence in self.sequences]

    def takes(self, scheduled: Scheduled) -> bool:
        """Count the step in and return True if it is one more of these sequences."""
        if not self.num_left or len(scheduled) != len(self.sequences):
            return False
        for own, (sequence, chunk) in zip(self.sequences, scheduled, strict=True):
            if sequence is not own or chunk.num_tokens != 1:
                return False
        self.num_left -= 1
        return True

    def learn(self, step_s: float) -> None:
        self.num_steps += 1
        self.seconds += step_s


@dataclass(frozen=True)
class Option:
    """What a step may verify."""

    counts: tuple[int, ...]  # drafted tokens of each sequence, at most
    are_offered: tuple[bool, ...]  # whether a sequence's draft is the lookup's
    drafter: str | None  # who drafts the others
    tokens: float  # expected
    seconds: float  # expected
    least: float = 0.0  # as `Drafter.propose` has it

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Situation:
    """The sequences of a step."""

    acceptances: Sequence[Acceptance]
    limits: Sequence[int]  # tokens that may be drafted for each
    offers: Sequence[Draft]  # the lookup's drafts, which cost nothing
    most_rows: int  # of the step
    unread: frozenset[str] = frozenset()  # drafters that would have much to prefill first: they are not tried out

    @property
    def most(self) -> int:
        """Drafted tokens for each sequence."""
        return min(max(self.limits), self.most_rows // len(self.limits) - 1)


class Controller:
    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._draft_s: dict[tuple[str, int], deque[float]] = {}  # of one token, by drafter and sequences
        self._begun: set[tuple[str, int]] = set()
        self._num_steps = 0
        self._num_since_plain = self._num_plain = 0  # steps with drafts since one without; steps without, since then
        self._plain_every = _MOST_STEPS
        self._probed_at: dict[str, int] = {}
        self._probe_every: dict[str, int] = {}
        self._elapsed_s = self._lost_s = 0.0
        self.is_settled = False  # whether `choose` answered last by what is known, and not to know more

    def choose(self, situation: Situation, drafters: Sequence[str]) -> Option | None:
        """Return what to verify, None for a step without drafts. drafters: those that take time, and are ready."""
        sequences = len(situation.limits)
        plain_s = self.times.plain_s(sequences)
        self.is_settled = False
        measures_plain = self._num_since_plain >= self._plain_every or self._num_plain > 0
        if plain_s is None or situation.most < 1 or measures_plain:
            return None
        self.is_settled = True
        plain_rate = sequences / plain_s
        best: Option | None = None
        has_offers = any(offer.token_ids for offer in situation.offers)
        for drafter in (*([None] if has_offers else []), *drafters):
            option = self._best_of(situation, drafter, plain_s)
            if option is None:
                continue
            if drafter is not None and option.rate <= plain_rate * _WORTH_DRAFTING:
                option = self._probe(situation, drafter)
            elif option.rate <= plain_rate * _WORTH:
                continue
            if option is not None and (best is None or option.rate > best.rate):
                best = option
        if best is None or not self._can_be_lost(best.seconds - plain_s, plain_s):
            return None
        gained = max(0.0, 1 - plain_rate / best.rate)
        self._plain_every = int(min(max(gained * _PLAIN_STEPS / _PLAIN_SHARE, _FEWEST_STEPS), _MOST_STEPS))
        # One more token is worth its time as long as it gives more tokens in it than are had anyway.
        token_s = self._token_s(best, plain_s)
        return replace(best, least=min(0.95, token_s * max(plain_rate, best.rate) / sequences))

    def learn(
        self, option: Option | None, rows: int, tokens: int, sequences: int, draft_s: float, step_s: float
    ) -> None:
        """Learn from a step of so many rows and sequences, which gave so many tokens.

        draft_s: spent on drafting before the step.
        step_s: the step's own time.
        """
        follows_draft, self._num_steps = self._num_since_plain > 0, self._num_steps + 1
        if option is None and follows_draft:
            self._num_plain += 1
            if self._num_plain < _PLAIN_STEPS:
                return
            self._num_since_plain = self._num_plain = 0
        is_known = self.times.learn(sequences, rows, step_s)
        if option is None:
            if is_known:
                self._elapsed_s += draft_s + step_s
            return
        self._num_since_plain, self._num_plain = self._num_since_plain + 1, 0
        plain_s, seconds = self.times.plain_s(sequences), draft_s + step_s
        if plain_s is None:
            return
        if option.drafter is not None:
            every = self._probe_every.get(option.drafter, _FIRST_PROBE)
            has_paid = tokens * plain_s > sequences * seconds
            self._probe_every[option.drafter] = _FIRST_PROBE if has_paid else min(2 * every, _LAST_PROBE)
            self._probed_at[option.drafter] = self._num_steps
        if is_known:
            self._elapsed_s += seconds
            self._lost_s = max(self._lost_s + seconds - tokens / sequences * plain_s, -_GAIN_STEPS * plain_s)

    def learn_plain(self, sequences: int, count: int, seconds: float) -> None:
        """Learn from so many steps in which nobody looked for drafts."""
        self.times.learn(sequences, sequences, seconds / count)
        self._num_steps += count
        self._num_since_plain = self._num_plain = 0
        self._elapsed_s += seconds

    @property
    def plain_s(self) -> float | None:
        """The measured time of a step of one sequence without drafts."""
        return self.times.plain_s(1)

    def learn_drafting(self, drafter: str, sequences: int, count: int, seconds: float) -> None:
        """Learn what `count` tokens took that were drafted one after the other."""
        if (drafter, sequences) not in self._begun:  # the first ones also prepare what all others find ready
            self._begun.add((drafter, sequences))
            return
        self._draft_s.setdefault((drafter, sequences), deque(maxlen=9)).append(seconds / count)

    def _probe(self, situation: Situation, drafter: str) -> Option | None:
        """Return a few tokens, now and then, of a drafter that has not been worth it."""
        if drafter in situation.unread or self.is_hopeless(drafter, len(situation.limits), situation.most):
            return None
        since = self._num_steps - self._probed_at.get(drafter, -_LAST_PROBE)
        if since < self._probe_every.get(drafter, _FIRST_PROBE):
            return None
        return next(self._options(situation, drafter, [min(_PROBE_TOKENS, situation.most)]), None)

    def is_hopeless(self, drafter: str, sequences: int, most: int = _PROBE_TOKENS) -> bool:
        """Return whether drafts would not pay even if all were accepted, as far as their time is known."""
        plain_s = self.times.plain_s(sequences)
        if plain_s is None or (drafter, sequences) not in self._draft_s:
            return False
        if self._num_steps - self._probed_at.get(drafter, self._num_steps) > _HOPELESS_STEPS:
            return False
        seconds = most * self._drafting_s(drafter, sequences) + self.times.step_s(sequences, sequences * (1 + most))
        return (1 + most) * plain_s <= seconds * _WORTH

    def _can_be_lost(self, seconds: float, plain_s: float) -> bool:
        return self._lost_s + seconds <= _LOSS_STEPS * plain_s + _LOSS_SHARE * self._elapsed_s

    def _best_of(self, situation: Situation, drafter: str | None, plain_s: float) -> Option | None:
        """Return the best of the options that would not cost too much if all drafts were rejected."""
        options = self._options(situation, drafter, range(1, situation.most + 1))
        affordable = (option for option in options if self._can_be_lost(option.seconds - plain_s, plain_s))
        return max(affordable, key=lambda option: option.rate, default=None)

    def _options(self, situation: Situation, drafter: str | None, counts: Iterable[int]) -> Iterator[Option]:
        """Yield an option for each count of tokens: the lookup's, or the drafter's where these promise more."""
        triples = list(zip(situation.acceptances, situation.limits, situation.offers, strict=True))
        offered = [own.tokens(offer.source, min(limit, len(offer.token_ids))) for own, limit, offer in triples]
        drafted = offered if drafter is None else [own.tokens(drafter, limit) for own, limit, _ in triples]
        for count in counts:
            chosen: list[tuple[int, bool]] = []
            tokens, longest, num_drafted = 0.0, 0, 0
            for of_offer, of_drafter in zip(offered, drafted, strict=True):
                own, other = min(count, len(of_offer) - 1), min(count, len(of_drafter) - 1)
                is_offered = drafter is None or of_offer[own] >= of_drafter[other]
                chosen.append((own if is_offered else other, is_offered))
                tokens += max(of_offer[own], of_drafter[other])
                if not is_offered:
                    longest, num_drafted = max(longest, other), num_drafted + 1
            total = sum(own for own, _ in chosen)
            if not total or (drafter is not None and not num_drafted):
                continue
            seconds = self.times.step_s(len(chosen), len(chosen) + total)
            if drafter is not None:
                seconds += longest * self._drafting_s(drafter, num_drafted)
            numbers, are_offered = zip(*chosen, strict=True)
            yield Option(numbers, are_offered, drafter, tokens, seconds)

    def _drafting_s(self, drafter: str, sequences: int) -> float:
        """Return what one token of a drafter takes."""
        known = self._draft_s.get((drafter, sequences))
        if known:
            return statistics.median(known)
        plain_s = self.times.plain_s(sequences)
        others = [statistics.median(seconds) for (name, _), seconds in self._draft_s.items() if name == drafter]
        return max(others, default=_UNKNOWN_SHARE * (plain_s or 0.0))

    def _token_s(self, option: Option, plain_s: float) -> float:
        """Return what one drafted token more takes: to draft it, and to verify it."""
        sequences, rows = len(option.counts), len(option.counts) + sum(option.counts)
        verifying = self.times.step_s(sequences, rows) - plain_s
        drafting = 0.0
        if option.drafter is not None:
            drafting = self._drafting_s(option.drafter, sequences - sum(option.are_offered))
        return drafting + max(0.0, verifying) / sum(option.counts)

"""Who drafts how many: what gives the most tokens a second, and never at a cost beyond a small share of the time."""

from __future__ import annotations

import random

import pytest

from localllm.engine.speculative.controller import Acceptance, Controller, Option, Situation, StepTimes
from localllm.engine.speculative.drafter import NO_DRAFT, Draft

OFFERED, SKIP = "ngram-4", "skip"


class World:
    """A machine whose steps take known times, and a text of which a known share of drafts is right."""

    def __init__(self, alpha: float, row_s: float = 0.05, draft_s: float = 0.1, seed: int = 0) -> None:
        """Seconds: a step takes 1 and `row_s` for each further row, a draft of a drafter `draft_s`."""
        self.alpha, self.row_s, self.draft_s = alpha, row_s, draft_s
        self.controller, self.acceptance = Controller(StepTimes()), Acceptance(Acceptance())
        self.random = random.Random(seed)
        self.plain_s = 1.0
        self.is_spiteful = False  # drafts are accepted where nobody makes them, and never else
        self.seconds, self.tokens = 0.0, 0

    def run(self, steps: int, *, offers: bool, drafters: tuple[str, ...] = ()) -> float:
        """Tokens a second, where a step without drafts gives 1."""
        before = self.seconds, self.tokens
        for _ in range(steps):
            self._step(Draft((1,) * 8, OFFERED) if offers else NO_DRAFT, drafters)
        return (self.tokens - before[1]) / (self.seconds - before[0])

    def _step(self, offer: Draft, drafters: tuple[str, ...]) -> None:
        option = self.controller.choose(Situation([self.acceptance], [8], [offer], 16), drafters)
        count, draft_s, source = 0, 0.0, OFFERED
        if option is not None:
            count = option.counts[0]
            if option.drafter is not None:
                draft_s, source = count * self.draft_s, option.drafter
                self.controller.learn_drafting(option.drafter, 1, count, draft_s)
        said = []
        alpha = self.alpha if not self.is_spiteful else float(not count)
        for _ in range(count + 1):
            said.append(1 if self.random.random() < alpha else 0)
            if not said[-1]:
                break
        if count:
            self.acceptance.learn(source, (1,) * count, said)
        elif offer.token_ids:
            self.acceptance.learn(offer.source, offer.token_ids, said[:1])
        step_s = 1 + self.row_s * count if count else self.plain_s
        self.controller.learn(option, 1 + count, len(said), 1, draft_s, step_s)
        self.seconds += draft_s + step_s
        self.tokens += len(said)


def best_rate(alpha: float, row_s: float, draft_s: float) -> float:
    rates = [sum(alpha**i for i in range(k + 1)) / (1 + k * (row_s + draft_s)) for k in range(9)]
    return max(rates)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("row_s", [0.01, 0.1, 0.3])
def test_offers_are_taken_as_far_as_they_pay(alpha: float, row_s: float) -> None:
    world = World(alpha, row_s)
    world.run(200, offers=True)
    assert world.run(800, offers=True) >= 0.85 * max(1.0, best_rate(alpha, row_s, 0.0))


@pytest.mark.parametrize("alpha", [0.6, 0.8, 0.95])
def test_a_drafter_that_takes_time_is_used_as_far_as_it_pays(alpha: float) -> None:
    for draft_s in (0.02, 0.1, 0.3):
        world = World(alpha, 0.02, draft_s)
        world.run(300, offers=False, drafters=(SKIP,))
        rate, best = world.run(1000, offers=False, drafters=(SKIP,)), best_rate(alpha, 0.02, draft_s)
        assert rate >= (0.85 * best if best > 1.3 else 0.98), draft_s


@pytest.mark.parametrize("row_s", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("draft_s", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_drafts_that_are_wrong_cost_next_to_nothing(alpha: float, row_s: float, draft_s: float) -> None:
    world = World(alpha, row_s, draft_s)
    assert world.run(600, offers=True, drafters=(SKIP,)) >= 0.975


@pytest.mark.parametrize("row_s", [0.05, 0.5])
def test_no_text_costs_more_than_the_budget(row_s: float) -> None:
    """What is seen always says that drafts pay, and they never do."""
    world = World(0.0, row_s)
    world.is_spiteful = True
    assert world.run(1000, offers=True) >= 0.98 and world.run(1000, offers=True) >= 0.99


def test_a_text_that_changes_is_followed() -> None:
    world = World(0.95, 0.05)
    rates = []
    for _ in range(6):
        world.alpha = 0.95
        rates.append(world.run(100, offers=True))
        world.alpha = 0.0
        assert world.run(100, offers=True) >= 0.85  # a few rounds until it is noticed
    assert min(rates[1:]) > 2.5
    assert world.tokens / world.seconds > 1.3


def test_plain_steps_that_become_faster_are_noticed_while_drafts_pay() -> None:
    world = World(0.6, 0.05)
    assert world.run(300, offers=True) > 1.5
    world.plain_s = 0.2
    world.run(300, offers=True)
    assert world.run(300, offers=True) > 0.95 / 0.2


def test_one_of_which_not_even_right_drafts_would_pay_is_not_asked_again() -> None:
    world = World(1.0, 0.1, draft_s=1.2)
    world.run(50, offers=False, drafters=(SKIP,))
    assert world.controller.is_hopeless(SKIP, 1)
    assert world.run(500, offers=False, drafters=(SKIP,)) == pytest.approx(1.0)


def test_a_batch_takes_the_better_of_both_for_each() -> None:
    controller = Controller(StepTimes())
    for rows in (2, 2, 2, 6, 6):
        controller.times.learn(2, rows, 1.0 + 0.01 * rows)
    for _ in range(3):
        controller.learn_drafting(SKIP, 1, 2, 0.02)
    sure, unsure = Acceptance(), Acceptance()
    for _ in range(30):
        sure.learn(OFFERED, (1, 1, 1), (1, 1, 1))
        unsure.learn(OFFERED, (1, 1, 1), (0,))
        unsure.learn(SKIP, (1, 1, 1), (1, 1, 1))
    offers = [Draft((1, 1, 1), OFFERED)] * 2
    option = controller.choose(Situation([sure, unsure], [3, 3], offers, 16), (SKIP,))
    assert isinstance(option, Option)
    assert option.drafter == SKIP and option.are_offered == (True, False) and option.counts == (3, 3)


def test_no_more_drafts_than_there_is_room_for() -> None:
    acceptances = [Acceptance()] * 4
    situation = Situation(acceptances, [8, 8, 2, 0], [NO_DRAFT] * 4, 16)
    assert situation.most == 3
    controller = Controller(StepTimes(lambda _sequences, _rows: 1.0))
    for _ in range(2):
        controller.times.learn(4, 4, 1.0)
    option = controller.choose(situation, (SKIP,))
    assert option is not None and option.counts[2] <= 2 and option.counts[3] == 0
    assert 4 + sum(option.counts) <= 16


def test_times_between_those_that_were_measured() -> None:
    times = StepTimes(lambda sequences, rows: 1 + 0.1 * (rows - sequences))
    assert times.plain_s(1) is None
    for rows, seconds in ((1, 9.0), (1, 1.0), (5, 9.0), (5, 3.0)):
        times.learn(1, rows, seconds)  # the first of each prepares
    assert (times.plain_s(1), times.step_s(1, 3), times.step_s(1, 5)) == (1.0, 2.0, 3.0)
    assert times.step_s(1, 9) == pytest.approx(3.0 * 1.8 / 1.4)


def test_acceptance_is_learnt_place_by_place() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.learn(SKIP, (1, 1, 1), (1, 1, 0))
    first, second, third, fourth = acceptance.rates(SKIP, 4)
    assert first > 0.97 and second > 0.97 and third < 0.1 and fourth <= 0.1
    assert acceptance.tokens(SKIP, 3) == pytest.approx([1, 1 + first, 1 + first + first * second, 3], abs=0.1)
    own = Acceptance(acceptance)
    assert own.rates(SKIP, 3) == pytest.approx([first, second, third])
    for _ in range(10):
        own.learn(SKIP, (1,), (0,))
    assert own.rates(SKIP, 1)[0] < 0.35  # a text of its own

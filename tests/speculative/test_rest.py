"""Where nobody can draft, nobody looks for drafts all the time; what would have been offered is seen afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.controller import cooldown_steps
from localllm.engine.speculative.drafter import NO_DRAFT, Draft
from localllm.engine.speculative.ngram import NgramLookup
from localllm.engine.speculative.speculator import Speculation
from tests.speculative.support import TALE, Said, loaded, request, said


class Nothing(NgramLookup):
    """Finds nothing, and tells how often it was asked."""

    name = "nothing"

    def __init__(self) -> None:
        super().__init__()
        self.num_looks, self.seen = 0, list[int]()

    def offers(self, sequences: Sequence[Running], _limits: Sequence[int]) -> list[Draft]:
        self.num_looks += 1
        return [NO_DRAFT] * len(sequences)

    def hindsight(self, sequence: Running, since: int, _limit: int) -> Iterator[tuple[Draft, Sequence[int]]]:
        self.seen.append(len(sequence.token_ids) - since)
        return iter(())


@pytest.mark.parametrize(
    ("looking_s", "step_s", "begins_ahead", "steps"),
    [(0.001, 0.01, False, 20), (0.0, 0.01, False, 0), (1.0, 0.01, False, 256), (0.0, 0.01, True, 16)],
)
def test_looking_takes_no_more_than_a_small_share(
    looking_s: float, step_s: float, begins_ahead: bool, steps: int
) -> None:
    assert cooldown_steps(looking_s, step_s, begins_ahead=begins_ahead) == steps


@pytest.fixture
def rests_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.engine.speculative.speculator.cooldown_steps", lambda *_, **__: 10)


@pytest.mark.usefixtures("rests_of_ten")
def test_a_lookup_that_finds_nothing_is_asked_seldom_and_sees_all() -> None:
    engine = loaded(ctx=512)
    wish = request(engine, TALE, temperature=0, max_tokens=200)
    (expected,) = said(engine, wish)
    lookup = Nothing()
    engine.speculation = Speculation(engine.residency, lookup, ())
    found: list[Said] = said(engine, wish)
    assert found == [expected]
    assert 17 <= lookup.num_looks <= 22 and set(lookup.seen) == {10} and len(lookup.seen) >= 16
    engine.close()


@pytest.mark.usefixtures("rests_of_ten")
def test_two_answers_rest_together_and_a_third_ends_it() -> None:
    engine = loaded(ctx=512)
    wishes = [request(engine, TALE[: 40 + i], temperature=0, max_tokens=60) for i in range(3)]
    expected = [said(engine, wish)[0] for wish in wishes]
    lookup = Nothing()
    engine.speculation = Speculation(engine.residency, lookup, ())
    first = [engine.submit(wish) for wish in wishes[:2]]
    while lookup.num_looks < 4 or not engine.speculation.rests:
        engine.step()
    third = engine.submit(wishes[2])
    while engine.scheduler.num_waiting:
        engine.step()
    assert not engine.speculation.rests and len(engine.scheduler.running) == 3
    while engine.has_work:
        engine.step()
    assert len({*first, third}) == 3
    assert said(engine, *wishes) == expected
    engine.close()

"""What is guessed: n-grams beside a plain search, blocks that are left out, and which of them do harm."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from localllm import Engine
from localllm.engine.speculative.layer_importance import Harm, Trial, least_harmful
from localllm.engine.speculative.ngram import NgramLookup, _Index
from localllm.engine.speculative.skip_file import NAME, read_trials, write_trials
from localllm.engine.speculative.skip_set import SkipSet, predicted_speedup
from tests.speculative.support import loaded, place, request

NAMES = [f"layers.{layer}.{kind}" for layer in range(8) for kind in ("attention", "mlp")]


def longest_match(token_ids: list[int], end: int) -> int:
    """Tokens before some earlier place that are those before `end`, by comparing all."""
    best = 0
    for start in range(1, end):
        count = 0
        while count < min(start, 16) and token_ids[start - 1 - count] == token_ids[end - 1 - count]:
            count += 1
        best = max(best, count)
    return best


@settings(max_examples=100, deadline=None, phases=[Phase.generate])
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 15), st.data())
def test_an_offer_is_what_followed_a_match(token_ids: list[int], limit: int, data: st.DataObject) -> None:
    index, end = _Index(), 0
    while end < len(token_ids):
        end = data.draw(st.integers(end + 1, len(token_ids)))
        draft = index.draft(token_ids, end, limit)
        assert bool(draft.token_ids) == (longest_match(token_ids, end) >= 2)
        if not draft.token_ids:
            continue
        assert len(draft.token_ids) == limit
        grade = int(draft.source.rsplit("-", 1)[1])
        text = token_ids[:end]
        followed = [
            start
            for start in range(grade, end)
            if text[start - grade : start] == text[end - grade :] and start + 1 <= end
        ]
        offered = [[*text[start:end], *text[start:end] * limit][:limit] for start in followed]
        assert list(draft.token_ids) in offered


def test_several_lengths_are_looked_up_and_the_longest_match_wins() -> None:
    index = _Index()
    text = [1, 2, 3, 4, 50, 9, 9, 2, 3, 4, 60, 9, 1, 2, 3, 4]
    draft = index.draft(text, len(text), 2)
    assert draft.token_ids == (50, 9) and draft.source == "ngram-4"
    assert index.draft([*text, 7, 9, 9], len(text) + 3, 1).token_ids == (2,)


def test_hindsight_tells_what_would_have_been_offered(tmp_path: Path) -> None:
    engine = loaded()
    lookup, wish = NgramLookup(), request(engine, "one two three. " * 4)
    engine.submit(wish)
    engine.scheduler.take_in()
    (sequence,) = engine.scheduler.sequences
    sequence.token_ids += wish.prompt_ids[:12]
    found = list(lookup.hindsight(sequence, wish.prompt_ids.__len__(), 3))
    assert len(found) == 8  # the last ones
    assert sum(offer.token_ids == tuple(said) for offer, said in found if len(said) == 3) >= 3
    lookup.forget(sequence)
    lookup.forget(sequence)
    engine.close()


def test_harm_is_learnt_from_trials() -> None:
    """Of 16 blocks four do harm; trials of random sets find them."""
    generator = random.Random(1)
    truth = dict.fromkeys(NAMES, 0.0) | {NAMES[1]: 0.5, NAMES[6]: 0.7, NAMES[7]: 0.4, NAMES[12]: 0.6}
    harm = Harm(NAMES)
    for _ in range(120):
        skipped = frozenset(name for name in NAMES if generator.random() < 0.3)
        share = 2.718281828 ** -sum(truth[name] for name in skipped)
        harm.learn(Trial(skipped, sum(generator.random() < share for _ in range(16)), 16))
    expected = harm.expected()
    worst = sorted(NAMES, key=lambda name: -expected[name])[:4]
    assert set(worst) == {name for name in NAMES if truth[name]}
    sampled = [harm.sampled(random.Random(seed))[NAMES[6]] for seed in range(50)]
    assert min(sampled) > 0.2 and len(set(sampled)) == 50


def test_before_any_trial_attention_goes_first_and_the_ends_stay() -> None:
    expected = Harm(NAMES).expected()
    assert max(expected, key=lambda name: expected[name]) in (NAMES[1], NAMES[-1])
    chosen = least_harmful(expected, dict.fromkeys(NAMES, 1.0), 0.1)
    assert chosen and all(name.endswith("attention") for name in chosen)
    assert not chosen & {NAMES[0], NAMES[-2]}


def test_trials_are_kept_beside_the_packed_model(tmp_path: Path) -> None:
    trials = [Trial(frozenset(NAMES[:2]), 7, 16), Trial(frozenset(), 16, 16)]
    assert read_trials(tmp_path) == []
    write_trials(tmp_path, trials)
    assert read_trials(tmp_path) == trials
    for damaged in ("", "{", "[]", '{"version": 1}', '{"version": 9, "trials": []}'):
        (tmp_path / NAME).write_text(damaged)
        assert read_trials(tmp_path) == [], damaged
    for entry in ({"skipped": "x", "same": 1}, {"skipped": [1], "same": 1}, {"skipped": [], "same": 3}, {}):
        (tmp_path / NAME).write_text(json.dumps({"version": 1, "trials": [{"count": 2, **entry}]}))
        assert read_trials(tmp_path) == [], entry
    (tmp_path / NAME).write_bytes(b"\xff" * 9)
    assert read_trials(tmp_path) == []
    write_trials(tmp_path / "file" / "below", trials)
    (tmp_path / "plain").write_text("")
    write_trials(tmp_path / "plain", trials)  # no folder: done without


@pytest.fixture(scope="module")
def engine() -> Engine:
    return loaded()


@pytest.mark.parametrize("placement", ["whole", "some", "all"])
def test_a_trial_changes_nothing_and_says_what_agreed(engine: Engine, placement: str, tmp_path: Path) -> None:
    place(engine, placement)
    skip_set = SkipSet(engine.residency, tmp_path)
    wish = request(engine, temperature=0, max_tokens=90)
    plain, tried = [], []
    for found, tries in ((plain, False), (tried, True)):
        request_id = engine.submit(wish)
        while engine.has_work:
            running = engine.scheduler.running
            if tries and running and skip_set.is_due(running[0]):
                skip_set.try_on(running[0], lambda: False)
                engine.residency.kv_pages.check_integrity()
            found += [event.token_id for event in engine.step() if hasattr(event, "token_id")]
        assert request_id >= 0
    assert plain == tried
    assert len(skip_set.harm.trials) >= (0 if placement == "all" else 8)  # there may be nothing left to guess with
    assert all(0 <= trial.same <= trial.count == 16 for trial in skip_set.harm.trials)
    skip_set.close()
    assert read_trials(tmp_path) == skip_set.harm.trials


def test_leaving_out_nothing_agrees_with_everything(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial compares with what was really drawn: sampled text too, by the noise of its places."""
    place(engine, "some")
    skip_set = SkipSet(engine.residency, None)
    wanted = iter([frozenset({"none.of.them"}), frozenset(f"layers.{i}.mlp" for i in range(12))])
    monkeypatch.setattr(skip_set, "_proposed", lambda: next(wanted))
    engine.submit(request(engine, temperature=1.0, seed=5, max_tokens=90))
    while engine.has_work and len(skip_set.harm.trials) < 2:
        running = engine.scheduler.running
        if running and skip_set.is_due(running[0]):
            learnt = []
            monkeypatch.setattr(skip_set, "learn", learnt.append)
            skip_set.try_on(running[0], lambda: False)
            skip_set.harm.trials = [*skip_set.harm.trials, *learnt]
        engine.step()
    while engine.has_work:
        engine.step()
    nothing, everything = skip_set.harm.trials
    assert nothing.same == 16 and everything.same < 14


def test_what_is_streamed_is_what_is_skipped(engine: Engine) -> None:
    skip_set = SkipSet(engine.residency, None)
    place(engine, "some")
    assert skip_set.names() == engine.residency.model.stream.names == skip_set.slow
    place(engine, "whole")
    assert not skip_set.slow
    for name in skip_set.harm.names:
        skip_set.learn(Trial(frozenset({name}), 16, 16))
    skip_set.harm.trials *= 20
    assert len(skip_set.names()) > 4  # harmless: the fewer blocks, the faster


def test_the_speedup_that_is_predicted() -> None:
    assert predicted_speedup(0.0, 0.5, 8) < 1
    assert predicted_speedup(1.0, 0.0, 8) > 5 > predicted_speedup(1.0, 0.0, 2)
    assert predicted_speedup(0.9, 0.2, 8) > predicted_speedup(0.6, 0.2, 8) > predicted_speedup(0.6, 0.6, 8)

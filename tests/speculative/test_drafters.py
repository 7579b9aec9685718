"""What is drafted: n-grams beside a plain search, and by a model without its slow blocks."""

from __future__ import annotations

from pathlib import Path

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from localllm.engine.speculative.drafter import SkipDrafter, slow_blocks
from localllm.engine.speculative.ngram import NgramLookup, _Index
from tests.speculative.support import loaded, place, request


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


def test_what_is_streamed_is_what_is_skipped() -> None:
    engine = loaded()
    drafter = SkipDrafter(lambda: engine.runner)
    place(engine, "some")
    assert slow_blocks(engine.model) == engine.residency.model.stream.names and drafter.is_ready
    place(engine, "whole")
    assert not slow_blocks(engine.model) and not drafter.is_ready
    engine.close()

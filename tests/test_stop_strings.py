"""Stop strings: the answer ends before the first of them, however it was cut into pieces."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.text.stop_strings import StopMatcher


def feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        new, stopped = matcher.push(piece)
        text += new
        if stopped:
            return text + matcher.finish(), True
    return text + matcher.finish(), False


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
)
def test_the_answer_ends_where_find_says(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    found = [whole.find(stop) for stop in stops if stop in whole]
    assert feed(stops, pieces)[0] == whole[: min(found, default=len(whole))]


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["\n\n"], ["one\n\ntwo"], ("one", True)),
        (["\n\n"], ["one\n", "\ntwo"], ("one", True)),
        (["\n\n"], list("one\n\ntwo"), ("one", True)),
        (["bc", "abcd"], ["abc", "d"], ("", True)),
        (["bc", "abcd"], ["abc", "x"], ("a", True)),
        (["bc", "abcd"], ["abc"], ("a", False)),
        ([], ["a", "b"], ("ab", False)),
    ],
)
def test_a_stop_is_found_across_pieces_and_a_longer_one_that_began_earlier_is_waited_for(
    stops: list[str], pieces: list[str], expected: tuple[str, bool]
) -> None:
    assert feed(stops, pieces) == expected


def test_only_what_may_be_the_start_of_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("a</") == ("a", False)
    assert matcher.push("b") == ("</b", False)
    assert matcher.push("<") == ("", False)
    assert matcher.finish() == "<"


def test_a_stop_ends_the_answer_as_soon_as_it_is_complete() -> None:
    matcher = StopMatcher(["END", "DONE"])
    assert matcher.push("it is EN") == ("it is ", False)
    assert matcher.push("D and more") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.finish() == ""


def test_a_long_stop_that_nearly_matches_costs_linear_time() -> None:
    start = time.process_time()
    feed(["a" * 20_000 + "b"], ["a" * 100_000] * 2)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("stops", "found"),
    [(["b", "cd"], "b"), (["cd", "d"], "cd"), (["abcx", "bc", "b"], "b"), (["ab", "abc"], "ab"), (["x"], None)],
)
def test_of_several_stops_the_first_to_begin_is_found(stops: list[str], found: str | None) -> None:
    matcher = StopMatcher(stops)
    matcher.push("abcd")
    matcher.finish()
    assert matcher.found == found

"""An answer in pieces: they add up to the text of the whole, and end before a stop string however it was cut."""

from __future__ import annotations

import time

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from localllm.text.detokenizer import Detokenizer
from localllm.text.stop_strings import StopMatcher
from localllm.text.tokenizer import Tokenizer
from tests.thinning import examples

FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture(params=["phi", "qwen"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@settings(max_examples=examples(100), deadline=None, suppress_health_check=FIXTURES)
@given(data=st.data())
def test_a_special_token_that_is_shown_is_written_out_between_what_stands_around_it(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    shown = frozenset(sorted(tokenizer.special_ids)[:3])
    words = tokenizer.encode("Once upon a time")
    ids = data.draw(st.lists(st.sampled_from([*words, *sorted(tokenizer.special_ids)[:6]]), max_size=12))
    detokenizer = Detokenizer(tokenizer, shown)
    text = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
    hidden = tokenizer.special_ids - shown
    assert text == tokenizer.decode([each for each in ids if each not in hidden], skip_special=False)


def test_a_character_that_a_shown_token_cuts_off_does_not_go_on_behind_it(tokenizer: Tokenizer) -> None:
    mark = min(tokenizer.special_ids)
    half = next(each for each in tokenizer.encode("a𐍈ꙮ") if "\ufffd" in tokenizer.decode([each]))
    detokenizer = Detokenizer(tokenizer, frozenset([mark]))
    said = "".join([*map(detokenizer.push, [half, mark]), detokenizer.finish()])
    assert said == f"\ufffd{tokenizer.token_text(mark)}"


@settings(max_examples=examples(300), deadline=None, suppress_health_check=FIXTURES)
@given(data=st.data())
def test_any_ids_give_in_pieces_what_they_give_as_a_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    bytes_and_specials = st.sampled_from([*range(3, 259), *sorted(tokenizer.special_ids)])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3) | bytes_and_specials, max_size=24))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=FIXTURES)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
def test_no_piece_of_a_text_holds_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    given_out = pieces(tokenizer, tokenizer.encode(text))
    assert not any("\ufffd" in piece for piece in given_out)
    assert given_out[-1] == ""
    assert "".join(given_out) == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize("text", ["𓀀", "𒀀"])
def test_a_dangling_tail_becomes_one_replacement_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode("a" + text)[:-1]
    given_out = pieces(tokenizer, ids)
    assert "\ufffd" not in "".join(given_out[:-1])
    assert given_out[-1] == "\ufffd"


def test_the_space_in_front_of_a_sentencepiece_text_is_dropped_once(phi: Tokenizer) -> None:
    space, hello = phi.encode(" Hello")
    end = phi.encode("<|end|>", special=True)[0]
    assert pieces(phi, [hello, hello]) == ["Hello", " Hello", ""]
    assert pieces(phi, [end, space, hello]) == ["", "", " Hello", ""]


def test_the_cost_of_a_token_does_not_grow(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("once upon a time 🐻 ") * 20_000
    detokenizer = Detokenizer(tokenizer)
    start = time.process_time()
    for index in ids:
        detokenizer.push(index)
    assert time.process_time() - start < 2


def test_a_vocabulary_of_words_is_spaced_as_a_whole() -> None:
    vocab = {"play": 0, "##ing": 1, "chess": 2, "[UNK]": 3, ",": 4}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    ids = [0, 1, 2, 4, 0, 2] * 9
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        new, stopped = matcher.push(piece)
        text += new
        if stopped:
            return text + matcher.finish(), True
    return text + matcher.finish(), False


@settings(max_examples=examples(500), deadline=None)
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

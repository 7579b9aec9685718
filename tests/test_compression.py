"""Which words of a prompt may leave, which do, and what is left."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import compression, quality
from benchmarks.measure import known, with_section
from localllm.chat.compression import Compression, Judge, compressible
from localllm.hub.names import TINY_DIRECTORY
from localllm.text.compression import Judged, leaving, without, words_of
from localllm.text.tokenizer import Tokenizer

PROSE = "The old miller went to the river.  He saw\nnobody there at all!\n\nHe came home again, wet and tired."
CLOSED = (
    "```python\nprint('a b c')\n\n# end\n```",
    "~~~\n``` inside\n~~~",
    "    indented(code)\n\n    more(code)",
    "\tindented by a tab",
    "| a | b c |\n|---|---|\n| d e | f |",
    json.dumps({"name": "a b c", "of": ["d e", {"f": 1.5}]}, indent=2),
    '["a b", "c d"]',
    "<person>\n<name>Ann Lee</name>\n</person>",
    "# A heading of four words",
    "x = f(a) + b[i] * 2; y = {k: v}; z = a & b | c",
)
INLINE = ("`code of more words`", "``a ` b``", "https://example.org/a?b=c", "{a b c}", "<br>", "[a link](x)")

closed_blocks = st.sampled_from(CLOSED)
sentences = st.lists(st.text("abc dE1,", min_size=1, max_size=12).filter(str.strip), min_size=1, max_size=8).map(
    lambda words: " ".join(words) + "."
)
paragraphs = st.lists(st.one_of(sentences, st.sampled_from(INLINE)), min_size=1, max_size=6).map(" ".join)
texts = st.lists(st.one_of(closed_blocks, paragraphs), min_size=1, max_size=6).map("\n\n".join)


@st.composite
def thinned(draw: st.DrawFn, of: st.SearchStrategy[str] = texts) -> tuple[str, str, set[int]]:
    """(a text, the same without some of its words, which they are)"""
    text = draw(of)
    words = words_of(text)
    gone = draw(st.sets(st.integers(0, len(words) - 1))) if words else set()
    return text, without(text, words, gone), gone


@given(thinned())
def test_what_is_no_prose_survives_byte_for_byte(given: tuple[str, str, set[int]]) -> None:
    before, after, _ = given
    for closed in (*CLOSED, *INLINE):
        assert after.count(closed) >= before.count(closed), closed


@given(thinned(st.text(max_size=60)))
@example(("a\n\nb c", "a c", {1}))
def test_the_words_that_stay_are_those_that_did_not_leave_in_their_order(given: tuple[str, str, set[int]]) -> None:
    before, _, gone = given
    words = words_of(before)
    after = without(before, words, gone)
    kept = "".join(before[word.begin : word.end] for place, word in enumerate(words) if place not in gone)
    begin, others = 0, ""
    for word in words:
        others += before[begin : word.begin]
        begin = word.end
    others += before[begin:]
    assert sorted("".join(after.split())) == sorted("".join((kept + others).split()))
    letters = iter("".join(before.split()))
    assert all(letter in letters for letter in "".join(after.split())), "in another order"


@given(st.text(max_size=200))
def test_a_text_that_nothing_leaves_is_as_it_was(text: str) -> None:
    assert without(text, words_of(text), set()) == text


def test_prose_is_words_in_sentences_and_a_paragraph_stays_apart() -> None:
    words = words_of(PROSE)
    assert [word.sentence for word in words] == [1] * 7 + [2] * 6 + [3] * 7
    assert (
        without(PROSE, words, set(range(7, 13)) | {13})
        == "The old miller went to the river.\n\ncame home again, wet and tired."
    )
    assert without(PROSE, words, set(range(13))) == "He came home again, wet and tired."
    dense = "你好。世界"
    assert [dense[word.begin : word.end] for word in words_of(dense)] == ["你", "好", "。", "世", "界"]


judged = st.lists(
    st.builds(Judged, st.integers(0, 4).map(float), st.floats(-9, 9), st.integers(1, 5), st.booleans()), max_size=40
)


@given(judged, st.floats(0.01, 0.99))
def test_what_stays_costs_the_ratio_or_a_word_less(words: list[Judged], ratio: float) -> None:
    gone = leaving(words, ratio, {1: 2.0})
    total, left = sum(word.cost for word in words), sum(w.cost for place, w in enumerate(words) if place not in gone)
    assert left <= ratio * total + 1e-9
    assert left > ratio * total - max((word.cost for word in words), default=0) - 1e-9
    assert gone == leaving(words, ratio, {1: 2.0})


def test_sentences_leave_before_words_and_telling_words_last() -> None:
    dull = [Judged(1, 0.1, 1, is_telling=True)] * 4
    told = [
        Judged(1, 0.0, 2, is_telling=True),
        Judged(1, 5.0, 2, is_telling=False),
        Judged(1, 9.0, 2, is_telling=False),
    ]
    assert leaving([*dull, *told], 3 / 7, {}) == {0, 1, 2, 3}
    assert leaving([*dull, *told], 2 / 7, {}) == {0, 1, 2, 3, 5}
    assert leaving([*dull, *told], 4 / 7, {1: 99.0}) == {4, 5, 6}


# Of a conversation


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_DIRECTORY)


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def shortened(
    messages: list[dict[str, str]], tokenizer: Tokenizer, ratio: float = 0.5, ctx: int = 64, question: str = ""
) -> tuple[list[dict[str, str]], Compression]:
    """By a judge that finds every second token likely."""
    whole, judge = compressible(messages, question), Judge("dice", tokenizer, ctx)
    readings = list(whole.readings(judge))
    assert all(len(reading.ids) < ctx for reading in readings)
    return whole.compressed(
        ((each, [-(token % 2) for token in each.ids]) for each in readings), ratio, judge, tokenizer
    )


def test_system_messages_answers_results_and_questions_stay(tokenizer: Tokenizer) -> None:
    others = [{"role": role, "content": PROSE} for role in ("system", "developer", "assistant", "tool")]
    messages = [*others, *user(f"Sum this up:\n\n{PROSE}\n\nWhat did he see?", PROSE + "\n\nAnd then what?")]
    after, told = shortened(messages, tokenizer)
    assert after[:4] == others
    first, second = (each["content"] for each in after[4:])
    assert first.startswith("Sum this up:\n\n") and first.endswith("\n\nWhat did he see?")
    assert second.endswith("\n\nAnd then what?")
    assert len(first) + len(second) < 0.8 * sum(len(each["content"]) for each in messages[4:])
    assert told.removed and all(run in f"{messages[4]['content']} {messages[5]['content']}" for run in told.removed)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("ctx", [8, 64, 4096])
def test_the_ratio_is_kept_in_windows_of_any_size_and_twice_the_same(
    tokenizer: Tokenizer, ratio: float, ctx: int
) -> None:
    messages = user(f"{PROSE} " * 9 + "\n\nWhere did he go?")
    after, told = shortened(messages, tokenizer, ratio, ctx)
    assert told.tokens_after == pytest.approx(ratio * told.tokens_before, abs=6)
    own = [len(tokenizer.encode(each[0]["content"])) for each in (messages, after)]
    assert own[0] - own[1] == pytest.approx(told.tokens_before - told.tokens_after, rel=0.1, abs=8)
    assert shortened(messages, tokenizer, ratio, ctx) == (after, told)


def test_a_question_that_is_known_stays_whole_and_texts_that_are_named(tokenizer: Tokenizer) -> None:
    question, code = "First this.\n\nThen that?", "for each of us\n\ngo on"
    whole = compressible(user(f"{PROSE}\n\n{code}\n\n{question}"), question, [code])
    (passage,) = whole.passages
    text = without(passage.text, passage.words, set(range(len(passage.words))))
    assert text.strip() == f"{code}\n\n{question}" and whole.question == question
    alone = f"{PROSE}\n\n{question}"
    assert (
        compressible(user(alone), alone).question == question and compressible(user(question), question).passages == ()
    )


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Context.\n\nQuestion: who?\n\nAnswer:", "Question: who?\n\nAnswer:"),
        ("Just one question here?", "Just one question here?"),
        (f"{PROSE[:33]} " * 20 + "Where did he go then?", "Where did he go then?"),
    ],
)
def test_what_a_message_asks_is_its_end(text: str, question: str) -> None:
    assert compressible(user(text)).question == question


def test_the_page_shows_the_results_that_are_committed() -> None:
    page, tables = quality.PAGE.read_text(encoding="utf-8"), compression.tables(known("compression"))
    assert with_section(page, compression.BEGIN, compression.END, tables) == page

"""Word wrap on a terminal, without one."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.cli.output import Output, WordWrap, width

PROSE = "The fox found a lantern, and the owl went home. "


def wrapped(text: str, columns: int = 20) -> str:
    """As it is streamed: character by character."""
    wrap = WordWrap(lambda: columns)
    return "".join(wrap.feed(character) for character in text) + wrap.flush()


def test_lines_end_between_words_and_within_the_columns() -> None:
    lines = wrapped(PROSE * 3).split("\n")
    assert all(width(line) <= 20 for line in lines)
    assert " ".join(lines).split() == (PROSE * 3).split()


def test_a_word_waits_until_it_is_whole() -> None:
    wrap = WordWrap(lambda: 20)
    assert wrap.feed("the fo") == "the" and wrap.feed("x ran") == " fox" and wrap.flush() == " ran"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcd efgh ijkl", "abcd efgh\nijkl"),
        ("abcd efghij", "abcd efghij"[:4] + "\nefghij"),
        ("abcde fghi\n", "abcde fghi\n"),  # just as wide as the line
        ("one\n\ntwo\n", "one\n\ntwo\n"),
        ("狐狸和灯笼的故事", "狐狸和灯笼\n的故事"),
        ("ab 狐狸和灯", "ab 狐狸和\n灯"),
        ("e\u0301e\u0301e\u0301 e\u0301e\u0301e\u0301 abc", "e\u0301e\u0301e\u0301 e\u0301e\u0301e\u0301\nabc"),
        ("    if fox: run(home)\nabcd efgh ijkl", "    if fox: run(home)\nabcd efgh\nijkl"),
        ("```py\nrun(home, fast, now)\n```\nabcd efgh ijkl", "```py\nrun(home, fast, now)\n```\nabcd efgh\nijkl"),
        (
            "see http://fox.example/den now",
            "see\nhttp://fox.example/den now",
        ),  # two of its letters are on the last line
        (" abc efgh\n ijk", " abc efgh\n ijk"),
        ("  abc efgh ijk\n\tabcd efgh ijkl", "  abc efgh ijk\n\tabcd efgh ijkl"),
    ],
)
def test_what_stands_on_ten_columns(text: str, expected: str) -> None:
    assert wrapped(text, 10) == expected


@given(st.text(alphabet="ab `\n\t狐\u0301", max_size=200), st.integers(1, 12))
def test_only_blanks_at_a_break_are_lost(text: str, columns: int) -> None:
    assert "".join(wrapped(text, columns).split()) == "".join(text.split())


@given(st.text(alphabet="abc \n", max_size=80))
def test_the_pieces_in_which_a_text_comes_change_nothing(text: str) -> None:
    whole = WordWrap(lambda: 20)
    assert whole.feed(text) + whole.flush() == wrapped(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the fox ran home again", "warning: the fox ran\nhome again\n"),
        ("/home/somebody/presets is no folder", "warning:\n/home/somebody/presets\nis no folder\n"),
        ("see `localllm list --all` for it", "warning: see\n`localllm list --all`\nfor it\n"),
        ("To go on: localllm pull org/repository", "warning: To go on: localllm pull org/repository\n"),
    ],
)
def test_a_warning_breaks_at_its_words_and_never_within_a_command(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("localllm.cli.output._columns", lambda _: 22)
    Output(None, terminal, {"NO_COLOR": "1"}).warn(text)
    assert terminal.getvalue() == expected

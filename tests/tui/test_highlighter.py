"""Code in colours: no line is changed by it, and code that grows looks as it does at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.content import Content

from localllm.tui import highlighter
from localllm.tui.highlighter import Highlighter

PYTHON = [
    "import os  # all of it",
    "class Fox(Animal):",
    '    """Red.',
    "    def no_code(self): it is prose",
    '    """',
    "    @property",
    "    def name(self) -> str:",
    "\treturn f'fox {self.number:>4}' if not None else \"\"",
    "",
    "print(1.5, 'it''s')",
]


def is_same(one: list[Content], other: list[Content]) -> bool:
    return len(one) == len(other) and all(map(Content.is_same, one, other))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PYTHON), min_size=1, max_size=120), st.lists(st.integers(1, 400), max_size=20))
def test_code_that_grows_is_coloured_as_it_is_at_once(rows: list[str], sizes: list[int]) -> None:
    code, end, found = "\n".join(rows), 0, Highlighter()
    for size in [*sizes, len(code)]:
        end += size
        assert is_same(found.lines(code[:end], "python"), Highlighter().lines(code[:end], "python"))


def test_of_long_code_that_grows_only_the_end_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = highlighter._highlighted
    monkeypatch.setattr(
        highlighter, "_highlighted", lambda rows, lexer: (sizes.append(len(rows)), whole(rows, lexer))[1]
    )
    rows = [f"value_{number} = {number}  # a comment" for number in range(300)]
    found = Highlighter()
    before = found.lines("\n".join(rows[:299]), "python")
    after = found.lines("\n".join(rows), "python")
    assert sizes == [299, 18] and all(one is other for one, other in zip(before[:298], after[:298], strict=True))
    rows += ['"""', *(f"in {number} words, for example" for number in range(300)), '"""', "x = 1"]
    found.lines("\n".join(rows[:399]), "python")
    sizes.clear()
    for end in range(400, len(rows) + 1):  # the text's begin is too far back
        found.lines("\n".join(rows[:end]), "python")
    assert sum(sizes) < 1.05 * sum(range(400, len(rows) + 1))  # 1.17 where its end is tried alone each time


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["python", "js", "html", "c", "go", "make", "sh", "json", "pycon", "diff", "yaml", "", "no such"]),
    st.text(
        st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"], include_characters="\n\t"), max_size=200
    ),
)
def test_no_character_is_changed(language: str, code: str) -> None:
    assert [line.plain for line in Highlighter().lines(code, language)] == code.expandtabs(4).split("\n")


def test_tabs_do_not_move_the_colours() -> None:
    (line,) = Highlighter().lines("\tif x: # y", "python")
    (comment,) = [span for span in line.spans if "60%" in str(span.style)]
    assert line.plain[comment.start : comment.end] == "# y"


def test_what_names_no_language_is_plain() -> None:
    """No guess: it changes while the text grows, and looks at 500 languages."""
    (line,) = Highlighter().lines("import this", "")
    assert len(line.spans) == 1

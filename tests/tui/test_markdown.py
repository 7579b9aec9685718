"""Markdown as lines, whole or in pieces, with code in colours."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.content import Content
from textual.strip import Strip
from textual.visual import RenderOptions

from localllm.chat.thoughts import Splitter, split
from localllm.tui import markdown_render
from localllm.tui.markdown_blocks import MarkdownLayout
from localllm.tui.markdown_render import Highlighter, code_blocks, groups, parser, pieces
from localllm.tui.widgets.document import DocumentBlock
from tests.thinning import every_other, examples
from tests.tui.support import FakeService, chatting, until

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


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from(PYTHON), min_size=1, max_size=120), st.lists(st.integers(1, 400), max_size=20))
def test_code_that_grows_is_coloured_as_it_is_at_once(rows: list[str], sizes: list[int]) -> None:
    code, end, found = "\n".join(rows), 0, Highlighter()
    for size in [*sizes, len(code)]:
        end += size
        assert is_same(found.lines(code[:end], "python"), Highlighter().lines(code[:end], "python"))


def test_of_long_code_that_grows_only_the_end_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = markdown_render._highlighted
    monkeypatch.setattr(
        markdown_render, "_highlighted", lambda rows, lexer: (sizes.append(len(rows)), whole(rows, lexer))[1]
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


@settings(max_examples=examples(150), deadline=None)
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


def lines(text: str, width: int = 40, num_codes: int | None = None) -> list[str]:
    """As they are shown."""
    found = pieces(parser().parse(text), num_codes=num_codes)
    return [line.plain.rstrip() for piece in found for line in piece.lines(width)]


def test_a_paragraph_is_wrapped_and_its_marks_are_gone() -> None:
    assert lines("Some *very* long **words** and `code` in a line of prose.", 20) == [
        "Some very long words",
        "and code in a line",
        "of prose.",
    ]


def test_items_hang_under_their_bullets() -> None:
    text = "- one item that is long\n  - inner\n    1. deep\n- two\n\n5. five\n6. six"
    assert lines(text, 16) == [
        "• one item that",
        "  is long",
        "  ◦ inner",
        "    1. deep",
        "• two",
        "",
        "5. five",
        "6. six",
    ]


def test_code_keeps_its_blanks_and_is_folded_where_it_is_too_long() -> None:
    assert lines("```py\nif x:\n    return  'abcdefghijkl'\n```", 18) == [
        "  py",
        "  if x:",
        "      return  'abc",
        "  defghijkl'",
    ]


def test_a_table_shares_what_room_there_is() -> None:
    text = "| name | what it is |\n|---|---|\n| fox | an animal with a red coat |\n| owl | [b] |"
    assert lines(text, 24) == [
        "name  what it is",
        "────  ──────────────────",
        "fox   an animal with a",
        "      red coat",
        "owl   [b]",
    ]
    assert all(len(line) <= 11 for line in lines(text, 11))


def test_the_columns_of_a_table_are_aligned_as_it_says() -> None:
    text = "| n | how many | where |\n|---|--:|:-:|\n| a | 7 | x |\n| b | 1,200 |"
    assert lines(text, 40) == [
        "n  how many  where",
        "─  ────────  ─────",
        "a         7    x",
        "b     1,200",
    ]


def test_tasks_have_boxes_in_place_of_bullets() -> None:
    assert lines("- [ ] *open*\n- [x] done\n  1. [X] inner\n- [ ]no task\n- [x](http://a.b)", 40) == [
        "☐ open",
        "☑ done",
        "  1. ☑ inner",
        "• [ ]no task",
        "• x (http://a.b)",
    ]


@pytest.mark.parametrize(
    "source, text",
    [
        (r"$x^2 + y_1$", "x² + y₁"),
        (r"\(\alpha \leq \frac{1}{2}\pi\)", "α ≤ ½π"),
        (r"$$\sum_{i=1}^{n} i = \frac{n(n+1)}{2}$$", "∑ᵢ₌₁ⁿ i = n(n+1)/2"),
        (r"\[ x = \frac{-b \pm \sqrt{b^2-4ac}}{2a} \]", "x = (-b ± √(b²-4ac))/(2a)"),
        (r"$e^{-x^2/2}$ and $\text{speed}$", "e^(-x²/2) and speed"),
        (r"$a_1 * b_1 * \begin{x}$", r"$a_1 * b_1 * \begin{x}$"),
        ("it costs $5 and *not* $10", "it costs $5 and not $10"),
        ("`$x^2$` and $HOME/$PATH", "$x^2$ and $HOME/$PATH"),
        (r"$\frac{1}$ \(x", r"$\frac{1}$ (x"),
        ("$" + "{" * 200 + "x" + "}" * 200 + "^2$", "$" + "{" * 200 + "x" + "}" * 200 + "^2$"),
    ],
)
def test_a_simple_formula_is_text_and_any_other_stays_as_it_is(source: str, text: str) -> None:
    assert lines(source, 500) == [text]


@given(st.text(alphabet="\\{}^_$ ()[]abfracsqrt12+"))
def test_a_formula_of_any_signs_is_shown_somehow(source: str) -> None:
    lines(f"${source}$ and \\({source}\\)", 40)


def test_code_has_its_number_and_language_above_it() -> None:
    tokens = parser().parse("```python x\na\n```\n- in a list:\n  ```\n  b\n  ```")
    shown = [line.plain.rstrip() for line in MarkdownLayout(pieces(tokens, num_codes=4)).lines(40)]
    assert shown == ["  5  python", "  a", "", "• in a list:", "    6", "    b"]


def test_a_quote_has_a_bar_and_a_rule_is_a_line() -> None:
    assert lines("> one\n> two\n>\n> - three\n\n---") == ["▎ one two", "▎", "▎ • three", "", "────────────"]


def test_a_link_says_where_it_leads() -> None:
    assert lines("[here](http://a.b/c) and <http://d.e>", 60) == ["here (http://a.b/c) and http://d.e"]


@pytest.mark.parametrize("signs", ["> ", "- ", "> - ", "1. ", "* > 1. "])
@pytest.mark.parametrize("width", [7, 40])
def test_what_is_nested_too_deep_to_be_shown_so_is_text(signs: str, width: int) -> None:
    found = lines(f"before\n\n{signs * 120}deep word\n\nafter", width)
    assert found[0] == "before" and found[-1] == "after"
    assert "deepword" in re.sub(r"[\s▎]", "", "".join(found)) and all(len(line) <= width for line in found)


def test_code_that_is_nested_deep_can_be_copied() -> None:
    assert [block.code for block in code_blocks(f"{'> ' * 30}```\n{'> ' * 30}a\n")] == ["a\n"]


def test_code_blocks_are_numbered_as_they_stand() -> None:
    found = code_blocks("```py\na\n```\n- in a list:\n  ```\n  b\n  ```\n\n~~~sh x\nopen")
    assert [(block.language, block.code) for block in found] == [("py", "a\n"), ("", "b\n"), ("sh", "open")]


SAMPLES = [
    "# Title\n\nText with *emphasis* over\ntwo lines.\n\n- a\n- b\n  - c\n\n  more of b\n- d\n\n1. x\n2. y\n",
    "```python\ndef f(x):\n    return x  # one\n\n\nprint(f(1))\n```\nafter\n\n    indented\n    code\n\nend",
    "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\n> quote\nlazy\n\n---\n\nSetext\n======\n\nlast `code",
    "~~~\nopen fence that never ends\n\n- no list\n",
    "```js\nlet a = 1;\n/* not yet\n" + "let b = 'c';\n" * 40 + "that was a comment */\nlet d;\n```",
    '```python\ndef f():\n    """Says\n' + "    more of it, if True:\n" * 40 + '    """\n    return 1\n' * 2 + "```",
    "```go\n\tif a {\t// b\n\t}\n```\n\n- item\n\n  ```sh\n  ls -l  # all\n  ```\n\n```\nif no = language:\n```\n",
    "ModelLine  \nbreak\\\nbroken &amp; <b>raw</b> [x]: y\n\n[ref]: http://z\n\n***\n* * *\n",
]

# Where they are cut they look like something else.
CUT = [
    "Issue\n#5 is best\nTitle\n***bold italic*** text\n\n> q\n-5 degrees\n\n- a\n**bold** tail\n- b\n\n",
    "- costs\n1.5 dollars\n\npara\n```code``` more\n\nname\na | b\n--|--no\n\nset\n--\n\nset\n-- no\n" * 2,
    "1. a\n   ```py\n   def f():\n     return 1\n   ```\n2. b\n\n   para\n   ```py\n   x\n   ```\n10. c",
    "```python\n" + "x = 1\n" * 30 + "```\n*emphasis* after\n1990. That was a year.\n\n- x\n\n\n- y",
]


def blocks(text: str) -> list[MarkdownLayout]:
    tokens, num_codes, found = parser().parse(text), 0, []
    for group in groups(tokens):
        found.append(MarkdownLayout(pieces(group, num_codes=num_codes)))
        num_codes += markdown_render.num_codes(group)
    return found


def drawn(widget: DocumentBlock, block: MarkdownLayout) -> list[Strip]:
    """As the widget would draw the block, in colours."""
    options = RenderOptions(widget._get_style, widget.styles, None, None)
    return block.render_strips(widget.size.width, None, widget.visual_style, options)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("num_pairs", [1, pytest.param(5, marks=pytest.mark.slow)])
async def test_what_comes_in_pieces_looks_as_what_comes_whole(num_pairs: int) -> None:
    chance = random.Random(7)
    async with chatting(FakeService(), size=(60, 40)) as (app, pilot):
        await until(pilot, lambda: app.chat.status.facts is not None)
        pairs = [chance.choice(SAMPLES) + "\n" + chance.choice(SAMPLES) for _ in range(num_pairs)]
        for text in [*SAMPLES, *pairs]:
            view = await app.chat.transcript.begin_answer(is_thinking=False)
            begin = 0
            while begin < len(text):
                end = begin + chance.randrange(1, max(12, len(text) // 10))
                await view.append(text[begin:end])
                begin = end
                if chance.random() < 0.5:
                    await pilot.pause()
            await view.end()
            shown = [line for block in view.query(DocumentBlock) for line in block.block.lines(50)]
            assert [line.plain.rstrip() for line in shown if line.plain.strip()] == list(
                filter(None, lines(text, 50, 0))
            )
            await pilot.pause()
            for grown, whole in zip(view.query(DocumentBlock), blocks(text), strict=True):
                assert drawn(grown, grown.block) == drawn(grown, whole)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("text", every_other(CUT))
async def test_what_looks_like_something_else_where_it_is_cut_does_not_stay_so(text: str) -> None:
    async with chatting(FakeService(), size=(60, 40)) as (app, pilot):
        await until(pilot, lambda: app.chat.status.facts is not None)
        view = await app.chat.transcript.begin_answer(is_thinking=False)
        for character in text:
            await view.document.append(character)
        grown = [block.block.lines(50) for block in view.query(DocumentBlock)]
        assert grown == [block.lines(50) for block in blocks(text)]


# Thoughts

PARTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<thinking>", "</thinking>", "[THINK]", "[/THINK]", "<", "a ", "\n", "word"]
    ),
    max_size=12,
)


@settings(max_examples=examples(200), deadline=None)
@given(PARTS, st.lists(st.integers(1, 5), max_size=30), st.booleans())
def test_a_thought_is_told_apart_in_whatever_pieces_it_comes(parts: list[str], sizes: list[int], is_in: bool) -> None:
    text = "".join(parts)
    whole, pieces = Splitter(is_thinking=is_in), Splitter(is_thinking=is_in)
    wanted = [*whole.feed(text), *whole.end()]
    found, begin = [], 0
    for size in [*sizes, len(text)]:
        found += pieces.feed(text[begin : begin + size])
        begin += size
    found += pieces.end()
    for which in (True, False):
        assert "".join(part for is_it, part in found if is_it is which) == "".join(
            part for is_it, part in wanted if is_it is which
        )


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "hm\n", "Yes."),
        ("hm\n</think>\nYes.", "hm\n", "Yes."),
        ("[THINK]a[/THINK]b", "a", "b"),
        (
            "The mark <think> opens a thought, </think> ends it.",
            "",
            "The mark <think> opens a thought, </think> ends it.",
        ),
        ("<think>never closed", "never closed", ""),
        ("Yes.", "", "Yes."),
    ],
)
def test_a_thought_stands_before_the_answer(text: str, thought: str, answer: str) -> None:
    assert split(text) == (thought, answer)


def test_a_template_may_open_the_thought() -> None:
    assert split("still thinking", is_thinking=True) == ("still thinking", "")

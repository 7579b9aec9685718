"""What strangers write is shown as it is: no escape sequence reaches the terminal, no bracket is taken for markup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.segment import Segment

from localllm.chat.text import one_line, visible
from localllm.engine.engine_info import EngineFacts
from localllm.errors import LocalLLMError
from localllm.tui import markdown_render, messages
from localllm.tui.app import ChatApp
from tests.thinning import every_other
from tests.tui.support import FakeService, assert_shown, chatting, shown, until

pytestmark = pytest.mark.usefixtures("home")

SEQUENCES = [
    "\x1b[2J\x1b[H gone",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil.test\x1b\\click\x1b]8;;\x1b\\",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1bP+q544e\x1b\\",
    "\x1b[?1049h\x1b[?1000h",
    "\x9b31m red \x9d0;t\x9c",
    "back\x08\x08\x08 \r over",
    "\u202egnp.exe \u2066x\u2069 \u200f",
    "line\u2028separator\u2029\x85\x0b\x0c\x1c\x1d\x1e",
    "bell \x07 null \x00 del \x7f",
    "half \ud800 surrogate \udfff",
    "[/INST] [b +] [red]x[/red] [/] [@click=app.bell]y[/] [[z]] \\[w]",
    "$primary {x} %s {{ y }} .em",
    "<think> not closed",
    "```python\nx = '\x1b[0m'\n",
    "| a | b\n|---|\n| \x1b[1m | ] |",
    "[x](javascript:alert(1)) ![i](file:///etc/passwd) <script>alert(1)</script> <!-- hidden -->",
    "[ref]: http://hidden.test 'title'",
    "&lt;&#27;[2J &amp; &#x1b;]52;c;eA==&#7;",
    "&#x202e;gnp.exe &rlm; &#8232; `&#x202e;` \u061c &#x61c; [&#x202e;](x 'y') ![&rlm;](z)",
    "e\u0301\u0323\u0302" * 40,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0915\u094d\u0937 \ufdfd",
    "\t\ttabs\tand   blanks   ",
    "a" * 500,
    "",
    " ",
    "\n\n\n",
]  # fmt: skip
OBEYED = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def painted(app: ChatApp) -> list[str]:
    """The texts of all segments on the screen: what is written between the escape sequences of ours."""
    lines = app.screen._compositor.render_strips(app.size)
    assert all(sum(Segment.get_line_length([segment]) for segment in line) == app.size.width for line in lines)
    return [segment.text for line in lines for segment in line if segment.control is None]


def assert_intact(app: ChatApp) -> None:
    """No segment has what a terminal could obey, and what is always on the screen is there."""
    assert not [text for text in painted(app) if OBEYED.search(text)]
    assert "f1 help" in shown(app).splitlines()[-1] and app.is_running and app.failure is None


@pytest.mark.parametrize("first", every_other(range(4)))
async def test_an_answer_a_question_a_title_an_error_and_a_name_are_shown_as_they_are(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    monkeypatch.setattr(ChatApp, "copy_to_clipboard", lambda _, text: copied.append(text))
    chosen = SEQUENCES[first::4]  # a screen costs more than what is shown on it
    async with chatting(FakeService([f"before {text} after" for text in chosen]), size=(80, 24)) as (app, pilot):
        for number, text in enumerate(chosen, 1):
            app.worker.do(lambda text=text: app.worker.say(f"asked {text} so"))
            await until(pilot, lambda number=number: app.chat.num_turns == 2 * number and not app.chat.is_answering)
            assert app.chat.transcript.views[-1].text == f"before {text} after" and "before" in shown(app)
            assert_intact(app)
            app.worker.do(lambda text=text: app.worker.command("title", text or "x"))
            app.chat.post_message(messages.JobFailed(LocalLLMError(text, why=text, fix=text)))
            app.chat.post_message(messages.Noted(text))
            app.chat.post_message(messages.ModelLoading(text, 1, 2))
            app.chat.post_message(messages.ModelReady(text, EngineFacts(10, "int4", "int8")))
            await until(pilot, lambda: app.chat.notice.error is not None)
            assert_intact(app)
            await pilot.press("escape")
    assert not copied


def naughty(shared_data: Callable[[str], Path]) -> list[str]:
    strings = json.loads(shared_data("adversarial/naughty_strings.json").read_text())
    assert len(strings) >= 500
    return [str(text) for text in strings]


async def test_515_naughty_strings_leave_the_screen_intact(shared_data: Callable[[str], Path]) -> None:
    strings = naughty(shared_data)
    async with chatting(FakeService(), size=(80, 24)) as (app, pilot):
        await until(pilot, lambda: app.chat.status.facts is not None)
        for begin in range(0, len(strings), 12):
            view = await app.chat.transcript.begin_answer(is_thinking=False)
            for text in strings[begin : begin + 12]:
                await view.append(f"{text}\n\n")
            await view.end()
            name, what = strings[begin], strings[-begin]
            app.chat.post_message(messages.ModelReady(name, EngineFacts(10, what, "int8")))
            app.chat.notice.show_error(LocalLLMError(what, why=name, fix=what))
            await pilot.pause()
            assert_intact(app)


def test_a_naughty_string_is_shown_whole(shared_data: Callable[[str], Path]) -> None:
    for text in naughty(shared_data):
        pieces = markdown_render.pieces(markdown_render.parser().parse(visible(text)))
        lines = [line.plain for piece in pieces for line in piece.lines(80)]
        assert not [line for line in lines if OBEYED.search(line)]
        letters = [letter for letter in visible(text) if letter.isalpha()]
        entities = re.search(r"&#?\w+;", text) or "![" in text or "\\" in text
        assert entities or "".join(letters) in "".join(filter(str.isalpha, "".join(lines))), text


async def test_nothing_of_an_answer_is_left_out_of_what_is_shown() -> None:
    text = "Use <b>this</b> [a](http://b.test/c)\n\n[r]: http://hidden.test\n\n<div>\nblock\n</div>\n\n![alt](x.png)"
    async with chatting(FakeService([text]), asked="?") as (app, _):
        assert_shown(app, "<b>this</b>", "http://b.test/c", "http://hidden.test", "<div>", "</div>", "alt", "x.png")


@pytest.mark.parametrize("text", SEQUENCES, ids=[repr(text)[:30] for text in SEQUENCES])
def test_visible_text_has_nothing_to_obey_and_loses_no_line(text: str) -> None:
    seen = visible(text)
    assert not OBEYED.search(seen.replace("\n", ""))
    assert seen.split("\n") == seen.replace("\n", "\r").split("\r") and seen.count("\n") == text.count("\n")
    assert not OBEYED.search(one_line(text))

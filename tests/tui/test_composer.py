"""Writing: what was asked before is searched, a draft survives, an edit loses nothing."""

from __future__ import annotations

import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from textual import events

from localllm.tui import drafts
from localllm.tui.app import ChatApp
from localllm.tui.widgets.composer import Suggestions
from tests.thinning import one_in
from tests.tui.support import FakeService, chat_app, chatting, press, running, say, send, shown, texts, until

pytestmark = pytest.mark.usefixtures("home")


async def test_a_search_leaves_what_was_being_written_where_it_was() -> None:
    async with chatting() as (app, pilot):
        for text in ("Where is the fox?", "Where is the bear?"):
            await say(pilot, text)
        composer = app.chat.composer
        composer.write("half a sen")
        await press(pilot, "ctrl+r", *"fox", until=lambda: composer.text == "fox" and "Where is the fox?" in shown(app))
        assert app.unsent == "half a sen"
        await pilot.press("escape")
        assert composer.text == "half a sen"
        await press(pilot, "ctrl+r", *"where", "ctrl+r", "enter", until=lambda: composer.text == "Where is the fox?")
        composer.clear_all()
        await pilot.press("up")
        assert composer.text == "half a sen"


async def test_what_is_being_written_is_kept_and_not_once_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.tui.app._DRAFT_S", 0.05)
    async with chatting(FakeService()) as (app, pilot):
        app.chat.composer.write("half a sentence")
        await until(pilot, lambda: drafts._path().exists())
        assert drafts._path().read_text(encoding="utf-8") == "half a sentence"
        await press(pilot, "enter", until=lambda: not drafts._path().exists())


async def test_of_a_private_chat_no_draft_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.tui.app._DRAFT_S", 0.02)
    async with chatting(FakeService(), private=True) as (app, pilot):
        app.chat.composer.write("half a sentence")
        end = time.monotonic() + 0.3
        await until(pilot, lambda: time.monotonic() > end)
        app.save_draft()
        assert not drafts._path().exists()


def test_a_draft_is_taken_once_and_an_empty_one_is_none() -> None:
    drafts.save("half")
    assert (drafts.take(), drafts.take()) == ("half", "")
    drafts.save("half")
    drafts.save(" \n")
    assert drafts.take() == ""


@pytest.mark.parametrize("key", one_in(3, ["shift+enter", "alt+enter", "ctrl+j"]))
async def test_a_key_breaks_the_line_and_enter_sends(key: str) -> None:
    async with chatting() as (app, pilot):
        await press(pilot, "a", key, "b", "enter", until=lambda: app.chat.num_turns == 2)
        assert texts(app)[0][1] == "a\nb"


async def test_a_large_paste_is_folded_and_sent_whole() -> None:
    app, pasted = chat_app(), "\n".join(f"line {number}" for number in range(40))
    async with running(app) as pilot:
        await pilot.press(*"see ")
        app.chat.composer.post_message(events.Paste(pasted))
        await until(pilot, lambda: "[pasted text 1: 40 lines]" in app.chat.composer.text)
        await press(pilot, "enter", until=lambda: app.chat.num_turns == 2)
        assert texts(app)[0][1] == f"see {pasted}"


async def test_a_small_paste_of_several_lines_is_one_message() -> None:
    async with chatting() as (app, pilot):
        app.chat.composer.post_message(events.Paste("a\r\nb\x1b[2Jc\rd"))
        await until(pilot, lambda: app.chat.composer.text == "a\nb[2Jc\nd")
        await press(pilot, "enter", until=lambda: app.chat.num_turns == 2)
        assert texts(app)[0][1] == "a\nb[2Jc\nd"


async def test_the_arrows_bring_back_what_was_asked_also_in_an_earlier_chat() -> None:
    async with chatting() as (app, pilot):
        await say(pilot, "first")
    async with chatting(asked="second") as (app, pilot):
        await pilot.press(*"third", "up")
        assert app.chat.composer.text == "second"
        await pilot.press("up")
        assert app.chat.composer.text == "first"
        await pilot.press("down", "down")
        assert app.chat.composer.text == "third"


async def test_what_was_asked_is_searched() -> None:
    async with chatting() as (app, pilot):
        for question in ("the red fox", "an owl", "a grey fox"):
            await say(pilot, question)
        await pilot.press("ctrl+r", *"red")
        assert app.chat.query_one(Suggestions).chosen == "the red fox"
        await pilot.press("enter")
        assert app.chat.composer.text == "the red fox" and app.chat.num_turns == 6
        await pilot.press("ctrl+c", "ctrl+r", *"zebra", "enter", "tab")
        await pilot.pause()
        assert app.chat.num_turns == 6 and app.chat.composer.text == "zebra"
        await pilot.press("escape")
        assert app.chat.composer.text == ""
        await pilot.press("ctrl+c", "ctrl+r", *"fox", "down", "tab")
        assert app.chat.composer.text == "a grey fox"


async def test_what_ctrl_c_takes_out_of_the_composer_comes_back_with_the_arrow() -> None:
    async with chatting() as (app, pilot):
        await pilot.press(*"half a thought", "ctrl+c")
        assert app.chat.composer.text == ""
        await pilot.press("up")
        assert app.chat.composer.text == "half a thought"


async def test_a_slash_lists_the_commands_and_tab_completes() -> None:
    async with chatting() as (app, pilot):
        await pilot.press("/", "t", "i")
        assert "/title [TEXT]" in shown(app)
        await pilot.press("tab")
        assert app.chat.composer.text == "/title "
        await pilot.press("tab", "x")  # no key of a message
        assert app.chat.composer.text == "/title x"
        await pilot.press("ctrl+c", "/", "escape")
        assert not app.chat.query_one(Suggestions).is_shown


async def test_a_command_that_there_is_not_names_the_nearest() -> None:
    async with chatting() as (app, pilot):
        await send(pilot, "/regem now")
        await pilot.pause()
        assert "there is no command /regem" in shown(app) and "the nearest is /regen" in shown(app)


async def test_the_editor_writes_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(command: list[str], check: bool) -> None:
        path = Path(command[-1])
        path.write_text(path.read_text() + " and more\n")

    monkeypatch.setattr(subprocess, "run", write)
    monkeypatch.setattr(ChatApp, "suspend", lambda _: nullcontext())
    async with chatting() as (app, pilot):
        await pilot.press(*"this", "ctrl+g")
        assert app.chat.composer.text == "this and more"


async def test_a_folded_paste_is_deleted_as_a_whole() -> None:
    async with chatting() as (app, pilot):
        app.chat.composer.post_message(events.Paste("line\n" * 60))
        await until(pilot, lambda: app.chat.composer.text == "[pasted text 1: 60 lines]")
        await pilot.press("backspace")
        assert app.chat.composer.text == ""


async def test_a_folded_paste_that_waits_is_not_lost_while_another_text_is_looked_for() -> None:
    app, pasted = chat_app(), "line\n" * 60
    async with running(app) as pilot:
        await say(pilot, "one")
        for keys in (("up",), ("ctrl+r",)):
            app.chat.composer.post_message(events.Paste(pasted))
            await until(pilot, lambda: "[pasted text 1: 60 lines]" in app.chat.composer.text)
            await press(pilot, *keys, until=lambda: app.unsent == pasted)
            await pilot.press(*(["escape"] if keys == ("ctrl+r",) else []), "ctrl+c")
            assert pasted in app.chat.composer.asked

"""Writing: what was asked before is searched, a draft survives, an edit loses nothing."""

from __future__ import annotations

import time

import pytest

from localllm.tui import draft
from tests.tui.support import FakeService, chat_app, running, say, shown, until

pytestmark = pytest.mark.usefixtures("home")


async def test_a_search_leaves_what_was_being_written_where_it_was() -> None:
    app = chat_app()
    async with running(app) as pilot:
        for text in ("Where is the fox?", "Where is the bear?"):
            await say(pilot, text)
        composer = app.chat.composer
        composer.write("half a sen")
        await pilot.press("ctrl+r", *"fox")
        await until(pilot, lambda: composer.text == "fox" and "Where is the fox?" in shown(app))
        assert app.unsent == "half a sen"
        await pilot.press("escape")
        assert composer.text == "half a sen"
        await pilot.press("ctrl+r", *"where", "ctrl+r", "enter")
        await until(pilot, lambda: composer.text == "Where is the fox?")
        composer.clear_all()
        await pilot.press("up")
        assert composer.text == "half a sen"


async def test_a_search_that_finds_nothing_sends_nothing() -> None:
    app = chat_app()
    async with running(app) as pilot:
        await say(pilot, "one")
        await pilot.press("ctrl+r", *"zebra", "enter", "tab")
        await pilot.pause()
        assert app.chat.num_turns == 2 and app.chat.composer.text == "zebra"
        await pilot.press("escape")
        assert app.chat.composer.text == ""


async def test_an_edit_does_not_lose_what_was_being_written() -> None:
    app = chat_app()
    async with running(app) as pilot:
        await say(pilot, "one")
        app.chat.composer.write("half a sentence")
        app.chat.begin_edit(0)
        assert app.chat.composer.text == "one"
        await pilot.press("escape", "up", "up")
        assert app.chat.composer.text == "half a sentence"


async def test_what_is_being_written_is_kept_while_it_is_and_not_once_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("localllm.tui.app._DRAFT_S", 0.05)
    app = chat_app(FakeService())
    async with running(app) as pilot:
        app.chat.composer.write("half a sentence")
        await until(pilot, lambda: draft._path().exists())
        assert draft._path().read_text(encoding="utf-8") == "half a sentence"
        await pilot.press("enter")
        await until(pilot, lambda: not draft._path().exists())


async def test_of_a_private_chat_no_draft_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.tui.app._DRAFT_S", 0.02)
    app = chat_app(FakeService(), private=True)
    async with running(app) as pilot:
        app.chat.composer.write("half a sentence")
        end = time.monotonic() + 0.3
        await until(pilot, lambda: time.monotonic() > end)
        app.keep_draft()
        assert not draft._path().exists()


def test_a_draft_is_taken_once_and_an_empty_one_is_none() -> None:
    draft.keep("half")
    assert (draft.take(), draft.take()) == ("half", "")
    draft.keep("half")
    draft.keep(" \n")
    assert draft.take() == ""

"""The chat screen, key by key, on a service that says what it is told to."""

from __future__ import annotations

import pytest

from localllm.errors import DoesNotFitError
from localllm.history import History, history_file
from tests.history_support import said
from tests.tui.support import FakeService, chat_app, running, say, shown, texts, until

pytestmark = pytest.mark.usefixtures("home")


async def test_a_question_is_answered_and_kept() -> None:
    app = chat_app(FakeService(["It went **home**."]))
    async with running(app) as pilot:
        await say(pilot, "Where did the fox go?")
        assert texts(app) == [("user", "Where did the fox go?"), ("assistant", "It went **home**.")]
        assert "It went home." in shown(app)
    with History.peek(history_file()) as history:
        ((session, _),) = history.sessions()
        assert [text for _, text, _ in said(history, session)] == ["Where did the fox go?", "It went **home**."]


async def test_a_question_that_comes_before_the_model_is_answered_when_it_is_there() -> None:
    service = FakeService(["At last."])
    service.gate.clear()
    app = chat_app(service)
    async with running(app) as pilot:
        app.chat.composer.write("Hello?")
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.num_turns == 1)
        assert "loading" in shown(app)
        service.gate.set()
        await until(pilot, lambda: app.chat.num_turns == 2)
        assert texts(app)[-1] == ("assistant", "At last.")


async def test_escape_stops_an_answer_and_keeps_what_was_said() -> None:
    app = chat_app(FakeService(["word " * 2000], pause_s=0.005))
    async with running(app) as pilot:
        app.chat.composer.write("Go on")
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.transcript.live is not None and len(app.chat.transcript.live.text) > 50)
        await pilot.press("escape")
        await until(pilot, lambda: not app.chat.is_answering and app.chat.num_turns == 2)
        kept = texts(app)[-1][1]
        assert 50 < len(kept) < 10000
        assert "stopped" in shown(app)
    with History.peek(history_file()) as history:
        ((session, _),) = history.sessions()
        assert said(history, session)[-1] == ("assistant", kept, "interrupted")


async def test_an_error_is_a_notice_with_four_lines_and_the_question_can_be_sent_again() -> None:
    error = DoesNotFitError("the model [b +] does not fit", why="it needs 9 GiB", fix="localllm plan tiny")
    app = chat_app(FakeService([error, "Now."]))
    async with running(app) as pilot:
        app.chat.composer.write("Hello")
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.notice.error is not None)
        screen = shown(app)
        for line in (
            "error: the model [b +] does not fit",
            "why:   it needs 9 GiB",
            "fix:   localllm plan tiny",
            "more:  localllm help does-not-fit",
        ):
            assert line in screen
        await say(pilot, "Hello again")
        assert texts(app)[-1][1] == "Now."

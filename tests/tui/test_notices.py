"""What the chat tells beside its messages: how an answer ended, notices, figures that are of now."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from localllm.config import load_settings
from localllm.errors import DoesNotFitError
from localllm.runtime.selection import selected
from localllm.text.chat_template import ChatTemplate
from localllm.tui.widgets.message_view import AnswerView
from tests.thinning import one_in
from tests.tui.support import FakeEngine, FakeService, begin, chatting, command, press, say, send, shown, texts, until

pytestmark = pytest.mark.usefixtures("home")
LONG = "word " * 400


async def stopped(pilot, app) -> None:  # type: ignore[no-untyped-def]
    """A question whose answer is stopped in its midst."""
    await begin(pilot, "Go on")
    await press(pilot, "escape", until=lambda: not app.chat.is_answering and "stopped: F6 goes on" in shown(app))


async def test_how_an_answer_ended_is_told_until_it_is_gone_on_with_to_its_end() -> None:
    async with chatting(FakeService([LONG, " and the end."], pause_s=0.004)) as (app, pilot):
        await stopped(pilot, app)
        await press(pilot, "f6", until=lambda: texts(app)[-1][1].endswith("the end.") and not app.chat.is_answering)
        await until(pilot, lambda: "stopped" not in shown(app))
        assert "F6 goes on" not in shown(app) and "interrupted" not in shown(app)


async def test_only_the_last_answer_says_that_it_can_be_gone_on_with() -> None:
    async with chatting(FakeService([LONG, "Whole.", "Other."], pause_s=0.004)) as (app, pilot):
        await stopped(pilot, app)
        await say(pilot, "Next")
        assert "F6 goes on" not in shown(app)
        await pilot.press("ctrl+up", "ctrl+up", "ctrl+up", "ctrl+up", "e")
        await send(pilot, "Anew", until=lambda: [text for _, text in texts(app)] == ["Anew", "Other."])
        assert "F6 goes on" not in shown(app)


async def test_an_answer_that_was_cut_says_so_again_when_what_came_after_it_is_taken_back() -> None:
    async with chatting(FakeService([LONG, "Whole."], pause_s=0.004)) as (app, pilot):
        await stopped(pilot, app)
        await say(pilot, "Next")
        await command(pilot, "/undo", until=lambda: app.chat.num_turns == 2 and "stopped: F6 goes on" in shown(app))


async def test_an_answer_that_the_full_context_has_cut_does_not_offer_to_be_gone_on_with() -> None:
    service = FakeService(["A tale."], finished={"finish_reason": "length"})
    async with chatting(service, asked="one") as (app, pilot):
        assert "cut by its length: F6 goes on" in shown(app)
        service.engine.ctx = 40
        await say(pilot, "two")
        await until(pilot, "cut by the full context: F5 answers anew")
        assert "F6 goes on" not in shown(app)
        app.chat.take_command("/set overflow evict")
        await say(pilot, "three")
        await until(pilot, "cut by its length: F6 goes on")


async def test_an_answer_that_is_stopped_before_its_first_word_leaves_the_question() -> None:
    service = FakeService([LONG, "Now."], prefill=800)
    service.reads_on.clear()
    async with chatting(service) as (app, pilot):
        await send(pilot, "Hello", until="reading the prompt: ")
        await press(pilot, "escape", until="F5 asks again")
        assert [view.role for view in app.chat.transcript.views] == ["user"]
        assert not [view for view in app.chat.transcript.views if isinstance(view, AnswerView)]


async def test_a_note_is_shown_below_an_error_and_the_next_command_closes_that() -> None:
    async with chatting() as (app, pilot):
        app.chat.take_command("/nope")
        assert "there is no command /nope" in shown(app) or app.chat.notice.error is not None
        app.chat.notice.note("something else")
        await pilot.pause()
        assert "there is no command /nope" in shown(app) and "something else" in shown(app)
        await command(pilot, "/set", until="temperature")
        assert app.chat.notice.error is None and "/nope" not in shown(app)


async def test_a_refused_command_leaves_the_composer_and_the_arrow_brings_it_back() -> None:
    async with chatting() as (app, pilot):
        for text in ("/nope", "/load"):
            await send(pilot, text, until=lambda: app.chat.notice.error is not None)
            assert app.chat.composer.text == ""
            await pilot.press("up")
            assert app.chat.composer.text == text
            app.chat.composer.clear_all()


async def test_figures_are_of_the_conversation_that_is_shown() -> None:
    async with chatting(FakeService(["A long answer about a fox."]), size=(120, 30), asked="Who?") as (app, pilot):
        full = app.chat.status.usage
        assert full is not None and full.parts["answer"] > 0 and "first word 0.01 s" in shown(app)
        await say(pilot, "And who else?")
        app.chat.take_command("/undo")
        await until(pilot, lambda: app.chat.status.usage is not None and app.chat.status.usage.used == full.used)
        app.chat.take_command("/clear")
        await until(pilot, lambda: app.chat.status.usage is not None and app.chat.status.usage.used == 0)
        assert "first word 0.01 s" not in shown(app) and "tok/s" not in shown(app)


async def test_no_more_of_the_context_is_said_to_be_used_than_there_is() -> None:
    service = FakeService(["A long answer about a fox. " * 4])
    service.engine = FakeEngine(ctx=100)
    async with chatting(service, asked="Who?") as (app, pilot):
        assert "100 of 100 tokens" in shown(app)
        await command(pilot, "/tokens", until="more than the context of 100")


async def test_a_model_that_is_loaded_in_a_chat_is_told_of_and_so_is_a_context_that_is_too_short_for_it() -> None:
    service = FakeService(["A long answer about a fox."])
    async with chatting(service, size=(120, 30), asked="Who?") as (app, pilot):
        assert "loaded tiny" not in shown(app)
        service.engine = FakeEngine(ctx=32)
        app.worker.do(lambda: app.worker.use("tiny"))
        await until(pilot, "loaded tiny: int4-g64 weights, int8 keys and values, 32 tokens")
        await until(pilot, "tokens, the context 32: /undo, /clear")


async def test_what_was_told_of_one_chat_does_not_stand_over_another() -> None:
    async with chatting(asked="one") as (app, pilot):
        app.chat.notice.note("this chat was removed from the history")
        await press(pilot, "ctrl+n", until=lambda: app.chat.num_turns == 0)
        assert "removed from the history" not in shown(app)


def test_a_template_that_refuses_a_system_message_alone_is_no_error_of_a_count() -> None:
    from localllm.chat.session import ChatSession

    engine = FakeEngine(template=ChatTemplate("{{ raise_exception('no user message') }}"))
    resolved = load_settings({"private": True})
    session = ChatSession(selected(resolved, None), Mock(), {}, system="Be brief.")
    session.use_engine(FakeService(), engine)  # type: ignore[arg-type]
    assert session.usage().used == len("Be brief.")


async def test_a_question_that_is_taken_back_before_there_is_a_model_is_not_asked() -> None:
    service = FakeService(["At last."])
    service.gate.clear()
    async with chatting(service) as (app, pilot):
        await send(pilot, "Hello?", until=lambda: app.chat.num_turns == 1)
        await command(pilot, "/undo", until=lambda: app.chat.num_turns == 0)
        service.gate.set()
        await until(pilot, lambda: not app.chat.is_busy)
        assert not service.requests and app.chat.notice.error is None


async def test_a_model_that_is_refused_at_once_leaves_the_chat_with_the_one_that_it_has() -> None:
    class Refusing(FakeService):
        def __call__(self, selection, post, before):  # type: ignore[no-untyped-def]
            if selection.settings.ctx == 512:
                raise DoesNotFitError("it does not fit", why="512", fix="localllm plan tiny")
            return super().__call__(selection, post, before)

    async with chatting(Refusing(["One.", "Two."]), asked="Who?") as (app, pilot):
        app.worker.do(lambda: app.worker.use("tiny", {"ctx": 512}))
        await until(pilot, lambda: app.chat.notice.error is not None)
        assert app.worker.resolved.settings.ctx is None
        await say(pilot, "And then?")
        assert texts(app)[-1] == ("assistant", "Two.")


@pytest.mark.parametrize("line", one_in(5, ["/attach", "/save", "/load", "/export", "/code 1"]))
async def test_a_home_that_there_is_not_is_refused_by_name(line: str) -> None:
    async with chatting(FakeService(["```\nx\n```"]), asked="one") as (app, pilot):
        await command(pilot, f"{line} ~nobody-5/a", until=lambda: app.chat.notice.error is not None)
        assert "there is no '~nobody-5/a'" in shown(app)


@pytest.mark.parametrize(("name", "why"), [("/attach", "it is a pipe or a device"), ("/load", "it is not a file")])
async def test_a_pipe_is_no_file_and_holds_nothing_up(tmp_path: Path, name: str, why: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with chatting() as (app, pilot):
        await command(pilot, f"{name} {tmp_path / 'pipe'}", until=lambda: app.chat.notice.error is not None)
        assert why in shown(app)
        await say(pilot, "one")


async def test_an_answer_that_is_gone_on_with_counts_what_was_said_of_it() -> None:
    async with chatting(FakeService([LONG, ["more "] * 200], pause_s=0.01)) as (app, pilot):
        await stopped(pilot, app)
        full = app.chat.status.usage
        assert full is not None
        await press(pilot, "f6", until=lambda: app.chat.transcript.live is not None)
        await until(pilot, lambda: app.chat.status.usage is not full)
        assert app.chat.status.usage is not None
        assert app.chat.status.usage.parts["answer"] == full.parts["answer"]
        await pilot.press("escape")


async def test_an_editor_that_fails_gives_the_screen_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    from localllm.tui.app import ChatApp

    is_back = []

    @contextmanager
    def suspend(_: object):  # type: ignore[no-untyped-def]
        yield
        is_back.append(True)  # as textual's own: not where something is raised

    monkeypatch.setenv("VISUAL", "false")
    monkeypatch.setattr(ChatApp, "suspend", suspend)
    async with chatting() as (app, pilot):
        app.chat.composer.write("mine")
        await press(pilot, "ctrl+g", until="the editor 'false' did not work")
        assert is_back and app.chat.composer.text == "mine"

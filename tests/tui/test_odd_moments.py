"""What is done at an odd moment: while a model loads or an answer is asked for, in another chat, after a failure."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from localllm.chat.attachments import files_of
from localllm.chat.recorder import ChatRecorder, look_up
from localllm.engine.events import FinishedEvent, Timings, TokenEvent, Usage
from localllm.errors import CardFaultError, HistoryError, LocalLLMError, TemplateError, UnsupportedModelError
from localllm.history import History, history_file
from localllm.runtime.selection import Selection
from localllm.text.chat_template import ChatTemplate
from localllm.tui import history_worker, messages
from localllm.tui.screens import models
from localllm.tui.screens.dialogs import LineDialog
from localllm.tui.widgets.chat_list import ChatList
from tests.patience import PATIENCE_S
from tests.thinning import every_other, one_in
from tests.tui.support import (
    TEMPLATE,
    FakeEngine,
    FakeService,
    begin,
    chatting,
    command,
    kept,
    press,
    say,
    send,
    shown,
    texts,
    until,
)

pytestmark = pytest.mark.usefixtures("home")
FAILURE = LocalLLMError("it broke", why="a test", fix="again")


class Slow(ChatTemplate):
    """Takes its time with a prompt."""

    def with_marks(self, *about: Any) -> Any:
        time.sleep(0.3)
        return super().with_marks(*about)


# Another chat


async def test_an_edit_ends_with_the_chat_that_it_was_begun_in() -> None:
    async with chatting(FakeService(["A", "B", "C", "D"]), asked="one") as (app, pilot):
        first = app.chat.session_id
        await press(pilot, "ctrl+n", until=lambda: app.chat.num_turns == 0)
        await say(pilot, "other")
        await pilot.press("ctrl+up", "ctrl+up", "e")
        assert first is not None
        app.worker.do(lambda: app.worker.open(first))
        await until(pilot, lambda: ("user", "one") in texts(app))
        await say(pilot, "two")
        assert [text for _, text in texts(app)] == ["one", "A", "two", "C"]


async def test_a_question_that_is_gone_is_not_written_anew() -> None:
    async with chatting(asked="one") as (app, pilot):
        app.worker.do(lambda: app.worker.edit({"role": "user", "content": "of another chat"}, "anew"))
        await until(pilot, lambda: app.chat.notice.error is not None)
        assert len(texts(app)) == 2


async def test_ctrl_c_leaves_an_edit_and_not_only_its_text() -> None:
    async with chatting(FakeService(["A", "B", "C", "D"]), asked=("one", "two")) as (app, pilot):
        await pilot.press(*["ctrl+up"] * 4, "e", "ctrl+c")
        await say(pilot, "three")
        assert [text for _, text in texts(app)] == ["one", "A", "two", "B", "three", "C"]


async def test_a_new_conversation_does_not_inherit_the_system_message_of_a_chat_that_was_opened() -> None:
    async with chatting(system="Be a pirate.", asked="one") as (app, pilot):
        pirate = app.chat.session_id
    async with chatting() as (app, pilot):
        assert pirate is not None
        app.worker.do(lambda: app.worker.open(pirate))
        await until(pilot, lambda: app.chat.num_turns == 2 and app.worker.session.dialogue.system == "Be a pirate.")
        await press(pilot, "ctrl+n", until=lambda: app.chat.num_turns == 0)
        assert app.worker.session.dialogue.system is None
        app.chat.take_command("/system Be brief.")
        await press(pilot, "ctrl+n", until=lambda: app.worker.session.dialogue.system == "Be brief.")


@pytest.mark.parametrize("text", one_in(3, [" \n", " ", "\t"]))
async def test_an_answer_of_blanks_can_be_opened_again(text: str) -> None:
    async with chatting(FakeService([[text]])) as (app, pilot):
        await say(pilot, "one")
    async with chatting(resumed=look_up(app.worker, "last")) as (app, pilot):
        await until(pilot, lambda: texts(app) == [("user", "one"), ("assistant", text)])


# Models that do not come


async def test_a_first_model_that_is_refused_leaves_chats_that_can_be_opened_and_their_own() -> None:
    async with chatting(FakeService(["A"])) as (app, pilot):
        await say(pilot, "old")

    def refuse(selection: Selection, post: Any, before: Any) -> Any:
        raise UnsupportedModelError("no such architecture", why="a test", fix="/model tiny")

    async with chatting(refuse) as (app, pilot):
        await until(pilot, lambda: app.chat.notice.error is not None)
        assert "no model (F3 chooses one)" in shown(app) and app.chat.composer.asked == ["old"]
        await send(pilot, "mine", until=lambda: app.chat.num_turns == 1)
        app.worker.do(lambda: app.worker.open("old"))
        await until(pilot, lambda: app.chat.num_turns == 2)
        await send(pilot, "more", until=lambda: app.chat.num_turns == 3)
    assert [[text for _, text, _ in chat] for chat in kept()] == [["old", "A", "more"], ["mine"]]


async def test_a_model_without_a_template_is_told_of_and_none_is_waited_for() -> None:
    class Bare(FakeEngine):
        @property
        def template(self) -> str:  # type: ignore[override]
            raise TemplateError("it has no template", why="a test", fix="another model")

        @template.setter
        def template(self, _: str) -> None: ...

    service = FakeService()
    service.engine = Bare()
    async with chatting(service) as (app, pilot):
        await until(pilot, lambda: app.chat.notice.error is not None)
        assert not app.chat.is_busy and "no model" in shown(app) and service.is_closed


async def test_f5_without_a_model_takes_nothing_back() -> None:
    service = FakeService(["A"])
    async with chatting(service, asked="one") as (app, pilot):
        service.failure = FAILURE
        app.worker.do(lambda: app.worker.use("tiny"))
        await until(pilot, lambda: app.chat.notice.error is FAILURE)
        await press(pilot, "f5", until="there is no model")
        assert texts(app) == [("user", "one"), ("assistant", "A")]


async def test_of_a_model_that_was_left_nothing_is_told_and_its_load_ends() -> None:
    posts: list[Any] = []

    class Watched(FakeService):
        def __call__(self, selection: Any, post: Any, before: Any) -> FakeService:
            posts.append(post)
            return super().__call__(selection, post, before)

    async with chatting(Watched()) as (app, pilot):
        app.worker.do(lambda: app.worker.use("tiny"))
        await until(pilot, lambda: len(posts) == 2 and not app.chat.is_busy)
        with pytest.raises(LocalLLMError, match="not wanted"):
            posts[0](messages.ModelLoading("loading the old one", 1, 2))
        posts[0](messages.Noted("of the old one"))
        await pilot.pause(0.1)
        assert not app.chat.is_busy and "old one" not in shown(app)


# Answers that are asked for


async def test_esc_stops_an_answer_whose_prompt_is_still_being_made() -> None:
    service = FakeService(["word " * 500], pause_s=0.01)
    service.engine.template = Slow(TEMPLATE)
    async with chatting(service) as (app, pilot):
        await until(pilot, lambda: not app.chat.is_busy)
        await send(pilot, "one")
        assert app.chat.is_answering
        await press(pilot, "escape", until=lambda: not app.chat.is_answering)
        assert len(texts(app)[-1][1]) < 100


async def test_f5_pressed_twice_answers_once() -> None:
    service = FakeService(["A", "B", "C", "D"])
    service.engine.template = Slow(TEMPLATE)
    async with chatting(service, asked="one") as (app, pilot):
        await press(pilot, "f5", "f5", until=lambda: texts(app)[-1] == ("assistant", "B") and not app.chat.is_answering)
        assert len(service.requests) == 2


async def test_an_edit_whose_answer_breaks_off_keeps_the_new_question_and_what_was_said() -> None:
    class Breaking(FakeService):
        def _say(self, number: int, request: Any, answer: Any, events: Any) -> None:
            if number < 2:
                super()._say(number, request, answer, events)
                return
            events.put(TokenEvent(number, 1, "half a "))
            fields = {"finish_reason": "error", "usage": Usage(1, 0, 1), "timings": Timings(), "error": FAILURE}
            events.put(FinishedEvent(number, ctx=4096, **fields))

    async with chatting(Breaking(["A", "B"]), asked=("one", "two")) as (app, pilot):
        await pilot.press(*["ctrl+up"] * 4, "e")
        await send(pilot, "one anew", until=lambda: app.chat.notice.error is FAILURE and not app.chat.is_answering)
        assert texts(app) == [("user", "one anew"), ("assistant", "half a ")]
        assert "ended by an error: F6 goes on" in shown(app)


async def test_the_files_of_a_question_that_was_taken_back_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("NOTE", encoding="utf-8")
    service = FakeService([FAILURE, "B"])
    async with chatting(service) as (app, pilot):
        await command(pilot, f"/attach {tmp_path / 'a.txt'}", until="a.txt (")
        await send(pilot, "one", until=lambda: app.chat.composer.text == "one" and not app.chat.is_answering)
        assert "a.txt (" in shown(app)
        await press(pilot, "enter", until=lambda: app.chat.num_turns == 2)
        assert files_of(texts(app)[0][1])[0].text == "NOTE"


async def test_a_thought_that_is_gone_on_with_stays_a_thought() -> None:
    service = FakeService(["It may be a fox. " * 200, "So.</think>A fox."], pause_s=0.01)
    service.opens_thought()
    async with chatting(service) as (app, pilot):
        await begin(pilot, "Who?")
        await press(pilot, "escape", until=lambda: not app.chat.is_answering)
        await press(pilot, "f6", until=lambda: "A fox." in shown(app) and not app.chat.is_answering)
        assert "thought: " in shown(app) and "may be" not in shown(app)


async def test_a_thought_that_was_saved_is_gone_on_with_where_the_template_opens_it(tmp_path: Path) -> None:
    service = FakeService([" a fox.</think>A fox."])
    service.opens_thought()
    answer = {"role": "assistant", "content": "", "reasoning_content": "It may be"}
    (tmp_path / "a.json").write_text(json.dumps([{"role": "user", "content": "Who?"}, answer]))
    async with chatting(service) as (app, pilot):
        await command(pilot, f"/load {tmp_path / 'a.json'}", until=lambda: app.chat.num_turns == 2)
        await press(pilot, "f6", until=lambda: "A fox." in shown(app) and not app.chat.is_answering)
        assert "".join(map(chr, service.requests[-1].prompt_ids)) == "<assistant><think>\nIt may be"
        await command(pilot, f"/save {tmp_path / 'b.json'}", until=lambda: (tmp_path / "b.json").exists())
    saved = json.loads((tmp_path / "b.json").read_text())["messages"][-1]
    assert saved == {"role": "assistant", "content": "A fox.", "reasoning_content": "It may be a fox."}


async def test_a_thought_that_was_interrupted_is_a_thought_when_the_chat_is_opened_again() -> None:
    service = FakeService(["It may be a fox. " * 200], pause_s=0.01)
    service.opens_thought()
    async with chatting(service) as (app, pilot):
        await begin(pilot, "Who?")
        with History.peek(history_file()) as history:  # what a kill at this moment would leave
            while_written = history.path(history.find("last"))[-1]
        await press(pilot, "escape", until=lambda: not app.chat.is_answering)
    assert while_written.state == "writing" and while_written.begins_in_thought
    async with chatting(resumed=look_up(app.worker, "last")) as (app, pilot):
        await until(pilot, "thought: ")
        assert "may be" not in shown(app)


async def test_a_model_that_is_closed_as_soon_as_it_is_loaded_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    monkeypatch.setattr(service, "wait_loaded", lambda timeout_s=None: None)  # as of one that was closed meanwhile
    async with chatting(service) as (app, pilot):  # fails where a thread ends with an exception
        await until(pilot, lambda: not [each for each in app.workers if "wait" in each.name])
        assert app.chat.status.facts is None and app.failure is None


async def test_a_chat_that_another_window_has_gone_on_with_says_so_and_loses_nothing() -> None:
    async with chatting(FakeService(["A", "B", "C", "D"]), asked="one") as (app, pilot):
        with History.open(history_file()) as history:
            session = history.find("last")
            history.append(session, session.head, "user", "from elsewhere")
            elsewhere = history.refresh(session).head
        app.chat.take_command("/title foxes")  # nothing is said by that: what the chat shows stays the other's
        await until(pilot, "foxes")
        assert "elsewhere" not in shown(app)
        with History.peek(history_file()) as history:
            assert history.find("foxes").head == elsewhere
        await say(pilot, "two")
        assert "gone on with elsewhere" in shown(app) and [text for _, text in texts(app)] == ["one", "A", "two", "B"]
        await command(pilot, "/fork", until="a copy: ")
        with History.open(history_file()) as history:
            copy = history.find(app.chat.session_id or "")
            history.append(copy, copy.head, "user", "from elsewhere, too")
        await press(pilot, "escape", until=lambda: "elsewhere" not in shown(app))
        await say(pilot, "and")
        assert "gone on with elsewhere" in shown(app)
        await press(pilot, "ctrl+n", until=lambda: app.chat.num_turns == 0)
        await say(pilot, "three")
        assert "elsewhere" not in shown(app)
    with History.peek(history_file()) as history:
        assert "from elsewhere" in [message.content for message in history.tree(history.find(session.id))]


async def test_one_can_look_at_the_beginning_while_an_answer_is_written() -> None:
    async with chatting(FakeService(["A"])) as (app, pilot):
        app.worker.do(lambda: app.worker.session.dialogue.turns.extend(turns(50)))
        await say(pilot, "q")
    async with chatting(FakeService(["word " * 300], pause_s=0.005), look_up(app.worker, "last")) as (app, pilot):
        await until(pilot, lambda: app.chat.num_turns == 52)
        await send(pilot, "last", until=lambda: app.chat.transcript.live is not None)
        await press(pilot, "ctrl+home", "pagedown", "pagedown", until=lambda: not app.chat.is_answering)
        seen = [view.index for view in app.chat.transcript.views]
        assert seen == list(range(len(seen)))
        await press(pilot, "ctrl+end", until=lambda: app.chat.transcript.views[-1].index == 53)
        seen = [view.index for view in app.chat.transcript.views]
        assert seen == list(range(seen[0], 54)) and texts(app)[-1][1].startswith("word word")


def turns(count: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": f"m{number}"} for number in range(count)]


# What must not end the program


async def test_whatever_the_list_of_models_raises_is_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(models, "model_rows", fail)
    async with chatting() as (_, pilot):
        await press(pilot, "f3", until="Input/output error")


async def test_a_folder_for_the_editor_that_there_is_not_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.tui.drafts import edited

    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(LocalLLMError, match="did not work"):
        edited("text", {"EDITOR": "true"})


@pytest.mark.parametrize("name", one_in(5, ["a/..", "/", ".", "..", ""]))
async def test_a_name_that_is_none_gets_an_ending_too(name: str) -> None:
    async with chatting() as (app, pilot):
        app.push_screen(LineDialog("export", name, endings=(".md", ".json")))
        await pilot.press("ctrl+t")
        await pilot.pause()
        assert app.screen.query_one(Input).value.endswith("chat.md")


@pytest.mark.parametrize(("is_there", "text"), every_other([(True, "a-2.md"), (False, "wrote ")]))
async def test_what_came_of_a_chat_is_told_where_its_list_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    reached, goes_on = threading.Event(), threading.Event()
    write = history_worker.write_new

    def write_late(path: Path, content: str) -> None:
        reached.set()
        assert goes_on.wait(PATIENCE_S)
        write(path, content)

    monkeypatch.setattr(history_worker, "write_new", write_late)
    async with chatting(asked="one") as (app, pilot):
        await press(pilot, "f4", until=lambda: len(app.screen.query_one(ChatList).rows) == 1)
        await press(pilot, "e", until=LineDialog)
        app.screen.query_one(Input).value = "a.md"
        if is_there:
            (tmp_path / "a.md").touch()
        await press(pilot, "enter", until=reached.is_set)
        await pilot.press("escape")
        assert app.screen is app.chat
        goes_on.set()
        await until(pilot, text)


async def test_a_question_of_a_megabyte_on_one_line_is_shown_in_part_and_edited_folded() -> None:
    async with chatting() as (app, pilot):
        app.worker.do(lambda: app.worker.say("x" * 1_000_000))
        await until(pilot, lambda: app.chat.num_turns == 2 and not app.chat.is_answering)
        await pilot.press("ctrl+home")
        assert "996,000 more characters" in str(app.chat.transcript.views[0].render())
        app.chat.begin_edit(0)
        assert app.chat.composer.text == "[pasted text 1: 1,000,000 characters]"
        assert len(app.chat.composer.whole) == 1_000_000


async def test_another_wording_and_what_followed_it_are_shown_again() -> None:
    async with chatting(FakeService(["A", "B", "C", "D"]), asked=("one", "two")) as (app, pilot):
        await pilot.press(*["ctrl+up"] * 4, "e")
        await send(pilot, "one anew", until=lambda: texts(app) == [("user", "one anew"), ("assistant", "C")])
        await pilot.press("ctrl+up", "ctrl+up", "o")
        await until(pilot, lambda: [text for _, text in texts(app)] == ["one", "A", "two", "B"])
        assert "1 of 2" in shown(app)
        await press(pilot, "f5", until=lambda: texts(app)[-1] == ("assistant", "D") and not app.chat.is_answering)
        app.chat.set_focus(app.chat.composer)
        await pilot.press("ctrl+up", "o")
        await until(pilot, lambda: texts(app)[-1] == ("assistant", "B") and app.chat.transcript.views[-1].has_focus)
        await pilot.press("o")  # the next key is for the message that came in its place
        await until(pilot, lambda: texts(app)[-1] == ("assistant", "D") and app.chat.transcript.views[-1].has_focus)
        await pilot.press("o")
        await until(pilot, lambda: texts(app)[-1] == ("assistant", "B") and app.chat.transcript.views[-1].has_focus)
        await press(pilot, "ctrl+up", "o", until="there is no other")
    assert [[text for _, text, _ in chat] for chat in kept()] == [["one", "A", "two", "B"]]


async def test_what_the_history_refused_is_kept_at_the_programs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise HistoryError("the history cannot be written", why="a test", fix="again")

    async with chatting(FakeService(["A", "B"]), asked="one") as (_, pilot):
        with monkeypatch.context() as refusing:
            refusing.setattr(ChatRecorder, "_sync", refuse)
            await say(pilot, "two")
            await until(pilot, "is not saved")
        assert [[text for _, text, _ in chat] for chat in kept()] == [["one", "A"]]
    assert [[text for _, text, _ in chat] for chat in kept()] == [["one", "A", "two", "B"]]


# A GPU that has failed


@pytest.mark.parametrize("moment", ["load", "answer"])
async def test_where_a_gpu_has_failed_the_chat_ends_with_that_error(moment: str) -> None:
    """In this process every answer would end so; the chat is saved."""
    fault = CardFaultError("the GPU ended in a fault with tiny", why="an illegal access", fix="run it again")
    service = FakeService(["A", fault])
    if moment == "load":
        service.failure = fault
    with pytest.raises(CardFaultError):
        async with chatting(service) as (app, pilot):
            if moment == "answer":
                await say(pilot, "one")
                await send(pilot, "two")
            await until(pilot, lambda: app.failure is not None)
    assert isinstance(app.failure, CardFaultError) and app.failure.what == fault.what

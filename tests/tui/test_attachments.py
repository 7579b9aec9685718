"""Files in the full-screen chat: named, completed, pasted, listed, and a line in the conversation."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events

from localllm.chat.attachments import files_of
from localllm.tui.widgets.composer import Suggestions
from tests.tui.support import FakeService, chatting, command, kept, press, say, send, shown, texts, until

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files in the folder of the chat."""
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path / "files")  # a long path is shown on two lines
    for name, text in (("notes.md", "It is\nred."), ("my notes.txt", "grey"), ("a.bin", "\0")):
        Path(name).write_text(text)
    return Path.cwd()


async def test_a_named_file_is_sent_and_shown_as_a_line() -> None:
    async with chatting(FakeService(["Red."])) as (app, pilot):
        await say(pilot, "What of @notes.md?")
        assert texts(app)[0][1] == kept()[0][0][1] == "File notes.md:\n```md\nIt is\nred.\n```\n\nWhat of @notes.md?"
        assert "+ notes.md (2 lines)" in shown(app) and "It is" not in shown(app)
        assert "notes.md: 35 tokens" in shown(app)
        await pilot.press("up")
        assert app.chat.composer.text == "What of @notes.md?"
        await command(pilot, "/tokens", until="files 37")
    async with chatting() as (app, pilot):
        await until(pilot, lambda: "What of @notes.md?" in app.chat.composer.asked)


async def test_attached_files_wait_with_what_they_cost_until_they_are_detached() -> None:
    async with chatting() as (app, pilot):
        await command(
            pilot, "/attach notes.md 'my notes.txt'", until="+ notes.md (35 tokens)  + my notes.txt (34 tokens)"
        )
        await command(pilot, "/detach", until=lambda: "my notes.txt" not in shown(app))
        await command(pilot, "/attach notes.md", until="+ notes.md (35 tokens)")
        await say(pilot, "What of @notes.md?")
        assert [file.path for file in files_of(texts(app)[0][1])] == ["notes.md"] and "35 tokens" not in shown(app)
        await command(pilot, "/attach", until="no file is attached")


async def test_before_a_model_is_loaded_the_characters_of_a_file_are_shown_and_then_its_tokens() -> None:
    service = FakeService()
    service.gate.clear()
    async with chatting(service) as (_, pilot):
        await command(pilot, "/attach notes.md", until="+ notes.md (10 characters)")
        service.gate.set()
        await until(pilot, "+ notes.md (35 tokens)")


async def test_a_question_with_a_file_that_cannot_be_read_comes_back_into_the_composer() -> None:
    async with chatting() as (app, pilot):
        await send(pilot, "What of @a.bin?", until=lambda: app.chat.notice.error is not None)
        await until(pilot, lambda: app.chat.composer.text == "What of @a.bin?" and not app.chat.is_answering)
        assert "it is binary" in shown(app) and app.chat.num_turns == 0


async def test_a_path_is_completed_and_enter_then_sends() -> None:
    async with chatting() as (app, pilot):
        await pilot.press(*"see @no")
        assert app.chat.query_one(Suggestions).chosen == "see @notes.md "
        await pilot.press("tab", *"and @my", "tab")
        assert app.chat.composer.text == 'see @notes.md and @"my notes.txt" '
        await press(pilot, "enter", until=lambda: app.chat.num_turns == 2)
        assert [file.path for file in files_of(texts(app)[0][1])] == ["notes.md", "my notes.txt"]


async def test_a_pasted_path_of_a_file_names_it_and_in_a_command_stays_a_path(folder: Path) -> None:
    async with chatting() as (app, pilot):
        await pilot.press(*"see")
        app.chat.composer.post_message(events.Paste(f"'{folder}/my notes.txt'\n"))
        await until(pilot, lambda: app.chat.composer.text == f'see @"{folder}/my notes.txt" ')
        app.chat.composer.clear_all()
        await pilot.press(*"/attach ")
        app.chat.composer.post_message(events.Paste(f"'{folder}/my notes.txt'"))
        attached = app.worker.session.dialogue.attached
        await press(pilot, "enter", until=lambda: [file.path for file in attached] == [f"{folder}/my notes.txt"])
        assert app.chat.num_turns == 0


async def test_another_wording_keeps_the_files_as_they_were_but_those_that_it_names_no_more() -> None:
    async with chatting() as (app, pilot):
        await command(pilot, "/attach 'my notes.txt'", until="+ my notes.txt")
        await say(pilot, "What of @notes.md?")
        Path("notes.md").unlink()
        for typed, names in (("And @notes.md?", ["my notes.txt", "notes.md"]), ("And now?", ["my notes.txt"])):
            await press(pilot, *["ctrl+up"] * 2, "e", until=lambda: "written anew" in shown(app))
            assert "my notes.txt" not in app.chat.composer.text
            await send(pilot, typed, until=lambda typed=typed: texts(app)[0][1].endswith(typed))  # type: ignore[misc]
            await until(pilot, lambda: app.chat.num_turns == 2 and not app.chat.is_answering)
            assert [file.path for file in files_of(texts(app)[0][1])] == names

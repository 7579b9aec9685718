"""The chat screen, key by key, on a service that says what it is told to."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from textual.command import CommandList
from textual.widgets import Input

from localllm.chat.recorder import look_up
from localllm.errors import ContextOverflowError, DoesNotFitError
from localllm.history import History, history_file
from localllm.runtime.presets import find_preset, save_preset
from localllm.text.chat_template import ChatTemplate
from localllm.tui import drafts
from localllm.tui.app import ChatApp
from localllm.tui.key_scopes import key_scopes
from localllm.tui.keys import DEFAULTS
from localllm.tui.screens.dialogs import CodeDialog
from localllm.tui.screens.help import HelpScreen
from localllm.tui.widgets.message_view import Thought
from localllm.tui.widgets.welcome import example_prompts
from tests.thinning import every_other
from tests.tui.support import (
    FakeService,
    assert_shown,
    begin,
    chatting,
    command,
    has_answered,
    kept,
    kept_titles,
    press,
    say,
    send,
    shown,
    texts,
    until,
)

pytestmark = pytest.mark.usefixtures("home")

CODE = "Look:\n\n```python\nprint('fox')\n```\n\nand\n\n```sh\nls -l\n```\n"


def tree() -> list[str]:
    """All that was said in the latest chat, as the history has it."""
    with History.peek(history_file()) as history:
        return [message.content for message in history.tree(history.find("last"))]


# Answers


async def test_a_question_is_answered_and_kept() -> None:
    async with chatting(FakeService(["It went **home**."]), asked="Where did the fox go?") as (app, _):
        assert texts(app) == [("user", "Where did the fox go?"), ("assistant", "It went **home**.")]
        assert "It went home." in shown(app)
    assert [text for _, text, _ in kept()[0]] == ["Where did the fox go?", "It went **home**."]


async def test_a_question_that_comes_before_the_model_is_kept_and_answered_when_it_is_there() -> None:
    service = FakeService(["At last."])
    service.gate.clear()
    async with chatting(service) as (app, pilot):
        await send(pilot, "Hello?", until=lambda: app.chat.num_turns == 1)
        assert "loading" in shown(app) and kept() == [[("user", "Hello?", "complete")]]
        service.gate.set()
        await until(pilot, lambda: app.chat.num_turns == 2)
        assert texts(app)[-1] == ("assistant", "At last.")


@pytest.mark.parametrize("key", every_other(["escape", "ctrl+c"]))
async def test_a_key_stops_an_answer_and_keeps_what_was_said(key: str) -> None:
    async with chatting(FakeService(["word " * 2000], pause_s=0.005)) as (app, pilot):
        await begin(pilot, "Go on")
        await press(pilot, key, until=lambda: not app.chat.is_answering and app.chat.num_turns == 2)
        text = texts(app)[-1][1]
        assert 50 < len(text) < 10000 and "stopped: F6 goes on" in shown(app)
    assert kept()[0][-1] == ("assistant", text, "interrupted")


async def test_what_is_typed_while_an_answer_is_written_waits_in_the_composer() -> None:
    async with chatting(FakeService(["word " * 2000], pause_s=0.05)) as (app, pilot):
        await begin(pilot, "Go on", 0)
        await pilot.press(*"next", "enter")
        assert app.chat.composer.text == "next" and "esc stops it" in shown(app)
        await pilot.press("escape")
        await until(pilot, lambda: not app.chat.is_answering and "an answer is being written" not in shown(app))
        await press(pilot, "enter", until=lambda: app.chat.num_turns == 3)
        assert texts(app)[2] == ("user", "next")


async def test_the_keys_of_a_message_do_no_harm_while_it_is_being_written() -> None:
    async with chatting(FakeService(["word " * 2000], pause_s=0.02)) as (app, pilot):
        await begin(pilot, "Go on", 0)
        await pilot.press("ctrl+up", "e", "r", "f", "c", "y", "escape")
        await until(pilot, lambda: not app.chat.is_answering and app.chat.num_turns == 2)


async def test_how_far_the_prompt_was_read_is_shown() -> None:
    service = FakeService(["Done."], prefill=4096)
    service.reads_on.clear()
    async with chatting(service) as (app, pilot):
        await send(pilot, "a long text", until=lambda: re.search("reading the prompt: .* of 4,096 tokens", shown(app)))
        service.reads_on.set()
        await until(pilot, lambda: app.chat.num_turns == 2)
        assert "reading the prompt" not in shown(app)


async def test_an_error_is_a_notice_with_four_lines_and_the_question_is_in_the_composer_again() -> None:
    error = DoesNotFitError("the model [b +] does not fit", why="it needs 9 GiB", fix="localllm plan tiny")
    async with chatting(FakeService([error, "Now."])) as (app, pilot):
        await send(pilot, "Hello", until=lambda: app.chat.notice.error is not None)
        assert_shown(app, "error: the model [b +] does not fit", "why:   it needs 9 GiB")
        assert_shown(app, "fix:   localllm plan tiny", "more:  localllm help does-not-fit")
        await until(pilot, lambda: app.chat.composer.text == "Hello")
        await press(pilot, "enter", until=lambda: app.chat.num_turns == 2)
        assert app.chat.notice.error is None and texts(app)[-1][1] == "Now."


async def test_a_prompt_that_is_too_long_is_refused_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    service = FakeService(["Now."])

    def refuse(_: object) -> None:
        raise ContextOverflowError("the prompt has 9 tokens, the context 8", why="too long", fix="shorten the prompt")

    service.engine.check = refuse  # type: ignore[method-assign]
    async with chatting(service) as (app, pilot):
        await send(pilot, "much too long")
        await until(pilot, lambda: app.chat.notice.error is not None and app.chat.composer.text != "")
        assert app.chat.composer.text == "much too long" and app.chat.num_turns == 0
        assert "the prompt has 9 tokens" in shown(app) and "/detach" not in shown(app)
        (tmp_path / "a.txt").write_text("NOTE", encoding="utf-8")
        app.chat.take_command(f"/attach {tmp_path / 'a.txt'}")
        await press(pilot, "enter", until="/detach, /undo, /clear, or shorten the prompt")


async def test_a_model_that_cannot_be_loaded_is_told_of_and_the_question_waits_for_another() -> None:
    service = FakeService(["By the other."])
    service.failure = DoesNotFitError("tiny does not fit", why="0 bytes are free", fix="localllm doctor")
    async with chatting(service) as (app, pilot):
        await until(pilot, lambda: app.chat.notice.error is not None)
        assert "no model" in shown(app) and "tiny does not fit" in shown(app)
        await send(pilot, "Anyone?", until="there is no model: the question waits")
        assert app.chat.num_turns == 1
        service.failure = None
        await send(pilot, "/model tiny", until=lambda: app.chat.num_turns == 2)
        assert texts(app)[-1][1] == "By the other."


# What was said, said otherwise


async def test_an_answer_is_had_again_and_the_first_stays_in_the_history() -> None:
    async with chatting(FakeService(["One.", "Two."]), asked="Count") as (app, pilot):
        await press(pilot, "f5", until=lambda: texts(app)[-1][1] == "Two." and not app.chat.is_answering)
        assert len(texts(app)) == 2
    assert tree() == ["Count", "One.", "Two."]


async def test_an_answer_that_cannot_be_had_again_stays() -> None:
    async with chatting(FakeService(["One.", DoesNotFitError("no", why="no", fix="no")])) as (app, pilot):
        await say(pilot, "Count")
        await press(pilot, "f5", until=lambda: app.chat.notice.error is not None and app.chat.num_turns == 2)
        assert texts(app)[-1][1] == "One."


async def test_an_earlier_question_is_edited_and_what_followed_it_leaves_the_screen() -> None:
    async with chatting(FakeService(["A.", "B.", "C."]), asked=("first", "second")) as (app, pilot):
        await pilot.press("ctrl+up", "ctrl+up", "ctrl+up", "ctrl+up", "e")
        assert app.chat.composer.text == "first" and "written anew" in shown(app)
        await send(pilot, "other", until=lambda: texts(app) == [("user", "other"), ("assistant", "C.")])
    assert len(tree()) == 6


async def test_an_edit_is_given_up_with_escape() -> None:
    async with chatting(asked="first") as (app, pilot):
        app.chat.composer.write("half a sentence")
        await pilot.press("ctrl+up", "ctrl+up", "e", "escape")
        assert app.chat.composer.text == "" and len(texts(app)) == 2
        await pilot.press("up", "up")
        assert app.chat.composer.text == "half a sentence"
        await say(pilot, "second")
        assert len(texts(app)) == 4


async def test_a_fork_goes_on_from_a_message_in_a_copy() -> None:
    async with chatting(FakeService(["A.", "B.", "C."]), asked=("first", "second")) as (app, pilot):
        original = app.chat.session_id
        await press(pilot, "ctrl+up", "ctrl+up", "ctrl+up", "f", until=lambda: app.chat.session_id != original)
        assert [text for _, text in texts(app)] == ["first", "A."]
        await say(pilot, "third")
    assert list(map(len, kept())) == [4, 4] and kept_titles() == ["first (copy)", "first"]


async def test_an_answer_is_continued_where_it_ends() -> None:
    service = FakeService(["It was a", " fox."])
    async with chatting(service, asked="Who?") as (app, pilot):
        await press(pilot, "f6", until=lambda: texts(app)[-1][1] == "It was a fox." and not app.chat.is_answering)
        assert len(texts(app)) == 2
        assert "".join(map(chr, service.requests[-1].prompt_ids)).endswith("<assistant>It was a")
        assert [request.opens_turn for request in service.requests] == [True, False]
        service.answers.append("")
        await press(pilot, "f6", until="nothing was added")


async def test_the_last_question_is_taken_back() -> None:
    async with chatting(asked="first") as (app, pilot):
        await command(pilot, "/undo", until=lambda: app.chat.num_turns == 0)
        assert "localllm" in shown(app) and texts(app) == []


@pytest.mark.parametrize("keys", [("ctrl+n",), ("f4", "n")])
async def test_a_new_conversation_leaves_the_old_one_in_the_history(keys: tuple[str, ...]) -> None:
    async with chatting(asked="first") as (app, pilot):
        await press(pilot, *keys, until=lambda: app.screen is app.chat and app.chat.num_turns == 0)
        await say(pilot, "second")
    assert kept_titles() == ["second", "first"]


# Copying and saving


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts in the clipboard, in turn."""
    found: list[str] = []
    monkeypatch.setattr(ChatApp, "copy_to_clipboard", lambda _, text: found.append(text))
    return found


async def test_the_last_answer_a_code_block_and_the_selection_are_copied(copied: list[str]) -> None:
    async with chatting(FakeService([CODE]), asked="Code") as (app, pilot):
        app.chat.take_command("/copy")
        app.chat.take_command("/copy 2")
        app.chat.take_command("/copy 3")
        await pilot.pause()
        assert copied == [CODE, "ls -l\n"] and "there is no code block '3'" in shown(app)
        await pilot.press("escape", "ctrl+up", "c")
        assert copied[-1] == CODE
        app.chat.transcript.views[-1].text_select_all()
        await pilot.press("ctrl+c")
        assert "print('fox')" in copied[-1]


async def test_a_file_that_is_there_is_not_overwritten_by_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text("mine", encoding="utf-8")
    async with chatting(asked="one") as (_, pilot):
        await command(pilot, f"/save {path}", until="chat-2.json")
        assert path.read_text(encoding="utf-8") == "mine"


async def test_the_answer_alone_is_copied_without_what_was_thought(tmp_path: Path, copied: list[str]) -> None:
    service = FakeService([f"```\nhm\n```\n</think>\n\n{CODE}"])
    service.opens_thought()
    async with chatting(service, asked="Code") as (app, pilot):
        for line in ("/copy", "/copy 1", f"/save {tmp_path / 'a.json'}"):
            app.chat.take_command(line)
        await until(pilot, lambda: (tmp_path / "a.json").exists())
        assert copied[0] == CODE and "print('fox')" in copied[1]
        before = app.chat.session_id
        await command(pilot, f"/load {tmp_path / 'a.json'}", until=lambda: app.chat.session_id not in (before, None))
        assert "thought: 3 words" in shown(app) and "print('fox')" in shown(app)
        await press(pilot, "ctrl+up", "c", "y", until=CodeDialog)
        assert copied[2:] == [CODE] and "1  python" in shown(app) and "hm" not in shown(app)


async def test_an_answer_without_a_thought_is_copied_as_it_stands(copied: list[str]) -> None:
    plain = "\n\n The mark </think> ends a thought."
    async with chatting(FakeService([plain]), asked="What ends it?") as (app, pilot):
        app.chat.take_command("/copy")
        await press(pilot, "escape", "ctrl+up", "c", until=lambda: copied == [plain, plain])


async def test_the_picker_copies_or_saves_a_code_block(copied: list[str], tmp_path: Path) -> None:
    async with chatting(FakeService([CODE]), asked="Code") as (app, pilot):
        await press(pilot, "f7", until=CodeDialog)
        assert "2  sh, 1 line: ls -l" in shown(app)
        await press(pilot, "down", "enter", until=lambda: copied == ["ls -l\n"])
        for is_new in (True, False):
            await press(pilot, "f7", until=CodeDialog)
            await pilot.press("s")
            app.screen.query_one(Input).value = str(tmp_path / "a.py")
            await press(pilot, "enter", until=lambda: app.screen is app.chat and (tmp_path / "a.py").exists())
            assert is_new == (app.chat.notice.error is None)
        assert (tmp_path / "a.py").read_text() == "print('fox')\n"


async def test_code_is_copied_by_the_number_it_has_on_the_screen(copied: list[str]) -> None:
    more = "".join(f"```\nblock {number}\n```\n\n" for number in range(3, 12))
    async with chatting(FakeService([CODE, "No code.", more]), asked=["1", "2", "3"], size=(100, 70)) as (app, pilot):
        assert_shown(app, "1  python", "2  sh", "  3  ", "  11  ")
        await press(pilot, "f7", "2", until=lambda: copied == ["ls -l\n"])
        await press(pilot, "f7", "1", "1", until=lambda: copied[1:] == ["block 11\n"])
        await press(pilot, "f7", "1", "enter", until=lambda: copied[2:] == ["print('fox')\n"])
        await press(pilot, "f7", "enter", until=lambda: copied[3:] == ["block 3\n"])
        await command(pilot, "/copy 4", until=lambda: copied[4:] == ["block 4\n"])
        await command(pilot, "/undo", until=lambda: app.chat.num_turns == 4)
        await command(pilot, "/copy 4", until="the chat has 2")


async def test_an_empty_chat_offers_examples_and_the_last_chats() -> None:
    async with chatting(asked="An old question") as (app, pilot):
        await command(pilot, "/clear", until="Go on with")
        assert_shown(app, "is ready, with a context of 4,096 tokens", "1  Tell me a story", "4  An old question")
        await send(pilot, "2", until=has_answered(app, 2))
        assert texts(app)[0] == ("user", example_prompts("tiny")[1])
        await press(pilot, "ctrl+o", until=lambda: texts(app)[0][1] == "An old question")
        for keys in (("3",), ("down", "down", "down", "enter")):
            await press(pilot, "ctrl+n", until="Go on with")
            await press(pilot, "tab", *keys, until=has_answered(app, 2))
            assert texts(app)[0] == ("user", example_prompts("tiny")[2])


def test_examples_suit_the_model() -> None:
    assert len({example_prompts("tiny"), example_prompts("qwen3-8b"), example_prompts("qwen2.5-coder-7b")}) == 3


async def test_the_chats_are_listed_beside_a_wide_conversation_until_they_are_hidden() -> None:
    async with chatting(asked="Of foxes", size=(140, 40)) as (app, pilot):
        await until(pilot, "▸ Of foxes")
        await pilot.press("ctrl+n")
        await say(pilot, "Of owls")
        await until(pilot, "▸ Of owls")
        await pilot.click(app.chat.sidebar.chats, offset=(6, 1))
        await until(pilot, "▸ Of foxes")
        assert texts(app)[0][1] == "Of foxes"
        await press(pilot, "ctrl+s", until=lambda: "▸" not in shown(app))
    async with chatting(size=(140, 40)) as (app, pilot):
        await until(pilot, "Go on with")
        assert not app.chat.sidebar.display
        await press(pilot, "ctrl+s", until=lambda: app.chat.sidebar.display)
        await pilot.resize_terminal(100, 30)
        await press(pilot, "ctrl+s", until="takes 120 columns")


async def test_text_is_no_wider_than_is_read_with_ease() -> None:
    async with chatting(FakeService(["word " * 100]), asked="Go", size=(220, 40)) as (app, _):
        assert max(map(len, re.findall("(?:word ?)+", shown(app)))) in range(90, 101)


async def test_the_conversation_is_saved_and_exported(tmp_path: Path) -> None:
    async with chatting(asked="Hello") as (app, pilot):
        for line in (f"/save {tmp_path / 'a.json'}", f"/export {tmp_path / 'a.md'}"):
            app.chat.take_command(line)
        await until(pilot, lambda: (tmp_path / "a.md").exists())
        assert "## You\n\nHello" in (tmp_path / "a.md").read_text()
        for name in ("a.md", "a.json"):
            before = (tmp_path / name).read_bytes()
            app.chat.take_command(f"/{'export' if name == 'a.md' else 'save'} {tmp_path / name}")
            await until(pilot, lambda: app.chat.notice.error is not None and "a-2." in app.chat.notice.error.fix)
            assert (tmp_path / name).read_bytes() == before
        await command(pilot, "/clear", until="new conversation")
        app.chat.take_command(f"/load {tmp_path / 'a.json'}")
        await until(pilot, lambda: app.chat.num_turns == 2 and "localllm  Hello" in shown(app))


# The rest of the screen


async def test_how_much_is_thought_is_changed_and_thoughts_stay_unfolded_where_they_are_to_be_shown() -> None:
    service = FakeService(["<think>Perhaps.</think>A fox.", ["<think>Perhaps", " not"]])
    service.engine.template = ChatTemplate("{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}")
    async with chatting(service, show_thoughts=True, asked="Who is there?") as (app, pilot):
        assert app.chat.query_one(Thought).is_open
        await command(pilot, "/think off", until="thinking: off")
        await command(pilot, "/think low", until="/think low is not possible")
        await say(pilot, "Who else?")
        await until(pilot, "the answer is empty")
        service.engine.template = ChatTemplate("<think>{% for m in messages %}{{ m.content }}{% endfor %}")
        await say(pilot, "And there?")  # of a model that has no switch, as after another was chosen
        await until(pilot, "think = off (/think) changes nothing")
        prompts = ["".join(map(chr, request.prompt_ids)) for request in service.requests]
        assert prompts[1].startswith("False") and "Perhaps" not in prompts[1] and "A fox." in prompts[1]


async def test_thoughts_are_folded_when_the_answer_begins_and_unfold() -> None:
    async with chatting(FakeService(["<think>\nIt may be a fox.\n</think>\n\nA fox."]), asked="Who?") as (app, pilot):
        assert "thought: 5 words" in shown(app) and "It may be" not in shown(app) and "A fox." in shown(app)
        await pilot.press("ctrl+t")
        assert "It may be a fox." in shown(app)
        await pilot.press("ctrl+t")
        await pilot.click(app.chat.query_one(Thought).query_one("_Fold"))
        assert "It may be a fox." in shown(app)
    assert kept()[0][-1][1].startswith("<think>")


async def test_a_resumed_chat_shows_what_was_said_and_that_it_was_interrupted() -> None:
    async with chatting(FakeService(["word " * 2000], pause_s=0.005)) as (app, pilot):
        await begin(pilot, "Go on")
    async with chatting(FakeService(["Again."]), resumed=look_up(app.worker, "last")) as (app, pilot):
        await until(pilot, lambda: len(texts(app)) == 2)
        assert texts(app)[0] == ("user", "Go on") and "interrupted: F6 goes on" in shown(app)
        await press(pilot, "f5", until=lambda: texts(app)[-1][1] == "Again.")


async def test_the_status_tells_of_model_context_and_speed() -> None:
    async with chatting(FakeService(["A long answer about a fox."]), size=(120, 30), asked="Who?") as (app, _):
        assert_shown(app, "tiny int4-g64", "of 4,096 tokens", "tok/s", "first word 0.01 s", "0 of ")


async def test_the_help_has_every_key_and_command_and_the_users_own_keys() -> None:
    async with chatting(keys={"chat.regenerate": "ctrl+y"}, size=(100, 160)) as (app, pilot):
        await press(pilot, "f1", until=HelpScreen)
        assert_shown(
            app,
            "^y                        regenerate the answer",
            "search earlier questions",
            "/export PATH",
            "Models (F3)",
        )
        await pilot.press("escape")
        await say(pilot, "one")
        await press(pilot, "ctrl+y", until=lambda: app.chat.is_answering or len(app.worker.session.dialogue.turns) == 2)


async def test_the_help_begins_with_what_the_status_line_says_and_fits_a_small_screen() -> None:
    async with chatting(asked="one", size=(80, 24)) as (app, pilot):
        await press(pilot, "?", until=HelpScreen)
        assert_shown(
            app, "of 4,096 tokens", "how full the context is", "first word 0.01 s", "quit", "/ lists the commands"
        )
        await press(pilot, "?", until=lambda: app.screen is app.chat)
        await pilot.press("a", "?")
        assert app.chat.composer.text == "a?"
        assert_shown(app, "f1 help", "^q quit")


async def test_hints_name_the_users_own_keys() -> None:
    keys = {
        "chat.continue": "ctrl+y",
        "chat.regenerate": "alt+r",
        "app.models": "f9,alt+m",
        "chat.stop": "f12",
        "app.help": "ctrl+l",
        "composer.find": "ctrl+f",
        "plan.reset": "x",
    }
    async with chatting(FakeService(["word " * 400], pause_s=0.02), keys=keys, size=(100, 160)) as (app, pilot):
        await until(pilot, "F9 has models for more")
        await begin(pilot, "one")
        await send(pilot, "two", until="an answer is being written: F12 stops it")
        await press(pilot, "f4", "n", until="an answer is being written: F12 in the chat stops it")
        await press(pilot, "escape", "escape", until=lambda: app.screen is app.chat)
        await press(pilot, "f12", until="stopped: ctrl+y goes on, alt+r answers anew")
        await press(pilot, "ctrl+f", until="type; ctrl+f the next, enter takes it, esc closes")
        await press(pilot, "escape", "f2", until="↑↓ choose  ←→ change  ⏎ apply  x reset  esc leave")
        await press(pilot, "escape", until=lambda: app.screen is app.chat)
        await press(pilot, "ctrl+l", until="Models (F9)")
        await press(pilot, "ctrl+l", until=lambda: app.screen is app.chat)


def test_the_keys_that_hints_name_are_those_of_their_bindings() -> None:
    bindings = [binding for scope in key_scopes().values() for binding in scope]
    bound = {binding.id: binding.key for binding in bindings}
    assert {name: bound[name] for name in DEFAULTS} == DEFAULTS


async def test_the_palette_does_what_a_command_does() -> None:
    async with chatting(asked="one") as (app, pilot):
        await pilot.press("ctrl+p", *"/clear")
        found = partial(app.screen.query_one, CommandList)
        await until(pilot, lambda: found().highlighted == 0 and "/clear" in str(found().get_option_at_index(0).prompt))
        await press(pilot, "enter", until=lambda: app.chat.num_turns == 0)


async def test_ctrl_c_leaves_at_the_second_time_and_ctrl_d_at_once() -> None:
    async with chatting() as (app, pilot):
        await pilot.press("ctrl+c")
        assert app.is_running and "Ctrl-C again leaves" in shown(app)
        await pilot.press("ctrl+c")
        assert app._exit
    async with chatting() as (app, pilot):
        await pilot.press("x", "home", "ctrl+d")
        assert app.chat.composer.text == "" and not app._exit
        await pilot.press("ctrl+d")
        assert app._exit


async def test_settings_and_the_system_message_are_changed() -> None:
    service = FakeService()
    async with chatting(service, temperature=0.5) as (app, pilot):
        for line in ("/set temperature 0.25", "/system Be brief."):
            app.chat.take_command(line)
        await say(pilot, "one")
        request = service.requests[-1]
        assert request.sampling.temperature == 0.25
        assert "".join(map(chr, request.prompt_ids)).startswith("<system>Be brief.")
        await command(pilot, "/set top_k=7", until="top_k = 7")
        await command(pilot, "/set stop ==", until="stop = '=='")
        for unknown in ("/set temprature", "/set nothing=1"):
            await command(pilot, unknown, until="unknown key")
        await command(pilot, "/set temperature hot", until=lambda: app.chat.notice.error is not None)
        for line in ("/set temperature -", "/set max_tokens 5", "/set max_tokens -"):
            app.chat.take_command(line)
        await until(pilot, "max_tokens = -")
        settings = app.worker.session.dialogue.resolved.settings
        assert (settings.temperature, settings.max_tokens) == (0.5, None)


async def test_a_private_chat_is_not_kept_and_says_so() -> None:
    async with chatting(private=True, asked="one") as (app, _):
        assert "private: nothing is saved" in shown(app)
    assert not history_file().exists()


# Presets


async def test_a_preset_is_taken_like_a_model_and_saved_from_a_chat() -> None:
    save_preset("mario", {"model": "tiny", "system": "You are Mario.", "top_k": 3}, replaces=False)
    async with chatting(FakeService(["A fox."]), asked="Who are you?") as (app, pilot):
        session = app.chat.worker.session
        await command(pilot, "/model mario", until=lambda: session.selection.word == "mario")
        assert session.dialogue.system is None  # of the next conversation
        await command(pilot, "/clear", until=lambda: session.dialogue.system == "You are Mario.")
        await command(pilot, "/preset save again", until=lambda: find_preset("again"))
        await command(pilot, "/model tiny", until=lambda: session.selection.settings.top_k is None)
    found = find_preset("again")
    assert found is not None
    assert found.values == {"model": "tiny", "system": "You are Mario.", "top_k": 3}


async def test_a_command_that_leaves_is_no_draft_of_the_next_chat() -> None:
    async with chatting(FakeService([])) as (app, pilot):
        await pilot.press(*"/bye")
        app.save_draft()  # as it is each second
        await pilot.press("enter")
    app.save_draft()
    assert drafts.take() == ""


async def test_one_escape_leaves_a_message_beside_a_notice() -> None:
    async with chatting(FakeService(["One."]), asked="Hello") as (app, pilot):
        await pilot.press("ctrl+up")
        await press(pilot, "c", until="copied the message")
        await pilot.press("escape")
        assert app.chat.composer.has_focus and "copied" not in shown(app)


async def test_help_and_quit_stay_in_every_line_of_keys() -> None:
    async with chatting(FakeService(["Once."]), size=(80, 24)) as (app, pilot):
        for key in ("f2", "f3", "f4"):
            await pilot.press(key)
            await until(pilot, lambda: app.screen is not app.chat)
            await until(pilot, lambda: "f1 help  ^q quit" in shown(app).splitlines()[-1])
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.chat)

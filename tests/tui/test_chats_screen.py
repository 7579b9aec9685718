"""The chats that are kept, key by key: listed, searched, read, opened, renamed, pinned, deleted and exported."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from localllm.chat.recorder import proposed_name
from localllm.chat.text import format_ago
from localllm.history import History, LockedError, Session, history_file
from localllm.tui.app import ChatApp
from localllm.tui.history_worker import HistoryWorker
from localllm.tui.screens.chats import ChatsScreen
from localllm.tui.screens.dialogs import LineDialog
from localllm.tui.widgets.bars import KeyBar
from localllm.tui.widgets.chat_list import ChatList
from localllm.tui.widgets.message_view import MessageView
from tests.history_support import said, tables
from tests.patience import PATIENCE_S
from tests.tui.support import (
    FakeService,
    chat_app,
    chatting,
    kept_titles,
    press,
    running,
    say,
    send,
    shown,
    texts,
    until,
)

pytestmark = pytest.mark.usefixtures("home")


@contextmanager
def opened() -> Iterator[History]:
    """As another process would have it."""
    with History.open(history_file()) as history:
        yield history


def keep(title: str, *messages: str, model: str = "tiny") -> Session:
    """A kept chat, questions and answers in turn."""
    with opened() as history:
        session, parent = history.begin(title, model, None), None
        for index, text in enumerate(messages):
            role = "assistant" if index % 2 else "user"
            parent = history.append(session, parent, role, text, model=model if index % 2 else None)
        return history.refresh(session)


def screen_of(app: ChatApp) -> ChatsScreen:
    assert isinstance(app.screen, ChatsScreen)
    return app.screen


def titles(app: ChatApp) -> list[str]:
    """In the order in which they are listed."""
    return [row.session.title for row in screen_of(app).chats.rows]


def on_chat(app: ChatApp) -> Callable[[], bool]:
    return lambda: app.screen is app.chat


async def enter(pilot: Pilot[None], app: ChatApp) -> ChatsScreen:
    """Opens the screen and waits for the list."""
    await press(pilot, "f4", until=lambda: isinstance(app.screen, ChatsScreen) and "reading" not in head(app))
    return screen_of(app)


@asynccontextmanager
async def listing(*service: Any, **settings: Any) -> AsyncIterator[tuple[ChatApp, Pilot[None], ChatsScreen]]:
    """`chatting`, with the screen and its list."""
    async with chatting(*service, **settings) as (app, pilot):
        yield app, pilot, await enter(pilot, app)


def head(app: ChatApp) -> str:
    found = app.screen.query("#title")
    return str(found.first(Static).render()) if found else "reading"


async def line(pilot: Pilot[None], app: ChatApp, key: str, value: str | None = None) -> Input:
    """The field of the dialog that a key opens; with a value, it is written there and accepted."""
    await press(pilot, key, until=LineDialog)
    field = app.screen.query_one(Input)
    if value is not None:
        field.value = value
        await pilot.press("enter")
    return field


async def search(pilot: Pilot[None], app: ChatApp, words: str) -> None:
    await pilot.press("slash")
    screen_of(app).query_one(Input).value = words
    await until(pilot, lambda: " in " in head(app))


async def test_the_latest_chat_stands_first_and_pinned_ones_above_it() -> None:
    first = keep("About foxes", "a", "b")
    keep("About owls", "a", "b", "c", model="/models/owl")
    keep("About cats", "a")
    with opened() as history:
        history.pin(first, True)
    async with listing(size=(120, 30)) as (app, pilot, screen):
        assert titles(app) == ["About foxes", "About cats", "About owls"] and "3 saved" in head(app)
        screen.add_class("-turned")  # the list alone
        await pilot.pause()
        line = next(line for line in shown(app).splitlines() if "owls" in line)
        assert line.split() == ["About", "owls", "3", "owl", "just", "now"]
        assert "★  About foxes" in shown(app)
        await pilot.press("escape")
        assert app.screen is app.chat
        await say(pilot, "Hello")
        screen = await enter(pilot, app)
        assert titles(app)[:2] == ["About foxes", "Hello"] and screen.chats.cursor == 1  # the one that is open


async def test_with_no_chat_kept_the_screen_says_so_and_no_key_ends_it() -> None:
    async with listing() as (app, pilot, _):
        assert "no chat is saved yet" in shown(app)
        await pilot.press("enter", "r", "p", "d", "e", "down", "end", "space", "space", "u")
        await until(pilot, "nothing was deleted")
        assert not history_file().exists()


async def test_a_private_chat_lists_what_was_kept_and_says_how_to_go_on_with_another_model() -> None:
    keep("From before", "a", "b", model="big-one")
    async with listing(private=True) as (app, pilot, _):
        assert titles(app) == ["From before"]
        await press(pilot, "enter", until=lambda: app.chat.num_turns == 2)
        await until(pilot, "/model big-one")


async def test_what_strangers_wrote_is_shown_and_never_obeyed() -> None:
    keep("\x1b[31mred[/] [bold]\u202etitle\x1b]52;c;x\x07", "lantern [b] \x1b[2J [@click=app.leave]x[/]", "[/]\x9b5m")
    async with listing(size=(140, 30)) as (app, pilot, screen):
        await search(pilot, app, "lantern")
        await pilot.press("tab")
        await until(pilot, lambda: screen.chats.has_focus and shown(app).count("[@click=app.leave]x[/]") == 2)
        assert shown(app).count("red[/] [bold]") == 2
        for key in ("r", "e"):
            await line(pilot, app, key)
            assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown(app))
            await pilot.press("escape")
        await pilot.pause()
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown(app))


async def test_enter_goes_on_with_the_chosen_chat() -> None:
    keep("Foxes", "Where?", "Home.")
    keep("Owls", "Who?", "Me.")
    service = FakeService(["Still there."])
    async with listing(service) as (app, pilot, _):
        await press(pilot, "down", "enter", until=lambda: app.chat.num_turns == 2 and app.screen is app.chat)
        await say(pilot, "And now?")
        assert [text for _, text in texts(app)] == ["Where?", "Home.", "And now?", "Still there."]
    assert kept_titles() == ["Foxes", "Owls"]


async def test_typing_finds_titles_and_messages_and_enter_opens_the_chat_at_the_message() -> None:
    turns = [f"{'answer' if number % 2 else 'question'} {number} {'x ' * 200}" for number in range(60)]
    turns[7] = f"{'before ' * 60} the red lantern hangs {'after ' * 60}"
    keep("Long", *turns)
    keep("A lantern in a title", "a", "b")
    async with listing() as (app, pilot, screen):
        await search(pilot, app, "red LANTERN")
        assert titles(app) == ["Long"] and "model: …before before" in shown(app)
        assert "the red lantern hangs" in shown(app)
        await search(pilot, app, "lantern")
        await until(pilot, lambda: len(screen.chats.rows) == 2)
        assert [row.message is None for row in screen.chats.rows] == [True, False]
        await press(pilot, "down", "enter", until=lambda: app.screen is app.chat and app.chat.num_turns == 60)
        await until(pilot, lambda: [view.index for view in app.chat.query(".-found").results(MessageView)] == [7])
        assert app.chat.focused is app.chat.composer  # so that what is typed next is not a key of the message
        await until(pilot, "red lantern")
        await pilot.pause(0.2)
        assert "red lantern" in shown(app)
        await enter(pilot, app)
        await press(pilot, "home", "enter", until=lambda: app.screen is app.chat and app.chat.num_turns == 2)
        await enter(pilot, app)
        await press(pilot, "end", "enter", until=lambda: app.screen is app.chat and app.chat.num_turns == 60)
        await until(pilot, "answer 59")


async def test_what_is_found_in_a_branch_that_is_not_shown_is_shown_from_then_on() -> None:
    session = keep("Foxes", "Where?")
    with opened() as history:
        history.append(session, session.head, "assistant", "The lantern one.")
        history.append(session, session.head, "assistant", "The other one.")
    async with listing(size=(140, 30)) as (app, pilot, _):
        await search(pilot, app, "lantern")
        await until(pilot, "does not show any more")
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is app.chat and texts(app)[-1:] == [("assistant", "The lantern one.")])
        await say(pilot, "Go on")
    with opened() as history:
        assert [text for _, text, _ in said(history, session)][:3] == ["Where?", "The lantern one.", "Go on"]


async def test_the_words_that_were_found_are_marked_and_escape_leaves_the_search_before_the_screen() -> None:
    keep("Foxes", "a")
    keep("Owls", "b")
    async with listing() as (app, pilot, _):
        await search(pilot, app, "fox")
        assert titles(app) == ["Foxes"]
        lines = app.screen._compositor.render_strips(app.size)
        assert [s.text for line in lines for s in line if s.style and s.style.underline and s.style.bold] == ["Fox"]
        await press(pilot, "escape", until=lambda: len(titles(app)) == 2)
        row = screen_of(app).chats.row
        assert row is not None and row.session.title == "Foxes"
        await press(pilot, "escape", until=on_chat(app))


async def test_a_wide_screen_has_a_preview_beside_the_list_and_a_narrow_one_on_a_key() -> None:
    keep("Foxes", "Where did it go?", "<think>hm</think>It went home.")
    for size, keys in (((140, 30), ()), ((80, 24), ("space",))):
        app = chat_app()
        async with running(app, size) as pilot:
            await enter(pilot, app)
            await press(pilot, *keys, until=lambda app=app: "It went home." in shown(app))  # type: ignore[misc]
            assert "hm" not in shown(app)
            if keys:
                await press(pilot, "escape", until=lambda app=app: screen_of(app).chats.has_focus)  # type: ignore[misc]


async def test_a_chat_is_renamed_from_its_old_title_and_keeps_the_new_one_when_it_goes_on() -> None:
    async with chatting(FakeService(["One.", "Two."]), asked="Hello") as (app, pilot):
        await enter(pilot, app)
        field = await line(pilot, app, "r")
        assert "▸ Hello" in shown(app) and field.value == "Hello"
        field.value = "  The   [red] fox "
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ChatsScreen) and titles(app) == ["The [red] fox"])
        await pilot.press("escape")
        await say(pilot, "Again")
        assert "The [red] fox" in shown(app)
    assert kept_titles() == ["The [red] fox"]


async def test_a_pin_lifts_a_chat_and_the_same_key_takes_it_away() -> None:
    for title in ("Foxes", "Owls", "Cats"):
        keep(title, "a")
    async with listing() as (app, pilot, _):
        await press(pilot, "end", "p", until=lambda: titles(app) == ["Foxes", "Cats", "Owls"])
        await press(pilot, "p", until=lambda: titles(app) == ["Cats", "Owls", "Foxes"])


async def test_deleted_chats_come_back_in_turn_as_they_were_also_after_the_screen_was_left() -> None:
    for title in ("Foxes", "Owls", "Cats"):
        session = keep(title, "question", "answer", "more")
        with opened() as history:
            history.append(session, session.head, "assistant", "first")
            history.append(session, session.head, "assistant", "second")
    with opened() as history:
        history.pin(history.find("Owls"), True)
    before = tables(history_file())
    async with listing() as (app, pilot, _):
        await press(pilot, "d", "d", until=lambda: kept_titles() == ["Foxes"])
        assert titles(app) == ["Foxes"]
        await press(pilot, "delete", until=lambda: kept_titles() == [])
        await until(pilot, "deleted: Foxes")
        await press(pilot, "u", until=lambda: titles(app) == ["Foxes"])
        await press(pilot, "escape", until=on_chat(app))
        await enter(pilot, app)
        await press(pilot, "u", "u", until=lambda: titles(app) == ["Owls", "Cats", "Foxes"])
        await press(pilot, "u", until="nothing was deleted")
    assert tables(history_file()) == before


async def test_a_chat_that_is_deleted_in_the_last_moment_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    keep("Foxes", "a")
    take_out, leaves = History.take_out, threading.Event()

    def take_out_late(history: History, session: Session) -> Any:
        assert leaves.wait(PATIENCE_S)
        return take_out(history, session)

    close = ChatApp.close

    def close_late(app: ChatApp, timeout_s: float) -> None:
        leaves.set()
        close(app, timeout_s)

    monkeypatch.setattr(History, "take_out", take_out_late)
    monkeypatch.setattr(ChatApp, "close", close_late)
    async with listing() as (_, pilot, _):
        await pilot.press("d")
    assert kept_titles() == []


async def test_the_open_chat_goes_on_unkept_when_it_is_deleted_and_is_kept_again_when_that_is_undone() -> None:
    async with chatting(FakeService(["One.", "Two.", "Three."]), asked="First") as (app, pilot):
        await enter(pilot, app)
        await press(pilot, "d", until=lambda: app.chat.session_id is None)
        await pilot.press("escape")
        await say(pilot, "Second")
        assert kept_titles() == []
        await enter(pilot, app)
        await press(pilot, "u", until=lambda: app.chat.session_id is not None)
        await press(pilot, "escape", until="this chat is saved again")
        await say(pilot, "Third")
    with opened() as history:
        ((session, _),) = history.sessions()
        assert [text for _, text, _ in said(history, session)] == ["First", "One.", "Second", "Two.", "Third", "Three."]


async def test_a_chat_is_written_as_markdown_or_json_named_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep("Wo ist der Fuchs? [../x]", "Where?", "Home.")
    async with listing() as (app, pilot, _):
        await line(pilot, app, "e")
        await pilot.press("enter")
        path = tmp_path / "wo-ist-der-fuchs-x.md"
        await until(pilot, lambda: path.exists() and "wrote" in shown(app))
        assert "Home." in path.read_text()
        await line(pilot, app, "e")
        await press(pilot, "ctrl+t", "enter", until=path.with_suffix(".json").exists)
        assert json.loads(path.with_suffix(".json").read_text())["sessions"][0]["title"].startswith("Wo ist")


async def test_a_file_is_overwritten_only_where_that_is_accepted_and_a_failure_is_told_of(tmp_path: Path) -> None:
    keep("Foxes", "Where?", "Home.")
    path = tmp_path / "mine.md"
    path.write_text("precious")
    async with listing() as (app, pilot, _):
        for answer, text in (("escape", "precious"), ("enter", "# Foxes")):
            await line(pilot, app, "e", str(path))
            await until(pilot, lambda: "already" in "".join(shown(app).split()))
            assert path.read_text() == "precious"
            await press(pilot, answer, until=lambda text=text: path.read_text().startswith(text))  # type: ignore[misc]
            await until(pilot, ChatsScreen)
        await line(pilot, app, "e", "~nobody-of-that-name/x.md")
        await until(pilot, lambda: "thereisno" in "".join(shown(app).split()) and "why:" in shown(app))


async def test_a_chat_that_another_process_deleted_goes_from_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep("Staying", "a")
    actions = [("enter",), ("p",), ("d",), ("e", "enter"), ("r", "x", "enter")]
    leaving = [keep(f"Leaving by {keys[0]}", "a") for keys in actions][::-1]
    async with listing() as (app, pilot, screen):
        for keys, session in zip(actions[::-1], leaving, strict=True):
            with opened() as history:
                history.remove([session])
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
            await until(pilot, lambda: screen.notice.error is not None)
            assert f"the chat {session.id} is not in the history any more" in shown(app)
            await until(pilot, lambda session=session: session.title not in titles(app))  # type: ignore[misc]
            await pilot.press("escape")
        assert titles(app) == ["Staying"] and not list(tmp_path.glob("*.md"))


async def test_a_chat_that_could_not_be_deleted_is_back_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    keep("Foxes", "a")

    def refused(*_: object) -> None:
        raise LockedError("the history is locked", why="another process holds it", fix="lsof")

    monkeypatch.setattr(History, "take_out", refused)
    async with listing() as (app, pilot, screen):
        await press(pilot, "d", until=lambda: screen.notice.error is not None and titles(app) == ["Foxes"])
        assert "the history is locked" in shown(app)


async def test_a_damaged_history_is_told_of() -> None:
    history_file().parent.mkdir(parents=True, exist_ok=True)
    history_file().write_bytes(b"no database at all, " * 500)
    async with chatting() as (_, pilot):
        await until(pilot, "the history was damaged")


async def test_while_an_answer_is_written_no_other_chat_is_opened() -> None:
    keep("Foxes", "Where?", "Home.")
    async with chatting(FakeService(["word " * 2000], pause_s=0.005)) as (app, pilot):
        await send(pilot, "Go on", until=lambda: app.chat.is_answering)
        await enter(pilot, app)
        await press(pilot, "end", "enter", until="an answer is being written")
        await pilot.press("n")
        assert isinstance(app.screen, ChatsScreen)
        app.worker.answers.stop()


async def test_the_mouse_chooses_opens_and_presses_keys() -> None:
    for title in ("Foxes", "Owls", "Cats"):
        keep(title, f"question of {title}", "answer")
    async with listing(size=(80, 24)) as (app, pilot, screen):
        await pilot.click(screen.chats, offset=(5, 1))
        assert screen.chats.cursor == 1
        bar = screen.query(KeyBar).last()
        await pilot.click(bar, offset=(shown(app).splitlines()[bar.region.y].index("pin"), 0))
        await until(pilot, lambda: titles(app)[0] == "Owls")
        await pilot.click(screen.chats, offset=(5, 2), times=2)
        await until(pilot, lambda: app.screen is app.chat and app.chat.num_turns == 2)
        assert texts(app)[0] == ("user", "question of Foxes")


async def test_a_preview_that_is_read_while_the_screen_is_removed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    keep("Owls")
    async with listing(size=(120, 30)) as (_, pilot, screen):

        async def read_until_the_list_is_gone(*_: Any) -> None:
            while screen.query(ChatList):
                await asyncio.sleep(0)

        monkeypatch.setattr(HistoryWorker, "excerpt", read_until_the_list_is_gone)
        screen._preview(screen.chats.rows[0])
        await pilot.pause()


async def test_what_is_listed_by_the_thousand_is_drawn_by_the_screenful(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as history, history.together():
        for number in range(600):
            history.begin(f"chat {number}", "tiny", None)
    async with listing(size=(80, 24)) as (_, pilot, screen):
        drawn = []
        line_of = screen.chats._line
        monkeypatch.setattr(screen.chats, "_line", lambda row, *rest: drawn.append(row) or line_of(row, *rest))
        await press(pilot, "end", until="chat 0 ")
        await press(pilot, "home", until="chat 599 ")
        assert 0 < len({row.key for row in drawn}) < 100


@pytest.mark.parametrize(
    ("elapsed_s", "shown_as"),
    [
        (5, "just now"),
        (60 * 59 + 59, "59 min ago"),
        (3600 * 23.9, "23 h ago"),
        (86400, "2026-03-09"),
        (-5, "2026-03-10"),
    ],
)
def test_when_is_told_as_how_long_ago_it_was_and_after_a_day_as_its_date(elapsed_s: float, shown_as: str) -> None:
    now = time.mktime((2026, 3, 10, 12, 0, 0, 0, 0, -1))
    assert format_ago(now - elapsed_s, now) == shown_as


@pytest.mark.parametrize(
    ("title", "name"),
    [("../../Etc/passwd", "etc-passwd"), ("Füchse & 灯笼?", "füchse-灯笼"), ("...", "chat"), ("x" * 80, "x" * 50)],
)
def test_a_file_is_named_after_a_title_and_stays_in_its_folder(title: str, name: str) -> None:
    assert proposed_name(title) == name

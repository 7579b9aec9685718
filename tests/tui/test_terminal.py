"""What a terminal sends: its background, pastes with escape sequences, keys of old protocols, many keys at once."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual._xterm_parser import XTermParser
from textual.keys import _character_to_key
from textual.message import Message
from textual.widgets import Input

from localllm.tui.app import ChatApp
from localllm.tui.messages import BackgroundReported
from localllm.tui.screens.chats import ChatsScreen
from localllm.tui.terminal import TerminalParser, TerminalWriter
from tests.patience import PATIENCE_S
from tests.thinning import every_other
from tests.tui.support import FakeService, assert_shown, chat_app, chatting, command, press, running, send, texts, until

CODE = """
import time
from localllm.tui import background as background_module
from localllm.tui.background import Background
background_module._PATIENCE_S = %r
background = Background()
time.sleep(0.05)
found = background.is_light({"COLORFGBG": %r})
background.restore()
print(repr(found))
"""
DARK, WHITE = b"\x1b]11;rgb:1c1c/1c1c/1c1c\x1b\\", b"\x1b]11;rgb:ffff/ffff/ff00\x07"
ATTRIBUTES = b"\x1b[?64;1;2c"


@pytest.mark.parametrize(
    ("answer", "colours", "found"),
    [
        (DARK + ATTRIBUTES, "0;15", "(False, '')"),
        (WHITE + ATTRIBUTES, "", "(True, '')"),
        (b"typed" + WHITE + b"\r" + ATTRIBUTES, "", "(True, 'typed\\n')"),
        (ATTRIBUTES, "0;15", "(True, '')"),
        (b"", "15;0", "(False, '')"),
    ],
)
def test_the_terminal_is_asked_and_what_is_typed_meanwhile_is_kept(answer: bytes, colours: str, found: str) -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", CODE % (PATIENCE_S if answer else 0.3, colours)],
        stdin=theirs,
        stdout=theirs,
        close_fds=True,
    )
    os.close(theirs)
    text = b""
    end = time.monotonic() + PATIENCE_S
    while b"\x1b[c" not in text:
        assert time.monotonic() < end
        text += os.read(ours, 1000)
    os.write(ours, answer)
    while b")" not in text:
        assert time.monotonic() < end
        text += os.read(ours, 1000)
    assert child.wait(PATIENCE_S) == 0 and found in text.decode()


def test_an_answer_that_comes_late_is_the_theme_and_stands_nowhere(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    colours = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    child = subprocess.Popen(
        [sys.executable, "-m", "localllm", "chat"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, **colours, "LOCALLLM_HOME": str(tmp_path)},
    )  # fmt: skip
    text = b""

    def wait_for(what: bytes) -> None:
        nonlocal text
        end = time.monotonic() + PATIENCE_S
        while what not in text:
            assert time.monotonic() < end, text[-500:]
            if select.select([ours], [], [], 0.1)[0]:
                text += os.read(ours, 1 << 16)

    wait_for(b"\x1b[c")
    time.sleep(0.35)  # longer than it is waited for
    os.write(ours, WHITE + ATTRIBUTES)
    wait_for(b"48;2;251;252;252")  # the background of the light theme
    wait_for(b"rite a message")
    os.write(ours, b"\x11")  # ctrl+q
    while child.poll() is None:
        if select.select([ours], [], [], 0.1)[0]:
            text += os.read(ours, 1 << 16)
    assert child.returncode == 0 and termios.tcgetattr(theirs) == before
    assert b"]11;rgb" not in text and b"^[" not in text


BEGIN, END = "\x1b[200~", "\x1b[201~"


def parsed(*chunks: str) -> list[Message]:
    parser = TerminalParser()
    return [message for chunk in chunks for message in list(parser.feed(chunk))]


def told(found: list[Message]) -> list[str]:
    return [f"paste {each.text}" if isinstance(each, events.Paste) else each.key for each in found]  # type: ignore[attr-defined]


@given(st.text(st.sampled_from("a\x1b[;m~\r\n201"), max_size=30), st.lists(st.integers(0, 50), max_size=5))
def test_a_paste_is_one_paste_however_it_comes(text: str, cuts: list[int]) -> None:
    text = text.replace(END, "")
    sent = f"x{BEGIN}{text}{END}y"
    at = sorted({1 + len(BEGIN) - 3, *(min(len(sent), len(BEGIN) + cut) for cut in cuts)})
    chunks = [sent[begin:end] for begin, end in zip([0, *at], [*at, len(sent)], strict=True)]
    pasted = "paste " + text.replace("\x1b", "\N{SYMBOL FOR ESCAPE}")
    assert told(parsed(*chunks)) == ["x", pasted, "y"]


@pytest.mark.parametrize(
    ("sent", "key"),
    [
        ("\x1b\r", "alt+enter"),
        ("\x1b[27;2;13~", "shift+enter"),
        ("\x1b[13;2u", "shift+enter"),
        ("\r", "enter"),
        ("\x1b[15~", "f5"),
        ("\x1b[2~", "insert"),
    ],
)
def test_keys_are_what_they_are_called(sent: str, key: str) -> None:
    assert told(parsed(sent)) == [key]


ANSWER = "\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62;22c"


@pytest.mark.parametrize("cut", range(2, len(ANSWER) + 1))
def test_an_answer_that_comes_late_is_no_key(cut: int) -> None:
    found = parsed("a" + ANSWER[:cut], ANSWER[cut:] + "b") if cut < len(ANSWER) else parsed(f"a{ANSWER}b")
    assert told([each for each in found if isinstance(each, events.Key)]) == ["a", "b"]
    (said,) = (each for each in found if not isinstance(each, events.Key))
    assert isinstance(said, BackgroundReported) and said.is_light


def pressed(parser: XTermParser, *chunks: str) -> list[Message]:
    """What comes in pieces, with a pause behind each."""
    found: list[Message] = []
    for chunk in chunks:
        found += parser.feed(chunk)
        for _ in range(4):
            time.sleep(0.1)
            found += parser.tick()
    return found


def typed(parser: XTermParser, *chunks: str) -> list[str]:
    return told(pressed(parser, *chunks))


@pytest.mark.parametrize("chunks", every_other(["\x1b]1 2", "\x07\x1b", "\x1b[? a", "\x1b\\\x1b"]))
def test_what_begins_as_an_answer_and_goes_on_as_none_is_keys(chunks: str) -> None:
    assert typed(TerminalParser(), *chunks.split()) == typed(XTermParser(), *chunks.split()) != []


def test_the_key_esc_behind_an_answer_is_the_key() -> None:
    answer = "\x1b]11;rgb:ffff/ffff/ffff\x07"
    said, *keys = pressed(TerminalParser(), answer + "\x1b")
    assert isinstance(said, BackgroundReported) and told(keys) == typed(XTermParser(), "\x1b")


def test_the_joiners_of_words_and_emoji_are_written() -> None:
    assert told(parsed("\u0645\u200cf\u200d")) == ["\u0645", "paste \u200c", "f", "paste \u200d"]


class GoneTerminal(io.StringIO):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def write(self, text: str) -> int:
        self._fail("write")
        return len(text)

    def flush(self) -> None:
        self._fail("flush")

    def _fail(self, where: str) -> None:
        if where == self._where:
            raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("where", ["write", "flush"])
def test_what_is_written_to_a_terminal_that_is_gone_holds_nobody_up(where: str) -> None:
    writer = TerminalWriter(GoneTerminal(where))
    writer.start()

    def write_and_stop() -> None:
        for _ in range(100):
            writer.write("a picture")
        writer.stop()

    writing = threading.Thread(target=write_and_stop, daemon=True)
    writing.start()
    writing.join(PATIENCE_S)
    assert not writing.is_alive()


async def test_the_theme_follows_a_terminal_that_answers_late_unless_another_was_chosen() -> None:
    async with chatting(follows_terminal=True) as (app, pilot):
        app.post_message(BackgroundReported(is_light=True))
        await until(pilot, lambda: app.theme == "localllm-light")
        app.chat.take_command("/theme nord")
        app.post_message(BackgroundReported(is_light=False))
        await pilot.pause()
        assert app.theme == "nord"
        await command(pilot, "/theme auto", until=lambda: app.theme == "localllm-dark")
        await command(pilot, "/theme light", until=lambda: app.theme == "localllm-light")
        assert_shown(app, "`localllm config set theme light` keeps it")
    async with chatting(theme="nord") as (app, pilot):
        app.post_message(BackgroundReported(is_light=True))
        await pilot.pause()
        assert app.theme == "nord"


async def press_at_once(app: ChatApp, *keys: str) -> None:
    for key in keys:
        character = key if len(key) == 1 else None
        app.post_message(events.Key(_character_to_key(key) if character else key, character))


@pytest.mark.usefixtures("home")
async def test_keys_that_come_at_once_act_in_their_order() -> None:
    async with chatting(FakeService(["A"])) as (app, pilot):
        await press_at_once(app, *"hello", "enter", *"wor", "ctrl+j", *"ld")
        await until(pilot, lambda: app.chat.num_turns == 2)
        assert texts(app)[0] == ("user", "hello") and app.chat.composer.text == "wor\nld"


@pytest.mark.usefixtures("home")
async def test_what_is_pressed_while_the_program_ends_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = ChatApp._close_all

    async def close_and_press(app: ChatApp) -> None:
        await closed(app)
        await press_at_once(app, "a", "enter")
        app.post_message(events.Paste("b"))
        app.post_message(events.MouseMove(None, 1, 1, 0, 0, 0, False, False, False))
        await asyncio.sleep(0.05)

    monkeypatch.setattr(ChatApp, "_close_all", close_and_press)
    async with running(chat_app()) as pilot:
        await pilot.pause()


@pytest.mark.usefixtures("home")
async def test_letters_behind_a_key_that_opens_a_field_are_written_there() -> None:
    async with chatting() as (app, pilot):
        await press_at_once(app, "f4", "slash", *"duck")
        await until(pilot, lambda: isinstance(app.screen, ChatsScreen) and app.screen.query_one(Input).value == "duck")


@pytest.mark.usefixtures("home")
async def test_a_key_whose_widget_goes_away_holds_no_other_up() -> None:
    async with chatting() as (app, pilot):
        await press_at_once(app, "f1", "escape", "f4", "escape", *"ab")
        await until(pilot, lambda: app.chat.composer.text == "ab")


@pytest.mark.usefixtures("home")
async def test_what_is_typed_before_the_beginning_stands_behind_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ChatApp._begin

    def begin_late(app: ChatApp) -> None:
        app.set_timer(0.2, lambda: begin(app))

    monkeypatch.setattr(ChatApp, "_begin", begin_late)
    async with chatting(draft="dra") as (app, pilot):
        await press(pilot, "f", "t", until=lambda: app.chat.status.facts is not None)
        assert app.chat.composer.text == "draft"


@pytest.mark.usefixtures("home")
async def test_what_is_asked_before_the_conversation_has_begun_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ChatApp._begin
    monkeypatch.setattr(ChatApp, "_begin", lambda _: None)
    async with chatting(FakeService(["A"])) as (app, pilot):
        await send(pilot, "early")
        await pilot.pause(0.2)
        begin(app)
        await until(pilot, lambda: texts(app) == [("user", "early"), ("assistant", "A")])
        assert app.chat.notice.error is None

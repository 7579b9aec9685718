"""A real session in a real terminal: typed into tmux, read off its screen. A process of its own for each start."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.errors import HistoryError
from localllm.history import History
from tests.cli_support import write_checkpoint
from tests.history_support import said
from tests.patience import PATIENCE_S, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")]


class Tmux:
    """A terminal of 100 x 30 with a shell, whose programs have a home folder of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._socket = home / "tmux"
        shell = ["env", f"LOCALLLM_HOME={home}", f"HF_HOME={home / 'hf'}", "PS1=$ ", "bash", "--norc"]
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", *shell)

    def _tmux(self, *arguments: str) -> str:
        line = ["tmux", "-S", str(self._socket), *arguments]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout

    @property
    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def paste(self, text: str) -> None:
        self._tmux("set-buffer", text)
        self._tmux("paste-buffer", "-p", "-r")

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def until(self, condition: Callable[[str], object]) -> str:
        end = time.monotonic() + PATIENCE_S
        while not condition(screen := self.screen):
            assert time.monotonic() < end, screen
            time.sleep(0.05)
        return screen

    def until_shown(self, pattern: str) -> str:
        return self.until(lambda screen: re.search(pattern, screen))

    def start(self, *arguments: str) -> None:
        """Begins `localllm chat` and waits for its model."""
        self.type(f"clear; {sys.executable} -m localllm chat {' '.join(arguments)}; echo left with $?\n")
        self.until_shown(r"tiny (int4|bf16)\S*")

    def send(self, text: str) -> None:
        """A line into the composer."""
        self.type(text)
        self.press("Enter")

    def ask(self, text: str) -> None:
        """Asks, and waits for the end of the answer."""
        before = self._num_whole()
        self.send(text)
        wait_for(lambda: self._num_whole() > before)
        self.until(lambda screen: "tok/s" in screen and "cached" in screen and "esc stop" not in screen)

    def _num_whole(self) -> int:
        """Answers that are kept whole."""
        try:
            told = [message for chat in kept(self.home) for message in chat]
        except HistoryError:  # it is not there yet, or is being made
            return 0
        return sum((role, state) == ("assistant", "complete") for role, _, state in told)

    def leave(self) -> str:
        self.press("C-q")
        return self.until_shown(r"left with \d+")

    def pid(self) -> int:
        """Of the chat."""
        shell = self._tmux("list-panes", "-F", "#{pane_pid}").strip()
        return int(subprocess.run(["pgrep", "-P", shell], check=True, capture_output=True, text=True).stdout.split()[0])

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], check=False, capture_output=True)


@pytest.fixture
def tmux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tmux]:
    terminal = Tmux(tmp_path_factory.mktemp("t"))
    yield terminal
    terminal.close()


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says some hundred tokens a second, and anything but the end of its answer."""
    return write_checkpoint(tmp_path_factory.mktemp("m"), hidden=256, layers=8, context=16384)


def kept(home: Path) -> list[list[tuple[str, str, str]]]:
    """(role, content, state) of what each chat shows, the latest chat first."""
    with History.peek(home / "data" / "conversations.db") as history:
        return [said(history, session) for session, _ in history.sessions()]


def test_a_session_from_the_first_word_to_the_resumed_chat(tmux: Tmux, endless: Path) -> None:
    tmux.start()
    tmux.ask("A tale about a fox, please.")
    tmux.ask("And then?")
    first = kept(tmux.home)[0]
    assert [role for role, _, _ in first] == ["user", "assistant"] * 2 and all(text for _, text, _ in first)

    tmux.send(f"/model {endless}")
    tmux.until_shown(endless.name + r"\S* (int4|bf16)")
    tmux.send("A very long tale about an owl, please.")
    tmux.until_shown("esc stop")
    tmux.until(lambda _: len(kept(tmux.home)[0]) == 6)
    tmux.press("Escape")
    tmux.until_shown("stopped: F6 goes on")

    tmux.press("C-Up", "C-Up")
    tmux.press("e")
    tmux.until_shown("written anew")
    tmux.press("C-u")
    tmux.send("A tale about a bear, please.")
    tmux.until(lambda _: kept(tmux.home)[0][4][1] == "A tale about a bear, please.")
    tmux.until(lambda _: len(kept(tmux.home)[0]) == 6)
    tmux.press("C-c")
    tmux.until_shown("stopped: F6 goes on")

    tmux.send("/fork")
    tmux.until(lambda _: len(kept(tmux.home)) == 2)
    tmux.send("/model tiny")
    tmux.until_shown(r"tiny (int4|bf16)")
    tmux.ask("And then?")
    assert [len(chat) for chat in kept(tmux.home)] == [8, 6]

    tmux.press("F4")
    tmux.until_shown("A tale about a fox")
    tmux.type("/")
    tmux.type("bear")
    tmux.until_shown("bear, please")
    tmux.press("Escape")
    tmux.press("Escape")
    tmux.until_shown("rite a message")
    before = kept(tmux.home)[0]
    screen = tmux.leave()
    assert "left with 0" in screen and "Traceback" not in screen
    name = re.search(r"chat --resume (\S+) goes on", screen)
    assert name is not None

    tmux.start("--resume", name[1])
    tmux.until_shown("And then")
    tmux.ask("Once more?")
    cached = re.search(r"([\d,]+) of ([\d,]+) cached", tmux.screen)
    assert cached is not None
    found, total = (int(number.replace(",", "")) for number in cached.groups())
    assert found >= total - 192  # whole pages of 64 of all that was said before
    assert kept(tmux.home)[0][:8] == before
    tmux.leave()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_amidst_an_answer_costs_at_most_its_last_sentence(tmux: Tmux, number: signal.Signals) -> None:
    tmux.start()
    tmux.send("A tale about a fox, please.")
    # The welcome has sentences of its own.
    seen = tmux.until(lambda screen: "Try: " not in screen and screen.count(". ") + screen.count(".\n") > 4)
    os.kill(tmux.pid(), number)
    tmux.until_shown(r"left with \d+|\$ $|Killed|Hangup")
    (chat,) = kept(tmux.home)
    assert chat[0] == ("user", "A tale about a fox, please.", "complete")
    assert chat[1][2] != "complete" or number != signal.SIGKILL
    shown = [line.strip(" ▌\n") for line in seen.splitlines()]
    answer = " ".join(shown[shown.index("A tale about a fox, please.") + 1 :]).split("╭")[0]
    whole = " ".join(answer.split()).rpartition(". ")[0]
    assert whole[:-40] in " ".join(chat[1][1].split())
    tmux.press("Enter")
    tmux.start("--resume")
    tmux.until_shown("A tale about a fox, please.")
    tmux.leave()


@pytest.mark.parametrize("flags", [(), ("--inline",)], ids=["full", "inline"])
def test_a_paste_with_keys_in_it_is_text(tmux: Tmux, flags: tuple[str, ...]) -> None:
    tmux.start(*flags)
    tmux.paste("one \x1b[A\x1b[13u\r two\nthree")
    tmux.until_shown("three")
    tmux.type(" four")
    tmux.press("M-Enter")
    tmux.type("five")
    screen = tmux.until_shown("five")
    assert "two" in screen and "four" in screen and "\u241b" in screen
    assert not (tmux.home / "data" / "conversations.db").exists() or not kept(tmux.home)
    tmux.leave()


def test_inline_the_lines_above_stay(tmux: Tmux) -> None:
    tmux.type("echo above\n")
    tmux.type(f"{sys.executable} -m localllm chat --inline; echo left with $?\n")
    screen = tmux.until_shown(r"tiny (int4|bf16)\S*")
    assert "above" in screen
    tmux.ask("A tale, please.")
    tmux.leave()

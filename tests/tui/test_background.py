"""What the terminal says of its background, when it does, and what is typed meanwhile."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

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
    assert child.wait(PATIENCE_S) == 0
    assert found in text.decode()


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
    wait_for(b"48;2;224;224;224")  # the background of `textual-light`
    wait_for(b"rite a message")
    os.write(ours, b"\x11")  # ctrl+q
    while child.poll() is None:
        if select.select([ours], [], [], 0.1)[0]:
            text += os.read(ours, 1 << 16)
    assert child.returncode == 0 and termios.tcgetattr(theirs) == before
    assert b"]11;rgb" not in text and b"^[" not in text

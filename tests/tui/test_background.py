"""What the terminal says of its background, and what is typed meanwhile."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

CODE = """
import time
from localllm.tui.background import Background
background = Background()
time.sleep(0.2)
print(repr(background.is_light({"COLORFGBG": %r})))
"""
DARK, WHITE = b"\x1b]11;rgb:1c1c/1c1c/1c1c\x1b\\", b"\x1b]11;rgb:ffff/ffff/ff00\x07"
ATTRIBUTES = b"\x1b[?64;1;2c"


@pytest.mark.parametrize(
    ("answer", "colours", "found"),
    [
        (DARK + ATTRIBUTES, "", "(False, '')"),
        (WHITE + ATTRIBUTES, "", "(True, '')"),
        (b"typed" + WHITE + b"\r" + ATTRIBUTES, "", "(True, 'typed\\n')"),
        (ATTRIBUTES, "0;15", "(True, '')"),
        (b"", "15;0", "(False, '')"),
    ],
)
def test_the_terminal_is_asked_and_what_is_typed_meanwhile_is_kept(answer: bytes, colours: str, found: str) -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", CODE % colours], stdin=theirs, stdout=theirs, close_fds=True)
    os.close(theirs)
    text = b""
    end = time.monotonic() + 20
    while b"\x1b[c" not in text:
        assert time.monotonic() < end
        text += os.read(ours, 1000)
    os.write(ours, answer)
    while b")" not in text:
        assert time.monotonic() < end
        text += os.read(ours, 1000)
    assert child.wait(10) == 0
    assert found in text.decode()

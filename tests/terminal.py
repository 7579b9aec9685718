"""A process on a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import termios
import time
from collections.abc import Callable
from pathlib import Path

from tests.cli_support import fork_cli, start_cli
from tests.patience import PATIENCE_S


def _take_terminal() -> None:
    """In the child: the terminal on stdin becomes its own, so that a typed Ctrl-C is a signal to it."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A process on a terminal of its own, and what it has written there so far."""

    def __init__(self, home: Path, *arguments: str | Path, fresh: bool = False, **variables: str) -> None:
        """fresh: by an interpreter of its own, not in a fork of this one."""
        self._ours, theirs = pty.openpty()
        self.mode = termios.tcgetattr(theirs)
        start, streams = start_cli if fresh else fork_cli, dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = start(home, *arguments, variables=variables, preexec_fn=_take_terminal, **streams)
        self._theirs = theirs  # kept open: the mode is read after the process has gone
        self.text = b""

    def wait_for(self, pattern: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not re.search(pattern.encode(), self.text):
            assert time.monotonic() < end, f"no {pattern!r} in {self.text[-600:]!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.text += os.read(self._ours, 65536)

    def wait_for_prompt(self) -> None:
        self.wait_for(">>> $")

    def send(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def say(self, line: str, reply: str = "") -> None:
        """A line at the prompt, what comes back, and the next prompt."""
        self.send(f"{line}\n")
        self.wait_for(reply)
        self.wait_for_prompt()

    def press_ctrl_c(self) -> None:
        """As a person does it: through the terminal, and not within the millisecond in which the prompt appears."""
        time.sleep(0.5)
        self.send("\x03")

    def forget(self) -> None:
        self.text = b""

    def end(self) -> int:
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self._ours], [], [], 0.02)[0]:
                self.text += os.read(self._ours, 65536)
        code = self.process.wait(timeout=0.1)
        while select.select([self._ours], [], [], 0.1)[0]:
            self.text += os.read(self._ours, 65536)
        return code

    def is_restored(self) -> bool:
        return termios.tcgetattr(self._theirs) == self.mode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


Open = Callable[..., Terminal]

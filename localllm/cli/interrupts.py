"""SIGINT, SIGTERM and SIGHUP: the first one stops an answer or leaves, the second leaves at once, in every phase.

Knows signals, threads and the terminal's mode. Knows nothing of what is being interrupted.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

GRACE_S = 1.5  # between the first press and leaving by force, where the main thread does not react
_LOOK_S = 0.05
_SAME_PRESS_S = 0.25  # the handler and the watcher see one press at slightly different times
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HANGUP = () if sys.platform == "win32" else (signal.SIGHUP,)  # the terminal was closed


class Interrupted(KeyboardInterrupt):
    """The user, or the system, wants this command to end. `exit_code`: 128 and the signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Interrupts:
    """The current effect of a signal.

    Outside `stopping` the first signal raises Interrupted in the main thread; inside, it calls back and the work goes
    on to its own end. A watcher thread, woken by the interpreter's C handler, ends the process where the main thread
    sits in a call that does not return: a name look-up, a library that is being loaded.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None  # of the last signal; None: none came
        self.farewell = ""  # what leaving by force still says
        self.terminal_reset = ""  # and writes first, to leave a full screen
        self._stop: Callable[[], None] | None = None
        self._stop_called = False
        self._unsettled = False  # Interrupted was raised, and nobody has said that it was dealt with
        self._handled_at = 0.0
        self._is_elsewhere = False
        self._terminal_mode = _terminal_mode()

    def install(self) -> None:
        """Takes them over, but for a SIGHUP that `nohup` has turned off. Call it first, and on the main thread."""
        for number in (*_SIGNALS, *(each for each in _HANGUP if signal.getsignal(each) is not signal.SIG_IGN)):
            signal.signal(number, self._on_signal)
        if sys.platform == "win32":
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="interrupts", daemon=True).start()

    @contextlib.contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """While it lasts, the first signal calls `stop` (in a signal handler: it must not block) and raises nothing."""
        self._stop_called = False
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """While it lasts, Ctrl-C is meant for another program on this terminal."""
        self._is_elsewhere = True
        try:
            yield
        finally:
            self._is_elsewhere = False

    def settle(self) -> None:
        """The signals so far are dealt with: the next is a first one again."""
        self._unsettled = False

    def leave(self) -> NoReturn:
        """Ends the process at once, with the terminal as it was found."""
        _restore(self._terminal_mode)
        said = self.terminal_reset + (f"\n{self.farewell}\n" if self.farewell else "")
        if said:
            with contextlib.suppress(OSError):
                os.write(2, said.encode())
        os._exit(self.exit_code or 130)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._handled_at = time.monotonic()
        if self._is_elsewhere and number == signal.SIGINT:
            return
        self.exit_code = 128 + number
        if self._unsettled or (self._stop is not None and self._stop_called):
            self.leave()
        if self._stop is not None:
            self._stop_called = True
            self._stop()
            return
        self._unsettled = True
        raise Interrupted(self.exit_code)

    def _watch(self, reader: int) -> None:
        while True:
            number = _next_signal(reader, None)
            if number is None:
                continue
            pressed_at, looks = time.monotonic(), 0
            while self._is_open(pressed_at):
                again, looks = _next_signal(reader, _LOOK_S), looks + 1
                # Counted in looks: where this process gets no turn, the main thread gets none either.
                if again is not None or looks * _LOOK_S > GRACE_S:
                    self.exit_code = 128 + number
                    self.leave()

    def _is_open(self, pressed_at: float) -> bool:
        """Whether the main thread has not come to its handler, or has raised and is not done with what follows."""
        return self._handled_at < pressed_at - _SAME_PRESS_S or (self._unsettled and self._stop is None)


def _next_signal(reader: int, timeout_s: float | None) -> int | None:
    if not select.select([reader], [], [], timeout_s)[0]:
        return None
    numbers = [byte for byte in os.read(reader, 64) if byte in _SIGNALS + _HANGUP]
    return numbers[-1] if numbers else None


def _terminal_mode() -> tuple[int, list[Any]] | None:
    try:
        import termios
    except ImportError:
        return None
    try:
        descriptor = sys.stdin.fileno()
        return descriptor, termios.tcgetattr(descriptor)
    except (AttributeError, OSError, ValueError, termios.error):
        return None


def _restore(mode: tuple[int, list[Any]] | None) -> None:
    if mode is None:
        return
    import termios

    with contextlib.suppress(termios.error, OSError):
        termios.tcsetattr(mode[0], termios.TCSANOW, mode[1])

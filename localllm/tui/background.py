"""The background colour of the terminal, dark or light, by OSC 11 and a query that every terminal answers.

Imports no textual: the query is on its way while that is imported.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

_QUESTION = b"\x1b]11;?\x1b\\\x1b[c"
_PART = "([0-9a-fA-F]{1,4})"
_COLOUR = re.compile(rf"\x1b\]11;rgba?:{_PART}/{_PART}/{_PART}[^\x07\x1b]*(?:\x07|\x1b\\)")
_ATTRIBUTES = re.compile(r"\x1b\[\?[0-9;]*c")
_BEGUN = re.compile(r"(?:\x1b\](?:1(?:1(?:;[^\x07\x1b]{0,40}\x1b?)?)?)?|\x1b\[\?[0-9;]{0,40})\Z")
_BETWEEN = re.compile(_COLOUR.pattern + r"(\x1b\[?)\Z")  # alone, an ESC is the key
# Since it was asked: what textual's import takes. A slower answer, over ssh, is met by `terminal.TerminalParser`.
_PATIENCE_S = 0.3
_REST_S = 0.2  # for the rest of an answer that has begun
_LIGHT = 0.5  # of the brightness of white


class Background:
    """Asks when it is made; slow work can be done before the answer is read. Until `restore` the terminal echoes
    nothing: an answer may come at any time."""

    def __init__(self, *, asks: bool = True) -> None:
        self._asked_at = time.monotonic()
        self._mode = _asked() if asks else None

    def restore(self) -> None:
        if self._mode is not None:
            import termios

            with suppress(termios.error):
                termios.tcsetattr(self._mode[0], termios.TCSANOW, self._mode[1])

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Lend the terminal in its old mode to another program."""
        self.restore()
        try:
            yield
        finally:
            if self._mode is not None:
                _listen(self._mode[0])

    def is_light(self, environ: Mapping[str, str] = os.environ) -> tuple[bool, str]:
        """Return whether it is light (False until the terminal has answered), and what was typed meanwhile."""
        answer = b""
        if self._mode is not None:
            with suppress(OSError):
                answer = _read(self._mode[0], self._asked_at + _PATIENCE_S)
        found, typed = without_answers(answer.decode(errors="ignore"))
        lines = typed.replace("\r", "\n")
        kept = "".join(character for character in lines if character.isprintable() or character == "\n")
        return environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15") if found is None else found, kept


def without_answers(text: str) -> tuple[bool | None, str]:
    """Return whether an answer in the text reports a light background (None without one), and the rest of the text."""
    rest = _ATTRIBUTES.sub("", _COLOUR.sub("", text))
    if (found := _COLOUR.search(text)) is None:
        return None, rest
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > _LIGHT, rest


def begun_answer(text: str) -> int:
    """The number of characters at the text's end that may begin an answer."""
    if (found := _BETWEEN.search(text)) is not None:
        return len(found.groups()[-1])
    found = _BEGUN.search(text)
    return 0 if found is None else len(found[0])


def _asked() -> tuple[int, list[Any]] | None:
    """Write the query. Returns the descriptor and the mode of the terminal, None where there is none."""
    try:
        import termios
    except ImportError:
        return None
    try:
        descriptor = sys.stdin.fileno()
        if not (os.isatty(descriptor) and os.isatty(1)):
            return None
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):
        return None
    _listen(descriptor)
    with suppress(OSError):  # it is gone
        os.write(1, _QUESTION)
    return descriptor, before


def _listen(descriptor: int) -> None:
    """Read each character as it comes, and echo none."""
    import termios
    import tty

    with suppress(termios.error):  # it is gone
        tty.setcbreak(descriptor, termios.TCSANOW)


def _read(descriptor: int, deadline: float) -> bytes:
    answer = b""
    while not _ATTRIBUTES.search(answer.decode(errors="ignore")):
        end = deadline + (_REST_S if b"\x1b" in answer else 0.0)
        if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            break
        if not (piece := os.read(descriptor, 1024)):  # hung up
            break
        answer += piece
    return answer

"""Whether the terminal is dark or light: asked of itself by OSC 11, and a question that every terminal answers."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Mapping
from typing import Any

_QUESTION = b"\x1b]11;?\x1b\\\x1b[c"
_PART = rb"([0-9a-fA-F]{1,4})"
_COLOUR = re.compile(rb"\x1b\]11;rgba?:%b/%b/%b[^\x07\x1b]*(?:\x07|\x1b\\)" % (_PART, _PART, _PART))
_ATTRIBUTES = re.compile(rb"\x1b\[\?[0-9;]*c")
# Since it was asked. Every terminal answers the second question, over ssh after a while; what came later would
# be taken for keys that were pressed.
_PATIENCE_S = 1.0
_LIGHT = 0.5  # of the brightness of white


class Background:
    """Asks when it is made; what takes time can be done before the answer is read."""

    def __init__(self) -> None:
        self._asked_at = time.monotonic()
        self._mode = _asked()

    def is_light(self, environ: Mapping[str, str] = os.environ) -> tuple[bool, str]:
        """Whether it is light, False where the terminal does not say; and what was typed meanwhile."""
        answer = self._answer()
        typed = _ATTRIBUTES.sub(b"", _COLOUR.sub(b"", answer))
        lines = typed.decode(errors="ignore").replace("\r", "\n")
        kept = "".join(character for character in lines if character.isprintable() or character == "\n")
        if (found := _COLOUR.search(answer)) is not None:
            red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
            return 0.2126 * red + 0.7152 * green + 0.0722 * blue > _LIGHT, kept
        background = environ.get("COLORFGBG", "").rpartition(";")[2]
        return background in ("7", "15"), kept

    def _answer(self) -> bytes:
        if self._mode is None:
            return b""
        import termios

        descriptor, before = self._mode
        try:
            return _read(descriptor, self._asked_at + _PATIENCE_S)
        except OSError:
            return b""
        finally:
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _asked() -> tuple[int, list[Any]] | None:
    """Writes the question; the descriptor and the mode in which the terminal was, None where there is no terminal."""
    try:
        import termios
        import tty
    except ImportError:
        return None
    try:
        descriptor = sys.stdin.fileno()
        if not (os.isatty(descriptor) and os.isatty(1)):
            return None
        before = termios.tcgetattr(descriptor)
        tty.setcbreak(descriptor, termios.TCSANOW)
        os.write(1, _QUESTION)
    except (OSError, ValueError, AttributeError, termios.error):
        return None
    return descriptor, before


def _read(descriptor: int, deadline: float) -> bytes:
    answer = b""
    while not _ATTRIBUTES.search(answer):
        rest_s = deadline - time.monotonic()
        if not select.select([descriptor], [], [], max(0.0, rest_s))[0]:
            break
        answer += os.read(descriptor, 1024)
    return answer

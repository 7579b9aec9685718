"""Whether the terminal is dark or light: asked of itself by OSC 11, and a question that every terminal answers."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Mapping

_QUESTION = b"\x1b]11;?\x1b\\\x1b[c"
_COLOUR = re.compile(
    rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})[^\x07\x1b]*(?:\x07|\x1b\\)"
)
_ATTRIBUTES = re.compile(rb"\x1b\[\?[0-9;]*c")
_PATIENCE_S = 0.15  # over ssh; one that knows neither question costs as much at each start
_LIGHT = 0.5  # of the brightness of white


def is_light(environ: Mapping[str, str] = os.environ) -> tuple[bool, str]:
    """Whether its background is light, False where it does not say; and what was typed meanwhile."""
    answer = _asked()
    typed = _ATTRIBUTES.sub(b"", _COLOUR.sub(b"", answer))
    kept = "".join(character for character in typed.decode(errors="ignore") if character.isprintable())
    if (found := _COLOUR.search(answer)) is not None:
        red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue > _LIGHT, kept
    background = environ.get("COLORFGBG", "").rpartition(";")[2]
    return background in ("7", "15"), kept


def _asked() -> bytes:
    """What the terminal says; b"" where there is none."""
    try:
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        if not (os.isatty(descriptor) and os.isatty(1)):
            return b""
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, AttributeError):
        return b""
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        os.write(1, _QUESTION)
        return _read(descriptor)
    except (OSError, termios.error):
        return b""
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _read(descriptor: int) -> bytes:
    answer, end = b"", time.monotonic() + _PATIENCE_S
    while not _ATTRIBUTES.search(answer):
        rest_s = end - time.monotonic()
        if rest_s <= 0 or not select.select([descriptor], [], [], rest_s)[0]:
            break
        answer += os.read(descriptor, 1024)
    return answer

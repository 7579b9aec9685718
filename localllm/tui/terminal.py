"""Corrections of Textual's terminal: a paste is one paste, whatever escape sequences are in it, a late answer is no
key, and output to a terminal that is gone is dropped."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import IO, cast

from textual import events
from textual._xterm_parser import XTermParser
from textual.drivers._writer_thread import WriterThread
from textual.message import Message

from localllm.tui.background import begun_answer, without_answers
from localllm.tui.messages import BackgroundReported

_BEGIN, _END = "\x1b[200~", "\x1b[201~"
_HELD_S = 0.2  # for the rest of an answer
_LEAST = 3  # characters of `_BEGIN` that are waited behind: fewer may be the key esc
_JOINERS = frozenset("\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}")
_SIGN = "\N{SYMBOL FOR ESCAPE}"
# As terminals without the newer protocol send them: alt+enter, and shift+enter by xterm's modifyOtherKeys.
_KEYS = {"\x1b\r": "\x1b[13;3u", "\x1b[27;2;13~": "\x1b[13;2u", "\x1b[27;3;13~": "\x1b[13;3u"}


class TerminalParser(XTermParser):
    """Textual's own parser takes what follows an ESC in a paste for keys, an enter among them."""

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._is_pasted = False
        self._held = ""  # the beginning of what may begin or end a paste, or be an answer
        self._held_at = 0.0
        self._may_be_answer = False
        self._is_light: bool | None = None  # as an answer among what was read last says

    def feed(self, data: str) -> Iterable[Message]:
        """Parse text as the base class does; "" is the end."""
        text = "".join(self._cleaned(self._held + data)) if data else self._held
        if self._is_light is not None:
            yield BackgroundReported(self._is_light)
        if text or not data:
            yield from _written(super().feed(text))

    def tick(self) -> Iterable[Message]:
        """Treat held text that did not go on as an answer as keys; called ten times a second."""
        if self._may_be_answer and self._held and time.monotonic() - self._held_at >= _HELD_S:
            held, self._held = self._held, ""
            yield from _written(super().feed(held))
        yield from super().tick()

    def _cleaned(self, data: str) -> Iterator[str]:
        self._held, self._is_light = "", None
        while data:
            mark = _END if self._is_pasted else _BEGIN
            before, found, data = data.partition(mark)
            if not found:
                held = _overlap(before, mark, 1 if self._is_pasted else _LEAST)
                self._may_be_answer = not (held or self._is_pasted)
                held = begun_answer(before) if self._may_be_answer else held
                before, self._held = before[: len(before) - held], before[len(before) - held :]
                self._held_at = time.monotonic()
            yield before.replace("\x1b", _SIGN) if self._is_pasted else self._known(before)
            yield found
            self._is_pasted ^= bool(found)

    def _known(self, text: str) -> str:
        is_light, text = without_answers(text)
        self._is_light = self._is_light if is_light is None else is_light
        for sent, meant in _KEYS.items():
            text = text.replace(sent, meant)
        return text


def _overlap(text: str, mark: str, least: int) -> int:
    """The number of characters at the text's end that begin the mark; 0 where they are fewer than `least`."""
    return next((count for count in range(len(mark) - 1, least - 1, -1) if text.endswith(mark[:count])), 0)


def _written(messages: Iterable[Message]) -> Iterator[Message]:
    """Joiners become pastes: Textual's fields drop what is not printable, but these belong to words and emoji."""
    for message in messages:
        if isinstance(message, events.Key) and message.character in _JOINERS:
            yield events.Paste(message.character)
        else:
            yield message


class TerminalWriter(WriterThread):
    """Textual's own writer ends with a terminal that is gone, and whoever writes then waits for ever."""

    def __init__(self, file: IO[str]) -> None:
        with suppress(OSError, ValueError):
            os.set_blocking(file.fileno(), True)  # else what another program left so is taken for gone
        super().__init__(cast(IO[str], _Lasting(file)))


class _Lasting:
    """A file that drops what is written once it is gone."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._is_gone = False

    def write(self, text: str) -> None:
        self._do(lambda: self._file.write(text))

    def flush(self) -> None:
        self._do(self._file.flush)

    def _do(self, what: Callable[[], object]) -> None:
        try:
            if not self._is_gone:
                what()
        except OSError:
            self._is_gone = True


def as_meant() -> None:
    """Replace the parser and the writer that Textual's drivers make."""
    if sys.platform != "win32":
        from textual.drivers import linux_driver, linux_inline_driver

        linux_driver.XTermParser = linux_inline_driver.XTermParser = TerminalParser  # type: ignore[attr-defined]
        linux_driver.WriterThread = TerminalWriter  # type: ignore[attr-defined]

"""Reads what a person types, or a pipe sends, message by message: history, continued lines, blocks in triple quotes."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import ModuleType

from localllm.cli.output import Output

_HISTORY_LINES = 2000
_FENCE = '"""'
_CONTINUED = "... "


class LineReader:
    """Lines of standard input; with editing and history where both ends are a terminal."""

    def __init__(self, output: Output, history: Path) -> None:
        self._output = output
        self._history = history
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        # Loaded only here: on a stream that is no terminal, readline's start-up writes escape codes into it.
        self._readline = _load_readline(history) if self.interactive and output.stdout_is_terminal else None
        self._continued = False  # the line that was asked for last belongs to a message begun before it

    def message(self) -> str | None:
        '''The next message, or None at the end of input: a line, lines that end in a backslash, or a block in """.'''
        line = self.line(">>> ")
        if line is None:
            return None
        if line.lstrip().startswith(_FENCE):
            return self._block(line.lstrip().removeprefix(_FENCE))
        while line.endswith("\\"):
            following = self.line(_CONTINUED)
            if following is None:
                return line.removesuffix("\\")
            line = line.removesuffix("\\") + "\n" + following
        return line

    def line(self, prompt: str) -> str | None:
        """One line without its newline, or None at the end of input. Raises Interrupted."""
        self._continued = prompt == _CONTINUED
        if self._readline is not None:
            try:
                return input(prompt)
            except EOFError:
                self._output.line()
                return None
        if self.interactive:
            self._output.prompt(prompt)
        text = sys.stdin.readline() if sys.stdin is not None else ""
        return text.removesuffix("\n") if text else None

    def has_begun(self) -> bool:
        """Return whether a message had been begun when Interrupted came: then that was meant for it."""
        return self._continued or (self._readline is not None and bool(self._readline.get_line_buffer()))

    def save_history(self) -> None:
        """Writes what was typed to the history file, readable by its owner only."""
        if self._readline is None:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_WRONLY | os.O_CREAT, 0o600))
            self._history.chmod(0o600)
            self._readline.set_history_length(_HISTORY_LINES)
            self._readline.write_history_file(self._history)

    def _block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(_FENCE):
            line = self.line(_CONTINUED)
            if line is None:
                return "\n".join(lines).strip("\n")
            lines.append(line)
        lines[-1] = lines[-1].rstrip().removesuffix(_FENCE)
        return "\n".join(lines).strip("\n")


def _load_readline(history: Path) -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    return readline

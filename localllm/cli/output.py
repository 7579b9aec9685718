"""The only writer to stdout and stderr: answers, tables and JSON on one, everything else on the other.

Knows streams, terminals and NO_COLOR. Knows no engine, no models and no settings.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import threading
import time
import unicodedata
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from localllm.chat.text import UNSAFE, Pace, error_rows, format_seconds, one_line, printable
from localllm.config import format_bytes
from localllm.errors import LocalLLMError, UnwrittenError

if TYPE_CHECKING:
    from localllm.chat.plan_text import Tone

SCHEMA_VERSION = 1

_BOLD, _DIM, _RED, _YELLOW, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
_TONE_STYLES: Mapping[Tone, str] = {"good": "\x1b[32m", "fair": _YELLOW, "poor": _RED}
_CLEAR_LINE = "\r\x1b[2K"
_UNBROKEN = "\ue000"  # a blank that ends no word
_NARROWEST_BAR = 5  # columns; where a terminal has no room for it, the time that is left goes first


class ReaderGoneError(Exception):
    """Whoever read stdout has closed it (`| head -1`): there is nothing left to do, and nothing to complain about."""


class Output:
    """The two streams of one process. A missing stderr (closed by the caller) swallows what it is given."""

    def __init__(self, stdout: TextIO | None, stderr: TextIO | None, environ: Mapping[str, str] = os.environ) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self._lock = threading.RLock()
        self._line_open = False  # the last character on stdout was not a newline
        self._drawn = ""  # of a progress, on the last line of stderr
        self._wrap = WordWrap(lambda: _columns(1))
        self._thought_open = False  # its last line was not ended
        self._thought_wrap = WordWrap(lambda: _columns(2))
        self.stdout_is_terminal = _is_terminal(stdout)
        self.stderr_is_terminal = _is_terminal(stderr)
        self._wants_colour = not environ.get("NO_COLOR") and environ.get("TERM", "") != "dumb"
        self.coloured = self.stderr_is_terminal and self._wants_colour
        self.animated = self.stderr_is_terminal and environ.get("TERM", "") != "dumb"

    @classmethod
    def of_process(cls) -> Output:
        """The process's own streams, in UTF-8 whatever the locale says."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="")
        return cls(sys.stdout, sys.stderr)

    @property
    def columns(self) -> int:
        """The width of the terminal that stdout is; 80 where it is none."""
        return _columns(1)

    # stdout

    def answer(self, text: str) -> None:
        """A model's words, as they come: on a terminal without control characters and wrapped, elsewhere verbatim."""
        shown = printable(text) if self.stdout_is_terminal else text
        if shown:
            self.end_thought()
            self._line_open = not shown.endswith("\n")
            self._write_stdout(self._wrap.feed(shown) if self.stdout_is_terminal else shown)

    def end_answer(self) -> None:
        """Ends the last line of the answer, and of a thought, where the model did not."""
        self.end_thought()
        if self._line_open:
            self._line_open = False
            self._write_stdout(self._wrap.flush() + "\n")
        self._wrap = WordWrap(lambda: _columns(1))

    def verbatim(self, text: str) -> None:
        """A text of which every byte counts; on a terminal without control characters."""
        self._write_stdout(printable(text) if self.stdout_is_terminal else text)

    def copy(self, text: str) -> bool:
        """Put a text into the clipboard by the terminal (OSC 52), without control characters: a shell might obey them
        in a paste. Return False where stdout is no terminal."""
        if self.stdout_is_terminal:
            self._write_stdout(f"\x1b]52;c;{b64encode(printable(text).encode()).decode()}\a")
        return self.stdout_is_terminal

    def line(self, text: str = "") -> None:
        """One line of a listing."""
        self._write_stdout((printable(text) if self.stdout_is_terminal else text) + "\n")

    def toned_line(self, parts: Iterable[tuple[str, Tone]]) -> None:
        """One line of texts, each in its tone where stdout is a terminal that shows colours."""
        is_coloured = self.stdout_is_terminal and self._wants_colour
        styled = (
            f"{_TONE_STYLES[tone]}{text}{_RESET}" if is_coloured and tone != "plain" else text for text, tone in parts
        )
        self._write_stdout("".join(styled) + "\n")

    def json(self, value: Mapping[str, Any], *, indent: int | None = None) -> None:
        """One JSON object, on one line unless `indent` is given; what a terminal could obey is escaped everywhere."""
        text = json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=False)
        self._write_stdout(UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", text) + "\n")

    def settle(self) -> None:
        """Waits until the disk has what was printed, where stdout is a file."""
        if self._stdout is not None:
            with contextlib.suppress(OSError, ValueError):  # it is none
                os.fsync(self._stdout.fileno())

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        optional: Sequence[str] = (),
        numbers: Collection[str] = (),
    ) -> None:
        """Left-aligned columns, two spaces apart.

        numbers: columns that are aligned at the right.
        optional: columns that a terminal does without, and says so, as far as it is too narrow; the first goes first.
        """
        lines = [[one_line(cell) for cell in row] for row in (header, *rows)]
        left_out: list[str] = []
        while self.stdout_is_terminal and len(left_out) < len(optional):
            widths = _column_widths(lines)
            if sum(widths) + 2 * (len(widths) - 1) <= _columns(1):
                break
            left_out.append(optional[len(left_out)])
            column = lines[0].index(left_out[-1])
            lines = [line[:column] + line[column + 1 :] for line in lines]
        widths = _column_widths(lines)
        for line in lines:
            cells = zip(lines[0], line, widths, strict=True)
            aligned = (f"{cell:>{width}}" if title in numbers else f"{cell:<{width}}" for title, cell, width in cells)
            self.line("  ".join(aligned).rstrip())
        if left_out:
            self.note(f"a wider terminal has {', '.join(reversed(left_out))} too, as has --json")

    def _write_stdout(self, text: str) -> None:
        if self._stdout is None:
            why = "standard output is closed"
            raise UnwrittenError("the answer could not be written", why=why, fix="run it without >&-")
        try:
            self._stdout.write(text)
            self._stdout.flush()
        except BrokenPipeError as error:
            raise ReaderGoneError from error
        except OSError as error:
            why = f"{error.strerror or error} (standard output)"
            raise UnwrittenError("the answer could not be written", why=why, fix="df -h .") from error

    # stderr

    def thought(self, text: str) -> None:
        """Print a model's thought as it comes; the answer begins on a line of its own."""
        if text:
            self._thought_open = True
            self._write_stderr(self._styled(_DIM, self._thought_wrap.feed(printable(text)) if self.animated else text))

    def end_thought(self) -> None:
        if self._thought_open:
            self._thought_open = False
            self._write_stderr(self._styled(_DIM, self._thought_wrap.flush()) + "\n")
            self._thought_wrap = WordWrap(lambda: _columns(2))

    def note(self, text: str) -> None:
        """Something a person may want to know: statistics, what happens now."""
        self._write_lines(self._styled(_DIM, self._wrapped(text)) + "\n")

    def warn(self, text: str) -> None:
        self._write_lines(self._wrapped(text, self._styled(_YELLOW, "warning:"), len("warning:")) + "\n")

    def prompt(self, text: str) -> None:
        """Print a question, without a newline."""
        self._write_stderr(one_line(text))

    def error(self, error: LocalLLMError) -> None:
        """Four lines: what, why, what to do, where to read more; and one for each other command that would do. An
        answer that it breaks off is ended before."""
        with contextlib.suppress(UnwrittenError, ReaderGoneError):
            self.end_answer()
        (label, what), *rows = error_rows(error)
        text = self._styled(_RED + _BOLD, f"{label}:") + f" {what}\n"
        text += "".join(f"{self._styled(_DIM, f'{label}:')}{' ' * (6 - len(label))}{value}\n" for label, value in rows)
        self._write_lines(text)

    def traceback(self, text: str) -> None:
        """A traceback as Python formats it, for --debug."""
        self._write_lines(text)

    def progress(self, label: str, *, plain_lines: bool = False) -> ProgressLine:
        """A line that shows how far something is. `plain_lines`: say so in whole lines where no terminal is there."""
        return ProgressLine(self, label, plain_lines=plain_lines)

    def draw(self, text: str) -> None:
        """The text in the place of what was drawn before, on a line that stays the last of stderr; "": none."""
        with self._lock:
            self._drawn = text
            self._write_stderr(_CLEAR_LINE + text)

    def _write_lines(self, text: str) -> None:
        """Whole lines, above the one that is drawn."""
        with self._lock:
            self._write_stderr(f"{_CLEAR_LINE}{text}{self._drawn}" if self._drawn else text)

    def _wrapped(self, text: str, label: str = "", label_columns: int = 0) -> str:
        """Return a label and a text, broken at its words where a terminal has no room for it on one line. Commands to
        paste are not broken: those in backticks, and a line with one without is left to the terminal."""
        line = f" {one_line(text)}" if label else one_line(text)
        whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", _UNBROKEN), line)
        if self.stderr_is_terminal and "localllm " not in whole:
            wrap = WordWrap(lambda: _columns(2))
            wrap.feed("-" * label_columns)
            line = (wrap.feed(whole) + wrap.flush())[label_columns:].replace(_UNBROKEN, " ")
        return label + line

    def _styled(self, style: str, text: str) -> str:
        return f"{style}{text}{_RESET}" if self.coloured else text

    def _write_stderr(self, text: str) -> None:
        if self._stderr is None:
            return
        with self._lock:
            # A lost stderr must not cost the answer.
            try:
                self._stderr.write(text)
                self._stderr.flush()
            except (OSError, ValueError):
                self._stderr = None

    def abandon_stdout(self) -> None:
        """Forgets a stdout that nobody reads, so that the interpreter's last flush is silent."""
        self._stdout = None
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


class ProgressLine:
    """One line on a terminal, redrawn in place ten times a second; elsewhere a plain line every tenth, or nothing.

    Threads may share it. Used as a context manager it leaves an empty line behind.
    """

    def __init__(self, output: Output, label: str, *, plain_lines: bool) -> None:
        self._output = output
        self._label = label
        self._plain_lines = plain_lines
        self._lock = threading.Lock()
        self._pace = Pace()
        self._drawn_at = 0.0
        self._tenth = -1
        self._closed = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def update(self, done: int, total: int, detail: str = "") -> None:
        """`done` of `total` bytes are there; `detail` names what is being worked on (a file and its own share)."""
        with self._lock:
            if self._closed:
                return
            if self._output.animated:
                self._draw(done, total, detail)
                return
            tenth = 10 * done // total if total else 10
            if self._plain_lines and tenth > self._tenth:
                self._tenth = tenth
                self._output._write_lines(one_line(f"{self._label}: {10 * tenth}% of {format_bytes(total)}") + "\n")

    def show(self, text: str) -> None:
        """Some other text in the line's place; nothing where no terminal is there."""
        with self._lock:
            if self._output.animated and not self._closed:
                self._put(text)

    def interject(self, text: str) -> None:
        """A note above the line."""
        self._output.note(text)

    def clear(self) -> None:
        """Takes the line away; later updates are ignored."""
        with self._lock:
            if not self._closed and self._drawn_at:
                self._output.draw("")
            self._closed = True

    def _draw(self, done: int, total: int, detail: str) -> None:
        now = time.monotonic()
        if now - self._drawn_at < 0.1 and done < total:
            return
        rate = self._pace.after(now, done)
        share = done / total if total else 1.0
        sizes, speed, left = f" {format_bytes(done)}/{format_bytes(total)}", "", ""
        if rate > 0 and 0 < done < total:
            speed, left = f" {format_bytes(int(rate))}/s", f" {format_seconds((total - done) / rate)} left"
        width = _columns(2) - len(f"{self._label} ") - 1
        choices = [f"{share:4.0%}{kept}{left}" for kept in (sizes + speed, sizes, "")]
        text = next((choice for choice in choices if len(choice) <= width), choices[-1])
        room = min(20, width - len(f"[] {text}"))
        bar = f" [{'#' * int(room * share):<{room}}]" if room >= _NARROWEST_BAR else ""
        text = f"{self._label}{bar} {text}"
        self._put(f"{text}  {detail}" if detail else text)

    def _put(self, text: str) -> None:
        self._drawn_at = time.monotonic()
        self._output.draw(one_line(text)[: _columns(2) - 1])


class WordWrap:
    """Breaks a text that is still being written at its words: text in, piece by piece; out what can be shown of it.

    The last word waits until it is known to be whole. Code (in a ``` block, or indented) goes through as it is.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns  # asked at each word: a window may be resized while an answer comes
        self._line = ""  # of the text, since its last newline
        self._fenced = False
        self._used = 0  # columns of the terminal's line
        self._gap = ""  # blanks before the word
        self._word = ""
        self._continues = False  # the word's beginning has been shown: it was longer than a line

    def feed(self, text: str) -> str:
        return "".join(map(self._take, text))

    def flush(self) -> str:
        """The word that waits, with the blanks before it."""
        if not self._word:
            return ""
        word, gap, self._word, self._gap = self._word, self._gap, "", ""
        columns, needed = self._columns(), width(gap) + width(word)
        if self._used and self._used + needed > columns and not self._continues:
            gap, needed, self._used = "\n", width(word), 0
        self._used = (self._used + needed - 1) % columns + 1  # a word longer than the line is broken by the terminal
        return gap + word

    def _take(self, character: str) -> str:
        if character == "\n":
            shown = self.flush() + "\n"
            self._fenced ^= self._line.lstrip().startswith("```")
            self._line, self._gap, self._used, self._continues = "", "", 0, False
            return shown
        self._line += character
        if self._fenced or self._line.startswith(("  ", "\t", "```")):
            shown, self._gap = self.flush() + self._gap + character, ""
            return shown
        if character in " \t":
            shown = self.flush()
            self._gap += character
            self._continues = False
            return shown
        wide, long = width(character) == 2, len(self._word) >= self._columns()
        shown = self.flush() if wide or long else ""
        self._continues = not wide and (long or self._continues)
        self._word += character
        return shown + self.flush() if wide else shown  # a line may break beside every wide character


def width(text: str) -> int:
    """Columns on a terminal: two for a wide character, none for one that is put on top of another."""
    return sum(
        0 if unicodedata.category(each) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(each) in "WF")
        for each in text
    )


def _column_widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]


def _columns(descriptor: int) -> int:
    try:
        return max(20, os.get_terminal_size(descriptor).columns or 80)  # 0: a terminal that does not know
    except OSError:
        return 80


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False

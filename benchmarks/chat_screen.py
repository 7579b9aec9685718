"""The full-screen chat on a terminal of its own: how long a key waits while an answer is written, and what that costs.

    python -m benchmarks.chat_screen            prints a table, and writes benchmarks/results/chat_screen.json

A child runs the program on a pseudo-terminal with a service that says 2,000 tokens of Markdown, 200 a second; this
process types, and waits until the terminal shows what was typed. Beside each figure stands the same without an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import random
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import DOCS, parser, save, spread, write_section
from localllm.cli.screen import tune

_ROWS, _COLUMNS = 50, 160
_TOKENS, _TOK_S = 2000, 200
_MESSAGES, _PAGES, _PAGE_S = 500, 150, 0.1  # of the long conversation
_WORDS = "the quick brown fox jumps over a lazy dog and finds lantern beneath old bridge while it rains".split()  # noqa: SIM905
_KEYS = "abcdefghijklmnopqrstuvwxyz"
_BEGIN, _END = "<!-- figures: written by `python -m benchmarks.chat_screen` -->", "<!-- end of the figures -->"
_AS_INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}  # the package is compiled once


def markdown(num_tokens: int, seed: int = 1) -> str:
    """Prose, lists, headings, tables and code, of so many tokens of four characters."""
    chance = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(chance.choice(_WORDS) for _ in range(count))

    parts: list[str] = []
    while sum(map(len, parts)) < 4 * num_tokens:
        match chance.randrange(5):
            case 0:
                lines = [f"    def {words(1)}_{n}(self, x: int) -> str: return '{words(2)}'" for n in range(20)]
                parts.append("```python\nclass A:\n" + "\n".join(lines) + "\n```\n\n")
            case 1:
                parts.append(f"## {words(5)}\n\n")
            case 2:
                parts.append("".join(f"- **{words(1)}** {words(10)}\n" for _ in range(6)) + "\n")
            case 3:
                rows = "".join(f"| {words(2)} | {words(4)} |\n" for _ in range(6))
                parts.append(f"| name | what |\n|---|---|\n{rows}\n")
            case _:
                parts.append(f"{words(60)}.\n\n")
    return "".join(parts)[: 4 * num_tokens]


def child(folder: Path, *, is_peer: bool) -> None:
    """The program: on this process's terminal, until it is left. is_peer: with Textual's own widgets for Markdown, as
    often laid out as Textual does."""
    os.environ["LOCALLLM_HOME"] = str(folder)
    tune()
    if is_peer:
        from localllm.tui import answer_worker
        from localllm.tui.widgets.document import Clear, Document, LaidOutOnce

        async def done(_: Document, *, is_whole: bool) -> None:
            pass

        del Document.append, Clear.render_lines, LaidOutOnce._size_updated
        Document._grow = done  # type: ignore[assignment]
        answer_worker._SHARE = float("inf")
    from localllm.tui.widgets.message_view import AnswerView
    from tests.tui.support import FakeService, chat_app

    answer = markdown(_TOKENS)
    app = chat_app(FakeService([answer], pause_s=1 / _TOK_S), private=True)
    found: dict[str, Any] = {"is_whole": False}
    leave = app.leave

    def look_and_leave() -> None:
        last = app.chat.transcript.views[-1:]
        if last and isinstance(last[0], AnswerView):
            found["is_whole"] = last[0].text == answer == last[0].document.source
        leave()

    app.leave = look_and_leave  # type: ignore[method-assign]
    app.run()
    if app.failure is not None:
        raise app.failure
    (folder / "child.json").write_text(json.dumps(found))
    os._exit(0)


async def _paged(session_id: str) -> dict[str, float]:
    from tests.tui.support import chat_app, running, until

    app = chat_app()
    async with running(app, (160, 50)) as pilot:
        await until(pilot, lambda: app.chat.status.facts is not None)
        began = time.perf_counter()
        app.worker.do(lambda: app.worker.open(session_id))
        views = app.chat.transcript
        await until(
            pilot, lambda: app.chat.num_turns == _MESSAGES and views.views and views.views[-1].region.height > 1
        )
        open_s = time.perf_counter() - began
        waits: list[float] = []

        async def watch() -> None:
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.005)
                waits.append(time.perf_counter() - before - 0.005)

        watching = asyncio.create_task(watch())
        for _ in range(_PAGES):
            app.chat.action_page(-1)
            await asyncio.sleep(_PAGE_S)
        watching.cancel()
    waits.sort()
    return {"open_s": open_s, "page_p95_ms": 1e3 * waits[int(0.95 * len(waits))], "page_max_ms": 1e3 * waits[-1]}


def long_child(folder: Path) -> None:
    """A conversation of 500 messages: opened, and scrolled through."""
    os.environ["LOCALLLM_HOME"] = str(folder)
    tune()
    from localllm.history import History, history_file

    history_file().parent.mkdir(parents=True)
    with History.open(history_file()) as history, history.together():
        session, parent = history.begin("long", "tiny", None), None
        for number in range(_MESSAGES):
            is_answer = number % 2 == 1
            text = markdown(150, number) if is_answer else f"question {number}"
            parent = history.append(session, parent, "assistant" if is_answer else "user", text)
    print(json.dumps(asyncio.run(_paged(session.id))))


class Terminal:
    """The child and its terminal; `text`: all that it has written."""

    def __init__(self, line: list[str], **variables: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            line, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **_AS_INSTALLED, **variables},
        )  # fmt: skip
        os.close(theirs)
        self.text = b""

    def read(self, timeout_s: float) -> bool:
        if not select.select([self.ours], [], [], timeout_s)[0]:
            return False
        try:
            self.text += os.read(self.ours, 1 << 16)
        except OSError:
            return False
        return True

    def wait_for(self, what: bytes, timeout_s: float = 30.0) -> float:
        """Seconds until it is there."""
        began = time.monotonic()
        while what not in self.text:
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"{what!r} did not come; the last was {self.text[-300:]!r}")
            self.read(0.05)
        return time.monotonic() - began

    def send(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def drain(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.read(0.01)

    def end(self) -> None:
        self.send(b"\x11")  # ctrl+q
        self.drain(0.5)
        while self.process.poll() is None:
            self.read(0.05)


def latencies(terminal: Terminal, seconds: float) -> list[float]:
    """Seconds until the terminal shows a key; keys are typed at chance, ten a second."""
    chance = random.Random(seconds)
    found, number, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end:
        key = f"Q{_KEYS[number % 26]}".encode()  # no answer has it
        number += 1
        terminal.text = b""
        terminal.send(key)
        found.append(terminal.wait_for(key[:1], 5.0))
        terminal.drain(chance.uniform(0.05, 0.15))  # a beat could fall in with the pictures'
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def streaming(*, is_peer: bool = False) -> dict[str, Any]:
    """One answer of 2,000 tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = [sys.executable, "-m", "benchmarks.chat_screen", "--child", name]
        terminal = Terminal([*line, "--peer"] if is_peer else line)
        terminal.wait_for(b"rite a message")
        terminal.wait_for(b"int4")
        terminal.drain(0.5)
        quiet = latencies(terminal, 2.0)
        terminal.send(b"\x03")
        terminal.drain(0.3)
        terminal.send(b"Tell me.\r")
        terminal.drain(0.5)
        watched = psutil.Process(terminal.process.pid)
        before, began = watched.cpu_times(), time.monotonic()
        busy = latencies(terminal, _TOKENS / _TOK_S - 1.5)
        after, took_s = watched.cpu_times(), time.monotonic() - began
        terminal.drain(2.0)
        terminal.end()
        found = json.loads((folder / "child.json").read_text())
    cpu_s = after.user + after.system - before.user - before.system
    return {
        "quiet_p95_ms": 1e3 * percentile(quiet, 0.95),
        "p50_ms": 1e3 * statistics.median(busy),
        "p95_ms": 1e3 * percentile(busy, 0.95),
        "max_ms": 1e3 * max(busy),
        "cpu_share": cpu_s / took_s,
        "is_whole": found["is_whole"],
    }


def long_conversation() -> dict[str, float]:
    """500 messages, in a process of its own: until they are there, and how long a key waits while one scrolls."""
    with tempfile.TemporaryDirectory() as name:
        line = [sys.executable, "-m", "benchmarks.chat_screen", "--long", "--child", name]
        found = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(found))


def start() -> dict[str, float]:
    """The program as it is typed: until the first picture, and until the first word of `tiny`, asked at once. Beside
    that what both cannot do without: a Python that imports the library, and ends."""
    with tempfile.TemporaryDirectory() as home:
        terminal = Terminal([sys.executable, "-m", "localllm", "chat"], LOCALLLM_HOME=home)
        painted_s = terminal.wait_for(b"rite a message")
        terminal.send(b"A tale, please.\r")
        terminal.wait_for(b"tok/s")
        first_word_s = time.monotonic() - terminal.started
        terminal.end()
    floors = {f"{name}_s": _import_s(module) for name, module in (("textual", "textual.app"), ("torch", "torch"))}
    return {"first_picture_s": painted_s, "first_word_s": first_word_s, **floors}


def _import_s(module: str) -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import os, {module}; os._exit(0)"], check=True)
    return time.monotonic() - began


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, least and most of each figure; of what is not a figure, whether it was so in all rounds."""
    values = {name: [one[name] for one in rounds] for name in rounds[0]}
    return {name: all(each) if isinstance(each[0], bool) else asdict(spread(each)) for name, each in values.items()}


def figures(result: Mapping[str, Any]) -> list[str]:
    """The tables of docs/using/chat.md."""

    def shown(part: str, name: str, scale: float = 1.0, unit: str = "", digits: int = 2) -> str:
        median, low, high = (scale * result[part][name][which] for which in ("median", "min", "max"))
        return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f}){unit}"

    rows = {"localllm": "streaming", "the same with Textual's own Markdown": "textual"}
    return [
        f"On a terminal of {_COLUMNS} x {_ROWS}, {_TOKENS:,} tokens of Markdown with code and tables are streamed",
        f"at {_TOK_S} a second. Keys typed meanwhile appear after so many ms.",
        "Medians of five rounds, with the lowest and highest.",
        "",
        "| | typed: median | 95 % | longest | of one core |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {shown(part, 'p50_ms', digits=0)} | {shown(part, 'p95_ms', digits=0)} "
            f"| {shown(part, 'max_ms', digits=0)} | {shown(part, 'cpu_share', 100, ' %', 0)} |"
            for name, part in rows.items()
        ),
        f"| while nothing is streamed | | {shown('streaming', 'quiet_p95_ms', digits=0)} | | |",
        "",
        "| | seconds |",
        "|---|---|",
        f"| `localllm chat` to the first picture | {shown('start', 'first_picture_s')} |",
        f"| for comparison: Python importing Textual | {shown('start', 'textual_s')} |",
        f"| to the first word of `tiny`, asked at once, on a new machine | {shown('start', 'first_word_s')} |",
        f"| for comparison: Python importing torch | {shown('start', 'torch_s')} |",
        f"| a conversation of 500 messages opened | {shown('long', 'open_s')} |",
        f"| ten pages of it a second: latency of a key, 95 % | {shown('long', 'page_p95_ms', 1e-3, digits=3)} |",
        f"| the longest | {shown('long', 'page_max_ms', 1e-3, digits=3)} |",
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--long", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.child is not None:
        long_child(arguments.child) if arguments.long else child(arguments.child, is_peer=arguments.peer)
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "streaming": streaming,
        "textual": partial(streaming, is_peer=True),
        "long": long_conversation,
        "start": start,
    }
    start()  # which compiles the package, and has the machine read what it needs
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in parts}
    for _ in range(arguments.rounds):
        for name, measure in parts.items():
            rounds[name].append(measure())
    result = {name: summary(found) for name, found in rounds.items()}
    save("chat_screen", result)
    content = "\n".join(figures(result))
    write_section(DOCS / "using" / "chat.md", _BEGIN, _END, content)
    print(content)


if __name__ == "__main__":
    main()

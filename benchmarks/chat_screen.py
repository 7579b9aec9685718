"""The full-screen chat on a terminal of its own: what a key waits for while an answer is written, and what that costs.

    python -m benchmarks.chat_screen            prints a table, and writes benchmarks/results/chat_screen.json

A child runs the program on a pseudo-terminal with a service that says 2,000 tokens of Markdown, 200 a second; this
process types, and waits until the terminal shows what was typed. Beside each figure stands the same without an answer.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
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
from pathlib import Path
from typing import Any

import psutil

from localllm.cli.screen import COLLECTOR

_ROWS, _COLUMNS = 50, 160
_TOKENS, _TOK_S = 2000, 200
_WORDS = "the quick brown fox jumps over a lazy dog and finds lantern beneath old bridge while it rains".split()  # noqa: SIM905
_KEYS = "abcdefghijklmnopqrstuvwxyz"
_RESULT = Path(__file__).parent / "results" / "chat_screen.json"


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


def child(folder: Path) -> None:
    """The program: on this process's terminal, until it is left."""
    os.environ["LOCALLLM_HOME"] = str(folder)
    from localllm.tui.widgets.message_view import AnswerView
    from tests.tui.support import FakeService, chat_app

    gc.set_threshold(*COLLECTOR)
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


class Terminal:
    """The child and its terminal; `text`: all that it has written."""

    def __init__(self, line: list[str], **variables: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            line, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **variables},
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
    """Of keys that are typed a tenth of a second apart: until the terminal shows each."""
    found, number, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end:
        key = f"Q{_KEYS[number % 26]}".encode()  # no answer has it
        number += 1
        terminal.text = b""
        terminal.send(key)
        found.append(terminal.wait_for(key[:1], 5.0))
        terminal.drain(0.1)
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def streaming() -> dict[str, Any]:
    """One answer of 2,000 tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        terminal = Terminal([sys.executable, "-m", "benchmarks.chat_screen", "--child", name])
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
        line = [sys.executable, "-m", "benchmarks.chat_screen_long", name]
        found = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(found))


def start() -> dict[str, float]:
    """The program as it is typed: until the first picture, and until the first word of `tiny`, asked at once."""
    with tempfile.TemporaryDirectory() as home:
        terminal = Terminal([sys.executable, "-m", "localllm", "chat"], LOCALLLM_HOME=home)
        painted_s = terminal.wait_for(b"rite a message")
        terminal.send(b"A tale, please.\r")
        terminal.wait_for(b"tok/s")
        first_word_s = time.monotonic() - terminal.started
        terminal.end()
    return {"first_picture_s": painted_s, "first_word_s": first_word_s}


def spread(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, least and most of each figure; of what is no figure, whether it was so in all rounds."""
    found: dict[str, Any] = {}
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        if isinstance(values[0], bool):
            found[name] = all(values)
        else:
            found[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child)
        return
    parts = {"streaming": streaming, "long": long_conversation, "start": start}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in parts}
    for _ in range(arguments.rounds):
        for name, measure in parts.items():
            rounds[name].append(measure())
    result = {name: spread(found) for name, found in rounds.items()}
    _RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

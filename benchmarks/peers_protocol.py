"""One side of a comparison as a process of its own, which answers one line of JSON with one line of JSON.

A side lives through all rounds and sleeps while another computes. It may run in another interpreter than the rest, so
nothing here imports torch or localllm. What a side answers to, with what JSON can say:

    load(...)                       build the model; facts about it, `weight_bytes_per_token` among them
    prefill(tokens, ...)            seconds from an empty context to the logits of a prompt's last token
    decode(tokens, depth, ...)      seconds to decode so many tokens, one by one, after `depth` tokens
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
STDERR_TAIL_LINES = 3


class UnavailableError(Exception):
    """A side that cannot run here: the reason, and the command that mends it."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


def serve(side: object) -> None:
    """Answer with the side's methods until stdin closes. What a library prints to stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        name = command.pop("do")
        try:
            answer = {"ok": getattr(side, name)(**command)}
        except UnavailableError as error:
            answer = {"unavailable": error.reason, "fix": error.fix}
        except Exception as error:  # the other side runs on; its error is reported there
            answer = {"unavailable": f"{type(error).__name__}: {error}", "fix": ""}
        answers.write(json.dumps(answer) + "\n")


class Worker:
    """A side in its process. `call` waits for the answer: only one side computes at a time."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="utf-8",
            cwd=REPOSITORY,
            env=environment,
        )
        self.pid = self._process.pid

    def call(self, name: str, **options: Any) -> Any:
        """Return the result of the side's command. Raises UnavailableError where it fails or its process ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": name, **options}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UnavailableError(f"its process ended with {self._process.wait()} during {name}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "unavailable" in answer:
            raise UnavailableError(answer["unavailable"], answer["fix"])
        return answer["ok"]

    def kill(self) -> None:
        """Kill the process from another thread than that which calls: the call fails then."""
        self._process.kill()

    def close(self) -> None:
        """Close its stdin, at which it ends, and wait; one that hangs for ten seconds is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        return " / ".join(lines[-STDERR_TAIL_LINES:]) or "without a word"

"""The time that a running server saves its user: `python -m benchmarks.attach`.

From the start of `localllm run` to its first byte, attached to a warm server and not; from a request for another model
to its first token, under a cap that one of them fits into; and how soon an engine that was killed answers again. Five
rounds, in turn; results go to benchmarks/results/attach.json.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import interleaved, machine, save, spread
from tests.cli_support import write_checkpoint

ROUNDS = 5
PROMPT = "A tale about an owl, please."
ONE_OF_TWO = "600MiB"  # into which one of the two models fits


class Home:
    """A user with a server. port: of the server."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port

    def first_byte_s(self, *arguments: str) -> float:
        """Seconds from the start of a command to its first byte."""
        started = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, *arguments], env=_environ(self.folder), stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            seconds = time.perf_counter() - started
            process.stdout.read()
        return seconds

    def first_token_s(self, model: str) -> float:
        """Seconds to the first token of a streamed answer."""
        body = {"model": model, "prompt": "Once", "max_tokens": 2, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.readline()
        seconds = time.perf_counter() - started
        assert reply.status == 200
        reply.read()
        connection.close()
        return seconds

    def killed_s(self) -> float:
        """Seconds to the first token by the loaded model, whose engine is killed just before."""
        [row] = self.rows()
        os.kill(row["pid"], signal.SIGKILL)
        return self.first_token_s(row["name"])

    def rows(self) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "localllm", "ps", "--json"]
        done = subprocess.run(command, env=_environ(self.folder), capture_output=True, check=True)
        rows: list[dict[str, Any]] = json.loads(done.stdout)["models"]
        return rows


def _environ(folder: Path) -> dict[str, str]:
    return {**os.environ, "LOCALLLM_HOME": str(folder)}


@contextmanager
def home(folder: Path) -> Iterator[Home]:
    write_checkpoint(folder / "other")
    flags = ["--port", "0", "--also", str(folder / "other"), "--ram", ONE_OF_TWO]
    command = [sys.executable, "-m", "localllm", "serve", "tiny", *flags]
    with subprocess.Popen(command, env=_environ(folder), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "serving" in line)
        yield Home(folder, int(re.findall(r":(\d+)", line)[-1]))
        process.send_signal(signal.SIGINT)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, home(Path(folder)) as on:
        run = ("-m", "localllm", "run", "-p", PROMPT, "--max-tokens", "1")
        starts = interleaved(
            {
                "bare python": lambda: on.first_byte_s("-c", "print(1)"),
                "localllm --help": lambda: on.first_byte_s("-m", "localllm", "--help"),
                "run, attached": lambda: on.first_byte_s(*run),
                "run --no-attach": lambda: on.first_byte_s(*run, "--no-attach"),
            },
            ROUNDS,
        )
        on.first_token_s("tiny")
        tokens = interleaved(
            {
                "loaded": lambda: on.first_token_s("tiny"),
                "another": lambda: on.first_token_s("other"),
                "its engine killed": on.killed_s,
                "back": lambda: on.first_token_s("tiny"),
            },
            ROUNDS,
        )
    result = {
        "machine": machine(),
        "first_byte_s": {name: spread(values) for name, values in starts.items()},
        "first_token_s": {name: spread(values) for name, values in tokens.items()},
    }
    for name, values in {**starts, **tokens}.items():
        print(f"{name:<18} {spread(values)} s")
    print(save("attach", result))


if __name__ == "__main__":
    main()

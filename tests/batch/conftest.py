"""Fixtures of the tests of jobs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.batch.support import Start, Write
from tests.cli_support import fork_cli, write_checkpoint


@pytest.fixture
def own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_machine: Callable[[Path], None]) -> Path:
    """The folder of this test's journals."""
    cache = tmp_path / "home" / "cache"
    monkeypatch.setenv("LOCALLLM_CACHE", str(cache))
    known_machine(cache)
    return cache / "jobs"


@pytest.fixture
def file(tmp_path: Path) -> Write:
    """Writes lines of JSON, or bytes as they are."""

    def write(*lines: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b"".join(x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines))
        return path

    return write


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred tokens a second: slow enough to be caught at work."""
    return write_checkpoint(tmp_path_factory.mktemp("slow"), hidden=256, layers=8, context=4096)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a job with pipes for its output."""
    with ExitStack() as processes:

        def started(model: Path, path: Path, *arguments: str) -> subprocess.Popen[bytes]:
            line = ["run", model, "--batch", path, *(arguments or ("--max-tokens", "40")), "--parallel", "3"]
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            # bufsize: what a first reader would read ahead, a second one would miss
            process = fork_cli(tmp_path / "home", *line, **streams, bufsize=0)
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        (tmp_path / "home").mkdir(exist_ok=True)
        yield started

"""A job's prompts, the command on them, and what it answers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli_support import Result, run_cli
from tests.patience import PATIENCE_S

Write = Callable[..., Path]
Start = Callable[..., subprocess.Popen[bytes]]
# The second has more tokens than any other: see `fails` in test_resume.py.
ZEBRA = "once upon a time there was a zebra with jokes"
PROMPTS = ["the fox", ZEBRA, "a lantern", "who", "the owl and the fox", "the end"]


def batch(model: Path | str, path: Path | str, *arguments: str, stdin: bytes = b"") -> Result:
    """`run --batch` with a seed and answers of four tokens."""
    return run_cli("run", model, "--batch", path, "--max-tokens", "4", "--seed", "1", *arguments, stdin=stdin)


def rerun(model: Path, path: Path, *arguments: str) -> Result:
    """The command of the fixture `start`, in this process."""
    return run_cli("run", model, "--batch", path, *(arguments or ("--max-tokens", "40")), "--parallel", "3")


def answers(result: Result) -> list[dict[str, Any]]:
    """The lines of the output without what the clock says, and what it decides: how much is drafted."""
    lines = [json.loads(line) for line in result.out.splitlines()]
    return [{key: value for key, value in line.items() if key not in ("timings", "speculation")} for line in lines]


def texts(result: Result) -> list[str]:
    assert result.code == 0, result.err
    return [line["text"] for line in answers(result)]


def finish(process: subprocess.Popen[bytes]) -> Result:
    out, err = process.communicate(timeout=PATIENCE_S)
    return Result(process.returncode, out, err.decode())


def wait_for_lines(process: subprocess.Popen[bytes], count: int) -> bytes:
    assert process.stdout is not None
    return b"".join(process.stdout.readline() for _ in range(count))

"""Clients that cannot be installed beside our own dependencies: each has an environment of its own, most a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.server.claims import checks_of, script_of, scripted
from tests.server.support import Running
from tests.thinning import thinned


def installed(name: str) -> Path:
    """The environment of that name. Skips where it is absent."""
    environment = Path(sys.prefix) / "clients" / name
    if not (environment / ".installed").exists():
        pytest.skip(f"{name} is not installed, or cannot be: make {os.path.relpath(environment)}/.installed")
    return environment


def interpreter(environment: Path) -> str:
    """Of its scripts: its own, or the system's where it has packages of JavaScript."""
    python = environment / "bin" / "python"
    return str(python) if python.exists() else "node"


# It asks in JavaScript. The others take 7 to 12 s each, and ask by the packages of OpenAI, Anthropic and Ollama, which
# the tests of each dialect use themselves.
OFTEN = {"ai-sdk"}


# Its checks are one test, as each start of a script takes seconds.
@pytest.mark.parametrize(
    "client", thinned(scripted(), lambda client: client.stem in OFTEN), ids=lambda client: client.stem
)
def test_a_client_understands_the_server(
    server: Running, calls: Callable[..., None], client: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    calls({"weather": {"unit": "C"}, "Degrees": {"unit": "C"}})
    place = installed(client.stem)
    # Nothing of the settings, keys and files of whoever runs the tests.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LLM_USER_PATH": str(tmp_path)}
    command = [interpreter(place), script_of(client), server.url]
    ended = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert list(told) == checks_of(client)
    for check, trace in told.items():
        with subtests.test(check):
            assert trace == ""

"""Clients that cannot be installed beside our own dependencies: each has an environment and a script of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.server.claims import checks_of, requirements, script_of
from tests.server.support import Running


def installed(client: str) -> Path:
    """Its interpreter. Skips where it is absent."""
    environment = Path(sys.prefix) / "clients" / client
    if not (environment / ".installed").exists():
        pytest.skip(f"{client} is not installed: make {os.path.relpath(environment)}/.installed")
    return environment / "bin" / "python"


# Its checks are one test, as each start of a script takes seconds.
@pytest.mark.parametrize("client", requirements())
def test_a_client_understands_the_server(
    server: Running, client: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    # Nothing of the settings, keys and files of whoever runs the tests.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LLM_USER_PATH": str(tmp_path)}
    command = [installed(client), script_of(client), server.url]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert list(told) == checks_of(client)
    for check, trace in told.items():
        with subtests.test(check):
            assert trace == ""

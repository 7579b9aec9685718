"""The full-screen chat beside a server: its engine answers, and the chat outlives it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from localllm.tui.model_loader import serve_attached
from tests.cli_support import run_cli, start_cli
from tests.patience import PATIENCE_S
from tests.server.support import wait_for
from tests.server.test_cli_serve import Served
from tests.tui.support import chatting, say, send, until

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Beside:
    """A server that runs for this user."""

    process: subprocess.Popen[bytes]
    engine_pid: int


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    process = start_cli(tmp_path, "serve", "--port", "0", stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    with process:
        try:
            Served(process)
            yield Beside(process, json.loads(run_cli("ps", "--json").out)["models"][0]["pid"])
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


def test_the_servers_engine_answers_and_the_chat_outlives_first_that_and_then_the_server(server: Beside) -> None:
    async def chat() -> None:
        async with chatting(serve_attached, max_tokens=6) as (app, pilot):
            await until(pilot, "the running server answers")
            await say(pilot, "A tale about a fox, please.")
            os.kill(server.engine_pid, signal.SIGKILL)
            wait_for(lambda: not psutil.pid_exists(server.engine_pid))
            await say(pilot, "And then?")
            assert app.chat.num_turns == 4
            assert app.worker.plan is None and app.worker.host_bytes == 0
            server.process.send_signal(signal.SIGINT)
            server.process.wait(PATIENCE_S)
            await send(pilot, "And then?", until="no server answers any more")
            await until(pilot, lambda: app.chat.num_turns == 6 and not app.chat.is_answering)

    asyncio.run(chat())

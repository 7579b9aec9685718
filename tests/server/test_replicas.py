"""`localllm serve --ray` as a process: Ray, its replicas, their death and their end. Ray is in `.venv/ray`."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
import pytest

from benchmarks.replicas import CHAT, Replicas, hit_rate, killed_under_load, replica_processes, replicas
from tests.cli_support import environment
from tests.patience import PATIENCE_S, wait_for
from tests.server.support import OWL

pytestmark = pytest.mark.slow
ENVIRONMENT = Path(sys.prefix) / "ray"


@dataclass
class Serving:
    """A command line, and what is known of it."""

    process: subprocess.Popen[str]
    client: httpx2.Client
    said: list[str]

    @property
    def owner(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    @property
    def group(self) -> Replicas:
        return Replicas(self.client, self.owner, lambda: self.wait_for("2 of 2 replicas"))

    def wait_for(self, words: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if words in line:
                return
        raise AssertionError("".join(self.said))

    def end(self) -> list[psutil.Process]:
        """By Ctrl-C. What had belonged to it and is still there."""
        everyone = self.owner.children(recursive=True)
        assert len(everyone) > 5
        self.process.send_signal(signal.SIGINT)
        assert self.process.stderr is not None
        self.said += self.process.stderr
        assert self.process.wait(PATIENCE_S) == 0
        return psutil.wait_procs(everyone, PATIENCE_S)[1]


def command(*arguments: str) -> list[str]:
    """Skips where Ray is absent."""
    if not (ENVIRONMENT / ".installed").exists():
        pytest.skip(f"Ray is not installed: make {os.path.relpath(ENVIRONMENT)}/.installed")
    return [str(ENVIRONMENT / "bin" / "python"), "-m", "localllm", "serve", "--ray", "--port", "0", *arguments]


@contextmanager
def serving(home: Path, *arguments: str, **variables: str) -> Iterator[Serving]:
    environ = environment(home, **variables)
    with subprocess.Popen(
        command(*arguments), env=environ, cwd=home, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            with httpx2.Client(timeout=PATIENCE_S) as client:
                served = Serving(process, client, [])
                served.wait_for("serving")
                client.base_url = re.findall(r"http://[0-9.:]+", "".join(served.said))[0]
                yield served
        finally:
            process.kill()


def test_two_replicas_of_the_cpu(tmp_path: Path, subtests: pytest.Subtests) -> None:
    before = set(Path("/tmp").glob("localllm-*"))
    with serving(tmp_path, "--replicas", "2", "--private", "--quiet") as served:
        with subtests.test("they have what they need, and listen to this machine alone"):
            assert len(replica_processes(served.owner)) == 2
            family = [served.owner, *served.owner.children(recursive=True)]
            heard = [each for one in family for each in one.net_connections("tcp") if each.status == "LISTEN"]
            assert heard and {each.laddr.ip.removeprefix("::ffff:") for each in heard} == {"127.0.0.1"}
        with subtests.test("a conversation stays where it was begun"):
            ours = hit_rate(served.client, random.Random(1))
            assert ours > 0.6
        with subtests.test("who hangs up is not computed for"):
            body = {"messages": OWL, "stream": True, "logit_bias": {"0": -100, "2": -100}}
            with served.client.stream("POST", CHAT, json=body) as reply:
                next(reply.iter_lines())
            wait_for(lambda: not any(slot["is_processing"] for _ in range(4) for slot in slots(served.client)))
        with subtests.test("a replica that is killed under load costs nobody who had not begun to be answered"):
            outcomes, _ = killed_under_load(served.group, seed=0)
            assert outcomes["lost"] == 0 and outcomes["whole"] > 0
            assert len(replica_processes(served.owner)) == 2
        with subtests.test("Ctrl-C leaves nothing behind"):
            assert served.end() == []
            assert served.process.stdout is not None and served.process.stdout.read() == ""
            told = "".join(served.said)
            assert "1 of 2 replicas answer; Ray starts what is missing" in told and told.endswith("stopped\n")
            assert set(Path("/tmp").glob("localllm-*")) == before and not (Path.home() / ".ray").exists()


def test_by_prefixes_more_is_found_than_by_turns() -> None:
    python = command()[0]
    rates = {}
    for router in ("prefix", "turns"):
        with replicas(router, 2, python) as group:
            rates[router] = hit_rate(group.client, random.Random(1))
    assert rates["prefix"] > rates["turns"] + 0.1


def slots(client: httpx2.Client) -> list[dict[str, bool]]:
    found: list[dict[str, bool]] = client.get("/slots").json()
    return found


def test_a_model_that_does_not_fit_ends_it_with_the_numbers(tmp_path: Path) -> None:
    words, how = command("--replicas", "2", "--ram", "200MiB"), {"capture_output": True, "text": True}
    ended = subprocess.run(words, env=environment(tmp_path), timeout=PATIENCE_S, **how)
    assert ended.returncode == 4, ended.stderr
    assert "100 MiB" in ended.stderr or "100.0 MiB" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_whoever_kills_the_command_ends_its_replicas_too(tmp_path: Path) -> None:
    with serving(tmp_path, "--replicas", "1", "--quiet") as served:
        computing = replica_processes(served.owner)
        served.process.kill()  # what is left of Ray itself, two idle agents, notices within a minute
        assert computing and psutil.wait_procs(computing, PATIENCE_S)[1] == []


def test_it_says_that_ps_does_not_find_it_and_so_does_ps(tmp_path: Path) -> None:
    with serving(tmp_path, "--replicas", "1", "--quiet") as served:
        served.wait_for("do not find this server")
        ps = [sys.executable, "-m", "localllm", "ps"]
        told = subprocess.run(ps, env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE_S).stderr
        assert "no server is found" in told and "started with --ray" in told


def test_while_the_replicas_start_a_client_is_told_so(tmp_path: Path) -> None:
    environ = environment(tmp_path)
    port = free_port()
    words = [*command("--replicas", "1"), "--port", str(port)]
    with subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True) as process:
        replies: list[httpx2.Response] = []

        def answers() -> bool:
            try:
                replies.append(httpx2.get(f"http://127.0.0.1:{port}/v1/models", timeout=PATIENCE_S))
            except httpx2.HTTPError:
                return False
            return True

        wait_for(answers)
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
        assert replies[0].status_code == 503 and json.loads(replies[0].text)["error"]["code"] == "loading"


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])

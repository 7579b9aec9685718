"""`localllm serve` as a process: its start, its key, its port, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from localllm.cli.dispatch import _to_paste
from localllm.cli.serve import _serve
from localllm.errors import Fix, LocalLLMError
from tests.cli_support import run_cli, start_cli
from tests.patience import PATIENCE_S, wait_for
from tests.server.support import OWL, Patch, running


@pytest.fixture
def home(tmp_path: Path, known_machine: Callable[[Path], None]) -> Path:
    """Of a server that need not measure the machine first."""
    known_machine(tmp_path / "cache")
    return tmp_path


class Served:
    """The process, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.said: list[str] = []
        self.url = re.findall(r"http://[0-9.:]+", self.wait_for("serving"))[0]

    def wait_for(self, word: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.decode())
            if word in self.said[-1]:
                return self.said[-1]
        raise AssertionError("".join(self.said))

    def ask(self, path: str, body: Any = None, **headers: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **headers})
        return urllib.request.urlopen(request, timeout=PATIENCE_S)

    def end(self, number: int) -> None:
        """By a signal; returns when it has ended."""
        self.process.send_signal(number)
        assert self.process.stderr is not None
        self.said += [line.decode() for line in self.process.stderr]
        self.process.wait(PATIENCE_S)


@contextmanager
def serving(home: Path, *arguments: str, **variables: str) -> Iterator[Served]:
    pipes: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    with start_cli(home, "serve", "--port", "0", *arguments, variables=variables, **pipes) as process:
        try:
            yield Served(process)
        finally:
            process.kill()


def test_a_cascade_whose_models_have_no_room_beside_each_other_answers(home: Path, model: Path) -> None:
    flags = ["--accept", "1", "--ram", "600MiB", "--ctx", "1100"]
    with serving(home, "--cascade", f"tiny,{model}", *flags) as served:
        told = served.wait_for("requests for cascade")
        assert "tiny takes 1024 tokens of context, not 1100" in "".join(served.said)
        assert f"answered by tiny where its confidence is 1 or more, else by {model.name}" in told

        def answered(_number: int) -> Any:
            return json.load(served.ask("/v1/chat/completions", {"model": "cascade", "messages": OWL, "max_tokens": 4}))

        assert answered(0)["model"] == model.name
        with ThreadPoolExecutor(2) as threads:
            assert [reply["model"] for reply in threads.map(answered, range(2))] == [model.name] * 2
        assert served.wait_for(f"{model.name} makes room for tiny")


def test_it_answers_until_ctrl_c_and_a_stream_ends_with_a_word(home: Path) -> None:
    with serving(home, "--metrics") as served:
        assert json.load(served.ask("/v1/models"))["data"][0]["id"] == "tiny"
        body = {"messages": OWL, "stream": True, "logit_bias": {"2": -100, "0": -100}}
        stream = served.ask("/v1/chat/completions", body)
        assert stream.readline().startswith(b"data: ")
        assert b"localllm_answers_running 1.0" in served.ask("/metrics").read()
        served.end(signal.SIGINT)
        assert served.process.returncode == 0
        assert b"the server is shutting down" in stream.read()
        assert "stopped\n" in served.said[-1] and served.process.stdout is not None
        assert served.process.stdout.read() == b""
        lines = [line for line in served.said if "/v1/models" in line]
        assert len(lines) == 1 and " 200 " in lines[0]


def test_ctrl_c_while_the_engines_process_begins_ends_without_a_traceback(home: Path) -> None:
    """The terminal sends it to each process that is there."""
    process = start_cli(home, "serve", "tiny", "--port", "0", stderr=subprocess.PIPE, start_new_session=True)
    with process:
        try:
            own = psutil.Process(process.pid)
            wait_for(lambda: any("forkserver" in " ".join(each.cmdline()) for each in own.children()))
            os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert b"Traceback" not in said and b"has ended" not in said and said.endswith(b"stopped\n"), said.decode()


def test_others_need_the_key_that_is_shown_once(home: Path) -> None:
    shown = []
    for _ in range(2):
        with serving(home, "--host", "0.0.0.0", "--quiet", "--parallel", "2") as served:
            shown.append("".join(served.said))
            served.url = served.url.replace("0.0.0.0", "127.0.0.1")
            assert served.wait_for("chat in a browser").endswith(f" {served.url}\n")
            with pytest.raises(urllib.error.HTTPError) as refused:
                served.ask("/v1/models")
            assert refused.value.code == 401
            refused.value.close()
            key = re.findall(r"shown this once: (\S+)", shown[0])[0]
            assert served.ask("/v1/models", authorization=f"Bearer {key}").status == 200
            served.end(signal.SIGTERM)
            assert served.process.returncode == 0 and not any("/v1/models" in line for line in served.said)
    assert "shown this once" not in shown[1] and "--new-key" in shown[1]


def test_a_port_that_is_taken_names_who_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run_cli("serve", "--port", str(port))
    assert result.code == 1 and f"port {port} is taken" in result.err and "process " in result.err
    assert f"--port {port + 1}" in result.err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "70000"), ("--parallel", "0"), ("--host", "no.such.host.invalid"), ("--overflow", "grow"),
        ("--allow-host", "a b"), ("--allow-origin", "evil"), ("--api-key-file", "/no/such/file"), ("--pooling", "max"),
        ("no-such-model", None), ("--frobnicate", None),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(flag: str, value: str | None) -> None:
    result = run_cli("serve", "--port", "0", flag, *filter(None, [value]))
    assert result.code in (2, 3) and flag in result.err


FIXES = {"tiny other third": "tiny --also other --also third", "--parallel 0": "--parallel 8"}


@pytest.mark.parametrize(("line", "fix"), FIXES.items())
def test_the_fix_of_a_refused_line_is_the_line_that_was_meant(line: str, fix: str) -> None:
    assert run_cli("serve", *line.split()).error_lines[2] == f"fix:   localllm serve {fix}"


def test_a_context_cannot_grow_under_a_server(monkeypatch: Patch) -> None:
    monkeypatch.setenv("LOCALLLM_OVERFLOW", "grow")
    result = run_cli("serve", "--port", "0")
    assert result.code == 2 and "LOCALLLM_OVERFLOW=evict" in result.err


def test_a_model_that_does_not_fit_ends_the_server_with_the_numbers(home: Path) -> None:
    process = start_cli(home, "serve", "--port", "0", "--ram", "100MiB", stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 4 and b"MiB" in said and b"fix:" in said


def test_where_ollama_itself_runs_its_port_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(LocalLLMError, match="is taken") as taken:
        ports = 0, other.getsockname()[1]
        _serve(SimpleNamespace(), None, {"parallel": 1, "queue": 1}, "127.0.0.1", ports)  # type: ignore[arg-type]
    assert taken.value.fix == "leave --also-ollama-port out"


def test_a_fix_leaves_a_switch_out_and_keeps_what_follows_it() -> None:
    fix = _to_paste(Fix.without("--new-key"), ["serve", "--new-key", "--api-key-file", "key.txt", "qwen3-8b"])
    assert str(fix) == "localllm serve --api-key-file key.txt qwen3-8b"


def test_a_server_that_is_stopped_has_not_failed() -> None:
    with running() as server:
        service = server.service
    assert service.wait_ended() is None

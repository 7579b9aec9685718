"""`pull`, `list`, `run` and `rm` of a model from a hub on this machine, each in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.adapter_support import peft_files
from tests.cli_support import start_cli, write_checkpoint
from tests.fake_hub import FakeHub, serve
from tests.patience import PATIENCE_S
from tests.terminal import Open

NAME = "maker/model"
Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), hidden=256, layers=4)
    with serve() as hub:
        hub.reset({NAME: {path.name: path.read_bytes() for path in folder.iterdir()}})
        yield hub


@pytest.fixture
def run(tmp_path: Path, hub: FakeHub) -> Run:
    hub.seconds_per_chunk = 0.0

    def ran(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        with start(tmp_path, hub, *arguments) as process:
            out, errors = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, errors)

    return ran


def start(home: Path, hub: FakeHub, *arguments: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe}
    return start_cli(home, *arguments, variables={"HF_ENDPOINT": hub.endpoint}, **streams)


def test_a_list_tells_what_shows_the_rest_until_something_is_pulled(run: Run) -> None:
    alone, everything = run("list"), run("list", "--all")
    assert alone.stdout.splitlines()[1].startswith(b"tiny ") and b"localllm list --all" in alone.stderr
    run("pull", NAME)
    assert b"tok/s" in everything.stderr.lower() and not run("list").stderr


def test_a_pulled_model_is_listed_run_and_removed(run: Run) -> None:
    pulled = run("pull", NAME, "--json")
    assert pulled.returncode == 0, pulled.stderr
    answer = json.loads(pulled.stdout)
    assert b"100% of" in pulled.stderr and b"\x1b" not in pulled.stderr
    listed = json.loads(run("list", "--json").stdout)["models"]
    assert [(row["state"], row["size_bytes"]) for row in listed if row["repo"] == NAME] == [
        ("installed", answer["size_bytes"])
    ]
    ran = run("run", NAME, "-p", "once", "--max-tokens", "2", "--json")
    assert json.loads(ran.stdout)["usage"]["completion_tokens"] == 2
    removed = json.loads(run("rm", NAME, "--yes", "--json").stdout)
    assert removed["freed_bytes"] >= answer["size_bytes"]
    assert run("run", NAME, "-p", "once").returncode == 3


def test_a_pull_that_is_interrupted_says_how_to_go_on_and_goes_on(run: Run, hub: FakeHub, tmp_path: Path) -> None:
    hub.seconds_per_chunk = 0.2
    with start(tmp_path, hub, "pull", NAME) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
        assert f"localllm pull {NAME}".encode() in process.stderr.read()
    hub.seconds_per_chunk = 0.0
    assert run("pull", NAME).returncode == 0


def test_a_chat_with_a_model_that_is_not_here_offers_to_pull_it_and_begins(hub: FakeHub, open_terminal: Open) -> None:
    terminal = open_terminal("run", NAME, "--max-tokens", "2", fresh=True, TERM="dumb", HF_ENDPOINT=hub.endpoint)
    terminal.wait_for(r"maker/model is not on this disk\s+[\d.]+ [KM]iB to download")
    terminal.wait_for(r"Download it\? \[y/N\] ")
    terminal.send("y\n")
    terminal.wait_for_prompt()
    terminal.say("Hello", "")
    terminal.send("/bye\n")
    assert terminal.end() == 0 and b"context" in terminal.text


def test_who_does_not_want_it_is_told_how_to_get_it_later(hub: FakeHub, open_terminal: Open) -> None:
    terminal = open_terminal("chat", NAME, "--plain", fresh=True, HF_ENDPOINT=hub.endpoint)
    terminal.wait_for(r"Download it\? \[y/N\] ")
    terminal.send("\n")
    assert terminal.end() == 3 and b"nothing was downloaded; localllm pull maker/model does it" in terminal.text


@pytest.mark.parametrize("answer", ["y", "n"])
def test_an_adapter_that_is_not_here_is_offered_too(hub: FakeHub, open_terminal: Open, answer: str) -> None:
    hub.repositories["maker/fox"] = peft_files(size_bytes=5000)
    hub.requests.clear()
    line = ("run", "tiny", "-p", "Once", "--max-tokens", "1", "--adapter", "maker/fox:0.5")
    terminal = open_terminal(*line, fresh=True, TERM="dumb", HF_ENDPOINT=hub.endpoint)
    terminal.wait_for(r"the adapter maker/fox is not on this disk\s+[\d.]+ [KM]iB to download")
    terminal.wait_for(r"Download it\? \[y/N\] ")
    terminal.send(f"{answer}\n")
    assert terminal.end() == 1  # its weights are noise
    assert bool(hub.file_requests("adapter_model.safetensors")) == (answer == "y")
    assert (b"nothing was downloaded; localllm pull maker/fox does it" in terminal.text) == (answer == "n")


def test_a_script_pulls_by_a_flag_and_is_told_of_it_without(run: Run) -> None:
    refused = run("run", NAME, "-p", "once", "--max-tokens", "2")
    assert refused.returncode == 3
    assert b"localllm pull maker/model" in refused.stderr and b"--pull" in refused.stderr
    ran = run("run", NAME, "-p", "once", "--max-tokens", "2", "--pull")
    assert ran.returncode == 0 and b"pulling maker/model" in ran.stderr


def test_a_repository_that_is_not_there_is_exit_code_three_or_six_in_four_lines(run: Run) -> None:
    failed = run("pull", "maker/absent")
    assert failed.returncode in (3, 6)
    assert [line.split(b":")[0] for line in failed.stderr.splitlines()] == [b"error", b"why", b"fix", b"more"]


def test_a_word_that_is_no_model_may_have_been_the_prompt(open_terminal: Open) -> None:
    terminal = open_terminal("run", "Hi")
    assert terminal.end() == 3 and b"localllm run --prompt=Hi" in terminal.text


def test_a_misspelt_repository_names_the_one_that_is_here(run: Run, hub: FakeHub, open_terminal: Open) -> None:
    run("pull", NAME)
    refused = run("run", "maker/modell", "-p", "once")
    assert b"maker/model is here" in refused.stderr and b"fix:   localllm run maker/model -p once" in refused.stderr
    assert b"is here" not in run("run", "maker/model2", "-p", "once").stderr  # another one of its series
    terminal = open_terminal("run", "maker/modell", "-p", "once", fresh=True, NO_COLOR="1", HF_ENDPOINT=hub.endpoint)
    assert terminal.end() == 3 and b"fix:   localllm run maker/model -p once" in terminal.text

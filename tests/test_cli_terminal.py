"""The command line on a terminal, in pipes that close, and under signals: each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli_support import environment, fork_cli, run_cli, start_cli, write_checkpoint
from tests.patience import PATIENCE_S, wait_for
from tests.terminal import Open
from tests.thinning import every_other

ESCAPE = re.compile(rb"\x1b")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough to be caught at work: some hundred tokens a second, and a context that lasts. Its kernels are
    compiled: not by each process anew."""
    model = write_checkpoint(tmp_path_factory.mktemp("model"), hidden=256, layers=8, context=16384)
    assert run_cli("run", model, "-p", "x", "--max-tokens", "2").code == 0
    return model


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the command with nothing on stdin and pipes for its output; fresh: by an interpreter of its own."""
    with contextlib.ExitStack() as processes:

        def started(*arguments: str | Path, fresh: bool = False, **options: Any) -> Any:
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = (start_cli if fresh else fork_cli)(tmp_path, *arguments, **{**streams, **options})
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield started


# Signals


@pytest.mark.parametrize("number", every_other([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_a_signal_stops_the_answer_keeps_it_and_says_so(model: Path, start: Start, number: int) -> None:
    process = start("run", model, "-p", "the fox", bufsize=0)  # `communicate` would not see what a buffer holds
    begun = process.stdout.read(16)
    process.send_signal(number)
    rest, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number and begun
    assert (begun + rest).endswith(b"\n")  # a random answer may begin with a newline, and then it needs no other
    assert re.search(rb"stopped after \d+ tokens?\n", errors) and b"Traceback" not in errors


def test_a_hangup_that_nohup_has_turned_off_stops_nothing(model: Path, start: Start) -> None:
    ignored = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), "bufsize": 0}
    process = start("run", model, "-p", "the fox", "--max-tokens", "100", **ignored)
    assert process.stdout.read(8)
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and b"stopped" not in errors


def test_an_interrupted_json_answer_is_one_whole_object(model: Path, start: Start) -> None:
    process = start("run", model, "--jsonl", "-p", "x")
    while b'"token"' not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    lines = process.stdout.read().splitlines()
    assert process.wait(timeout=PATIENCE_S) == 130
    assert b'"finish_reason": "cancelled"' in lines[-1]


def test_ctrl_c_while_the_model_loads_leaves(model: Path, open_terminal: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.cli.load_progress.open_engine", lambda *_: threading.Event().wait())
    terminal = open_terminal("run", model, "-p", "x")
    terminal.wait_for("loading")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130 and terminal.is_restored() and b"Traceback" not in terminal.text


def test_ctrl_c_while_the_prompt_is_read_leaves(model: Path, open_terminal: Open) -> None:
    terminal = open_terminal("run", model, "-p", "the fox and " * 2500, "--ctx", "16384")
    terminal.wait_for("reading the prompt")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130 and b"stopped after" in terminal.text


@pytest.mark.parametrize(("module", "told"), [("interrupts", b""), ("dispatch", b"interrupted")])
def test_ctrl_c_in_the_first_moment_is_no_traceback(tmp_path: Path, module: str, told: bytes) -> None:
    program = f"""
import os, signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "localllm.cli.{module}":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.meta_path.insert(0, Press())
from localllm.cli import main
main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment(tmp_path), capture_output=True, timeout=PATIENCE_S
    )
    assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (130, b"", told)


def test_a_second_ctrl_c_leaves_at_once(model: Path, start: Start) -> None:
    process = start("run", model, "-p", "x")
    process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130


@pytest.mark.parametrize(
    "numbers", [[signal.SIGINT], pytest.param([signal.SIGTERM, signal.SIGHUP], marks=pytest.mark.slow)]
)
def test_a_signal_that_the_main_thread_does_not_hear_ends_the_command_all_the_same(numbers: list[int]) -> None:
    deaf = """
import hashlib
from localllm.cli.interrupts import Interrupts
Interrupts().install()
print("begun", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
    processes = [subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) for _ in numbers]
    try:
        for process in processes:
            assert process.stdout.readline() == b"begun\n"
        for process in processes:
            spent_s = psutil.Process(process.pid).cpu_times().user
            wait_for(lambda child=process, was=spent_s: psutil.Process(child.pid).cpu_times().user > was + 0.1)  # deaf
        for process, number in zip(processes, numbers, strict=True):
            process.send_signal(number)
        assert [process.wait(timeout=PATIENCE_S) for process in processes] == [128 + number for number in numbers]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_ctrl_c_while_standard_input_is_awaited_leaves(model: Path, start: Start) -> None:
    process = start("tokenize", model, stdin=subprocess.PIPE)
    assert b"standard input" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE_S) == 130


# Streams


@pytest.mark.parametrize("flags", every_other([[], ["--jsonl"]]))
def test_a_closed_pipe_is_silent(model: Path, start: Start, flags: list[str]) -> None:
    process = start("run", model, "-p", "x", *flags)
    process.stdout.read(8)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=PATIENCE_S) == 0


@pytest.mark.parametrize("arguments", [["list", "--all"], ["--help"], ["run", "--help"]], ids=" ".join)
def test_a_full_disk_under_stdout_is_an_error(start: Start, arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start(*arguments, stdout=full, fresh=True)
        errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 1
    assert b"No space left" in errors and b"bug" not in errors and b"Traceback" not in errors


@pytest.mark.parametrize("arguments", [["--version"], ["run", "--raw", "--show-prompt", "-p", "x"]], ids=" ".join)
def test_a_closed_stdout_is_an_error(start: Start, arguments: list[str]) -> None:
    process = start(*arguments, fresh=True, stdout=None, preexec_fn=lambda: os.close(1))
    errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 1
    assert b"standard output is closed" in errors


def test_an_answer_on_a_terminal_is_broken_between_words_and_a_prompt_is_not(model: Path, open_terminal: Open) -> None:
    words = "the fox found a lantern " * 8
    terminal = open_terminal("run", model, "--raw", "--show-prompt", "-p", words)
    assert terminal.end() == 0 and words.encode() in terminal.text
    line = ("run", model, "--raw", "-p", words, "--logit-bias", f"{_token_of(model, ' fox')}=1000")
    terminal = open_terminal(*line, "--max-tokens", "60", TERM="dumb")
    assert terminal.end() == 0 and re.search(rb"\A(?: ?fox(?: fox)*\r\n)+\Z", terminal.text)
    assert max(map(len, terminal.text.split(b"\r\n"))) <= 80


def test_a_pipe_gets_no_escape_codes_and_utf8_whatever_the_locale(model: Path, start: Start) -> None:
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "FORCE_COLOR": "1"}
    process = start("run", model, "-p", "x", "--max-tokens", "40", "--stats", fresh=True, variables=locale)
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    out.decode("utf-8")
    assert not ESCAPE.search(errors)


@pytest.mark.usefixtures("own_folders")
def test_a_terminal_gets_the_answer_without_the_models_control_characters(model: Path, open_terminal: Open) -> None:
    # The byte-level alphabet's token for ESC, forced: in a pipe it is there, on a terminal it is not.
    token_id = _token_of(model, "\x1b")
    line = ("run", model, "-p", "x", "--logit-bias", f"{token_id}=1000", "--max-tokens", "5")
    assert run_cli(*line).out == b"\x1b" * 5 + b"\n"
    terminal = open_terminal(*line, "--stats", TERM="dumb")
    assert terminal.end() == 0 and b"answer 5 tokens" in terminal.text
    assert not ESCAPE.search(terminal.text)


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_for_terminals_that_want_them(
    tmp_path: Path, open_terminal: Open, variables: dict[str, str], coloured: bool
) -> None:
    terminal = open_terminal("run", "nothing-like-it", "-p", "x", **variables)
    assert terminal.end() == 3 and b"error:" in terminal.text
    assert bool(ESCAPE.search(terminal.text)) is coloured


def test_run_on_a_terminal_without_a_prompt_says_how_to_give_one(model: Path, open_terminal: Open) -> None:
    terminal = open_terminal("run", model, "--json")
    assert terminal.end() == 2
    assert f"localllm run {model} --json -p 'Tell me a tale".encode() in terminal.text


def _token_of(model: Path, text: str) -> int:
    from localllm.text.tokenizer import Tokenizer

    ids = Tokenizer.load(model).encode(text)
    assert len(ids) == 1
    return ids[0]


# Chat


def test_a_chat_on_a_terminal(model: Path, tmp_path: Path, open_terminal: Open) -> None:
    terminal = open_terminal("chat", model, "--plain", "--max-tokens", "8", "--seed", "1")
    terminal.wait_for_prompt()
    terminal.say("/hlep", "the nearest is /help")
    terminal.say('"""first\nsecond"""', r"\.\.\. ")
    terminal.say("/set max_tokens 100000")
    terminal.forget()
    terminal.send("go on\n")
    terminal.wait_for(r"\n.{40}")
    terminal.press_ctrl_c()
    terminal.wait_for("stopped after")
    terminal.wait_for_prompt()
    terminal.say("/save chat.json", "wrote chat.json")
    terminal.send("/save chat.json\n")
    terminal.wait_for("Overwrite it")
    terminal.say("n", "nothing was written")
    terminal.press_ctrl_c()
    terminal.wait_for(r"\n(\x1b\[[0-9;]*m)*Ctrl-C again leaves")
    terminal.wait_for_prompt()
    terminal.forget()
    terminal.send("half a question")
    terminal.wait_for("half a question")
    terminal.press_ctrl_c()  # clears the line, and is not a second press
    terminal.wait_for(r"\n.*>>> $")
    assert b"leaves" not in terminal.text
    terminal.press_ctrl_c()
    terminal.wait_for("Ctrl-C again leaves")
    terminal.wait_for_prompt()
    terminal.press_ctrl_c()
    assert terminal.end() == 130 and terminal.is_restored()
    history = tmp_path / "data" / "history"
    assert "/save chat.json" in history.read_text() and history.stat().st_mode & 0o777 == 0o600


def test_the_farewell_names_the_chat_that_was_gone_on_with(model: Path, open_terminal: Open) -> None:
    terminal = open_terminal("chat", model, "--plain", "--max-tokens", "4")
    terminal.wait_for_prompt()
    for line in ("the fox", "/clear", "the owl"):
        terminal.say(line)
    terminal.say("/sessions the fox", "going on with .*: the fox")
    [fox] = re.findall(rb"going on with (\w+): the fox", terminal.text)
    terminal.send("/bye\n")
    assert terminal.end() == 0 and b"--resume " + fox + b" goes on" in terminal.text


def test_ctrl_d_leaves_a_chat(model: Path, open_terminal: Open) -> None:
    terminal = open_terminal("chat", model, "--plain")
    terminal.wait_for_prompt()
    terminal.send("\x04")
    assert terminal.end() == 0 and terminal.is_restored()


def test_a_listing_leaves_out_what_a_narrow_terminal_has_no_room_for_and_says_so(open_terminal: Open) -> None:
    terminal = open_terminal("list")
    assert terminal.end() == 0
    lines = ESCAPE.sub(b"", terminal.text).decode().splitlines()
    assert lines[0].split()[:2] == ["NAME", "STATE"]
    assert max(map(len, lines)) <= 80
    assert any(re.search("a wider terminal has (FROM, )?LICENCE too, as has --json", line) for line in lines)


def test_a_first_use_is_told_on_a_line_of_its_own(
    model: Path, tmp_path: Path, known_machine: Callable[[Path], None], open_terminal: Open
) -> None:
    known_machine(tmp_path / "cache")
    terminal = open_terminal("run", model, "--weights", "int4", "-p", "x", "--max-tokens", "1", NO_COLOR="1")
    assert terminal.end() == 0 and b"\r\x1b[2Kloading" in terminal.text
    assert b"\r\x1b[2Kpacking %b to int4, once: " % bytes(model) in terminal.text


@pytest.mark.parametrize(("answer", "code", "told"), [("y", 0, "512 B freed"), ("", 1, "nothing was deleted")])
def test_a_removal_says_how_much_it_takes_with_it_and_heeds_the_answer(
    tmp_path: Path, open_terminal: Open, answer: str, code: int, told: str
) -> None:
    blobs = tmp_path / "hf" / "hub" / "models--maker--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "of a download that was broken off").write_bytes(bytes(512))
    terminal = open_terminal("rm", "maker/model", fresh=True)
    terminal.wait_for(r"Delete maker/model \(512 B\)\? \[y/N\] ")
    terminal.send(f"{answer}\n")
    assert terminal.end() == code and told.encode() in terminal.text
    assert blobs.exists() == (answer != "y")


def test_an_answer_is_copied_by_the_terminal(model: Path, open_terminal: Open) -> None:
    terminal = open_terminal("chat", model, "--plain", "--max-tokens", "4")
    terminal.wait_for_prompt()
    terminal.say("one")
    terminal.say("/copy", r"\x1b\]52;c;[A-Za-z0-9+/=]+\x07(.|\s)*copied the answer: \d+ characters")

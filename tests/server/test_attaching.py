"""`run` and `chat` beside a server: its engine answers, where it is what is asked for; `ps`, `load` and `stop`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from localllm.config import load_settings
from localllm.engine.events import FinishedEvent
from localllm.engine.request import Request, SamplingParams
from localllm.errors import EngineGoneError, EngineStuckError, ModelChangedError
from localllm.runtime import server_client
from localllm.runtime.renewed_client import RenewedClient
from localllm.runtime.selection import selected
from localllm.runtime.server_client import Server, ServerEngine, attached
from localllm.runtime.watchdog import Patience
from tests.cli_support import environment, fork_cli, start_cli, write_checkpoint
from tests.patience import PATIENCE_S, wait_for
from tests.server.support import Json, Patch
from tests.server.test_adapters import write_adapter
from tests.server.test_cli_serve import Served

SLOW = pytest.mark.slow
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
Ended = subprocess.CompletedProcess[bytes]
ASK = ("run", "-p", "A tale about an owl, please.", "--max-tokens", "6", "--temperature", "0")


class Home:
    """A user's folders, with a server that runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocked = path / "blocked"
        self.blocked.mkdir()
        (self.blocked / "torch.py").write_text('raise ImportError("torch is not to be loaded")')

    def localllm(self, *arguments: str | Path, torch: bool = True, stdin: bytes = b"") -> Ended:
        """torch: may be imported, and is here already, in a fork; where it may not, what runs all the same has
        attached."""
        if torch:
            with fork_cli(self.path, *arguments, **PIPES) as process:
                out, err = process.communicate(stdin, PATIENCE_S)
            return subprocess.CompletedProcess(arguments, process.returncode, out, err)
        environ = environment(self.path)
        environ["PYTHONPATH"] = f"{self.blocked}{os.pathsep}{environ['PYTHONPATH']}"
        command = [sys.executable, "-m", "localllm", *map(str, arguments)]
        return subprocess.run(command, env=environ, cwd=self.path, capture_output=True, input=stdin, timeout=PATIENCE_S)

    def rows(self) -> dict[str, Json]:
        """What `ps` tells of each model, by its name."""
        return {row["name"]: row for row in json.loads(self.localllm("ps", "--json").stdout)["models"]}

    def pid_of(self, name: str) -> int:
        """The process of a model's engine."""
        return int(self.rows()[name]["pid"])

    def client(self, model: str | Path, monkeypatch: Patch) -> RenewedClient:
        """A client of the server's engine, in this process."""
        monkeypatch.setenv("LOCALLLM_HOME", environment(self.path)["LOCALLLM_HOME"])
        resolved = load_settings({}, environ={})
        return attached(selected(resolved, str(model)), lambda _text: None)


@contextmanager
def served_alone(folder: Path, *arguments: str | Path, end: int = signal.SIGKILL) -> Iterator[Served]:
    """A server of its own for a user of its own. end: the signal by which it ends."""
    process = start_cli(folder, "serve", "--port", "0", *arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with process:
        try:
            yield Served(process)
        finally:
            process.send_signal(end)
            process.wait(PATIENCE_S)


@pytest.fixture(autouse=True)
def known(tmp_path: Path, known_machine: Callable[[Path], None]) -> None:
    """A server of a test's own need not measure the machine."""
    known_machine(tmp_path / "cache")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, known_machine: Callable[[Path], None]) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("user")
    known_machine(folder / "cache")
    write_checkpoint(folder / "other")
    with served_alone(folder, "--also", folder / "other", end=signal.SIGINT):
        yield Home(folder)


def test_run_has_the_servers_engine_answer_and_loads_nothing_itself(home: Home) -> None:
    attached = home.localllm(*ASK, torch=False)
    assert attached.returncode == 0, attached.stderr
    alone = home.localllm(*ASK, "--no-attach")
    assert attached.stdout == alone.stdout != b"" and attached.stderr == b""


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory, known_machine: Callable[[Path], None]) -> Iterator[Home]:
    """With a server of a model that has other names there, one of them another model's."""
    folder = tmp_path_factory.mktemp("user")
    known_machine(folder / "cache")
    teller = write_checkpoint(folder / "models" / "teller")
    with served_alone(folder, teller, "--alias", "bard", "--alias", "tiny", end=signal.SIGINT):
        yield Home(folder)


def test_a_name_that_is_another_models_alias_there_is_not_that_model(home: Home, renamed: Home) -> None:
    there, here = renamed.localllm(*ASK, torch=False), home.localllm(*ASK, torch=False)
    assert there.returncode == 0 and there.stdout == here.stdout


def test_run_and_chat_know_a_model_by_the_names_that_the_server_has_for_it(renamed: Home) -> None:
    asked = ("-p", "A tale.", "--max-tokens", "3")
    for name in ("teller", "bard"):
        answered = renamed.localllm("run", name, *asked, torch=False)
        assert answered.returncode == 0 and answered.stderr == b""
    chatted = renamed.localllm("chat", "bard", "--plain", "--max-tokens", "3", torch=False, stdin=b"A tale.\n")
    assert chatted.returncode == 0 and chatted.stdout.strip()
    assert renamed.localllm("run", "teller", *asked, "--no-attach").returncode == 3
    assert b"did you mean" in renamed.localllm("run", "tinny", *asked).stderr


def test_a_refusal_is_the_same_as_without_a_server(home: Home) -> None:
    too_long = ("run", "-p", "owl " * 3000)
    attached, alone = home.localllm(*too_long, torch=False), home.localllm(*too_long, "--no-attach")
    assert attached.returncode == alone.returncode == 5 and attached.stderr == alone.stderr


def test_an_engine_that_has_come_to_what_is_asked_for_answers_in_the_same_forms(home: Home) -> None:
    chosen = ("--kv", "int8", "--ctx", "1024")
    answered = home.localllm("run", "--json", "--regex", "(yes|no)", "-p", "Is it so?", *chosen, torch=False)
    assert answered.returncode == 0 and answered.stderr == b""
    assert json.loads(answered.stdout)["text"] in ("yes", "no")


OTHER_CTX = pytest.param(
    ("--ctx", "256"), "the server's engine has ctx 1024, and this command asks for 256", marks=SLOW
)
PRIVATE = pytest.param(("--private",), "which --private rules out", marks=SLOW)


@pytest.mark.parametrize(
    ("flags", "why"),
    [(("--kv", "bf16"), "the server's engine has kv int8, and this command asks for bf16"), OTHER_CTX, PRIVATE],
)
def test_an_engine_that_is_not_what_is_asked_for_is_left_alone_and_that_is_said(
    home: Home, flags: tuple[str, ...], why: str
) -> None:
    answered = home.localllm(*ASK, *flags)
    assert answered.returncode == 0 and b"the running server is not used" in answered.stderr
    assert why in answered.stderr.decode()


def test_a_chat_goes_on_where_its_engine_is_killed(home: Home) -> None:
    pid = home.pid_of("tiny")
    with start_cli(home.path, "chat", "--plain", "--max-tokens", "4", **PIPES) as chat:
        chat.stdin.write(b"A tale about a fox.\n")
        chat.stdin.flush()
        first = chat.stdout.readline()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not psutil.pid_exists(pid))
        chat.stdin.write(b"And then?\n")
        chat.stdin.close()
        second = chat.stdout.read()
    assert chat.returncode == 0 and first.strip() and second.strip()


def test_a_chat_goes_on_by_itself_where_the_server_has_ended(tmp_path: Path) -> None:
    chat_line = ("chat", "--plain", "--max-tokens", "4", "--temperature", "0")
    with served_alone(tmp_path) as server, start_cli(tmp_path, *chat_line, **PIPES) as chat:
        chat.stdin.write(b"A tale about a fox.\n")
        chat.stdin.flush()
        first = chat.stdout.readline()
        server.end(signal.SIGTERM)
        chat.stdin.write(b"And then?\n")
        chat.stdin.close()
        second, said = chat.stdout.read(), chat.stderr.read().decode()
    assert chat.returncode == 0 and first.strip() and second.strip()
    assert said.count("no server answers any more: tiny is loaded by this program itself\n") == 1
    assert "Errno" not in said and "error:" not in said
    kept = Home(tmp_path).localllm("sessions", "show", "last").stdout
    assert b"A tale about a fox." in kept and b"And then?" in kept


def test_an_engine_that_was_killed_has_ended_and_is_loaded_by_the_next_question(tmp_path: Path) -> None:
    own = Home(tmp_path)
    with served_alone(tmp_path, "--idle-unload", "1h") as server:
        os.kill(own.pid_of("tiny"), signal.SIGKILL)
        told = server.wait_for("has ended")
        assert "the engine of tiny has ended: its process was ended by SIGKILL" in told
        [row] = own.rows().values()
        assert (row["state"], row["pid"], row["expires_at"]) == ("ended", None, None)
        cells = own.localllm("ps").stdout.decode().splitlines()[1].split()
        assert cells == ["tiny", "ended", "-"]
        assert server.ask("/health").status == 200
        assert own.localllm(*ASK, torch=False).returncode == 0
        assert own.rows()["tiny"]["state"] == "loaded"


def test_an_engine_that_is_stopped_is_listed_as_silent_and_a_program_that_waits_for_it_is_told(
    home: Home, monkeypatch: Patch
) -> None:
    assert home.localllm("load", "tiny", torch=False).returncode == 0
    pid, service = home.pid_of("tiny"), home.client("tiny", monkeypatch)
    engine = service.wait_loaded()
    os.kill(pid, signal.SIGSTOP)
    row = home.rows()["tiny"]
    assert row["state"] == "silent" and row["ctx"] == 1024
    service.client.watchdog.patience = Patience(still_s=1.0)
    stream = service.submit(Request(tuple(engine.encode("Once")), SamplingParams(max_tokens=2)))
    with pytest.raises(EngineStuckError, match="does not move on"):
        list(stream)
    wait_for(lambda: not psutil.pid_exists(pid))
    again = service.submit(Request(tuple(engine.encode("Once")), SamplingParams(max_tokens=2)))
    assert any(isinstance(event, FinishedEvent) for event in again)
    service.close()


def test_a_model_that_is_written_anew_answers_run_and_chat_as_it_is_now(home: Home, monkeypatch: Patch) -> None:
    folder = write_checkpoint(home.path / "other")
    asked = ("run", str(folder), "-p", "A tale.", "--max-tokens", "6", "--temperature", "0")
    before = home.localllm(*asked, torch=False)
    chat = home.client(folder, monkeypatch)
    engine, sampling = chat.wait_loaded(), SamplingParams(max_tokens=2)
    old = Request(tuple(engine.encode([{"role": "user", "content": "A tale."}])), sampling)
    write_checkpoint(folder, seed=1)
    (folder / "chat_template.jinja").write_text("another: {{ messages[0].content }}")
    with pytest.raises(ModelChangedError, match="has changed since the question was asked"):
        chat.submit(old)
    new = engine.encode([{"role": "user", "content": "A tale."}])
    assert engine.tokenizer.decode(new).endswith("another: A tale.")
    assert list(chat.submit(Request(tuple(new), sampling)))
    chat.close()
    after, alone = home.localllm(*asked, torch=False), home.localllm(*asked, "--no-attach")
    assert before.returncode == after.returncode == 0 and after.stdout == alone.stdout != before.stdout
    (folder / "chat_template.jinja").unlink()


def test_models_are_loaded_listed_and_unloaded_by_hand(home: Home) -> None:
    folder = home.path / "other"
    loaded = home.localllm("load", folder, torch=False)
    assert loaded.returncode == 0 and loaded.stderr == b"other is loaded\n"
    assert home.rows().keys() == {"tiny", "other"}
    table = home.localllm("ps", torch=False).stdout.decode()
    assert "other" in table and "RESERVED" in table and "memory" in table and "its room is needed" in table
    stopped = home.localllm("stop", "other", torch=False)
    assert stopped.returncode == 0 and list(home.rows()) == ["tiny"]
    again = home.localllm("stop", "other", torch=False)
    assert again.returncode == 1 and b"other is not loaded" in again.stderr and b"fix:   localllm ps" in again.stderr


def test_an_adapter_is_loaded_and_unloaded_by_hand(home: Home, tmp_path: Path) -> None:
    ask = ("run", "tiny", "-p", "Once upon a time", "--temperature", "0", "--max-tokens", "8")
    folder, plain = write_adapter(tmp_path / "fox", 1), home.localllm(*ask).stdout
    loaded = home.localllm("load", "tiny", "--adapter", folder, torch=False)
    assert loaded.returncode == 0 and b"tiny:fox is loaded" in loaded.stderr
    adapted = home.localllm(*ask, "--adapter", folder, torch=False)  # the server's engine answers
    assert adapted.returncode == 0 and adapted.stdout != plain
    assert home.rows()["tiny"]["adapters"] == ["fox"]
    assert b"tiny has adapters in memory: fox" in home.localllm("ps", torch=False).stdout
    (tmp_path / "other").mkdir()
    taken = home.localllm("load", "tiny", "--adapter", write_adapter(tmp_path / "other" / "fox", 2), torch=False)
    assert taken.returncode == 1 and b"tiny has an adapter fox already" in taken.stderr
    for named in (folder, "fox"):
        unloaded = home.localllm("stop", "tiny", "--adapter", named, torch=False)
        assert unloaded.returncode == 0 and b"tiny:fox is unloaded" in unloaded.stderr
        again = home.localllm("stop", "tiny", "--adapter", named, torch=False)
        assert again.returncode == 1 and b"fix:   localllm ps" in again.stderr, "there is none any more"
        assert home.localllm("load", "tiny", "--adapter", folder, torch=False).returncode == 0
    assert home.rows()["tiny"]["state"] == "loaded", "the model stays"
    (folder / "adapter_config.json").write_text("{}")
    wrong = home.localllm("load", "tiny", "--adapter", folder, torch=False)
    assert wrong.returncode == 1 and b"adapter_config.json" in wrong.stderr and b"help adapter" in wrong.stderr
    nowhere = home.localllm("stop", "tiny", "--adapter", "wolf", torch=False)
    assert nowhere.returncode == 1 and b"tiny:wolf is not loaded" in nowhere.stderr
    assert home.localllm("stop", "--adapter", "fox", torch=False).returncode == 2


def test_an_error_in_mid_answer_begins_on_a_line_of_its_own(home: Home) -> None:
    assert home.localllm("load", "tiny").returncode == 0
    pid = home.pid_of("tiny")
    endless = ("run", "-p", "A tale.", "--max-tokens", "900", "--logit-bias", "2=-100", "--logit-bias", "0=-100")
    with start_cli(home.path, *endless, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as answering:
        said = answering.stdout.read(40)
        os.kill(pid, signal.SIGKILL)
        said += answering.stdout.read()
    assert answering.returncode == 1 and b"\nerror: the engine is gone\n" in said


@pytest.mark.slow
@pytest.mark.parametrize("command", [ASK, ("load", "tiny")], ids=["run", "load"])
def test_a_model_that_was_found_loaded_is_unloaded_after_its_time(tmp_path: Path, command: tuple[str, ...]) -> None:
    own = Home(tmp_path)
    with served_alone(tmp_path, "--idle-unload", "8s") as server:
        assert own.localllm(*command, torch=False).returncode == 0
        [row] = own.rows().values()
        assert row["expires_at"] is not None and not any("is unloaded" in line for line in server.said)
        server.wait_for("tiny is unloaded")
        assert own.rows() == {}


@pytest.mark.slow
def test_who_asks_for_a_model_that_is_being_unloaded_waits_until_its_process_has_gone(tmp_path: Path) -> None:
    own = Home(tmp_path)
    with served_alone(tmp_path) as server, ThreadPoolExecutor() as threads:
        pid = own.pid_of("tiny")
        os.kill(pid, signal.SIGSTOP)  # it does not end before it is killed, after five seconds
        stopped = threads.submit(own.localllm, "stop", "tiny")
        time.sleep(2.0)
        body = {"prompt": "Once", "max_tokens": 1}
        assert server.ask("/v1/completions", body).status == 200
        assert not psutil.pid_exists(pid)
        assert stopped.result().returncode == 0


@pytest.mark.parametrize(("command", "fix"), [("load", "localllm load tiny"), ("stop", "localllm ps")])
def test_a_model_that_there_is_not_is_told_by_name_with_what_helps(home: Home, command: str, fix: str) -> None:
    told = home.localllm(command, "tinny", torch=False)
    lines = [
        "error: there is no model 'tinny'",
        "why:   did you mean tiny? `localllm list --all` names all",
        f"fix:   {fix}",
    ]
    assert told.returncode == 3 and told.stderr.decode().splitlines()[:3] == lines


def test_the_servers_socket_is_this_users_alone(home: Home) -> None:
    [path] = home.path.glob("data/run/server.sock")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_another_server_of_the_same_user_says_that_it_is_not_found(home: Home) -> None:
    with served_alone(home.path) as served:
        assert "do not find this server" in "".join(served.said)
        served.end(signal.SIGTERM)
    assert home.localllm(*ASK, torch=False).returncode == 0


@pytest.mark.slow
def test_what_a_killed_server_leaves_behind_is_in_nobodys_way(tmp_path: Path) -> None:
    own = Home(tmp_path)
    with served_alone(tmp_path) as server:
        engines = psutil.Process(server.process.pid).children(recursive=True)
    _, alive = psutil.wait_procs(engines, PATIENCE_S)
    assert alive == []
    assert b"no server is found" in own.localllm("ps").stderr
    assert own.localllm("stop").returncode == 1
    assert own.localllm(*ASK).returncode == 0
    with served_alone(tmp_path) as again:
        assert own.localllm("stop").returncode == 0
        again.process.wait(PATIENCE_S)
        assert again.process.returncode == 0 and again.said


def test_settings_are_those_of_the_server_that_runs(home: Home) -> None:
    urls = json.loads(home.localllm("ps", "--json").stdout)["urls"]
    told = json.loads(home.localllm("connect", "aider", "--json").stdout)
    assert told["url"] in urls and told["server"] == "ready"


def test_an_engine_that_has_just_ended_is_asked_for_again(tmp_path: Path, monkeypatch: Patch) -> None:
    """The server gives its socket until it learns of the end."""
    monkeypatch.setattr(server_client, "_AGAIN_S", 0.0)
    sockets = iter([tmp_path / "ended", tmp_path / "next"])
    monkeypatch.setattr(Server, "ask", lambda *_: {"socket": str(next(sockets)), "pid": os.getpid()})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "next"))
        listener.listen()
        engine = ServerEngine(Server(tmp_path / "server"), {})
        engine.connect().close()
    assert engine.pid == os.getpid()
    monkeypatch.setattr(Server, "ask", lambda *_: {"socket": str(tmp_path / "ended")})
    with pytest.raises(EngineGoneError, match="engine cannot be reached"):
        engine.connect()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the server says which process it is")
def test_an_engine_that_ends_before_its_process_is_known_is_asked_for_again(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(server_client, "_AGAIN_S", 0.0)
    monkeypatch.setattr(Server, "ask", lambda *_: {"socket": str(tmp_path / "engine")})
    asked: list[socket.socket] = []

    def pid(sock: socket.socket) -> int:
        asked.append(sock)
        if len(asked) == 1:
            raise OSError("the other end is gone")
        return 1234

    monkeypatch.setattr(server_client, "listener_pid", pid)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "engine"))
        listener.listen()
        engine = ServerEngine(Server(tmp_path / "server"), {})
        engine.connect().close()
    assert engine.pid == 1234 and len(asked) == 2 and asked[0].fileno() == -1

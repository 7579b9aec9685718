"""An engine in a process of its own: the same answers, for several programs at once, whichever of them ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import psutil
import pytest

from localllm.config import load_settings
from localllm.engine.engine import Engine
from localllm.engine.engine_info import EngineStatus
from localllm.engine.events import Event, FinishedEvent, TokenEvent
from localllm.engine.request import Request, SamplingParams
from localllm.errors import ContextOverflowError, EngineClosedError, EngineGoneError, GrammarError, UsageError
from localllm.runtime import protocol
from localllm.runtime.engine_client import EngineClient
from localllm.runtime.engine_handle import EngineHandle, EnginePeer
from localllm.runtime.engine_loader import Opening
from localllm.runtime.engine_process import Caps, Foreseen, LoadObserver, foresee, grant, start_engine
from localllm.runtime.renewed_client import RenewedClient
from localllm.runtime.selection import Selection, selected
from localllm.runtime.server_client import Server, ServerEngine
from localllm.runtime.sockets import connected, listening
from localllm.text.grammar.grammar import Grammar
from tests.cli_support import environment
from tests.engine_support import token_ids
from tests.patience import PATIENCE_S
from tests.server.support import wait_for

STORY = "Once upon a time"
ENDLESS = SamplingParams(max_tokens=900, seed=1, logit_bias={0: -100, 2: -100})


def selection() -> Selection:
    resolved = load_settings({}, environ={})
    return selected(resolved, "tiny")


def started() -> EngineClient:
    """One that takes what room there is."""
    return start_engine(selection(), Opening(parallel=4), Caps(), LoadObserver())


@pytest.fixture(scope="module")
def process() -> Iterator[EngineClient]:
    process = started()
    process.wait_loaded()
    yield process
    process.close()


@pytest.fixture
def guest(process: EngineClient) -> Iterator[EngineClient]:
    """Another program that uses it."""
    guest = attached(process)
    yield guest
    guest.close()


def attached(process: EngineClient) -> EngineClient:
    return EngineClient(selection().files.directory, EnginePeer(lambda: connected(socket_of(process))))


def socket_of(process: EngineClient) -> Path:
    path = process.peer.socket_path
    assert path is not None
    return path


def engine_of(service: EngineHandle) -> Any:
    engine = service.wait_loaded()
    assert engine is not None
    return engine


def request(service: EngineHandle, prompt: str = STORY, sampling: SamplingParams | None = None, **more: Any) -> Request:
    prompt_ids = engine_of(service).encode(prompt)
    return Request(tuple(prompt_ids), sampling or SamplingParams(max_tokens=8, seed=3), **more)


def answer(service: EngineHandle, *arguments: Any, **more: Any) -> list[Event]:
    return list(service.submit(request(service, *arguments, **more)))


def last(events: Sequence[Event]) -> FinishedEvent:
    finished = events[-1]
    assert isinstance(finished, FinishedEvent)
    return finished


def status(service: EngineHandle) -> EngineStatus:
    return engine_of(service).status()


def test_it_says_what_an_engine_of_this_process_says(process: EngineClient, guest: EngineClient) -> None:
    engine = Engine.load("tiny")
    own = [*engine.generate(STORY, SamplingParams(max_tokens=8, seed=3))]
    engine.close()
    assert token_ids(answer(process)) == token_ids(answer(guest)) == token_ids(own) != []


def test_what_is_known_of_the_model_is_what_it_was_loaded_with(process: EngineClient) -> None:
    engine = engine_of(process)
    facts = engine.facts()
    assert (facts.ctx, facts.weights, engine.config.vocab_size) == (engine.ctx, engine.weights, 4096)
    assert facts.ctx == 1024 and facts.weight_bytes > 1 << 20
    assert facts.held_bytes("ram") > 300 << 20 and list(map(str, engine.fixes_for(1024))) == ["--ctx 1024"]
    assert engine.current_plan is None and "message" in next(iter(engine.template.sources.values()))


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"prompt": "owl " * 3000}, ContextOverflowError),
        ({"sampling": SamplingParams(logit_bias={1 << 20: 1.0})}, UsageError),  # a token that there is not
        ({"grammar": Grammar("regex", "(")}, GrammarError),
    ],
)
def test_a_request_that_cannot_run_is_refused_as_by_an_engine_of_this_process(
    process: EngineClient, more: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        engine_of(process).check(request(process, **more))
    with pytest.raises(error):
        answer(process, **more)


def test_a_grammar_holds_over_there(process: EngineClient) -> None:
    events = answer(process, grammar=Grammar("regex", "(yes|no)"))
    assert last(events).meets_grammar
    assert "".join(getattr(event, "text", "") for event in events) in ("yes", "no")


def test_an_answer_that_is_stopped_ends_and_keeps_what_was_said(process: EngineClient) -> None:
    stream = process.submit(request(process, sampling=ENDLESS))
    said = []
    for event in stream:
        said.append(event)
        if len(token_ids(said)) == 3:
            stream.abort()
    assert last(said).finish_reason == "cancelled" and len(token_ids(said)) < 900


def test_what_a_program_asked_for_ends_when_it_goes_and_others_go_on(process: EngineClient) -> None:
    goes, stays = attached(process), attached(process)
    gone, staying = (each.submit(request(each, sampling=ENDLESS)) for each in (goes, stays))
    next(iter(gone)), next(iter(staying))
    assert goes._sock is not None
    goes._sock.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: len(status(process).running) == 1)
    assert isinstance(next(iter(staying)), TokenEvent)
    stays.close()
    wait_for(lambda: status(process).is_idle)


@pytest.mark.parametrize(
    "data",
    [b"\x00\xff\n", b"[]\n", b"{}\n", b'{"op":"dance","id":1}\n', b'{"op":"submit","id":1}\n', b"7" * 4096 + b"\n"],
)
def test_who_says_what_nobody_understands_is_not_listened_to(process: EngineClient, data: bytes) -> None:
    with connected(socket_of(process)) as sock, sock.makefile("rb") as lines:
        assert protocol.message(lines.readline())["op"] == "loaded"
        sock.sendall(data)
        assert lines.read() == b""
    assert token_ids(answer(process))


def test_its_socket_is_this_users_alone(process: EngineClient) -> None:
    assert socket_of(process).stat().st_mode & 0o777 == 0o600
    assert socket_of(process).parent.stat().st_mode & 0o777 == 0o700


def test_who_uses_an_engine_that_is_killed_hears_why_and_can_have_another() -> None:
    alive = [started()]
    alive[0].wait_loaded()
    service = RenewedClient(attached(alive[0]), lambda: attached(alive[-1]))
    engine, short = engine_of(service), request(service)
    events = iter(service.submit(request(service, sampling=ENDLESS)))
    next(events)
    os.kill(alive[0].peer.pid or 0, signal.SIGKILL)
    with pytest.raises(EngineGoneError):
        list(events)
    failure = alive[0].wait_ended()
    assert isinstance(failure, EngineGoneError) and "SIGKILL" in failure.why
    with pytest.raises(EngineGoneError, match="gone"):
        alive[0].submit(short)
    alive.append(started())
    alive[1].wait_loaded()
    wait_for(lambda: service.client.has_ended)
    assert len(token_ids(list(service.submit(short)))) == 8
    assert engine.facts().ctx == 1024  # who holds the engine that it was holds the one that it is
    for each in (service, *alive):
        each.close()


def test_a_request_of_which_nothing_was_answered_goes_to_another_engine_where_its_own_is_killed() -> None:
    alive = [started(), started()]
    for each in alive:
        each.wait_loaded()
    service = RenewedClient(attached(alive[0]), lambda: attached(alive[1]))
    short, pid = request(service), alive[0].peer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it receives what is sent, and answers nothing
    streams = [service.submit(each) for each in (short, request(service, sampling=ENDLESS))]
    os.kill(pid, signal.SIGKILL)
    assert len(token_ids(list(streams[0]))) == 8
    streams[1].abort()
    assert last(list(streams[1])).finish_reason == "cancelled"
    for client in (service, *alive):
        client.close()


def test_a_request_that_was_stopped_loads_no_other_engine() -> None:
    process, again = started(), mock.Mock(side_effect=AssertionError)
    process.wait_loaded()
    service = RenewedClient(attached(process), again)
    endless, pid = request(service, sampling=ENDLESS), process.peer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    stream = service.submit(endless)
    stream.abort()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineGoneError):
        list(stream)
    assert not again.called
    for client in (service, process):
        client.close()


def test_who_attaches_in_the_moment_in_which_the_server_ends_has_another_engine(process: EngineClient) -> None:
    def gone() -> socket.socket:
        raise EngineGoneError("the server cannot be reached", why="it has ended")

    def lost() -> EngineClient:
        return EngineClient(selection().files.directory, EnginePeer(gone))

    service = RenewedClient(lost(), lambda: attached(process))
    assert token_ids(answer(service)) == token_ids(answer(process))
    service.close()
    never = RenewedClient(lost(), lost)
    with pytest.raises(EngineGoneError, match="cannot be reached"):
        never.wait_loaded()


def test_an_engine_that_is_closed_takes_nothing_on_and_leaves_no_process_and_no_socket() -> None:
    process = started()
    process.wait_loaded()
    pid, path = process.peer.pid, socket_of(process)
    assert pid is not None
    stream = process.submit(request(process, sampling=ENDLESS))
    next(iter(stream))
    process.close()
    assert [event.finish_reason for event in stream if isinstance(event, FinishedEvent)] == ["cancelled"]
    assert not psutil.pid_exists(pid) and not path.exists()
    with pytest.raises(EngineClosedError):
        process.submit(Request((1,)))


def test_what_it_would_come_to_is_said_before_it_loads_and_again_with_other_caps() -> None:
    told: list[Foreseen] = []
    arrived = threading.Semaphore(0)

    def hear(what: Foreseen) -> None:
        told.append(what)
        arrived.release()

    process = start_engine(selection(), Opening(), Caps(ram=1 << 20), LoadObserver(hear))
    assert arrived.acquire(timeout=PATIENCE_S) and told[0].error is not None and not process.is_settled
    foresee(process, Caps(ram=800 << 20))
    assert arrived.acquire(timeout=PATIENCE_S) and told[1].is_easy and told[1].limits["ram"] == 800 << 20
    grant(process, Caps(ram=800 << 20))
    assert engine_of(process).facts().limits["ram"] == 800 << 20
    process.close()


@pytest.mark.parametrize("moment", ["before it has begun", "while it waits for room"])
def test_a_load_that_is_stopped_is_given_up_at_once(moment: str) -> None:
    arrived = threading.Event()
    process = start_engine(selection(), Opening(), Caps(), LoadObserver(lambda _foreseen: arrived.set()))
    if moment == "while it waits for room":
        assert arrived.wait(PATIENCE_S)
    process.stop()
    assert process.wait_loaded(60) is None and process.is_settled
    process.close()
    assert process.peer.pid is None or not psutil.pid_exists(process.peer.pid)


_OWNER = """
import sys, time
from tests.engine_owner import answer, started
process = started()
answer(process)
print(process.peer.pid, "torch" in sys.modules, flush=True)
time.sleep(60)
"""


def test_who_starts_an_engine_loads_no_torch_and_takes_it_along_when_it_is_killed(
    tmp_path: Path, known_machine: Callable[[Path], None]
) -> None:
    known_machine(tmp_path / "cache")
    command, environ = [sys.executable, "-c", _OWNER], environment(tmp_path)
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, has_torch = owner.stdout.readline().split()
        assert has_torch == "False" and psutil.pid_exists(int(pid))
        owner.kill()
    wait_for(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell who listens")
def test_an_engine_is_known_by_the_number_that_its_process_has_here(tmp_path: Path) -> None:
    """What a server in a container tells is another's, who would be killed for an engine that does not move on."""
    address = tmp_path / "a.sock"
    told: dict[str, Any] = {"pid": 1, "socket": str(address)}
    engine = ServerEngine(cast(Server, SimpleNamespace(ask=lambda *_asked: told)), {})
    with closing(listening(address)), closing(engine.connect()):
        assert engine.pid == os.getpid()

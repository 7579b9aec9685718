"""Several models in one server: loaded when they are asked for, unloaded when their room is, and started anew."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from localllm.engine.engine import Engine
from localllm.engine.engine_info import EngineFacts, EngineStatus
from localllm.engine.request import Request, SamplingParams
from localllm.errors import DoesNotFitError, EngineGoneError, EngineStuckError
from localllm.hub.names import TINY_DIRECTORY
from localllm.runtime import protocol, resident_models
from localllm.runtime.engine_client import EngineClient
from localllm.runtime.engine_handle import EnginePeer
from localllm.runtime.engine_process import Caps, Foreseen, foresee
from localllm.runtime.served_model import ServedModel
from localllm.runtime.watchdog import Patience, Watchdog
from localllm.server.model_server import Capacity
from tests.cli_support import write_checkpoint
from tests.patience import PATIENCE_S
from tests.server.support import OWL, Json, Patch, Running, running, wait_for

CHAT = "/v1/chat/completions"
TEXT: Json = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
BIAS = {"2": -100, "0": -100}  # of what would end the answer
Changing = tuple[Running, Path]
Texts = dict[str, str]
ENDLESS: Json = {"prompt": "Once", "max_tokens": 900, "stream": True, "logit_bias": BIAS}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "other")


@pytest.fixture(scope="module")
def texts(other: Path) -> Texts:
    """What each model says of TEXT."""
    return {"tiny": _text_of("tiny"), "other": _text_of(str(other))}


def _text_of(model: str) -> str:
    engine = Engine.load(model)
    events = engine.generate(TEXT["prompt"], SamplingParams(temperature=0, max_tokens=8))
    text = "".join(getattr(event, "text", "") for event in events)
    engine.close()
    return text


@pytest.fixture(scope="module")
def processes(other: Path) -> Iterator[Running]:
    with running(in_processes=True, also=[other], ram="600MiB") as server:
        yield server


@pytest.fixture
def tight(processes: Running) -> Running:
    """A server under whose cap one of its two models has room: tiny has it."""
    said(processes, "tiny")
    return processes


@pytest.fixture(scope="module")
def both(other: Path) -> Iterator[Running]:
    """A server that has room for both of its models."""
    with running(in_processes=True, also=[other]) as server:
        yield server


def pulled(hub: Path, *seeds: int, **refs: str) -> list[Path]:
    """A model as it is pulled: a snapshot for each seed, named aaa..., bbb..., and the references to them."""
    folder = hub / "models--maker--teller"
    snapshots = [folder / "snapshots" / ("abc"[number] * 40) for number in range(len(seeds))]
    for snapshot, seed in zip(snapshots, seeds, strict=True):
        write_checkpoint(snapshot, seed=seed)
    (folder / "refs").mkdir()
    for name, letter in refs.items():
        (folder / "refs" / name).write_text(letter * 40)
    return snapshots


def said(server: Running, model: str) -> str:
    reply = server.post("/v1/completions", {**TEXT, "model": model})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def listed(server: Running) -> list[str]:
    return [each["id"] for each in server.get("/v1/models").json()["data"]]


def loaded(server: Running) -> list[str]:
    return [each["name"].removesuffix(":latest") for each in server.get("/api/ps").json()["models"]]


def process_of(server: Running, name: str) -> EngineClient:
    engine = server.pool.known(name).handle
    assert isinstance(engine, EngineClient)
    return engine


def pid_of(server: Running, name: str) -> int:
    return process_of(server, name).peer.pid


def kill(server: Running, name: str, how: int = signal.SIGKILL) -> None:
    os.kill(pid_of(server, name), how)


def hold(server: Running, name: str, *, still_s: float = 2.0) -> None:
    """Stop the engine, which is found out after that time."""
    kill(server, name, signal.SIGSTOP)
    process_of(server, name).watchdog.patience = Patience(still_s=still_s)


@contextmanager
def answering(server: Running, **more: Any) -> Iterator[Iterator[str]]:
    """A long answer, of which the first line has come."""
    with server.client.stream("POST", "/v1/completions", json={**ENDLESS, **more}) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield lines


def test_a_model_is_loaded_when_it_is_asked_for_and_the_other_makes_room(tight: Running, texts: Texts) -> None:
    for name in ("tiny", "other", "tiny"):
        assert said(tight, name) == texts[name]
        assert loaded(tight) == [name]
        assert listed(tight) == ["tiny", "other"]


def test_a_model_that_has_room_beside_the_others_leaves_them_alone(both: Running, texts: Texts) -> None:
    assert [said(both, name) for name in ("other", "tiny")] == [texts["other"], texts["tiny"]]
    assert loaded(both) == ["tiny", "other"]


def test_a_model_that_answers_is_waited_for_and_then_makes_room(tight: Running, texts: Texts) -> None:
    with ThreadPoolExecutor() as threads:
        with answering(tight, model="tiny", max_tokens=500) as lines:
            waiting = threads.submit(said, tight, "other")
            wait_for(lambda: tight.served.is_leaving or waiting.done())
            behind = threads.submit(said, tight, "tiny")  # it does not keep the other from its turn
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert waiting.result(PATIENCE_S) == texts["other"] and behind.result(PATIENCE_S) == texts["tiny"]


def test_where_no_room_comes_the_refusal_has_the_numbers(tight: Running, monkeypatch: Patch) -> None:
    monkeypatch.setattr(resident_models, "_ROOM_S", 0.0)
    with answering(tight, model="tiny"):
        refused = tight.post("/v1/completions", {**TEXT, "model": "other"})
    assert refused.status_code == 503 and "retry-after" in refused.headers
    told = refused.json()["error"]["message"]
    assert "there is no room for other" in told and "tiny" in told and "MiB" in told
    tight.wait_until_idle()


def test_an_engine_that_is_killed_in_mid_answer_ends_the_stream_with_an_error(tight: Running, texts: Texts) -> None:
    pid = pid_of(tight, "tiny")
    with answering(tight, model="tiny") as lines:
        kill(tight, "tiny")
        told = "".join(lines)
    assert "the engine is gone" in told and "SIGKILL" in told and "[DONE]" not in told
    assert said(tight, "tiny") == texts["tiny"]
    assert pid_of(tight, "tiny") != pid


@pytest.mark.parametrize("phase", ["idle", "reading the prompt"])
def test_a_request_of_which_nothing_was_said_is_asked_anew_where_its_engine_is_killed(
    tight: Running, texts: Texts, phase: str
) -> None:
    if phase == "idle":
        kill(tight, "tiny")
        assert said(tight, "tiny") == texts["tiny"]
        return
    long = {**TEXT, "prompt": "owl " * 900, "model": "tiny", "logit_bias": BIAS}
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(tight.post, "/v1/completions", long)
        wait_for(lambda: not tight.is_idle or asked.done())
        kill(tight, "tiny")
        reply = asked.result(PATIENCE_S)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("end", [kill, hold], ids=["killed", "stopped"])
def test_an_engine_that_ends_or_does_not_move_while_it_loads_is_loaded_anew(
    tight: Running, texts: Texts, end: Callable[[Running, str], None]
) -> None:
    served = tight.pool.known("other")
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(said, tight, "other")
        wait_for(lambda: isinstance(served.handle, EngineClient) and served.handle.peer.pid is not None)
        end(tight, "other")
        assert asked.result(PATIENCE_S) == texts["other"]


def test_who_waits_for_an_engine_that_is_killed_keeps_no_other_model_from_its_turn(other: Path, texts: Texts) -> None:
    capacity = Capacity(parallel=1, queue=8)
    with (
        running(in_processes=True, also=[other], ram="600MiB", capacity=capacity) as server,
        ThreadPoolExecutor() as threads,
        answering(server),
    ):
        behind = threads.submit(said, server, "tiny")
        wait_for(lambda: server.served.num_open == 2 or behind.done())
        waiting = threads.submit(said, server, "other")
        wait_for(lambda: server.served.is_leaving or waiting.done())
        kill(server, "tiny")
        assert waiting.result(PATIENCE_S) == texts["other"] and behind.result(PATIENCE_S) == texts["tiny"]


def test_a_model_that_would_never_fit_is_refused_before_another_leaves(other: Path) -> None:
    with running(in_processes=True, also=[other], ram="600MiB") as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.pool, "_launch", lambda _selection, caps, foreseen: FakeLoading(caps, foreseen))
            refused = server.post("/v1/completions", {**TEXT, "model": "other"})
        assert refused.status_code == 503 and "3 TiB are needed" in refused.json()["error"]["message"]
        assert loaded(server) == ["tiny"]


class FakeLoading(EngineClient):
    """A model that nothing has room for."""

    def __init__(self, caps: Caps, foreseen: Any) -> None:
        self._ended = threading.Event()
        self._foreseen = foreseen
        foresee(self, caps)

    def answer(self, message: protocol.Message) -> None:
        assert message["op"] == "foresee", "it has no room"
        self._foreseen(Foreseen(error=DoesNotFitError("it does not fit", why="3 TiB are needed")))

    @property
    def is_settled(self) -> bool:
        return False

    def wait_loaded(self, timeout_s: float | None = None) -> None:
        self._ended.wait()

    def stop(self) -> None:
        self._ended.set()

    def close(self, timeout_s: float = 1.0) -> None:
        self._ended.set()


def test_a_model_that_is_asked_something_small_in_its_last_moment_goes_all_the_same(tight: Running) -> None:
    tight.post("/v1/completions", {**TEXT, "model": "tiny", "keep_alive": 0.2})
    tight.post("/tokenize", {"content": "an owl", "model": "tiny"})
    wait_for(lambda: tight.served.handle is None)


def test_who_asks_a_model_while_it_is_looked_at_whether_it_may_leave_is_answered(monkeypatch: Patch) -> None:
    looked, released, seen = threading.Event(), threading.Event(), Engine.status

    def status(engine: Engine) -> EngineStatus:
        found = seen(engine)
        looked.set()
        released.wait(PATIENCE_S)
        return found

    with running() as server:
        monkeypatch.setattr(Engine, "status", status)
        server.post("/v1/completions", {**TEXT, "keep_alive": 0})
        wait_for(looked.is_set)
        with answering(server, max_tokens=60) as lines:
            released.set()
            assert "data: [DONE]" in list(lines)


def test_who_asks_an_engine_that_was_killed_a_moment_ago_is_answered_by_another(
    tight: Running, texts: Texts, monkeypatch: Patch
) -> None:
    submitted, killed = EngineClient.submit, list[int]()

    def submit(service: EngineClient, *arguments: Any) -> Any:
        if not killed and service.peer.pid is not None:
            killed.append(service.peer.pid)
            os.kill(service.peer.pid, signal.SIGKILL)
            wait_for(lambda: service.has_ended)
        return submitted(service, *arguments)

    monkeypatch.setattr(EngineClient, "submit", submit)
    assert said(tight, "tiny") == texts["tiny"]
    assert len(killed) == 1 and tight.pool.known("tiny").num_open == 0


def test_who_waits_for_a_model_that_is_unloaded_as_soon_as_it_is_loaded_has_it_loaded_again(
    tight: Running, texts: Texts, monkeypatch: Patch
) -> None:
    load, unloaded = tight.pool.load, list[str]()

    async def loaded_for_a_moment(served: ServedModel) -> None:
        await load(served)
        if not unloaded:
            unloaded.append(served.name)
            await tight.pool.residents.unload(served)

    said(tight, "other")  # in whose place the first one comes
    monkeypatch.setattr(tight.pool, "load", loaded_for_a_moment)
    assert said(tight, "tiny") == texts["tiny"] and unloaded == ["tiny"]


@pytest.mark.parametrize("phase", ["before anything was said", "in mid answer"])
def test_an_engine_that_does_not_move_is_ended_and_who_waits_is_told(tight: Running, texts: Texts, phase: str) -> None:
    stopped, pid = process_of(tight, "tiny"), pid_of(tight, "tiny")
    with ThreadPoolExecutor() as threads:
        if phase == "in mid answer":
            with answering(tight, model="tiny") as lines:
                hold(tight, "tiny")
                told = "".join(lines)
            assert "does not move on" in told and "[DONE]" not in told
        else:
            hold(tight, "tiny", still_s=4.0)
            waiting = threads.submit(tight.post, "/v1/completions", {**TEXT, "model": "tiny"})
            wait_for(lambda: tight.get("/health").status_code == 503 or waiting.done())
            assert not waiting.done()
            stopped.watchdog.patience = Patience(still_s=1.0)
            refused = waiting.result(PATIENCE_S)
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert "neither computed nor read" in refused.json()["error"]["message"]
    assert said(tight, "tiny") == texts["tiny"] and tight.get("/health").status_code == 200
    assert pid_of(tight, "tiny") != pid and not psutil.pid_exists(pid)


def test_an_engine_that_is_stopped_keeps_no_other_request_waiting(both: Running, texts: Texts) -> None:
    with ThreadPoolExecutor() as threads:
        assert said(both, "other") == texts["other"] and said(both, "tiny") == texts["tiny"]
        hold(both, "tiny", still_s=PATIENCE_S)
        # More than its socket takes: whoever says it must not wait for the engine.
        many = [threads.submit(both.post, "/v1/completions", {"prompt": [4000] * 900, "n": 8}) for _ in range(6)]
        wait_for(lambda: both.served.num_open == 48)
        assert said(both, "other") == texts["other"]
        process_of(both, "tiny").watchdog.patience = Patience(still_s=1.0)
        assert {each.result(PATIENCE_S).status_code for each in many} == {503}


def test_an_engine_that_computes_without_end_is_ended_and_one_that_comes_from_block_to_block_is_not() -> None:
    convicted, num_looks, moves = list[str](), 0, True
    watchdog = Watchdog(lambda: os.getpid(), lambda: True, convicted.append, Patience(still_s=0.05, hung_s=0.3))

    def effort() -> tuple[float, int]:
        nonlocal num_looks
        num_looks += 1
        watchdog.received(has_moved=moves)
        return float(num_looks), 0

    watchdog._effort = effort  # type: ignore[method-assign]
    watchdog.begin()
    wait_for(lambda: num_looks >= 200)
    assert not convicted
    moves = False
    wait_for(lambda: bool(convicted))
    assert "without coming to the end of a block" in convicted[0]
    watchdog.end()


def test_an_engine_that_hangs_is_ended_also_where_its_process_answers_other_questions() -> None:
    ours, theirs = socket.socketpair()

    def hang() -> None:
        say, lines = theirs.makefile("wb", buffering=0), theirs.makefile("rb")
        with suppress(OSError, ValueError):  # it is killed in the midst of it
            say.write(protocol.line({"op": "loaded", "facts": protocol.plain(EngineFacts(64, "fp32", "fp32"))}))
            for message in map(protocol.message, lines):
                if message["op"] == "call":
                    told = {"op": "answered", "id": message["id"], "value": protocol.plain(EngineStatus())}
                    say.write(protocol.line(told))

    threading.Thread(target=hang, daemon=True).start()
    peer = EnginePeer(lambda: ours)
    peer.pid, peer.kill = os.getpid(), theirs.close  # type: ignore[method-assign]
    service = EngineClient(TINY_DIRECTORY, peer, patience=Patience(still_s=0.05, hung_s=0.3))
    service.watchdog._effort = lambda: None  # type: ignore[method-assign]
    engine = service.wait_loaded()
    stream = service.submit(Request((1,), SamplingParams(max_tokens=2)))
    with pytest.raises(EngineStuckError, match="does not move on"):
        wait_for(lambda: not engine.status())
    with pytest.raises(EngineStuckError, match="does not move on"):
        list(stream)


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changing]:
    """A server of a folder that others write in."""
    folder = write_checkpoint(tmp_path_factory.mktemp("changing") / "teller")
    with running(folder, in_processes=True) as server:
        yield server, folder


def test_a_model_whose_files_are_being_written_keeps_no_other_from_being_loaded(
    other: Path, texts: Texts, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("localllm.runtime.model_pool._REST_WAIT_S", 1.5)
    folder = write_checkpoint(tmp_path / "copied")
    written, stop = threading.Event(), threading.Event()

    def write() -> None:
        while not stop.wait(0.05):
            os.utime(folder / "config.json")
            written.set()

    with running(folder, in_processes=True, also=[other]) as server, ThreadPoolExecutor() as threads:
        said(server, "copied")
        threads.submit(write)
        try:
            assert written.wait(PATIENCE_S)
            refused = threads.submit(server.post, "/v1/completions", {**TEXT, "model": "copied"})
            assert said(server, "other") == texts["other"]
            error = refused.result(PATIENCE_S).json()["error"]
        finally:
            stop.set()
        assert error["code"] == "model_changed" and "being written" in error["message"]
        said(server, "copied")


def test_a_model_that_leaves_while_its_files_are_looked_at_is_loaded_again(
    both: Running, texts: Texts, monkeypatch: Patch
) -> None:
    said(both, "tiny")
    has_changed, looks = both.pool.has_changed, list[ServedModel]()

    async def leaving(served: ServedModel) -> bool:
        looks.append(served)
        if len(looks) == 1:
            await both.pool.residents.unload(served)
        return await has_changed(served)

    monkeypatch.setattr(both.pool, "has_changed", leaving)
    assert said(both, "tiny") == texts["tiny"] and len(looks) > 1


def test_an_engine_that_does_not_say_whether_it_is_idle_is_not_taken_for_it(both: Running) -> None:
    """Programs that have attached may wait for its answers, of which the server knows nothing."""
    said(both, "tiny")
    engine, asked = both.served.engine_if_loaded, threading.Event()

    def status() -> EngineStatus:
        asked.set()
        raise EngineStuckError("the engine does not answer", why="it was asked 5 s ago")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "status", status)
        both.post("/api/generate", {"model": "tiny", "keep_alive": 0})
        assert asked.wait(PATIENCE_S)
        assert both.served.handle is not None
    wait_for(lambda: both.served.handle is None)


def test_a_prompt_of_what_a_model_was_is_not_answered_by_what_it_is(changing: Changing) -> None:
    server, folder = changing
    said(server, "teller")
    process = process_of(server, "teller")
    kill(server, "teller", signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(server.post, "/v1/completions", TEXT)
        wait_for(lambda: process._receivers)
        write_checkpoint(folder, seed=1)
        kill(server, "teller")
        refused = asked.result(PATIENCE_S)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_changed"
    said(server, "teller")


def test_a_model_that_is_written_anew_is_loaded_anew_with_all_that_belongs_to_it(changing: Changing) -> None:
    server, folder = changing
    write_checkpoint(folder)
    long = {**TEXT, "prompt": "once upon a time there was a fox " * 10}
    first, again = (server.post("/v1/completions", long).json() for _ in range(2))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    write_checkpoint(folder, seed=1)
    (folder / "chat_template.jinja").write_text("another: {{ messages[0].content }}")
    (folder / "generation_config.json").write_text('{"top_k": 7}')
    anew = server.post("/v1/completions", long).json()
    assert anew["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert anew["choices"][0]["text"] != first["choices"][0]["text"]
    assert said(server, "teller") == _text_of(str(folder))
    prompt = server.post("/apply-template", {"messages": OWL}).json()["prompt"]
    assert prompt.endswith("another: A tale about an owl, please.")
    assert server.get("/props").json()["default_generation_settings"]["params"]["top_k"] == 7
    assert "the files of teller have changed: it is loaded anew" in server.log
    (folder / "chat_template.jinja").write_text("a third: {{ messages[0].content }}")
    assert "a third: " in server.post("/apply-template", {"messages": OWL}).json()["prompt"]
    (folder / "chat_template.jinja").unlink()


def test_an_answer_that_is_being_written_is_not_cut_where_the_model_changes(changing: Changing) -> None:
    server, folder = changing
    write_checkpoint(folder)
    said(server, "teller")
    with ThreadPoolExecutor() as threads:
        with answering(server, max_tokens=400) as lines:
            write_checkpoint(folder, seed=1)
            waiting = threads.submit(said, server, "teller")
            rest = list(lines)
        assert "data: [DONE]" in rest and waiting.result(PATIENCE_S) == _text_of(str(folder))


@pytest.mark.parametrize(("harm", "status", "word"), [("gone", 404, "is gone"), ("half", 503, "is cut short")])
def test_a_model_that_is_not_whole_is_told_with_the_reason_and_answers_when_it_is(
    changing: Changing, harm: str, status: int, word: str
) -> None:
    server, folder = changing
    said(server, "teller")
    pid, weights, away = pid_of(server, "teller"), folder / "model.safetensors", folder.with_name("away")
    whole = weights.read_bytes()
    folder.rename(away) if harm == "gone" else weights.write_bytes(whole[: len(whole) // 2])
    refused = server.post("/v1/completions", TEXT)
    assert refused.status_code == status and word in refused.json()["error"]["message"]
    away.rename(folder) if harm == "gone" else weights.write_bytes(whole)
    assert server.post("/v1/completions", TEXT).status_code == 200
    assert harm != "gone" or pid_of(server, "teller") == pid


def test_models_of_one_folder_name_have_different_names_and_each_answers_by_its_own(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / place / "model", seed=seed) for seed, place in enumerate("abc")]
    with running(folders[0], also=[folders[1], folders[2], folders[1]]) as server:
        ids = listed(server)
        assert ids[:3] == ["model", "b/model", "c/model"] and len(set(ids)) == len(ids)
        for name, folder in zip(ids, folders, strict=False):
            assert said(server, name) == _text_of(str(folder))
        assert f"{folders[1]} is called b/model here: model is another model" in server.log
        assert {each["name"] for each in server.get("/api/tags").json()["models"]} >= {f"{name}:latest" for name in ids}


def test_a_revision_served_by_its_name_is_not_what_the_plain_name_means(own_folders: None, tmp_path: Path) -> None:
    plain, other = pulled(tmp_path / "hub", 0, 1, main="a", dev="b")
    with running("maker/teller@dev") as server:
        for name, snapshot in (("maker/teller@dev", other), ("maker/teller", plain)):
            assert said(server, name) == _text_of(str(snapshot))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT),
        (CHAT, {"messages": OWL, "max_tokens": 2}),
        ("/v1/messages", {"messages": OWL, "max_tokens": 2}),
        ("/v1/responses", {"input": "A tale.", "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": "An owl."}),
        ("/api/embed", {"input": "An owl.", "truncate": True}),
        ("/api/generate", {"prompt": "Once", "options": {"num_predict": 2}, "stream": False}),
    ],
)
def test_a_model_is_unloaded_behind_the_request_that_says_so(both: Running, path: str, body: Json) -> None:
    assert both.post(path, {"model": "tiny", **body, "keep_alive": 0}).status_code == 200
    wait_for(lambda: both.served.handle is None)
    assert "tiny" not in loaded(both) and both.get("/health").status_code == 200
    assert both.post("/api/generate", {"model": "tiny", "keep_alive": 0}).json()["done_reason"] == "unload"


def test_a_model_that_nobody_asks_for_is_unloaded_after_its_time() -> None:
    with running(in_processes=True) as server:
        awake = server.get("/props").json()
        server.post("/api/generate", {"model": "tiny", "keep_alive": 0})
        wait_for(lambda: server.served.handle is None)
        asleep = server.get("/props")
        assert asleep.status_code == 200 and asleep.json() == {**awake, "is_sleeping": True}
        assert not awake["is_sleeping"] and "message" in awake["chat_template"]
        assert server.get("/health").status_code == 200 and server.get("/slots").json()[0]["n_ctx"] == 1024
    with running(in_processes=True, idle_s=0.2) as server:
        wait_for(lambda: server.served.handle is None)
        assert server.post(CHAT, {"messages": OWL, "max_tokens": 1, "keep_alive": -1}).status_code == 200
        assert server.get("/api/ps").json()["models"][0]["expires_at"].startswith("2999")
        assert server.post("/api/generate", {"model": "tiny", "keep_alive": "1h"}).json()["done_reason"] == "load"
        assert not server.get("/api/ps").json()["models"][0]["expires_at"].startswith("2999")


def test_a_first_load_that_came_to_nothing_is_not_waited_for() -> None:
    failures = [EngineGoneError("the engine is gone", why="its process was ended by SIGKILL") for _ in range(2)]

    def load() -> Engine:
        if failures:
            raise failures.pop()
        return Engine.load("tiny")

    with running(load=load) as server:
        wait_for(lambda: not failures and server.get("/health").status_code == 200)
        assert server.served.handle is None
        assert said(server, "tiny")


def test_a_model_that_there_is_not_is_refused_by_name_and_nothing_is_unloaded(tight: Running) -> None:
    for name in ("tinny", "../tiny", "/etc", str(Path.cwd())):
        refused = tight.post("/v1/completions", {**TEXT, "model": name})
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    assert loaded(tight) == ["tiny"]


def test_no_name_is_suggested_for_one_that_is_like_none() -> None:
    with running(aliases=[f"teller-{number}" for number in range(9)]) as server:
        names = ["gpt-4o", "claude-sonnet-5", "x" * 9000, "tinyllama"]
        errors = [server.post("/v1/completions", {**TEXT, "model": name}).json()["error"] for name in names]
    *messages, known = (error["message"] for error in errors)
    assert "localllm pull tinyllama-1.1b" in known and "ask for" not in known
    for message in messages:
        assert "this server has tiny, teller-0," in message and "teller-6 and 2 more" in message
        assert "ask for one of these" in message and "--alias NAME" in message and len(message) < 500


def resources() -> tuple[int, int, int]:
    """Descriptors, threads and bytes of this process."""
    gc.collect()  # the tests themselves have it done seldom
    own = psutil.Process()
    return own.num_fds(), own.num_threads(), own.memory_info().rss


def living_children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_fifty_switches_leave_nothing_behind_and_each_answer_is_right(tight: Running, texts: Texts) -> None:
    names = ["tiny", "other"] * 25
    for name in names[:6]:
        said(tight, name)
    descriptors, threads, rss_bytes = resources()
    num_processes = len(living_children())
    for name in names:
        assert said(tight, name) == texts[name]
    after = resources()
    assert after[0] <= descriptors + 2 and after[1] <= threads + 2 and after[2] < rss_bytes + (16 << 20)
    assert len(living_children()) <= num_processes


@pytest.mark.slow
def test_the_server_answers_whenever_an_engine_is_killed(tight: Running, texts: Texts) -> None:
    """Twenty times, at moments spread over loading, reading a long prompt and answering."""
    long = {**ENDLESS, "prompt": "owl " * 900, "max_tokens": 100, "model": "tiny"}
    for round_number in range(20):
        name = ("tiny", "other")[round_number % 2]
        with ThreadPoolExecutor() as threads:
            busy = threads.submit(_ended, tight, {**long, "model": name})
            threading.Event().wait(0.025 * round_number)
            engine = tight.pool.known(name).handle
            if isinstance(engine, EngineClient) and engine.peer.pid is not None:
                os.kill(engine.peer.pid, signal.SIGKILL)
            busy.result(PATIENCE_S)
        assert said(tight, name) == texts[name]


def _ended(server: Running, body: Json) -> None:
    """Whatever comes of it."""
    with (
        httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        reply.read()


@pytest.mark.usefixtures("own_folders")
def test_a_model_that_was_pulled_is_loaded_by_its_name_and_no_half_of_one(tmp_path: Path) -> None:
    [snapshot] = pulled(tmp_path / "hub", 0, main="a")
    half = tmp_path / "hub" / "models--maker--half" / "snapshots" / ("b" * 40)
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    with running() as server:
        assert listed(server) == ["tiny", "maker/teller"]
        assert server.post("/v1/completions", {**TEXT, "model": "Maker/teller"}).json()["model"] == "Maker/teller"
        assert sorted(loaded(server)) == ["maker/teller", "tiny"]
        later = write_checkpoint(snapshot.with_name("c" * 40), seed=1)
        (snapshot.parent.parent / "refs" / "main").write_text("c" * 40)
        ids = listed(server)
        assert ids[:2] == ["tiny", "maker/teller"] and ids.count("maker/teller") == 1
        assert said(server, "maker/teller") == _text_of(str(later))
        refused = server.post("/v1/completions", {**TEXT, "model": "maker/half"})
        assert refused.status_code == 404 and "'maker/half' is not served here" in refused.json()["error"]["message"]
        known = server.post("/v1/completions", {**TEXT, "model": "qwen3-8b"})
        assert known.status_code == 404 and "localllm pull qwen3-8b" in known.json()["error"]["message"]

"""Which replica a request goes to, and what becomes of it where that replica dies: without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from starlette.types import Message

from localllm.config import load_settings
from localllm.errors import DoesNotFitError, LocalLLMError, ModelChangedError, UsageError
from localllm.server.guard import Admission
from localllm.server.model_server import Capacity
from localllm.server.replicas.affinity import CHUNK_BYTES, Affinity, ReplicaCall, beginning_of
from localllm.server.replicas.fleet import _require_listener, _told_by_replica, require_ray, share_of
from localllm.server.replicas.front import ReplicaFront, ReplicaGoneError, create_front
from localllm.server.replicas.replica import Replica, ReplicaError, Role
from localllm.settings import Settings
from tests.cli_support import run_cli, write_checkpoint
from tests.server.support import Json, Patch, Says

LONG = "Tales of the sea, and of those who sail it. " * 20
GIB = 1 << 30
CHAT = "/v1/chat/completions"


def body(*messages: str, **more: Any) -> bytes:
    return json.dumps({**more, "messages": [{"role": "user", "content": each} for each in messages]}).encode()


def common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=False))


def test_a_longer_conversation_begins_with_the_chain_of_the_shorter_one() -> None:
    turn, next_turn = beginning_of(body(LONG, "one")), beginning_of(body(LONG, "one", "two " * 100))
    assert len(turn) - common(turn, next_turn) <= 1 and len(next_turn) > len(turn)


def test_what_differs_once_differs_from_there_on() -> None:
    one, other = beginning_of(body(LONG + "x" + LONG)), beginning_of(body(LONG + "y" + LONG))
    assert len(LONG) // CHUNK_BYTES <= common(one, other) < len(one) and one[-1] != other[-1]


@pytest.mark.parametrize("changed", [{"temperature": 1}, {"stream": True}, {"max_tokens": 3}, {"seed": 4}])
def test_how_is_answered_does_not_change_what_was_said(changed: Json) -> None:
    assert beginning_of(body(LONG, **changed)) == beginning_of(body(LONG))


@pytest.mark.parametrize("field", ["system", "instructions", "prompt", "input"])
def test_every_dialects_text_counts(field: str) -> None:
    assert len(beginning_of(json.dumps({field: LONG}).encode())) == len(json.dumps(LONG)) // CHUNK_BYTES


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b'{"messages": null}', body("short")])
def test_what_says_too_little_has_no_beginning(data: bytes) -> None:
    assert beginning_of(data) == ()


@given(st.binary(max_size=300))
def test_no_body_breaks_the_front(data: bytes) -> None:
    assert isinstance(beginning_of(data), tuple)


def affinity(*replicas: str, most_more: int = 2, **limits: int) -> Affinity[str]:
    made = Affinity[str](most_more, **limits)
    made.keep(replicas)
    return made


def chain(text: str) -> tuple[bytes, ...]:
    """abc -> a, ab, abc"""
    return tuple(text[: end + 1].encode() for end in range(len(text)))


def test_the_longest_known_beginning_wins() -> None:
    known = affinity("one", "two", "three")
    known.learn("one", chain("ab"))
    known.learn("two", chain("abcd"))
    known.learn("three", chain("x"))
    assert known.ranked(chain("abcde")) == ["two", "one", "three"]


def test_a_replica_that_is_much_busier_is_passed_over() -> None:
    known = affinity("one", "two", most_more=2)
    known.learn("one", chain("abc"))
    firsts = []
    for happens in (known.sent, known.sent, known.sent, known.answered):
        happens("one")
        firsts.append(known.ranked(chain("abc"))[0])
    assert firsts == ["one", "one", "two", "one"]


def test_what_nobody_knows_goes_to_who_has_least_to_do() -> None:
    known = affinity("one", "two")
    known.sent("one")
    assert known.ranked(chain("abc"))[0] == "two"


def test_among_idle_replicas_new_conversations_are_shared_out() -> None:
    known = affinity("one", "two")
    firsts = []
    for name in "abcdefgh":
        firsts.append(known.ranked(chain(name))[0])
        known.learn(firsts[-1], chain(name))
    assert firsts.count("one") == firsts.count("two") == 4


def test_a_dead_replica_is_forgotten_with_what_it_knew() -> None:
    known = affinity("one", "two")
    known.learn("one", chain("abc"))
    known.forget("one")
    assert known.ranked(chain("abc")) == ["two"] and known.num_known == 0
    known.learn("one", chain("abc"))  # a word of it that comes late
    known.answered("one")
    known.keep(["one", "two"])
    assert known.num_known == 0


def test_tails_are_forgotten_first() -> None:
    known = affinity("one", "two", most_known=3)
    known.learn("two", chain("abcdef"))
    assert known.num_known == 3 and known.ranked(chain("abc"))[0] == "two"


class AffinityOverTime(RuleBasedStateMachine):
    """Replicas come and go, are asked and answer, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.known = Affinity[int](most_more=2, most_known=12)
        self.open: dict[int, int] = {}

    @rule(replicas=st.sets(st.integers(0, 4)))
    def there_are(self, replicas: set[int]) -> None:
        self.known.keep(replicas)
        self.open = {each: self.open.get(each, 0) for each in replicas}

    @precondition(lambda self: self.open)
    @rule(said=st.text("ab", max_size=8))
    def ask(self, said: str) -> None:
        first = self.known.ranked(chain(said))[0]
        assert self.open[first] <= min(self.open.values()) + 2
        self.known.sent(first)
        self.known.learn(first, chain(said))
        self.open[first] += 1

    @precondition(lambda self: any(self.open.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        busy = data.draw(st.sampled_from([each for each, count in self.open.items() if count]))
        self.known.answered(busy)
        self.open[busy] -= 1

    @invariant()
    def every_replica_is_ranked_once_and_memory_is_bounded(self) -> None:
        assert sorted(self.known.ranked(chain("ab"))) == sorted(self.open)
        assert self.known.num_known <= 12


TestAffinityOverTime = AffinityOverTime.TestCase


def start(status: int = 200, media_type: str = "application/json", failure: str | None = None) -> Message:
    headers = [(b"content-type", media_type.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers, "failure": failure}


def piece(text: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


Script = list[list[Message | type[BaseException]]]


def asked_of(script: Script) -> tuple[ReplicaFront, list[ReplicaCall]]:
    """A front whose replicas say, one try after the other, what the script says; the calls that they were given."""
    calls: list[ReplicaCall] = []

    async def ask(call: ReplicaCall) -> AsyncGenerator[Message, None]:
        calls.append(call)
        for each in script[len(calls) - 1]:
            if isinstance(each, type):
                raise each
            yield each

    return ReplicaFront(ask), calls


def post(front: ReplicaFront, path: str = CHAT, log: Says = lambda _line: None) -> httpx2.Response:
    async def posted() -> httpx2.Response:
        transport = httpx2.ASGITransport(create_front(front, Admission((80,)), log=log))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json={"messages": []})

    return asyncio.run(posted())


def test_a_request_that_had_not_begun_to_be_answered_goes_to_another_replica() -> None:
    front, calls = asked_of([[ReplicaGoneError], [start(), ReplicaGoneError], [start(), piece(b"{}", more=False)]])
    reply = post(front)
    assert (reply.status_code, reply.text) == (200, "{}")
    assert calls[0] == calls[1] == calls[2] and calls[0].body == b'{"messages":[]}'


def test_a_request_under_which_every_replica_dies_ends_no_more_of_them() -> None:
    front, calls = asked_of([[ReplicaGoneError]] * 9)
    reply = post(front)
    assert reply.status_code == 503 and reply.headers["retry-after"] and len(calls) == 3


@pytest.mark.parametrize(
    ("path", "kind", "said", "last"),
    [
        (CHAT, "text/event-stream", b"data: {}\n\n", rb'data: {"error":{"message":"the replica that was answering'),
        ("/v1/messages", "text/event-stream", b"event: ping\n\n", b'event: error\ndata: {"type":"error","error":'),
        ("/api/chat", "application/x-ndjson", b"{}\n", b'{"error":"the replica that was answering has died'),
        ("/v1/responses", "text/event-stream", b'data: {"sequence_number":7}\n\n',
         b'event: error\ndata: {"type":"error","sequence_number":8,'),
    ],
)  # fmt: skip
def test_a_stream_that_began_ends_with_an_error_of_its_dialect(path: str, kind: str, said: bytes, last: bytes) -> None:
    front, calls = asked_of([[start(200, kind), piece(said), ReplicaGoneError]])
    log: list[str] = []
    reply = post(front, path, log.append)
    assert reply.content.startswith(said + last) and len(calls) == 1
    assert " 200 overloaded " in log[0]


def test_what_a_replica_refused_stands_in_the_log() -> None:
    log: list[str] = []
    front, _ = asked_of([[start(404, failure="model_not_found"), piece(b"{}", more=False)]])
    assert post(front, log=log.append).status_code == 404
    assert log[0].startswith(f"POST {CHAT} 404 model_not_found ")


def test_a_server_that_is_stopped_ends_its_streams_with_a_word() -> None:
    async def ask(_call: ReplicaCall) -> AsyncGenerator[Message, None]:
        yield start(200, "text/event-stream")
        yield piece(b"data: {}\n\n")
        front.stop()
        await asyncio.Future()

    front = ReplicaFront(ask)
    assert b"the server is shutting down" in post(front).content


def test_each_header_comes_once() -> None:
    front, _ = asked_of([[start(), piece(b"{}", more=False)]])
    names = [name for name, _ in post(front).headers.multi_items()]
    assert len(names) == len(set(names)) and "x-request-id" in names and "content-security-policy" in names


def test_the_front_has_the_page_for_browsers_while_there_is_no_replica() -> None:
    async def opened() -> httpx2.Response:
        transport = httpx2.ASGITransport(create_front(asked_of([])[0], Admission((80,))))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/", headers={"accept": "text/html"})

    assert "<!doctype html>" in asyncio.run(opened()).text


NODE = {"CPU": 8.0, "memory": 40.0 * GIB}


@pytest.mark.parametrize(
    ("nodes", "count", "settings", "told"),
    [
        ([NODE], 2, {}, {"per_node": 2, "num_cpus": 4, "threads": 4, "num_gpus": 0, "ram_bytes": int(18 * GIB)}),
        ([NODE], 2, {"ram": 8 * GIB, "threads": 3}, {"ram_bytes": 4 * GIB, "threads": 3}),
        ([NODE], 16, {}, {"num_cpus": 0.5}),
        ([NODE] * 3, 3, {}, {"per_node": 1, "threads": None, "ram_bytes": None}),
        ([{**NODE, "GPU": 2.0}], 2, {}, {"num_gpus": 1}),
        ([{**NODE, "GPU": 2.0}], 3, {"device": "cpu"}, {"num_gpus": 0}),
    ],
)
def test_a_machine_is_shared_out_and_a_replica_by_itself_has_all_of_it(
    nodes: list[dict[str, float]], count: int, settings: Json, told: Json
) -> None:
    share = vars(share_of(nodes, count, Settings(**settings)))
    assert {name: share[name] for name in told} == told


def test_more_replicas_than_gpus_are_refused() -> None:
    with pytest.raises(DoesNotFitError, match="3 replicas need 3 GPUs"):
        share_of([{**NODE, "GPU": 2.0}], 3, Settings())


def test_why_a_replica_cannot_start_survives_a_trace_of_rays() -> None:
    cause = DoesNotFitError("tiny does not fit", why="it needs 9 GiB", fix="--ram 9GiB")
    told = _told_by_replica(f"Traceback ...\n  ReplicaError: {ReplicaError(cause)}\nmore")
    assert (told.what, told.why, told.fix, told.exit_code) == (cause.what, cause.why, cause.fix, 4)
    assert _told_by_replica("Traceback of something else") is None


def test_a_cluster_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(LocalLLMError) as refused:
        _require_listener("127.0.0.1:9")
    assert refused.value.what == "no Ray cluster answers at 127.0.0.1:9" and "RAY_ADDRESS" in refused.value.fix


def test_without_the_extra_the_error_has_the_command_that_installs_it(monkeypatch: Patch) -> None:
    monkeypatch.setattr("localllm.server.replicas.fleet.find_spec", lambda _name: None)
    with pytest.raises(UsageError) as refused:
        require_ray()
    assert "localllm[ray]" in refused.value.fix


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--replicas 2", "--replicas needs --ray"),
        ("--ray --metrics", "--ray and --metrics"),
        ("--ray --replicas 0", "--replicas is 0"),
        ("--ray --replicas two", "--replicas"),
    ],
)
def test_flags_that_replicas_cannot_honour_are_refused_by_name(flags: str, word: str) -> None:
    result = run_cli("serve", "--port", "0", *flags.split())
    assert result.code == 2 and word in result.err


def test_a_replica_whose_files_are_others_is_no_healthy_one_when_they_have_been_left_alone(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "teller")
    settings = load_settings({}, environ={})
    replica = Replica(Role(str(folder), settings, Capacity(), (), "mean", needs_key=False, is_alone=False))
    for _ in range(3):
        replica.check_health()
    write_checkpoint(folder, seed=1)
    replica.check_health()
    with pytest.raises(ModelChangedError):
        replica.check_health()

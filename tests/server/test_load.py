"""Many clients at once, some of whom go: every answer is the one that the same request gets alone."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from localllm.server.model_server import Capacity
from tests.kv_support import check_prefix
from tests.patience import PATIENCE_S
from tests.server.support import Json, Raw, Running, running

# Which fields of the dialects' replies are what is said, and why it ended.
SAID = frozenset({"text", "content", "response", "delta", "finish_reason", "stop_reason", "done_reason"})
WORDS = ("owl", "fox", "lantern", "troll", "river", "snow", "bell", "miller", "castle", "goose", "winter", "king")


@pytest.fixture(scope="module")
def busy() -> Iterator[Running]:
    with running(capacity=Capacity(parallel=8, queue=64)) as server:
        yield server


@dataclass(frozen=True)
class LoadRequest:
    """path, body: of a request. goes_after_s: seconds after which the client goes; None: it stays."""

    path: str
    body: Json
    goes_after_s: float | None


def some_request(chance: random.Random) -> LoadRequest:
    """Chats that share their beginnings, texts, embeddings, in each dialect; greedy or by seed, streamed or not."""
    tale = " ".join(chance.choices(WORDS, k=chance.choice([3, 30, 200])))
    body: Json = {"max_tokens": chance.randint(1, 40), "stream": chance.random() < 0.5}
    body |= {"temperature": 0} if chance.random() < 0.3 else {"temperature": 1, "seed": chance.randint(0, 9)}
    goes_after_s = chance.choice([0.0, 0.003, 0.01, 0.03, 0.1]) if chance.random() < 0.25 else None
    turns = [{"role": "user", "content": f"A tale about {tale}"}]
    if chance.random() < 0.5:
        turns += [{"role": "assistant", "content": "Once."}, {"role": "user", "content": "Go on."}]
    told = {"logprobs": True, "top_logprobs": 3} if chance.random() < 0.2 else {}
    options = {name: body[name] for name in ("temperature", "seed") if name in body}
    options["num_predict"] = body["max_tokens"]
    anthropic = {name: value for name, value in body.items() if name != "seed"} | {"temperature": 0}
    responses = {"max_output_tokens" if name == "max_tokens" else name: value for name, value in body.items()}
    asked = {
        "/v1/chat/completions": {"messages": turns, **body, **told},
        "/v1/completions": {"prompt": [f"Once upon a time {tale}", "Once"], "n": 2, **body},
        "/v1/responses": {"input": turns, **responses},
        "/v1/messages": {"messages": turns, **anthropic},
        "/api/chat": {"messages": turns, "stream": body["stream"], "options": options},
        "/api/generate": {"prompt": tale, "stream": body["stream"], "options": options},
        "/v1/embeddings": {"input": [tale, "an owl"]},
    }
    path = chance.choice(list(asked))
    return LoadRequest(path, asked[path], goes_after_s)


def answer(server: Running, asked: LoadRequest, *, stays: bool) -> Any:
    """What is said; None of a client that went."""
    with Raw(server.port) as raw:
        raw.post(asked.path, asked.body, connection="close")
        if asked.goes_after_s is not None and not stays:
            time.sleep(asked.goes_after_s)
            return None
        raw.sock.settimeout(PATIENCE_S)
        head, _, data = raw.read_all().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), (asked, data)
    return said(data.decode())


def num_threads() -> int:
    """Without those of asyncio's own pool: it starts them as it needs them, up to a bound."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


def said(data: str) -> dict[tuple[int, str], Any]:
    """Of a reply, whole or streamed in whatever pieces: by the number of the answer, and the field."""
    found: dict[tuple[int, str], Any] = {}
    for line in data.replace("data: ", "").splitlines():
        if line.startswith("{"):
            _collect(json.loads(line), 0, found)
    return found


def _collect(value: Any, index: int, found: dict[tuple[int, str], Any]) -> None:
    if isinstance(value, dict):
        index = value.get("index", index)
        for name, each in value.items():
            if name == "embedding":
                found[index, name] = each
            elif name in SAID and isinstance(each, str):
                found[index, name] = found.get((index, name), "") + each
            else:
                _collect(each, index, found)
    elif isinstance(value, list):
        for each in value:
            _collect(each, index, found)


@pytest.mark.parametrize(("num_clients", "num_requests"), [(8, 2), pytest.param(16, 200, marks=pytest.mark.slow)])
def test_every_answer_is_the_one_that_the_request_gets_alone(
    busy: Running, num_clients: int, num_requests: int
) -> None:
    chance = random.Random(num_requests)
    clients = [[some_request(chance) for _ in range(num_requests)] for _ in range(num_clients)]
    together: list[list[Any]] = [[] for _ in clients]

    def load(most: int) -> None:
        def work(index: int) -> None:
            together[index] = [answer(busy, asked, stays=False) for asked in clients[index][:most]]

        with ThreadPoolExecutor(num_clients) as pool:
            list(pool.map(work, range(num_clients)))
        busy.wait_until_idle()

    pages, prefix, process = busy.engine.residency.kv_pages, busy.engine.prefix, psutil.Process()
    assert prefix is not None
    load(20)  # libraries, pools of pages, threads
    held, threads = process.memory_info().rss - prefix.ram_used_bytes, num_threads()
    load(num_requests)
    assert process.memory_info().rss - prefix.ram_used_bytes - held < 64 << 20
    assert num_threads() <= threads and not list(pages.sequences) and not busy.engine.scheduler.sequences
    check_prefix(prefix)
    num_gone = sum(found is None for row in together for found in row)
    assert num_gone > num_clients * num_requests / 8
    for row, found in zip(clients, together, strict=True):
        for asked, one in zip(row, found, strict=True):
            if one is not None:
                assert answer(busy, asked, stays=True) == one, asked
    busy.wait_until_idle()

"""Hits by prefix routing, and the cost of a replica's death: `.venv/ray/bin/python -m benchmarks.replicas`.

Replicas of the built-in model on this machine's CPU, each with a cache of its own, behind one address.

`hits`: conversations, each with a system message of its own, go on in turns of one another. Of all tokens of their
prompts, how many a replica had computed before: by `localllm serve --ray`, by replicas that take turns, and by a single
one, which is what can be had.
`death`: eight clients ask, for a stream every second time; in the middle of it one of two replicas is killed (SIGKILL).
A request is *lost* where it ends before it began to be answered; *cut* where it had begun and ends with an error event.
Those that are passed on are late, not lost.

Five rounds; medians with their lowest and highest. Results go to benchmarks/results/replicas.json; those of a part that
is not run stay.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import psutil

from benchmarks.measure import known, machine, parser, save, spread

CHAT = "/v1/chat/completions"
CONVERSATIONS, TURNS, ANSWER_TOKENS = 6, 4, 16
CLIENTS, REQUESTS, ANSWERED = 8, 80, 60
NO_END = {"0": -100, "2": -100}
_WORDS = ("fox", "owl", "lantern", "river", "boat", "storm", "bridge", "baker", "moon", "garden", "stone", "bell")


@dataclass(frozen=True)
class Replicas:
    """A client of the replicas, their common process, and a function that waits until a killed one is back."""

    client: httpx2.Client
    owner: psutil.Process
    wait_for_all: Callable[[], None]


@contextmanager
def replicas(router: str, count: int, python: str = sys.executable) -> Iterator[Replicas]:
    """They end with the block. python: one that has Ray."""
    command = [python, "-m", "benchmarks.replicas_server", router, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            with httpx2.Client(base_url=url, timeout=60) as client:
                counts = map(int, process.stdout)
                yield Replicas(client, psutil.Process(process.pid), lambda: next(_until(counts, count), None))
        finally:
            process.stdin.close()
            process.wait(30)


def _until(counts: Iterator[int], count: int) -> Iterator[None]:
    return (None for each in counts if each == count)


def replica_processes(owner: psutil.Process) -> list[psutil.Process]:
    """Ray's processes that are replicas."""
    found = []
    for each in owner.children(recursive=True):
        try:
            if each.cmdline()[0].startswith("ray::ServeReplica"):
                found.append(each)
        except (psutil.Error, IndexError):
            continue
    return found


def tale(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


def hit_rate(client: httpx2.Client, rng: random.Random) -> float:
    """Cached tokens of prompt tokens, of conversations that nobody has had before."""
    talks = [[{"role": "system", "content": tale(rng, 150)}] for _ in range(CONVERSATIONS)]
    order = [talk for talk in talks for _ in range(TURNS)]
    rng.shuffle(order)
    cached = prompt = 0
    for talk in order:
        talk.append({"role": "user", "content": tale(rng, 12)})
        body = {"messages": talk, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logit_bias": NO_END}
        reply = client.post(CHAT, json=body).json()
        talk.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        prompt += reply["usage"]["prompt_tokens"]
        cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached / prompt


def hits(rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"prefix": [], "turns": [], "one": []}
    for name, each in rates.items():
        with replicas("turns" if name == "turns" else "prefix", 1 if name == "one" else 2) as group:
            hit_rate(group.client, random.Random("what warms them up"))
            each += [hit_rate(group.client, random.Random(number)) for number in range(rounds)]
    return {f"{name}_hit_rate": spread(each) for name, each in rates.items()}


def outcome(client: httpx2.Client, rng: random.Random, *, is_streamed: bool) -> str:
    """The outcome of one request: whole, cut or lost."""
    body = {"messages": [{"role": "user", "content": tale(rng, 20)}], "max_tokens": ANSWERED, "logit_bias": NO_END}
    num_events = 0
    try:
        if not is_streamed:
            return "whole" if client.post(CHAT, json=body).status_code == 200 else "lost"
        with client.stream("POST", CHAT, json={**body, "stream": True}) as reply:
            for line in reply.iter_lines():
                if line.startswith('data: {"error"'):
                    return "cut" if num_events else "lost"
                if line == "data: [DONE]":
                    return "whole"
                num_events += line.startswith("data: ")
    except httpx2.HTTPError:
        pass
    return "cut" if num_events else "lost"


def killed_under_load(group: Replicas, seed: int) -> tuple[Counter[str], float]:
    """The outcomes of the requests, and seconds until as many replicas answer as before."""
    asked, middle = Counter[str](), threading.Event()
    lock = threading.Lock()

    def ask(number: int) -> str:
        with lock:
            asked["all"] += 1
            if asked["all"] == REQUESTS // 4:
                middle.set()
        return outcome(group.client, random.Random(1000 * seed + number), is_streamed=number % 2 == 0)

    with ThreadPoolExecutor(CLIENTS) as pool:
        coming = [pool.submit(ask, number) for number in range(REQUESTS)]
        middle.wait()
        victim = replica_processes(group.owner)[seed % 2]
        victim.kill()
        killed_at = time.perf_counter()
        outcomes = Counter(each.result() for each in coming)
    group.wait_for_all()
    return outcomes, time.perf_counter() - killed_at


def death(rounds: int) -> dict[str, Any]:
    counts: dict[str, list[float]] = {"whole": [], "cut": [], "lost": [], "back_s": []}
    with replicas("prefix", 2) as group:
        for seed in range(rounds):
            outcomes, back_s = killed_under_load(group, seed)
            for name, each in counts.items():
                each.append(back_s if name == "back_s" else outcomes[name])
    return {"requests": REQUESTS, **{name: spread(each) for name, each in counts.items()}}


PARTS = {"hits": hits, "death": death}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--part", choices=tuple(PARTS), action="append")
    flags = arguments.parse_args()
    saved = known("replicas") if flags.part else {}
    result: dict[str, Any] = {**saved, "machine": machine(), "model": "tiny"}
    for name in flags.part or PARTS:
        result[name] = PARTS[name](flags.rounds)
        for key, value in result[name].items():
            print(f"{name} {key}: {value}", flush=True)
    print(save("replicas", result))


if __name__ == "__main__":
    main()

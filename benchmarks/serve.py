"""The cost of HTTP, and what several clients get: `python -m benchmarks.serve [--part first|overhead|parallel|gap]`.

A 1.1B shape (random INT4 weights, which cost what trained ones do) behind the server as `localllm serve` has it, in a
process of its own; beside the same on a thread of this process. Clients are in another process, on the same cores.

`first`: seconds to the first token of a short prompt, beside the same request put to the engine by its own thread's
interface; pairs in turns, many a round, as one is noisier than what is looked for.
`overhead`: tokens a second of a stream behind its first one, beside the same without HTTP.
`parallel`: eight streams at once beside one: all their tokens a second.
`gap`: the longest silence of a stream while a prompt of 8,000 tokens is read, beside the longest piece of that prompt.

Rounds take turns; medians with their lowest and highest. Results go to benchmarks/results/serve.json.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.measure import machine, paired, parser, save, spread
from benchmarks.prefix import long_shape
from benchmarks.random_files import random_model
from localllm.config import load_settings
from localllm.engine.engine import Engine
from localllm.engine.events import TokenEvent
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.request import Request, SamplingParams
from localllm.engine.step_types import Limits
from localllm.hub import ModelFiles
from localllm.quant.recipe import RECIPES
from localllm.runtime.engine_handle import EngineHandle
from localllm.runtime.engine_loader import Opening
from localllm.runtime.engine_process import Caps, Foreseen, LoadObserver, start_engine
from localllm.runtime.engine_thread import EngineThread
from localllm.runtime.model_pool import ModelPool
from localllm.runtime.selection import Selection, with_defaults
from localllm.server.app import create_app
from localllm.server.guard import Admission
from localllm.server.http_server import bound, serve
from localllm.server.model_server import Capacity, ModelServer
from localllm.settings import EngineConfig

NAME, WEIGHTS = "tinyllama-1.1b", "int4-g64"
PATH = "/v1/completions"
PROMPT_TOKENS, ANSWER_TOKENS, LONG_TOKENS = 128, 128, 8000
SHORT_TOKENS, PAIRS = 16, 12  # a round of `first`
PARALLEL = 8
_CTX = 8192


class Bench:
    """A server, its engine, and clients in a process of their own."""

    def __init__(self, port: int, service: EngineThread, engine: Engine, client: subprocess.Popen[str]) -> None:
        self._port, self._service, self._client = port, service, client
        self.engine = engine
        self._random = random.Random(0)
        self._ends = [str(token_id) for token_id in engine.eos_ids]

    def prompt(self, num_tokens: int) -> list[int]:
        """One that nobody has asked before."""
        return [self._random.randrange(10, self.engine.config.vocab_size) for _ in range(num_tokens)]

    def ask(self, *bodies: dict[str, Any]) -> list[list[float]]:
        """Seconds to each piece of each stream; all are sent at once."""
        assert self._client.stdin is not None and self._client.stdout is not None
        streamed = [{"stream": True, "temperature": 0, **body} for body in bodies]
        self._client.stdin.write(json.dumps({"port": self._port, "path": PATH, "bodies": streamed}) + "\n")
        self._client.stdin.flush()
        arrivals: list[list[float]] = json.loads(self._client.stdout.readline())
        return arrivals

    def body(self, num_tokens: int = PROMPT_TOKENS, answer: int = ANSWER_TOKENS) -> dict[str, Any]:
        """An answer of as many tokens: what would end it is ruled out."""
        bias = dict.fromkeys(self._ends, -100)
        return {"prompt": self.prompt(num_tokens), "max_tokens": answer, "logit_bias": bias}

    def ask_engine(self, num_tokens: int = PROMPT_TOKENS, answer: int = ANSWER_TOKENS) -> list[float]:
        """Seconds to each token of one stream as in `ask`, without HTTP."""
        bias = {int(token_id): -100.0 for token_id in self._ends}
        sampling = SamplingParams(temperature=0, max_tokens=answer, logit_bias=bias)
        request = Request(tuple(self.prompt(num_tokens)), sampling)
        started = time.perf_counter()
        stream = self._service.submit(request)
        return [time.perf_counter() - started for event in stream if isinstance(event, TokenEvent)]


@contextmanager
def bench(files: ModelFiles, *, on_thread: bool) -> Iterator[Bench]:
    """on_thread: the server's engine is the one of this process."""

    def load() -> Engine:
        limits = Limits(max_sequences=PARALLEL)
        return Engine.load(
            files, EngineConfig(weights=WEIGHTS, ctx=_CTX, speculate="off"), limits=limits, reuse=NO_REUSE
        )

    service = EngineThread(load)
    engine = service.wait_loaded()
    assert engine is not None
    wishes = {"weights": WEIGHTS, "ctx": _CTX, "speculate": "off", "cache_disk": "off"}
    resolved = load_settings(wishes, environ={})

    def launch(selection: Selection, caps: Caps, foreseen: Callable[[Foreseen], None]) -> EngineHandle:
        if on_thread:
            return service
        return start_engine(selection, Opening(parallel=PARALLEL), caps, LoadObserver(foreseen))

    pool = ModelPool(with_defaults(resolved, files), resolved, launch)
    server = ModelServer(pool, Capacity(PARALLEL, PARALLEL))
    sock = bound("127.0.0.1", 0)
    port = int(sock.getsockname()[1])
    stops: list[Callable[[], None]] = []
    arguments = (create_app(server, Admission((port,))), [sock], stops.append, pool.stop, lambda: pool.load(pool.first))
    thread = threading.Thread(target=serve, args=arguments, daemon=True)
    thread.start()
    command = [sys.executable, "-m", "benchmarks.serve_client"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        while pool.first.engine_if_loaded is None:
            time.sleep(0.1)
        yield Bench(port, service, engine, client)
        client.terminate()
    stops[0]()
    thread.join(10)
    server.close()


def rate(arrivals: Sequence[float], tokens: int) -> float:
    """Tokens a second behind the first one."""
    return (tokens - 1) / (arrivals[-1] - arrivals[0])


def first(on: Bench, rounds: int) -> dict[str, Any]:
    """The first token over HTTP and without; each round gives the median of its pairs."""
    http_s, engine_s, more_ms = [], [], []
    for number in range(-1, rounds):
        pairs = []
        for _ in range(PAIRS):
            [http] = on.ask(on.body(SHORT_TOKENS, 2))
            pairs.append((http[0], on.ask_engine(SHORT_TOKENS, 2)[0]))
        if number >= 0:
            http_s.append(median(http for http, _ in pairs))
            engine_s.append(median(engine for _, engine in pairs))
            more_ms.append(1000 * median(http - engine for http, engine in pairs))
    return {"http_s": spread(http_s), "engine_s": spread(engine_s), "more_ms": spread(more_ms)}


def overhead(on: Bench, rounds: int) -> dict[str, Any]:
    """Either goes first in every other round: a clock that slows down is not a difference."""
    http_tok_s, engine_tok_s = [], []
    for number in range(-1, rounds):
        if number % 2:
            direct = on.ask_engine()
            [http] = on.ask(on.body())
        else:
            [http] = on.ask(on.body())
            direct = on.ask_engine()
        if number >= 0:
            http_tok_s.append(rate(http, ANSWER_TOKENS))
            engine_tok_s.append(rate(direct, ANSWER_TOKENS))
    return {
        "http_tok_s": spread(http_tok_s),
        "engine_tok_s": spread(engine_tok_s),
        "tok_s_of_engine": paired(http_tok_s, engine_tok_s),
    }


def parallel(on: Bench, rounds: int) -> dict[str, Any]:
    """All tokens behind the first of each stream, from the very first to the last: what it takes to begin is in it."""
    one_tok_s, many_tok_s = [], []
    for number in range(-1, rounds):
        [one] = on.ask(on.body())
        many = on.ask(*(on.body(answer=2 * ANSWER_TOKENS) for _ in range(PARALLEL)))
        begin, end = min(each[0] for each in many), max(each[-1] for each in many)
        if number >= 0:
            one_tok_s.append(rate(one, ANSWER_TOKENS))
            many_tok_s.append(PARALLEL * (2 * ANSWER_TOKENS - 1) / (end - begin))
    return {
        "one_tok_s": spread(one_tok_s),
        "all_tok_s": spread(many_tok_s),
        "all_of_one": paired(many_tok_s, one_tok_s),
    }


def gap(on: Bench, rounds: int) -> dict[str, Any]:
    """The engine's steps are timed where it takes them."""
    steps: list[tuple[float, bool]] = []
    plain, scheduler = on.engine.step, on.engine.scheduler

    def timed(*arguments: Any) -> Any:
        before, started = scheduler.num_chunks, time.perf_counter()
        events = plain(*arguments)
        steps.append((time.perf_counter() - started, scheduler.num_chunks > before))
        return events

    on.engine.step = timed  # type: ignore[method-assign, assignment]
    gaps, chunks = [], []
    for number in range(-1, rounds):
        steps.clear()
        talk = on.body(answer=400)
        long = {**on.body(LONG_TOKENS, 1), "after_s": 1.0}
        said, _ = on.ask(talk, long)
        if number >= 0:
            gaps.append(max(later - at for at, later in itertools.pairwise(said)))
            chunks.append(max(seconds for seconds, is_chunk in steps if is_chunk))
    on.engine.step = plain  # type: ignore[method-assign]
    return {"gap_s": spread(gaps), "chunk_s": spread(chunks), "gap_of_chunk": paired(gaps, chunks)}


PARTS = {"first": first, "overhead": overhead, "parallel": parallel, "gap": gap}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--part", choices=tuple(PARTS), action="append")
    flags = arguments.parse_args()
    result: dict[str, Any] = {"machine": machine(), "model": NAME, "weights": WEIGHTS}
    with random_model(NAME, long_shape(NAME).raw_config, RECIPES[WEIGHTS]) as files:
        for name in flags.part or PARTS:
            with bench(files, on_thread=name == "gap") as on:  # whose steps are timed here
                result[name] = PARTS[name](on, flags.rounds)
            for key, value in result[name].items():
                print(f"{name} {key}: {value}", flush=True)
    if flags.part is None:
        print(save("serve", result))


if __name__ == "__main__":
    main()

"""Engines that benchmarks on a CPU load, and the answers that are timed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.random_files import random_model
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, SpeculationStats, TokenEvent
from localllm.engine.prefix_config import NO_REUSE, KVReuse
from localllm.engine.request import Request, SamplingParams
from localllm.models.shapes import find_shape
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig

SHAPE, WEIGHTS = "qwen2.5-0.5b", "int4-g64"


@contextmanager
def tiny_engine(ctx: int) -> Iterator[Engine]:
    engine = Engine.load("tiny", EngineConfig(weights=WEIGHTS, device="cpu", ctx=ctx, speculate="off"), reuse=NO_REUSE)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def random_engine(
    shape: str,
    ctx: int,
    *,
    tokenizer: str = "",
    changes: Mapping[str, Any] | None = None,
    threads: int | None = None,
    reuse: KVReuse = NO_REUSE,
) -> Iterator[Engine]:
    """An engine of random weights of this shape.

    tokenizer: the content of tokenizer.json, in place of one word an id.
    changes: of the shape's config.json.
    reuse: as `Engine.load` has it.
    """
    with random_model(shape, {**find_shape(shape).raw_config, **(changes or {})}, RECIPES[WEIGHTS]) as files:
        if tokenizer:
            (files.directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        engine = Engine.load(
            files,
            EngineConfig(device="cpu", weights=WEIGHTS, ctx=ctx, speculate="off", threads=threads),
            reuse=reuse,
        )
        try:
            yield engine
        finally:
            engine.close()


@dataclass(frozen=True)
class Answers:
    """Answers to prompts that were asked at once.

    decode_tok_s: the mean over the answers.
    job_tok_s: tokens of all answers a second, prompts included.
    speculation: of the first answer.
    """

    token_ids: list[tuple[int, ...]]
    decode_tok_s: float
    job_tok_s: float
    ttft_s: float
    speculation: SpeculationStats | None

    @property
    def ids(self) -> tuple[int, ...]:
        """The first answer's."""
        return self.token_ids[0]

    @property
    def token_s(self) -> float:
        """Seconds of decoding for each token."""
        return 1 / self.decode_tok_s


def answer(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, **sampling: Any) -> Answers:
    """Greedy answers of exactly so many tokens, unless `sampling` says otherwise. Raises what a request fails with."""
    params = SamplingParams(**{"temperature": 0, "ignore_eos": True, **sampling}, max_tokens=num_tokens)
    started = time.perf_counter()
    answers: dict[int, list[int]] = {engine.submit(Request(tuple(prompt), params)): [] for prompt in prompts}
    finished: dict[int, FinishedEvent] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                answers[event.request_id].append(event.token_id)
            elif isinstance(event, FinishedEvent):
                if event.error is not None:
                    raise event.error
                finished[event.request_id] = event
    elapsed = time.perf_counter() - started
    rates = [event.timings.decode_tok_s or 0.0 for event in finished.values()]
    waits = [event.timings.ttft_s or 0.0 for event in finished.values()]
    total = sum(map(len, answers.values()))
    speculation = finished[next(iter(answers))].speculation
    token_ids = [tuple(each) for each in answers.values()]
    return Answers(token_ids, sum(rates) / len(rates), total / elapsed, max(waits), speculation)


def random_ids(count: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    choose = random.Random(seed)
    return tuple(choose.randrange(vocab_size) for _ in range(count))

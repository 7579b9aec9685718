"""Engines that are measured with and without guesses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from localllm.bench.random_model import random_model
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, SpeculationStats, TokenEvent
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.request import SamplingParams
from localllm.engine.speculative.config import OFF, Speculate, speculation
from localllm.engine.speculative.drafter import Lookup
from localllm.engine.speculative.speculator import Speculation
from localllm.models.layout import EMBED, HEAD
from localllm.models.shapes import find_shape
from localllm.quant.recipe import RECIPES

SHAPE, WEIGHTS = "qwen2.5-0.5b", "int4-g64"
CTX = 1024


@dataclass(frozen=True)
class Run:
    token_ids: tuple[int, ...]
    seconds: float  # of decoding, for each token
    told: SpeculationStats | None


def run(engine: Engine, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> Run:
    params = SamplingParams(**{"temperature": 0, **sampling}, max_tokens=num_tokens, ignore_eos=True)
    events = list(engine.generate(list(prompt), params))
    finished = events[-1]
    assert isinstance(finished, FinishedEvent)
    if finished.error is not None:
        raise finished.error
    assert finished.timings.decode_tok_s is not None
    token_ids = tuple(event.token_id for event in events if isinstance(event, TokenEvent))
    return Run(token_ids, 1 / finished.timings.decode_tok_s, finished.speculation)


def guess(engine: Engine, wish: Speculate, lookup: Lookup | None = None, *, keeps: bool = False) -> None:
    """From now on; with `lookup`, that one guesses. keeps: what guessed before goes on later."""
    if not keeps:
        engine.speculation.close()
    if lookup is None:
        engine.speculation = speculation(wish, engine.residency, engine.plan)
    else:
        engine.speculation = Speculation(engine.residency, lookup, (), wish.most_tokens, adapts=wish.adapts)


def stream(engine: Engine, streamed: Callable[[str], bool]) -> None:
    """Whether a block comes from the disk at every step, by its name; embedding and head stay."""
    blocks = engine.residency.blocks
    tiers = ["disk" if block.name not in (EMBED, HEAD) and streamed(block.name) else "ram" for block in blocks]
    engine.move([replace(block, tier=tier) for block, tier in zip(blocks, tiers, strict=True)])  # type: ignore[arg-type]


@contextmanager
def random_engine(shape: str) -> Iterator[Engine]:
    with random_model(shape, find_shape(shape).raw_config, RECIPES[WEIGHTS]) as files:
        engine = Engine.load(files, weights=WEIGHTS, device="cpu", ctx=CTX, reuse=NO_REUSE, speculate=OFF)
        try:
            yield engine
        finally:
            engine.close()


def ids(count: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(vocab_size) for _ in range(count))

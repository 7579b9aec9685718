"""A mixture under a cap, its experts chosen by a trace or by its router: `python -m benchmarks.offload_experts SPEC`.

A random router chooses at random, which no trained one does: of the experts of a token some 45 % are those of the token
before (Qwen3-30B-A3B). The trace repeats that share, and draws the others anew. It foresees 0.8 of a block's experts;
the first of them that is not in memory is right in 0.7, as in the mixture that `tools/train_tiny.py --experts` trains.
Prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.engines import random_ids
from benchmarks.measure import drop_from_cache
from localllm.bench.machine import PeakMemory
from localllm.engine.engine import Engine
from localllm.engine.events import TokenEvent
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.request import SamplingParams
from localllm.hub import locate
from localllm.hub.packed import packed_directory
from localllm.kernels.cpu_expert_room import ExpertRoom
from localllm.layers.moe import MoE
from localllm.models.expert_records import PooledExperts
from localllm.offload.planner.disk_speed import files_read_gbs
from localllm.offload.streaming.expert_pool import ExpertPool
from localllm.settings import EngineConfig


@dataclass(frozen=True)
class Spec:
    """repetition, foresight: of the trace; without a repetition the router chooses, and a temperature above 0 lets each
    round write other tokens, for which it chooses other experts."""

    folder: str
    weights: str
    ram_bytes: int
    repetition: float | None
    foresight: float = 0.8
    temperature: float = 0.0
    prompt_tokens: int = 64
    gen_tokens: int = 48
    rounds: int = 5


class Trace:
    """The experts of each token in turn, block after block, and what a pool that forgets the oldest would have of them.

    blocks: how many there are. slots: of the pool, for all of them. repetition, foresight: the share of a token's
    experts that are those of the token before, and that a guess is right about.
    """

    def __init__(self, blocks: int, num_experts: int, repetition: float, foresight: float, slots: int) -> None:
        self._random, self._guesses = random.Random(0), random.Random(1)  # the trace is the same without guesses
        self._num_experts, self._repetition, self._foresight = num_experts, repetition, foresight
        self._blocks, self._slots = blocks, slots
        self._block = 0
        self._drawn: list[int] | None = None  # the experts of the next block, where they were guessed at
        self._last: dict[int, list[int]] = {}
        self._held: OrderedDict[tuple[int, int], None] = OrderedDict()
        self.wanted = self.hits = 0

    def choose(self, tokens: int, top_k: int) -> Tensor:
        """Return int32 [tokens, top_k] for the next block."""
        block, drawn, self._drawn = self._block, self._drawn, None
        self._block = (block + 1) % self._blocks
        rows = [drawn] if drawn else [self._next(block, top_k) for _ in range(tokens)]
        self._count(block, {expert for row in rows for expert in row})
        return torch.tensor(rows, dtype=torch.int32)

    def guess(self, top_k: int) -> list[int]:
        """Return a guess at a single token's experts in the next block, in any order."""
        self._drawn = self._next(self._block, top_k)
        guess = [expert for expert in self._drawn if self._guesses.random() < self._foresight]
        others = [expert for expert in range(self._num_experts) if expert not in self._drawn]
        guess += self._guesses.sample(others, min(top_k - len(guess), len(others)))
        return self._guesses.sample(guess, len(guess))

    def _next(self, block: int, top_k: int) -> list[int]:
        kept = [expert for expert in self._last.get(block, []) if self._random.random() < self._repetition]
        others = [expert for expert in range(self._num_experts) if expert not in kept]
        self._last[block] = kept + self._random.sample(others, top_k - len(kept))
        return self._last[block]

    def _count(self, block: int, experts: set[int]) -> None:
        for expert in experts:
            self.wanted += 1
            if (block, expert) in self._held:
                self.hits += 1
                self._held.move_to_end((block, expert))
            else:
                self._held[block, expert] = None
        while len(self._held) > self._slots:
            self._held.popitem(last=False)


@dataclass(frozen=True)
class Round:
    """tok_s: behind the first token. bytes_read, hits, wanted: of those tokens. A hit was in memory without a guess."""

    tok_s: float
    bytes_read: int
    tokens: int
    hits: int
    wanted: int
    ideal_hits: int


def measure(spec: Spec) -> dict[str, Any]:
    files = locate(spec.folder)
    drop_from_cache(sorted(packed_directory(files, spec.weights).glob("*.safetensors")))
    config = EngineConfig(weights=spec.weights, dtype="bf16", ram=spec.ram_bytes, ctx=256, speculate="off")
    engine = Engine.load(files, config, reuse=NO_REUSE)
    bodies = [block.body for block in engine.model.blocks if isinstance(block.body, MoE)]
    pool = bodies[0].experts.pool if isinstance(bodies[0].experts, PooledExperts) else None
    plan = engine.plan
    assert pool is not None and plan is not None, "the cap is below the model's size"
    num_experts, trace = bodies[0].config.router.num_experts, None
    if spec.repetition is not None:
        trace = Trace(len(bodies), num_experts, spec.repetition, spec.foresight, pool.num_slots)
    paths = [packed_directory(files, spec.weights) / f"{name}.safetensors" for name in plan.streamed]
    peak, rounds, floors = PeakMemory(torch.device("cpu")), [], []
    with nullcontext() if trace is None else traced(trace):
        for number in range(spec.rounds + 1):
            rounds.append(answered(engine, pool, trace, spec, number))
            floors.append(files_read_gbs(paths))
    record_bytes = pool.memory.shape[1]
    engine.close()
    return {
        "slots": pool.num_slots,
        "experts": sum(body.config.router.num_experts for body in bodies),
        "decode_tok_s": [each.tok_s for each in rounds[1:]],
        "missed_bytes": [(each.wanted - each.hits) * record_bytes / each.tokens for each in rounds[1:]],
        "read_bytes": [each.bytes_read / each.tokens for each in rounds[1:]],
        "floor_gbs": [statistics.harmonic_mean(pair) for pair in itertools.pairwise(floors)],
        "hit_rate": [each.hits / each.wanted for each in rounds[1:]],
        "ideal_hit_rate": None if trace is None else [each.ideal_hits / each.wanted for each in rounds[1:]],
        "predicted_tok_s": plan.decode_tok_s,
        "ledger_bytes": plan.total_bytes("ram"),
        "peak_rss_bytes": peak.rss_bytes(),
    }


def traced(trace: Trace) -> Any:
    """Inside, the trace chooses the experts of every token, and the router's weights are taken as they come."""

    def chosen(room: ExpertRoom, top_k: int) -> Tensor:
        experts = trace.choose(int(room.shape[0]), top_k)
        room.experts[: experts.numel()] = experts.flatten()
        return experts

    def guessed(_room: ExpertRoom, top_k: int) -> list[int]:
        return trace.guess(top_k)

    return mock.patch.multiple(ExpertRoom, chosen=chosen, guessed=guessed)


def answered(engine: Engine, pool: ExpertPool, trace: Trace | None, spec: Spec, number: int) -> Round:
    prompt = random_ids(spec.prompt_tokens, engine.model.config.vocab_size, number)
    sampling = SamplingParams(temperature=spec.temperature, max_tokens=spec.gen_tokens + 1, ignore_eos=True)
    marks = [*_marks(engine, pool, trace, prompt, sampling)]
    (began, *before), (ended, *after) = marks[0], marks[-1]
    bytes_read, hits, wanted, ideal = (new - old for new, old in zip(after, before, strict=True))
    tokens = len(marks) - 1
    return Round(tokens / (ended - began), bytes_read, tokens, hits, wanted, ideal)


def _marks(
    engine: Engine, pool: ExpertPool, trace: Trace | None, prompt: Sequence[int], sampling: SamplingParams
) -> Iterator[tuple[float, int, int, int, int]]:
    """When each token was drawn, and the counters then."""
    for event in engine.generate(prompt, sampling):
        if isinstance(event, TokenEvent):
            yield time.perf_counter(), pool.clock.bytes_read, pool.hits, pool.wanted, 0 if trace is None else trace.hits


if __name__ == "__main__":
    print(json.dumps(measure(Spec(**json.loads(sys.argv[1])))))

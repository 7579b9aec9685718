"""One engine's prefill and decode, timed as a front end sees them; decoding begins at any depth of the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from localllm.bench.target import BenchmarkTarget
from localllm.bench.workload import Workload
from localllm.cache.paged_kv import PagedKV
from localllm.engine.engine import Engine
from localllm.engine.events import Event, FinishedEvent, Timings, TokenEvent
from localllm.engine.request import Request, SamplingParams
from localllm.engine.sequence import Sequence
from localllm.kernels.paged_attention import write

_STRETCH_S = 0.5  # of decoding between two samples of the floor: what disturbs one disturbs the other
_FILL_TOKENS = 512


def random_ids(target: BenchmarkTarget, count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, target.config.vocab_size, (count,), generator=generator).tolist()
    return tuple(ids)


def prefill(engine: Engine, prompt: tuple[int, ...]) -> Timings:
    """The engine's own timings of a prompt and the first token behind it."""
    finished = None
    for event in engine.generate(prompt, _greedy(1)):
        finished = _checked(event)
    assert isinstance(finished, FinishedEvent)
    return finished.timings


class Depth:
    """Decoding with `context` tokens in the cache, which is filled once and rolled back before each round."""

    def __init__(self, target: BenchmarkTarget, context: int, workload: Workload) -> None:
        self._context = context
        self._engine = target.engine
        self._gen_tokens = workload.gen_tokens
        self._prompt = random_ids(target, context + 1, seed=context)
        self._kv = target.engine.residency.new_kv(workload.length(context))
        if target.has_random_weights:
            _fill(self._kv, context)
        elif context:
            self._run(self._prompt[:context], 1)

    def decode(self, floor_gbs: Callable[[], float] | None = None) -> tuple[float, float]:
        """Tokens a second, and the GB/s of `floor_gbs` meanwhile (0 without one)."""
        self._kv.trim(self._context)
        return self._run(self._prompt, self._gen_tokens, floor_gbs)

    def _run(
        self, prompt: tuple[int, ...], num_tokens: int, floor_gbs: Callable[[], float] | None = None
    ) -> tuple[float, float]:
        """Run a request to its end in our own cache."""
        self._engine.submit(Request(prompt, _greedy(num_tokens)))
        self._engine.scheduler.schedule()
        (sequence,) = self._engine.scheduler.running
        self._take_over(sequence)
        samples = [floor_gbs()] if floor_gbs else []
        elapsed, num_emitted, stretch = 0.0, 0, 0.0
        while self._engine.has_work:
            started = time.perf_counter()
            events = [_checked(event) for event in self._engine.step()]
            step_s = time.perf_counter() - started
            elapsed, stretch = elapsed + step_s, stretch + step_s
            num_emitted += sum(isinstance(event, TokenEvent) for event in events)
            if floor_gbs and (stretch > _STRETCH_S or not self._engine.has_work):
                samples.append(floor_gbs())
                stretch = 0.0
        return num_emitted / elapsed, statistics.harmonic_mean(samples) if samples else 0.0

    def _take_over(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        sequence.kv.close()
        sequence.kv, sequence.owns_kv = self._kv, False


def _checked(event: Event) -> Event:
    if isinstance(event, FinishedEvent) and event.error is not None:
        raise event.error
    return event


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def _fill(kv: PagedKV, num_tokens: int) -> None:
    """Fill with random keys and values, the same few in every layer: attention to them takes as long as to any."""
    layout, num_layers = kv.layouts[0], len(kv.pages.places)
    noise = torch.randn((2, min(_FILL_TOKENS, num_tokens), layout.num_kv_heads, layout.head_dim))
    while kv.length < num_tokens:
        past, count = kv.length, min(_FILL_TOKENS, num_tokens - kv.length)
        kv.prepare(past + count)
        for layer in range(num_layers):
            write(kv.layer(layer, past, count), past, *(values[:count].to(layout.dtype) for values in noise))
        kv.advance(count)

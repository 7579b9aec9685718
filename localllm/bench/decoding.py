"""Prompts and tokens of one engine, timed as a front end would see them; decoding begins at any depth of the cache.

Knows the engine's requests and steps. Knows no floors but the one that is sampled between two stretches of decoding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from localllm.bench.subject import Subject
from localllm.bench.workload import VERIFY_TOKENS, Workload
from localllm.cache.paged_kv import PagedKV
from localllm.engine.engine import Engine
from localllm.engine.events import Event, FinishedEvent, Timings, TokenEvent
from localllm.engine.request import Request, SamplingParams
from localllm.engine.sequence import Sequence
from localllm.engine.step_types import Chunk
from localllm.kernels.paged_attention import write
from localllm.offload.planner.roofline import seconds

_VERIFY_REPEATS = 3
_STRETCH_S = 0.5  # of decoding between two samples of the floor: what disturbs one disturbs the other
_FILL_TOKENS = 512


def random_ids(subject: Subject, count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, subject.config.vocab_size, (count,), generator=generator).tolist()
    return tuple(ids)


def read_prompt(engine: Engine, prompt: tuple[int, ...]) -> Timings:
    """The engine's own clock for a prompt and the first token of its answer."""
    finished = None
    for event in engine.generate(prompt, _greedy(1)):
        finished = _raise_error(event)
    assert isinstance(finished, FinishedEvent)
    return finished.timings


@torch.inference_mode()
def matrices_gbs(engine: Engine) -> float | None:
    """The read of the blocks' matrices alone, one token's; None where they are not computed by one native call."""
    step = engine.runner.cpu_step
    if step is None or engine.model.stream.names:
        return None
    tape, num_bytes = step.matrices_only()
    tape.run()
    times: list[float] = []
    while sum(times) < _STRETCH_S:
        times.append(seconds(tape.run))
    return num_bytes / statistics.median(times) / 1e9


class Depth:
    """Decoding with `context` tokens in the cache. The cache is filled once and rolled back for each round."""

    def __init__(self, subject: Subject, context: int, workload: Workload) -> None:
        self.context = context
        self._engine = subject.engine
        self._gen_tokens = workload.gen_tokens
        self._prompt = random_ids(subject, context + VERIFY_TOKENS, seed=context)
        self._kv = subject.engine.residency.new_kv(workload.reach(context))
        if subject.has_random_weights:
            _fill(self._kv, context)
        elif context:
            self._run(self._begin(self._prompt[:context], 1))

    def decode(self, floor_gbs: Callable[[], float] | None = None) -> tuple[float, float]:
        """Tokens a second, and the GB/s of `floor_gbs` meanwhile (0 without one)."""
        self._kv.trim(self.context)
        return self._run(self._begin(self._prompt[: self.context + 1], self._gen_tokens), floor_gbs)

    def verify_ratio(self) -> float:
        """The time of a forward of 8 tokens over that of one."""
        pairs = [(self._forward_s(1), self._forward_s(VERIFY_TOKENS)) for _ in range(_VERIFY_REPEATS)]
        return statistics.median(many for _, many in pairs) / statistics.median(one for one, _ in pairs)

    def _forward_s(self, num_tokens: int) -> float:
        chunk = Chunk(self._prompt[: self.context + num_tokens], self._kv, num_tokens)
        self._kv.trim(self.context)
        # One value of the logits is asked for: a device is done with all of them by then.
        elapsed = seconds(lambda: self._engine.runner.forward([chunk], all_logits=True)[-1, 0].item())
        self._kv.trim(self.context)
        return elapsed

    def _begin(self, prompt: tuple[int, ...], num_tokens: int) -> Sequence:
        """A request, admitted but not begun."""
        self._engine.submit(Request(prompt, _greedy(num_tokens)))
        self._engine.scheduler.schedule()
        (sequence,) = self._engine.scheduler.running
        return sequence

    def _run(self, sequence: Sequence, floor_gbs: Callable[[], float] | None = None) -> tuple[float, float]:
        """The request to its end, in our own cache instead of the one that it was given."""
        assert sequence.kv is not None
        sequence.kv.close()
        sequence.kv, sequence.owns_kv = self._kv, False
        samples = [floor_gbs()] if floor_gbs else []
        elapsed, num_tokens, stretch = 0.0, 0, 0.0
        while self._engine.has_work:
            started = time.perf_counter()
            events = [_raise_error(event) for event in self._engine.step()]
            step_s = time.perf_counter() - started
            elapsed, stretch = elapsed + step_s, stretch + step_s
            num_tokens += sum(isinstance(event, TokenEvent) for event in events)
            if floor_gbs and (stretch > _STRETCH_S or not self._engine.has_work):
                samples.append(floor_gbs())
                stretch = 0.0
        return num_tokens / elapsed, statistics.harmonic_mean(samples) if samples else 0.0


def _raise_error(event: Event) -> Event:
    if isinstance(event, FinishedEvent) and event.error is not None:
        raise event.error
    return event


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def _fill(kv: PagedKV, num_tokens: int) -> None:
    """Random keys and values, the same few in every layer: to attend to them takes as long as to any."""
    layout, num_layers = kv.layouts[0], len(kv.pages.places)
    noise = torch.randn((2, min(_FILL_TOKENS, num_tokens), layout.num_kv_heads, layout.head_dim))
    while kv.length < num_tokens:
        past, count = kv.length, min(_FILL_TOKENS, num_tokens - kv.length)
        kv.prepare(past + count)
        for layer in range(num_layers):
            write(kv.layer(layer, past, count), past, *(values[:count].to(layout.dtype) for values in noise))
        kv.advance(count)

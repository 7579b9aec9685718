"""One benchmark: the peaks of memory, the disk, then rounds in which every rate stands beside its floor.

Prefill and decode are timed as a front end sees them; decoding begins at any depth of the cache.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

import torch

from localllm.bench.machine import PeakMemory, machine
from localllm.bench.report import BenchmarkReport, BenchmarkRun, MachineFloors, paired, spread
from localllm.bench.target import BenchmarkTarget
from localllm.bench.workload import Workload
from localllm.cache.paged_kv import PagedKV
from localllm.engine.engine import Engine
from localllm.engine.events import Event, FinishedEvent, Timings, TokenEvent
from localllm.engine.request import Request, SamplingParams
from localllm.kernels.paged_attention import write
from localllm.offload.measurements.roofline import DeviceFloors, MatmulFloor, MemoryFloor
from localllm.offload.planner.disk_speed import disk_file
from localllm.quant.dense import dense_name

DISK_BYTES = 1 << 30  # beyond what a disk keeps in its own memory
_MOST_DISK_READS = 5  # a second each, and nothing that comes later stands beside them
_STRETCH_S = 0.5  # of decoding between two samples of the floor: what disturbs one disturbs the other
_FILL_TOKENS = 512


@dataclass(frozen=True)
class DepthSamples:
    """Of each round: tokens a second, and GB/s of the memory that holds the weights meanwhile. Peaks in bytes."""

    context: int
    rounds: Sequence[tuple[float, float]]
    peak_rss_bytes: int
    peak_vram_bytes: int | None


def run_benchmark(
    load: Callable[[], BenchmarkTarget],
    workload: Workload,
    *,
    device: torch.device,
    disk: Path,
    notify: Callable[[str], None],
) -> BenchmarkReport:
    """Measure the model that `load` makes. disk: a folder on the disk that models are loaded from; need not exist.

    Nothing is left behind, however it ends. Raises what `load` and the engine raise.
    """
    peak = PeakMemory(device)
    target = load()
    prompt = random_ids(target, workload.prompt_tokens)
    notify("warming up")
    prefill(target.engine, prompt)
    depths, peaks = [], []
    for context in workload.contexts:
        depths.append(Depth(target, context, workload))
        depths[-1].decode()
        peaks.append((peak.rss_bytes(), peak.vram_bytes()))
    notify("reading the disk")
    rates, disk_method = defaultdict[str, list[float]](list), None
    with disk_file(disk, DISK_BYTES) as file:
        if file is not None:
            rates["disk_read_gbs"] = [file.read_gbs() for _ in range(min(workload.rounds, _MOST_DISK_READS))]
            disk_method = file.method
    floors = _Floors(device)
    prompts, decoding = [], []
    for number in range(workload.rounds):
        notify(f"round {number + 1} of {workload.rounds}")
        before, timings, after = floors.gflops(), prefill(target.engine, prompt), floors.gflops()
        prompts.append(timings)
        decoding.append([depth.decode(floors.memory_gbs) for depth in depths])
        rates["matmul_gflops"].append(harmonic_mean((before, after)))
        rates[floors.memory_name] += [floor_gbs for _, floor_gbs in decoding[-1]]
        for name, rate in floors.others().items():
            rates[name].append(rate)
    samples = [
        DepthSamples(context, of_rounds, *peak_bytes)
        for context, of_rounds, peak_bytes in zip(workload.contexts, zip(*decoding, strict=True), peaks, strict=True)
    ]
    runs = tuple(summary(target, workload, prompts, each, rates) for each in samples)
    target.engine.close()
    return BenchmarkReport(1, machine(device), _machine_floors(rates, disk_method), runs)


class _Floors:
    """The floors with their buffers, warm when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._memory = MemoryFloor()
        self._device = DeviceFloors(device) if device.type == "cuda" else None
        self.gflops = MatmulFloor(device).gflops
        # The memory that holds the weights.
        self.memory_name = "device_copy_gbs" if self._device else "dram_read_gbs"
        self.memory_gbs = self._device.device_copy_gbs if self._device else self._memory.dram_read_gbs
        self.memory_gbs()
        self.others()
        self.gflops()

    def others(self) -> dict[str, float]:
        """The rates beside which nothing is measured."""
        if self._device is None:
            return {}
        return {"dram_read_gbs": self._memory.dram_read_gbs(), "h2d_gbs": self._device.h2d_gbs()}


def summary(
    target: BenchmarkTarget,
    workload: Workload,
    prompts: Sequence[Timings],
    depth: DepthSamples,
    rates: Mapping[str, Sequence[float]],
) -> BenchmarkRun:
    """The run at one depth. prompts: of each round. rates: the floors' samples, by their names in a result."""
    engine = target.engine
    streamed_bytes = engine.plan.streamed_bytes if engine.plan is not None else 0
    bytes_per_token = target.bytes_per_token(depth.context, workload.gen_tokens)
    decode, floor = zip(*depth.rounds, strict=True)
    fraction = paired([tok_s * bytes_per_token / 1e9 for tok_s in decode], floor)
    # A prompt that was prefilled to its end has been timed.
    prefill_tok_s = [timings.prefill_tok_s or 0.0 for timings in prompts]
    gflops = [tok_s * target.prefill_flops_per_token() / 1e9 for tok_s in prefill_tok_s]
    disk_gbs = median(rates["disk_read_gbs"]) if rates.get("disk_read_gbs") else None
    return BenchmarkRun(
        model=target.name,
        weights=engine.weights,
        kv=dense_name(engine.model.dtype) if engine.kv_format.name == "bf16" else engine.kv_format.name,
        prompt_tokens=workload.prompt_tokens,
        gen_tokens=workload.gen_tokens,
        context=depth.context,
        prefill_tok_s=spread(prefill_tok_s),
        decode_tok_s=spread(decode),
        ttft_s=spread([timings.ttft_s or 0.0 for timings in prompts]),
        bytes_per_token=bytes_per_token,
        floor_fraction=fraction.median,
        peak_rss_bytes=depth.peak_rss_bytes,
        peak_vram_bytes=depth.peak_vram_bytes,
        floor_fraction_spread=fraction,
        prefill_fraction=paired(gflops, rates["matmul_gflops"]).median,
        random_weights=target.has_random_weights,
        rounds=workload.rounds,
        attend="all" if (pages := engine.residency.kv_pages.chosen_pages) is None else f"top:{pages}",
        streamed_bytes=streamed_bytes,
        disk_fraction=median(decode) * streamed_bytes / 1e9 / disk_gbs if streamed_bytes and disk_gbs else None,
    )


def _machine_floors(rates: Mapping[str, Sequence[float]], disk_method: str | None) -> MachineFloors:
    spreads = {name: spread(values) for name, values in rates.items()}
    absent = dict.fromkeys(("disk_read_gbs", "device_copy_gbs", "h2d_gbs"))
    medians: dict[str, Any] = {**absent, **{name: found.median for name, found in spreads.items()}}
    return MachineFloors(**medians, disk_method=disk_method, spreads=spreads)


# Prefill and decode


def random_ids(target: BenchmarkTarget, count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, target.engine.config.vocab_size, (count,), generator=generator).tolist()
    return tuple(ids)


def prefill(engine: Engine, prompt: tuple[int, ...]) -> Timings:
    """The engine's own timings of a prompt and the first token behind it."""
    finished = None
    for event in engine.generate(prompt, _greedy(1)):
        finished = _checked(event)
    assert isinstance(finished, FinishedEvent)
    return finished.timings


class Depth:
    """Decoding with `context` tokens in the cache, which is rolled back before each round, or filled anew where it
    cannot be."""

    def __init__(self, target: BenchmarkTarget, context: int, workload: Workload) -> None:
        self._context = context
        self._engine = target.engine
        self._gen_tokens = workload.gen_tokens
        self._prompt = random_ids(target, context + 1, seed=context)
        self._kv = target.engine.residency.new_kv(workload.length(context))
        self._kv.attend_from = context
        self._is_random = target.has_random_weights
        self._fill()

    def _fill(self) -> None:
        if self._is_random:
            _fill(self._kv, self._context)
        elif self._context:
            self._run(self._prompt[: self._context], 1)

    def decode(self, floor_gbs: Callable[[], float] | None = None) -> tuple[float, float]:
        """Tokens a second, and the GB/s of `floor_gbs` meanwhile (0 without one)."""
        if self._kv.trim(self._context) < self._context:  # a recurrent state
            self._fill()
        return self._run(self._prompt, self._gen_tokens, floor_gbs)

    def _run(
        self, prompt: tuple[int, ...], num_tokens: int, floor_gbs: Callable[[], float] | None = None
    ) -> tuple[float, float]:
        """Run a request to its end in our own cache."""
        self._engine.submit(Request(prompt, _greedy(num_tokens)))
        self._engine.scheduler.schedule()
        (sequence,) = self._engine.scheduler.running
        assert sequence.kv is not None
        sequence.kv.close()
        sequence.kv, sequence.owns_kv = self._kv, False
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
        return num_emitted / elapsed, harmonic_mean(samples) if samples else 0.0


def _checked(event: Event) -> Event:
    if isinstance(event, FinishedEvent) and event.error is not None:
        raise event.error
    return event


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def _fill(kv: PagedKV, num_tokens: int) -> None:
    """Fill with random keys and values, the same few in every layer: attention to them takes as long as to any."""
    layouts = [kv.layouts_of(layer)[0] for layer in range(len(kv.pages.places))]
    shapes = {(layout.num_kv_heads, layout.head_dim) for layout in layouts}
    noise = {shape: torch.randn((2, min(_FILL_TOKENS, num_tokens), *shape)) for shape in shapes}
    while kv.length < num_tokens:
        past, count = kv.length, min(_FILL_TOKENS, num_tokens - kv.length)
        kv.prepare(past + count)
        for layer, layout in enumerate(layouts):
            random = noise[layout.num_kv_heads, layout.head_dim][:, :count].to(layout.dtype)
            write(kv.layer(layer, past, count), past, *random)
        kv.advance(count)

"""One benchmark: the disk, then the peaks of memory, then rounds in which every rate stands beside what bounds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean, median

import torch

from localllm.bench.decoding import Depth, matrices_gbs, random_ids, read_prompt
from localllm.bench.machine import PeakMemory, machine
from localllm.bench.measure import paired, spread
from localllm.bench.report import Floors, Report, Run
from localllm.bench.subject import Subject
from localllm.bench.workload import Workload
from localllm.engine.engine import Engine
from localllm.engine.events import Timings
from localllm.offload.planner.disk_speed import disk_file
from localllm.offload.planner.roofline import DeviceFloors, MatmulFloor, MemoryFloor
from localllm.quant.dense import Dense

DISK_BYTES = 1 << 30  # beyond what a disk keeps in its own memory
_MOST_DISK_READS = 5  # a second each, and nothing that comes later stands beside them

Say = Callable[[str], None]


@dataclass(frozen=True)
class Decoding:
    """One round at one depth. floor_gbs: the read of the memory that the weights lie in, taken meanwhile."""

    tok_s: float
    floor_gbs: float
    verify_ratio: float


@dataclass(frozen=True)
class Round:
    prompt: Timings
    matmul_gflops: float
    depths: tuple[Decoding, ...]
    matrices_fraction: float | None
    rates: dict[str, float]  # the other floors, by their names in a result


@dataclass(frozen=True)
class Peaks:
    rss_bytes: int
    vram_bytes: int | None


def run_benchmark(
    load: Callable[[], Subject], workload: Workload, *, device: torch.device, disk: Path, say: Say
) -> Report:
    """Measure the model that `load` makes. disk: a folder on the disk that models are loaded from; need not exist.

    Nothing is left behind, however it ends. Raises what `load` and the engine raise.
    """
    say("reading the disk")
    disk_rates, disk_method = _read_disk(disk, workload.rounds)
    peak = PeakMemory(device)
    subject = load()
    prompt = random_ids(subject, workload.prompt_tokens)
    say("warming up")
    read_prompt(subject.engine, prompt)
    matrices_gbs(subject.engine)
    depths, peaks = [], []
    for context in workload.contexts:
        depths.append(Depth(subject, context, workload))
        depths[-1].decode()
        depths[-1].verify_ratio()
        peaks.append(Peaks(peak.rss_bytes(), peak.vram_bytes()))
    bench = _Bench(subject, prompt, depths, device)
    rounds = []
    for number in range(workload.rounds):
        say(f"round {number + 1} of {workload.rounds}")
        rounds.append(bench.round())
    disk_gbs = median(disk_rates) if disk_rates else None
    runs = [summary(subject, workload, rounds, index, peaks[index], disk_gbs) for index in range(len(depths))]
    subject.engine.close()
    return Report(machine(device), _floors(rounds, disk_rates, disk_method), tuple(runs))


class _Bench:
    """The model, warm, and the floors with their buffers, warm when this is made."""

    def __init__(self, subject: Subject, prompt: tuple[int, ...], depths: list[Depth], device: torch.device) -> None:
        self._subject, self._prompt, self._depths = subject, prompt, depths
        self._memory = MemoryFloor()
        self._matmul = MatmulFloor(device)
        self._device = DeviceFloors(device) if device.type == "cuda" else None
        self._rates()
        self._matmul.gflops()

    def round(self) -> Round:
        before = self._matmul.gflops()
        timings = read_prompt(self._subject.engine, self._prompt)
        after = self._matmul.gflops()
        return Round(
            timings,
            harmonic_mean((before, after)),
            tuple(self._decoding(depth) for depth in self._depths),
            self._matrices_fraction(),
            self._rates(),
        )

    def _decoding(self, depth: Depth) -> Decoding:
        tok_s, floor_gbs = depth.decode(self._floor_gbs)
        return Decoding(tok_s, floor_gbs, depth.verify_ratio())

    def _matrices_fraction(self) -> float | None:
        before, matrices, after = self._floor_gbs(), matrices_gbs(self._subject.engine), self._floor_gbs()
        return None if matrices is None else matrices / harmonic_mean((before, after))

    def _floor_gbs(self) -> float:
        """Of the memory that the weights lie in."""
        return self._device.device_copy_gbs() if self._device else self._memory.dram_read_gbs()

    def _rates(self) -> dict[str, float]:
        rates = {"dram_read_gbs": self._memory.dram_read_gbs()}
        if self._device:
            rates |= {"device_copy_gbs": self._device.device_copy_gbs(), "h2d_gbs": self._device.h2d_gbs()}
        return rates


def _read_disk(directory: Path, rounds: int) -> tuple[list[float], str | None]:
    with disk_file(directory, DISK_BYTES) as file:
        if file is None:
            return [], None
        return [file.read_gbs() for _ in range(min(rounds, _MOST_DISK_READS))], file.method


def summary(
    subject: Subject, workload: Workload, rounds: list[Round], index: int, peaks: Peaks, disk_gbs: float | None = None
) -> Run:
    """Of the rounds at the workload's depth number `index`."""
    plan = subject.engine.plan
    streamed_bytes = plan.streamed_bytes if plan is not None else 0
    context = workload.contexts[index]
    samples = [each.depths[index] for each in rounds]
    bytes_per_token = subject.bytes_per_token(context, workload.gen_tokens)
    decode = [sample.tok_s for sample in samples]
    fraction = paired([tok_s * bytes_per_token / 1e9 for tok_s in decode], [sample.floor_gbs for sample in samples])
    prefill, ttft = (
        [_known(each.prompt.prefill_tok_s) for each in rounds],
        [_known(each.prompt.ttft_s) for each in rounds],
    )
    matrices = [each.matrices_fraction for each in rounds if each.matrices_fraction is not None]
    gflops = [tok_s * subject.prefill_flops_per_token() / 1e9 for tok_s in prefill]
    return Run(
        model=subject.name,
        weights=subject.weights,
        kv=_kv_name(subject.engine),
        prompt_tokens=workload.prompt_tokens,
        gen_tokens=workload.gen_tokens,
        context=context,
        prefill_tok_s=spread(prefill),
        decode_tok_s=spread(decode),
        ttft_s=spread(ttft),
        bytes_per_token=bytes_per_token,
        floor_fraction=fraction.median,
        peak_rss_bytes=peaks.rss_bytes,
        peak_vram_bytes=peaks.vram_bytes,
        floor_fraction_spread=fraction,
        prefill_fraction=paired(gflops, [each.matmul_gflops for each in rounds]).median,
        verify_8_ratio=spread([sample.verify_ratio for sample in samples]),
        matrices_fraction=median(matrices) if matrices else None,
        random_weights=subject.has_random_weights,
        rounds=workload.rounds,
        streamed_bytes=streamed_bytes,
        disk_fraction=median(decode) * streamed_bytes / 1e9 / disk_gbs if streamed_bytes and disk_gbs else None,
    )


def _floors(rounds: list[Round], disk_rates: list[float], disk_method: str | None) -> Floors:
    """Of the memory that decoding reads, the samples taken while it did."""
    samples = {name: [each.rates[name] for each in rounds] for name in rounds[0].rates}
    decoded = "device_copy_gbs" if "device_copy_gbs" in samples else "dram_read_gbs"
    samples[decoded] = [sample.floor_gbs for each in rounds for sample in each.depths]
    samples |= {"matmul_gflops": [each.matmul_gflops for each in rounds]}
    samples |= {"disk_read_gbs": disk_rates} if disk_rates else {}
    spreads = {name: spread(values) for name, values in samples.items()}
    medians = {name: found.median for name, found in spreads.items()}
    return Floors(
        dram_read_gbs=medians["dram_read_gbs"],
        disk_read_gbs=medians.get("disk_read_gbs"),
        device_copy_gbs=medians.get("device_copy_gbs"),
        h2d_gbs=medians.get("h2d_gbs"),
        matmul_gflops=medians["matmul_gflops"],
        disk_method=disk_method,
        spreads=spreads,
    )


def _known(value: float | None) -> float:
    assert value is not None, "a prompt that was read to its end has been timed"
    return value


def _kv_name(engine: Engine) -> str:
    """In what keys and values are kept; dense ones are in the model's dtype."""
    name = engine.kv_format.name
    return Dense(engine.model.dtype).name if name == "bf16" else name

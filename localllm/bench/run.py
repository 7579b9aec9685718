"""One benchmark: the disk, then the peaks of memory, then rounds in which every rate stands beside its floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean, median

import torch

from localllm.bench.depth import Depth, prefill, random_ids
from localllm.bench.machine import PeakMemory, machine
from localllm.bench.report import BenchmarkReport, BenchmarkRun, MachineFloors, paired, spread
from localllm.bench.target import BenchmarkTarget
from localllm.bench.workload import Workload
from localllm.engine.events import Timings
from localllm.offload.measuring.roofline import DeviceFloors, MatmulFloor, MemoryFloor
from localllm.offload.planner.disk_speed import disk_file
from localllm.quant.dense import dense_name

DISK_BYTES = 1 << 30  # beyond what a disk keeps in its own memory
_MOST_DISK_READS = 5  # a second each, and nothing that comes later stands beside them


@dataclass(frozen=True)
class Round:
    """rates: other floors, by their names in a result. decoding: tok/s at each depth, and GB/s of the floor meanwhile.

    The floor of decoding is the read of the memory that holds the weights.
    """

    prompt: Timings
    matmul_gflops: float
    decoding: tuple[tuple[float, float], ...]
    rates: dict[str, float]


@dataclass(frozen=True)
class Peaks:
    rss_bytes: int
    vram_bytes: int | None


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
    notify("reading the disk")
    with disk_file(disk, DISK_BYTES) as file:
        disk_rates = [file.read_gbs() for _ in range(min(workload.rounds, _MOST_DISK_READS))] if file else []
        disk_method = file.method if file else None
    peak = PeakMemory(device)
    target = load()
    prompt = random_ids(target, workload.prompt_tokens)
    notify("warming up")
    prefill(target.engine, prompt)
    depths, peaks = [], []
    for context in workload.contexts:
        depths.append(Depth(target, context, workload))
        depths[-1].decode()
        peaks.append(Peaks(peak.rss_bytes(), peak.vram_bytes()))
    floors = _Floors(device)
    rounds = []
    for number in range(workload.rounds):
        notify(f"round {number + 1} of {workload.rounds}")
        before, timings, after = floors.gflops(), prefill(target.engine, prompt), floors.gflops()
        decoding = tuple(depth.decode(floors.memory_gbs) for depth in depths)
        rounds.append(Round(timings, harmonic_mean((before, after)), decoding, floors.rates()))
    disk_gbs = median(disk_rates) if disk_rates else None
    runs = tuple(summary(target, workload, rounds, index, peaks[index], disk_gbs) for index in range(len(depths)))
    target.engine.close()
    return BenchmarkReport(machine(device), _floors(rounds, disk_rates, disk_method), runs)


class _Floors:
    """The floors with their buffers, warm when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._memory = MemoryFloor()
        self._device = DeviceFloors(device) if device.type == "cuda" else None
        self.gflops = MatmulFloor(device).gflops
        self.rates()
        self.gflops()

    def memory_gbs(self) -> float:
        """The read of the memory that holds the weights."""
        return self._device.device_copy_gbs() if self._device else self._memory.dram_read_gbs()

    def rates(self) -> dict[str, float]:
        rates = {"dram_read_gbs": self._memory.dram_read_gbs()}
        if self._device:
            rates |= {"device_copy_gbs": self._device.device_copy_gbs(), "h2d_gbs": self._device.h2d_gbs()}
        return rates


def summary(
    target: BenchmarkTarget,
    workload: Workload,
    rounds: list[Round],
    index: int,
    peaks: Peaks,
    disk_gbs: float | None = None,
) -> BenchmarkRun:
    """The run at the workload's depth number `index`."""
    plan, kv = target.engine.plan, target.engine.kv_format.name
    streamed_bytes = plan.streamed_bytes if plan is not None else 0
    context = workload.contexts[index]
    bytes_per_token = target.bytes_per_token(context, workload.gen_tokens)
    decode, floor = zip(*(each.decoding[index] for each in rounds), strict=True)
    fraction = paired([tok_s * bytes_per_token / 1e9 for tok_s in decode], floor)
    prefill_tok_s = [_known(each.prompt.prefill_tok_s) for each in rounds]
    gflops = [tok_s * target.prefill_flops_per_token() / 1e9 for tok_s in prefill_tok_s]
    return BenchmarkRun(
        model=target.name,
        weights=target.weights,
        kv=dense_name(target.engine.model.dtype) if kv == "bf16" else kv,  # dense ones are in the model's dtype
        prompt_tokens=workload.prompt_tokens,
        gen_tokens=workload.gen_tokens,
        context=context,
        prefill_tok_s=spread(prefill_tok_s),
        decode_tok_s=spread(decode),
        ttft_s=spread([_known(each.prompt.ttft_s) for each in rounds]),
        bytes_per_token=bytes_per_token,
        floor_fraction=fraction.median,
        peak_rss_bytes=peaks.rss_bytes,
        peak_vram_bytes=peaks.vram_bytes,
        floor_fraction_spread=fraction,
        prefill_fraction=paired(gflops, [each.matmul_gflops for each in rounds]).median,
        random_weights=target.has_random_weights,
        rounds=workload.rounds,
        streamed_bytes=streamed_bytes,
        disk_fraction=median(decode) * streamed_bytes / 1e9 / disk_gbs if streamed_bytes and disk_gbs else None,
    )


def _floors(rounds: list[Round], disk_rates: list[float], disk_method: str | None) -> MachineFloors:
    """The floors over all rounds; of the memory that decoding reads, the samples taken while it did."""
    samples = {name: [each.rates[name] for each in rounds] for name in rounds[0].rates}
    decoded = "device_copy_gbs" if "device_copy_gbs" in samples else "dram_read_gbs"
    samples[decoded] = [floor_gbs for each in rounds for _, floor_gbs in each.decoding]
    samples |= {"matmul_gflops": [each.matmul_gflops for each in rounds]}
    samples |= {"disk_read_gbs": disk_rates} if disk_rates else {}
    spreads = {name: spread(values) for name, values in samples.items()}
    medians = {name: found.median for name, found in spreads.items()}
    return MachineFloors(
        dram_read_gbs=medians["dram_read_gbs"],
        disk_read_gbs=medians.get("disk_read_gbs"),
        device_copy_gbs=medians.get("device_copy_gbs"),
        h2d_gbs=medians.get("h2d_gbs"),
        matmul_gflops=medians["matmul_gflops"],
        disk_method=disk_method,
        spreads=spreads,
    )


def _known(value: float | None) -> float:
    assert value is not None, "a prompt that was prefilled to its end has been timed"
    return value

"""The result of a benchmark, which is its JSON. Imports no torch.

A result may come from another machine: its form is checked before it is compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from localllm.chat.text_file import read_text_file
from localllm.config import format_figure
from localllm.errors import UsageError

Number = Annotated[float, Field(ge=0, lt=1e18)]  # refuses NaN and infinity, which Python's JSON lets pass
Count = Annotated[int, Field(ge=0, lt=10**18)]


@dataclass(frozen=True)
class Spread:
    median: Number
    min: Number
    max: Number

    def __post_init__(self) -> None:
        if not self.min <= self.median <= self.max:
            raise ValueError("its median is not between its minimum and its maximum")

    def __str__(self) -> str:
        return f"{format_figure(self.median)} ({format_figure(self.min)} to {format_figure(self.max)})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def paired(ours: Sequence[float], other: Sequence[float]) -> Spread:
    """The ratios formed within each round, so that what slows the machine for a while slows both sides."""
    return spread([a / b for a, b in zip(ours, other, strict=True)])


@dataclass(frozen=True)
class MachineFloors:
    """Medians over the rounds in 1e9 bytes or operations a second; None where this machine has none.

    device_copy_gbs: bytes read and bytes written.
    disk_method: how the page cache was kept out of the reads.
    """

    dram_read_gbs: Number
    disk_read_gbs: Number | None
    device_copy_gbs: Number | None
    h2d_gbs: Number | None
    matmul_gflops: Number
    disk_method: str | None
    spreads: dict[str, Spread]


@dataclass(frozen=True)
class BenchmarkRun:
    """One model at one depth. Fractions are medians of ratios formed within a round.

    floor_fraction: decode_tok_s * bytes_per_token over the read of the memory that holds the weights.
    peak_rss_bytes: of loading and of one round, without the floors' buffers.
    prefill_fraction: of the bf16 matrix product, by the multiplications and additions of the blocks.
    streamed_bytes: read from the disk in every step.
    disk_fraction: streamed_bytes over the disk's read; None where nothing is streamed.
    """

    model: str
    weights: str
    kv: str
    prompt_tokens: Count
    gen_tokens: Count
    context: Count
    prefill_tok_s: Spread
    decode_tok_s: Spread
    ttft_s: Spread
    bytes_per_token: Count
    floor_fraction: Number
    peak_rss_bytes: Count
    peak_vram_bytes: Count | None
    floor_fraction_spread: Spread
    prefill_fraction: Number
    random_weights: bool
    rounds: Count
    streamed_bytes: Count = 0
    disk_fraction: Number | None = None
    attend: str = "all"


@dataclass(frozen=True)
class BenchmarkReport:
    """runs: one for each context; they differ in nothing else that was asked for."""

    schema_version: Annotated[int, Field(ge=1, le=1)]
    machine: dict[str, Any]
    floors: MachineFloors
    runs: Annotated[tuple[BenchmarkRun, ...], Field(min_length=1)]

    def __post_init__(self) -> None:
        if len({run.context for run in self.runs}) < len(self.runs):
            raise ValueError("two of its runs have the same context")


def read_report(path: Path) -> BenchmarkReport:
    """Raises UsageError naming the file and what is wrong with it."""
    text = read_text_file(path, "--compare")
    try:
        return TypeAdapter(BenchmarkReport).validate_json(text, strict=True)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        why = ": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"])))
        fix = "localllm bench --json > bench.json"
        raise UsageError(f"{path} is not a result of `localllm bench --json`", why=why, fix=fix) from None

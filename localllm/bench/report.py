"""What a benchmark found, as JSON and as a table: each figure beside its floor. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm.bench.measure import Spread

SCHEMA_VERSION = 1
GIB = 1 << 30


@dataclass(frozen=True)
class Floors:
    """Medians over the rounds, in 1e9 bytes (or operations) a second; None: this machine has none, or let none be made.

    device_copy_gbs counts bytes read and bytes written. disk_method: how the page cache was kept out of the reads.
    """

    dram_read_gbs: float
    disk_read_gbs: float | None
    device_copy_gbs: float | None
    h2d_gbs: float | None
    matmul_gflops: float
    disk_method: str | None
    spreads: dict[str, Spread]


@dataclass(frozen=True)
class Run:
    """One depth of one model. Fractions are medians of ratios formed within a round.

    floor_fraction: decode_tok_s * bytes_per_token over the read of the memory that the weights lie in. The peaks are of
    loading and of one round, without the buffers that the floors need.
    """

    model: str
    weights: str
    kv: str
    prompt_tokens: int
    gen_tokens: int
    context: int
    prefill_tok_s: Spread
    decode_tok_s: Spread
    ttft_s: Spread
    bytes_per_token: int
    floor_fraction: float
    peak_rss_bytes: int
    peak_vram_bytes: int | None
    floor_fraction_spread: Spread
    prefill_fraction: float  # of the bf16 matrix product's rate, by the blocks' multiplications and additions
    verify_8_ratio: Spread  # the time of a forward of 8 tokens over that of one
    matrices_fraction: float | None  # as floor_fraction, of one token's matrices alone; None: not to be had apart
    random_weights: bool
    rounds: int
    streamed_bytes: int = 0  # that every step reads from the disk
    disk_fraction: float | None = None  # of the disk's read, by those bytes; None: nothing is streamed


@dataclass(frozen=True)
class Report:
    machine: dict[str, Any]
    floors: Floors
    runs: tuple[Run, ...]

    def fields(self) -> dict[str, Any]:
        """The one object of `bench --json`."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def save(self, path: Path) -> None:
        """Whole or not at all. Raises OSError."""
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            unfinished.write_text(json.dumps(self.fields(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

"""A report for a person: every figure on one line of 80 columns with what bounds it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.bench.measure import Spread
from localllm.bench.report import GIB, Floors, Report, Run

HEADER = ("", "MEASURED", "BESIDE", "SHARE")
Row = tuple[str, str, str, str]


def headline(report: Report) -> str:
    run, machine = report.runs[0], report.machine
    threads = machine["threads"]
    where = machine["gpu"] or f"{machine['cpu']}, {threads} thread{'' if threads == 1 else 's'}"
    made = ", random weights" if run.random_weights else ""
    return f"{run.model} in {run.weights}{made}, KV cache in {run.kv}, on {where}"


def rows(report: Report) -> list[Row]:
    """For HEADER. What does not depend on the depth is taken from the first run."""
    decoding = [row for run in report.runs for row in _decode_rows(run, report.floors)]
    return [*_prompt_rows(report), *decoding, *_matrix_rows(report), *_memory_rows(report), *_disk_rows(report.floors)]


def _prompt_rows(report: Report) -> Iterator[Row]:
    run = report.runs[0]
    product = f"bf16 product {report.floors.matmul_gflops:,.0f} GFLOP/s"
    yield f"prefill of {run.prompt_tokens}", _rate(run.prefill_tok_s), product, _share(run.prefill_fraction)
    yield "first token", _duration(run.ttft_s), "", ""


def _decode_rows(run: Run, floors: Floors) -> Iterator[Row]:
    on_device = floors.device_copy_gbs is not None
    memory = f"GPU copy {floors.device_copy_gbs:,.0f}" if on_device else f"DRAM read {floors.dram_read_gbs:.1f}"
    yield f"decode at {run.context}", _rate(run.decode_tok_s), f"{memory} GB/s", _share(run.floor_fraction)
    if run.disk_fraction is not None:
        read = f"{run.streamed_bytes / 1e9:.2f} GB"
        yield "  read from the disk", read, f"disk read {floors.disk_read_gbs:.2f} GB/s", _share(run.disk_fraction)
    yield "  bytes of a token", f"{run.bytes_per_token / 1e9:.3f} GB", "", ""
    yield "  8 tokens at once", f"{run.verify_8_ratio} x one", "", ""


def _matrix_rows(report: Report) -> Iterator[Row]:
    fraction = report.runs[0].matrices_fraction
    if fraction is not None:
        yield "matrices alone", "", "the same read", _share(fraction)


def _memory_rows(report: Report) -> Iterator[Row]:
    peak = max(report.runs, key=lambda run: run.peak_rss_bytes)
    yield "peak RAM", f"{peak.peak_rss_bytes / GIB:.2f} GiB", "", ""
    if peak.peak_vram_bytes is not None:
        yield "peak VRAM", f"{max(run.peak_vram_bytes or 0 for run in report.runs) / GIB:.2f} GiB", "", ""


def _disk_rows(floors: Floors) -> Iterator[Row]:
    for name, label, note in (
        ("h2d_gbs", "pinned RAM to GPU", ""),
        ("disk_read_gbs", "disk read", floors.disk_method or ""),
    ):
        if name in floors.spreads:
            yield label, f"{floors.spreads[name]} GB/s", note, ""


def _rate(rate: Spread) -> str:
    return f"{rate} tok/s"


def _duration(seconds: Spread) -> str:
    if seconds.median >= 1:
        return f"{seconds} s"
    return f"{Spread(1000 * seconds.median, 1000 * seconds.min, 1000 * seconds.max)} ms"


def _share(fraction: float) -> str:
    return f"{fraction:.2f}"

"""Tables of one result and of two. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.bench.report import BenchmarkReport, BenchmarkRun, MachineFloors, Spread
from localllm.config import format_figure

GIB = 1 << 30
HEADER = ("", "MEASURED", "BESIDE", "SHARE")
COMPARED_HEADER = ("", "A", "B", "B / A")

_FLOOR_ROWS = {
    "dram_read_gbs": "DRAM read, GB/s",
    "disk_read_gbs": "disk read, GB/s",
    "device_copy_gbs": "GPU copy, GB/s",
    "h2d_gbs": "pinned RAM to GPU, GB/s",
}
_RUN_ROWS = {  # field: label and unit
    "prefill_tok_s": ("prefill, tok/s", 1.0),
    "ttft_s": ("first token, s", 1.0),
    "decode_tok_s": ("decode, tok/s", 1.0),
    "floor_fraction": ("decode, share of its floor", 1.0),
    "bytes_per_token": ("bytes a token, GB", 1e9),
    "peak_rss_bytes": ("peak RAM, GiB", GIB),
    "peak_vram_bytes": ("peak VRAM, GiB", GIB),
}

Row = tuple[str, str, str, str]


def headline(report: BenchmarkReport) -> str:
    """What was measured, and where."""
    run, machine = report.runs[0], report.machine
    threads = machine.get("threads")
    where = machine.get("gpu") or f"{machine.get('cpu')}, {threads} thread{'' if threads == 1 else 's'}"
    made = ", random weights" if run.random_weights else ""
    chosen = "" if run.attend == "all" else f" (--attend {run.attend})"
    return f"{run.model} in {run.weights}{made}, KV cache in {run.kv}{chosen}, on {where}"


def rows(report: BenchmarkReport) -> Iterator[Row]:
    """Rows below HEADER. What does not depend on the depth is taken from the first run."""
    run, floors = report.runs[0], report.floors
    product = f"bf16 product {floors.matmul_gflops:,.0f} GFLOP/s"
    yield f"prefill of {run.prompt_tokens}", f"{run.prefill_tok_s} tok/s", product, f"{run.prefill_fraction:.2f}"
    yield "first token", _duration(run.ttft_s), "", ""
    for each in report.runs:
        yield from _decode_rows(each, floors)
    yield "peak RAM", f"{max(each.peak_rss_bytes for each in report.runs) / GIB:.2f} GiB", "", ""
    if run.peak_vram_bytes is not None:
        yield "peak VRAM", f"{max(each.peak_vram_bytes or 0 for each in report.runs) / GIB:.2f} GiB", "", ""
    for name, label, note in (
        ("h2d_gbs", "pinned RAM to GPU", ""),
        ("disk_read_gbs", "disk read", floors.disk_method or ""),
    ):
        if name in floors.spreads:
            yield label, f"{floors.spreads[name]} GB/s", note, ""


def _decode_rows(run: BenchmarkRun, floors: MachineFloors) -> Iterator[Row]:
    on_device = floors.device_copy_gbs is not None
    memory = f"GPU copy {floors.device_copy_gbs:,.0f}" if on_device else f"DRAM read {floors.dram_read_gbs:.1f}"
    yield f"decode at {run.context}", f"{run.decode_tok_s} tok/s", f"{memory} GB/s", f"{run.floor_fraction:.2f}"
    if run.disk_fraction is not None:
        read = f"{run.streamed_bytes / 1e9:.2f} GB"
        yield "  read from the disk", read, f"disk read {floors.disk_read_gbs:.2f} GB/s", f"{run.disk_fraction:.2f}"
    yield "  bytes of a token", f"{run.bytes_per_token / 1e9:.3f} GB", "", ""


def _duration(seconds: Spread) -> str:
    if seconds.median >= 1:
        return f"{seconds} s"
    return f"{Spread(1000 * seconds.median, 1000 * seconds.min, 1000 * seconds.max)} ms"


def compared_rows(a: BenchmarkReport, b: BenchmarkReport) -> Iterator[Row]:
    """Rows below COMPARED_HEADER: the floors of both machines, then each context that either was measured at."""
    for name, label in _FLOOR_ROWS.items():
        yield from _compared(label, getattr(a.floors, name), getattr(b.floors, name), 1.0)
    runs_a, runs_b = ({run.context: run for run in report.runs} for report in (a, b))
    for context in runs_a | runs_b:
        yield from (("", "", "", ""), (f"at {context}", "", "", ""))
        for name, (label, unit) in _RUN_ROWS.items():
            first, second = (getattr(runs.get(context), name, None) for runs in (runs_a, runs_b))
            yield from _compared(f"  {label}", first, second, unit)


def _compared(label: str, a: Spread | float | None, b: Spread | float | None, unit: float) -> Iterator[Row]:
    """One row, where either side has the figure."""
    if a is None and b is None:
        return
    first, second = (each.median if isinstance(each, Spread) else each for each in (a, b))
    ratio = f"{second / first:.2f}" if first and second is not None else "-"
    yield label, _shown(a, unit), _shown(b, unit), ratio


def _shown(value: Spread | float | None, unit: float) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, Spread) else format_figure(value / unit, digits=4)

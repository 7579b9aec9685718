"""Two results side by side: a table with ratios, and bars of text. Imports no torch.

A result may come from another machine: nothing in it is believed before its form has been checked.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from localllm.bench.report import GIB, SCHEMA_VERSION
from localllm.config import format_figure
from localllm.errors import UsageError

HEADER = ("", "A", "B", "B / A")
LEGEND = "bars: # to the slowest round, = on to the fastest; the number is the median"
_LARGEST_FILE_BYTES = 16 << 20
_LARGEST_NUMBER = 1e18
_WIDEST_BAR, _BESIDE_BAR = 60, 12  # columns: "A ", the bar, " 1.235"
_NAME_LIMIT = 40

_FLOORS = ("dram_read_gbs", "disk_read_gbs", "device_copy_gbs", "h2d_gbs")
_RATES = ("prefill_tok_s", "decode_tok_s", "ttft_s")
_TEXTS = ("model", "weights", "kv")
_COUNTS = ("prompt_tokens", "gen_tokens", "context")
_NUMBERS = (*_COUNTS, "bytes_per_token", "floor_fraction", "peak_rss_bytes")
_OPTIONAL_NUMBERS = ("peak_vram_bytes",)

# What a row says, where it is found, and by how much it is divided.
_FLOOR_ROWS = {
    "dram_read_gbs": "DRAM read, GB/s",
    "disk_read_gbs": "disk read, GB/s",
    "device_copy_gbs": "GPU copy, GB/s",
    "h2d_gbs": "pinned RAM to GPU, GB/s",
}
_RUN_ROWS = {
    "prefill_tok_s": ("prefill, tok/s", 1.0),
    "ttft_s": ("first token, s", 1.0),
    "decode_tok_s": ("decode, tok/s", 1.0),
    "floor_fraction": ("decode, share of its floor", 1.0),
    "bytes_per_token": ("bytes a token, GB", 1e9),
    "peak_rss_bytes": ("peak RAM, GiB", GIB),
    "peak_vram_bytes": ("peak VRAM, GiB", GIB),
}
_PLOTTED = {"decode_tok_s": "decode, tok/s", "prefill_tok_s": "prefill, tok/s"}

Fields = Mapping[str, Any]
Row = tuple[str, str, str, str]


@dataclass(frozen=True)
class Result:
    """The part of a result's JSON that is compared, known to be there and of the right types."""

    path: Path
    floors: Fields
    runs: tuple[Fields, ...]


def read_result(path: Path) -> Result:
    """Raises UsageError naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        fix = f"ls -l {shlex.quote(str(path))}"
        raise UsageError(f"{path} cannot be read", why=error.strerror or str(error), fix=fix) from None
    if len(text) > _LARGEST_FILE_BYTES:
        _refuse(path, f"it is larger than {_LARGEST_FILE_BYTES >> 20} MiB")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"it is not JSON: {str(error)[:80]}")
    if not isinstance(fields, dict):
        _refuse(path, "it is not an object")
    version = fields.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        _refuse(path, f"its schema_version is {str(version)[:20]}; this version reads {SCHEMA_VERSION}")
    floors, runs = fields.get("floors"), fields.get("runs")
    if not isinstance(floors, dict) or not isinstance(runs, list) or not runs:
        _refuse(path, "it has no floors, or no runs")
    for name in _FLOORS:
        _check(path, f"floors.{name}", _is_number(floors.get(name)) or (name in floors and floors[name] is None))
    for index, run in enumerate(runs):
        _check_run(path, f"runs[{index}]", run)
    return Result(path, floors, tuple(runs))


def _check_run(path: Path, where: str, run: object) -> None:
    if not isinstance(run, dict):
        _refuse(path, f"{where} is not an object")
    for name in _TEXTS:
        _check(path, f"{where}.{name}", isinstance(run.get(name), str))
    for name in _NUMBERS:
        _check(path, f"{where}.{name}", _is_number(run.get(name)))
    for name in _OPTIONAL_NUMBERS:
        _check(path, f"{where}.{name}", name in run and (run[name] is None or _is_number(run[name])))
    for name in _RATES:
        _check(path, f"{where}.{name}", _is_spread(run.get(name)))


def _check(path: Path, where: str, is_right: bool) -> None:
    if not is_right:
        _refuse(path, f"{where} is absent, or not of the form that it has there")


def _is_number(value: object) -> bool:
    """None of them is negative; NaN and infinity, which Python's JSON lets pass, fail both bounds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST_NUMBER


def _is_spread(value: object) -> bool:
    if not isinstance(value, dict) or not all(_is_number(value.get(key)) for key in ("median", "min", "max")):
        return False
    return bool(value["min"] <= value["median"] <= value["max"])


def _refuse(path: Path, why: str) -> NoReturn:
    fix = "localllm bench --output bench.json"
    raise UsageError(f"{path} is not a result of `localllm bench`", why=why, fix=fix)


def matched(a: Result, b: Result) -> list[tuple[Fields | None, Fields | None]]:
    """The runs in pairs: of the same model, weights and workload; what is left over in its order; the rest alone."""
    waiting: dict[tuple[Any, ...], deque[int]] = defaultdict(deque)
    for index, run in enumerate(b.runs):
        waiting[_identity(run)].append(index)
    pairs, alone = [], []
    for run in a.runs:
        twins = waiting[_identity(run)]
        if twins:
            pairs.append((run, b.runs[twins.popleft()]))
        else:
            alone.append(run)
    left = sorted(index for indices in waiting.values() for index in indices)
    return [*pairs, *zip_longest(alone, (b.runs[index] for index in left))]


def table(a: Result, b: Result) -> list[Row]:
    """For HEADER: the floors of both machines, then each pair of runs under a line that names it."""
    rows = [
        _row(label, a.floors[name], b.floors[name])
        for name, label in _FLOOR_ROWS.items()
        if a.floors[name] is not None or b.floors[name] is not None
    ]
    for one, other in matched(a, b):
        rows += [("", "", "", ""), (title(one, other), "", "", "")]
        for name, (label, unit) in _RUN_ROWS.items():
            values = [_scaled(run, name, unit) for run in (one, other)]
            if values != [None, None]:
                rows.append(_row(f"  {label}", *values))
    return rows


def plot(a: Result, b: Result, columns: int) -> Iterator[str]:
    """Lines of so many columns, or 80 at most: two bars for each rate of each pair of runs, on one scale."""
    yield LEGEND
    for name, label in _PLOTTED.items():
        for one, other in matched(a, b):
            yield ""
            yield f"{label}: {title(one, other)}"[: min(80, columns)]
            longest = max(run[name]["max"] for run in (one, other) if run is not None)
            room = min(_WIDEST_BAR, columns - _BESIDE_BAR)
            yield from (f"{side} {_bar(run, name, longest, room)}" for side, run in (("A", one), ("B", other)))


def title(one: Fields | None, other: Fields | None) -> str:
    """What a pair has in common once, what it has not with a line between."""
    pair = [run for run in (one, other) if run is not None]
    parts = []
    for name in ("model", "weights", "context"):
        values = dict.fromkeys(_short(run[name]) for run in pair)
        parts.append(("at " if name == "context" else "") + " | ".join(values))
    return " ".join(parts)


def _identity(run: Fields) -> tuple[Any, ...]:
    return tuple(run[name] for name in (*_TEXTS, *_COUNTS))


def _scaled(run: Fields | None, name: str, unit: float) -> float | None:
    value = None if run is None else run[name]
    if isinstance(value, dict):
        value = value["median"]
    return None if value is None else value / unit


def _row(label: str, a: float | None, b: float | None) -> Row:
    ratio = f"{b / a:.2f}" if a and b is not None else "-"  # no ratio to nothing
    return label, _shown(a), _shown(b), ratio


def _shown(value: float | None) -> str:
    return "-" if value is None else format_figure(value, digits=4)


def _bar(run: Fields | None, name: str, longest: float, columns: int) -> str:
    if run is None:
        return "-"
    rate = run[name]
    slowest, fastest = (round(columns * rate[key] / (longest or 1)) for key in ("min", "max"))
    bar = "#" * slowest + "=" * (fastest - slowest)
    return f"{bar:<{columns}} {_shown(rate['median'])}"


def _short(value: object) -> str:
    return "".join(character for character in str(value) if character.isprintable())[:_NAME_LIMIT]

"""The shared way to measure: warm up, interleave A B A B, five rounds, median with min and max. Also result files."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from localllm.bench.machine import machine
from localllm.bench.report import Spread, paired, spread
from localllm.offload.measurements.roofline import seconds

__all__ = ["Spread", "interleaved", "machine", "paired", "parser", "save", "seconds", "spread", "write_section"]

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"


def interleaved(measurements: Mapping[str, Callable[[], float]], rounds: int = 5) -> dict[str, list[float]]:
    """Call each measurement once to warm up, then `rounds` times in turn; return what each returned."""
    for measure in measurements.values():
        measure()
    values: dict[str, list[float]] = {name: [] for name in measurements}
    for _ in range(rounds):
        for name, measure in measurements.items():
            values[name].append(measure())
    return values


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with --rounds, whose help is the module's docstring as it stands."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=5)
    return made


def save(name: str, result: Mapping[str, object], directory: Path = RESULTS) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, default=plain) + "\n", encoding="utf-8")
    return path


def known(name: str, directory: Path = RESULTS) -> dict[str, Any]:
    """The results that are saved already, or nothing."""
    path = directory / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def plain(value: object) -> object:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"{type(value)} is not JSON")


def with_section(text: str, begin: str, end: str, content: str) -> str:
    """The page with the text between two of its markers replaced."""
    before, rest = text.split(begin)
    return before + begin + "\n\n" + content + "\n" + end + rest.split(end)[1]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """left: columns that are aligned there; the rest have figures."""
    rule = "|" + " --- |" * left + " ---: |" * (len(head) - left)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def write_section(page: Path, begin: str, end: str, content: str) -> None:
    page.write_text(with_section(page.read_text(encoding="utf-8"), begin, end, content), encoding="utf-8")


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Drop what the page cache holds of these files; pages that a process has mapped stay."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a page that is not on the disk yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(paths: Iterable[Path]) -> None:
    """Read these files, so that the page cache holds them."""
    buffer = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

"""Where results go. How they are taken is in localllm/bench/measure.py: warm up, interleave A B A B, five rounds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from localllm.bench.machine import machine
from localllm.bench.measure import Spread, interleaved, paired, spread
from localllm.offload.planner.roofline import seconds

__all__ = ["Spread", "interleaved", "machine", "paired", "save", "seconds", "spread"]

RESULTS = Path(__file__).parent / "results"


def save(name: str, result: dict[str, object], directory: Path = RESULTS) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, default=_plain) + "\n", encoding="utf-8")
    return path


def _plain(value: object) -> object:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"{type(value)} is not JSON")

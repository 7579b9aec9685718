"""What `benchmarks.peers` measured, as JSON for programs and as tables for people. Runs nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from localllm.bench.measure import paired, spread

SCHEMA_VERSION = 1
RESULTS = Path(__file__).parent / "results" / "peers.json"
PAGE = Path(__file__).parent.parent / "docs" / "peers.md"
BEGIN, END = "<!-- tables: written by `python -m benchmarks.peers` -->", "<!-- end of the tables -->"
SPINNING_SHARE = 0.02  # of a core, by all waiting sides: above it one side disturbs another


@dataclass(frozen=True)
class Task:
    what: Literal["prefill", "decode"]
    tokens: int = 0  # of a prompt; how many are decoded is the side's own
    depth: int = 0

    def __str__(self) -> str:
        return f"prefill of {self.tokens}" if self.what == "prefill" else f"decode at {self.depth}"


@dataclass(frozen=True)
class Figure:
    side: str
    variant: str  # "" where the side has one only
    task: Task
    timed_tokens: int


def summary(
    ours: str,
    speeds: Mapping[Figure, list[float]],
    floors: Mapping[Task, list[float]],
    facts: Mapping[str, Mapping[str, Any]],
    kv_bytes: int,
) -> dict[str, Any]:
    """`dram_read_gbs` and one object a figure; floor_fraction and localllm_ratio are taken within each round.

    speeds: tok/s; floors: GB/s just before each task; kv_bytes: of one position, in all layers.
    """
    own = {figure.task: values for figure, values in speeds.items() if figure.side == ours}
    runs = []
    for figure, values in speeds.items():
        task = figure.task
        run: dict[str, Any] = {"side": figure.side, "variant": figure.variant, **asdict(task)}
        run |= {"timed_tokens": figure.timed_tokens, "tok_s": asdict(spread(values))}
        run["localllm_ratio"] = asdict(paired(own[task], values))
        if task.what == "decode":
            positions = task.depth + figure.timed_tokens // 2  # in the middle of what is timed
            moved_bytes = facts[figure.side]["weight_bytes_per_token"] + positions * kv_bytes
            moved_gbs = [speed * moved_bytes / 1e9 for speed in values]
            run |= {"bytes_per_token": moved_bytes, "floor_fraction": asdict(paired(moved_gbs, floors[task]))}
        runs.append(run)
    return {"dram_read_gbs": asdict(spread([gbs for values in floors.values() for gbs in values])), "runs": runs}


def best(runs: list[dict[str, Any]], side: str, task: Task) -> dict[str, Any]:
    """The fastest variant of a side at a task."""
    its = [run for run in runs if run["side"] == side and _task(run) == task]
    return max(its, key=lambda run: float(run["tok_s"]["median"]))


def table(model: str, result: Mapping[str, Any]) -> str:
    """One model's figures in Markdown: a column for each side, its best variant named where it has several."""
    sides, runs = result["sides"], result["runs"]
    lines = [
        f"### {model}",
        "",
        f"{result['machine']['cpu']}, {result['machine']['threads']} threads, {result['rounds']} rounds; "
        f"DRAM read {_spread(result['dram_read_gbs'])} GB/s.",
        "",
        "| | " + " | ".join(side["title"] for side in sides.values()) + " |",
        "| --- |" + " --- |" * len(sides),
    ]
    for task in dict.fromkeys(map(_task, runs)):
        lines += _task_rows(task, [best(runs, side, task) for side in sides])
    for name, skipped in result["skipped"].items():
        mend = f" To have it: `{skipped['fix']}`" if skipped["fix"] else ""
        lines += ["", f"{name} did not run: {skipped['reason']}.{mend}"]
    return "\n".join(lines) + "\n"


def _task_rows(task: Task, runs: list[dict[str, Any]]) -> list[str]:
    def row(title: str, cells: list[str]) -> str:
        return f"| {title} | " + " | ".join(cells) + " |"

    speeds = [_spread(run["tok_s"]) + (f", {run['variant']}" if run["variant"] else "") for run in runs]
    rows = [row(f"**{task}**, tok/s", speeds)]
    rows.append(
        row("localllm's speed to it", [_spread(run["localllm_ratio"]) if i else "" for i, run in enumerate(runs)])
    )
    if task.what == "decode":
        rows.append(row("of the DRAM read", [_spread(run["floor_fraction"]) for run in runs]))
        rows.append(row("MB a token", [f"{run['bytes_per_token'] / 1e6:.0f}" for run in runs]))
    return rows


def _task(run: Mapping[str, Any]) -> Task:
    return Task(run["what"], run["tokens"], run["depth"])


def _spread(value: Mapping[str, float]) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"


def print_report(model: str, result: Mapping[str, Any]) -> None:
    """The table to stdout; to stderr what makes it doubtful."""
    print(table(model, result))
    if result["waiting_cpu_share"] > SPINNING_SHARE:
        share = result["waiting_cpu_share"]
        print(f"waiting sides took {share:.1%} of a core: the figures disturb each other", file=sys.stderr)


def save(model: str, result: Mapping[str, Any], results: Path = RESULTS, page: Path = PAGE) -> None:
    """Put one model's figures in the place of its last ones, in the results and on the page; the rest stays."""
    known = json.loads(results.read_text(encoding="utf-8"))["models"] if results.exists() else {}
    models = {**known, model: result}
    results.parent.mkdir(exist_ok=True)
    document = {"schema_version": SCHEMA_VERSION, "models": models}
    results.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    page.write_text(with_tables(page.read_text(encoding="utf-8"), models), encoding="utf-8")


def with_tables(text: str, models: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with what stands between its markers replaced."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n\n" + "\n".join(table(*entry) for entry in models.items()) + "\n" + END + after

"""What `benchmarks.kv_quality` measured, as tables in docs/quality.md. Runs nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.quality_page import PAGE, Run, with_section
from benchmarks.quality_page import RESULTS as WEIGHT_RESULTS

RESULTS = WEIGHT_RESULTS.with_name("kv_quality.json")
BEGIN, END = "<!-- tables: written by `python -m benchmarks.kv_quality` -->", "<!-- end of the tables of KV formats -->"


def save(result: Mapping[str, Any]) -> None:
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")


def with_tables(text: str, result: Mapping[str, Any]) -> str:
    """The page with what stands between its markers replaced."""
    return with_section(text, BEGIN, END, tables(result))


def tables(result: Mapping[str, Any]) -> str:
    bases = result["bases"]
    return "\n".join(
        [
            f"{result['text']}: {result['predicted_tokens']:,} tokens, in windows of {result['ctx']} that each start "
            f"without context. Perplexity with bf16 pages: {bases['exact']:.3f}; as the program computes with int4-g64 "
            f"weights: {bases['shipped']:.3f}, which the rows of that kind are compared with.",
            "",
            _formats(result["runs"], result["memory"]),
            "### Outliers in the keys",
            "",
            _outliers(result["runs"]),
        ]
    )


def removed(plain: float, rotated: float) -> float:
    """The share of a loss that the rotation removes."""
    return 1 - rotated / plain


def runs_of(runs: Sequence[Run], **what: object) -> list[Run]:
    return [run for run in runs if all(run.get(key) == value for key, value in what.items())]


def outlier_run(runs: Sequence[Run], kv: str, factor: int, *, is_rotated: bool) -> Run:
    (found,) = runs_of(runs, group="rounded", kv=kv, factor=factor, is_rotated=is_rotated)
    return found


def factors(runs: Sequence[Run]) -> list[int]:
    return sorted({run["factor"] for run in runs if run["group"] == "rounded" and run["factor"] > 1})


def _formats(runs: Sequence[Run], memory: Sequence[Run]) -> str:
    contexts = [key for key in memory[0] if key.isdecimal()]
    head = ["keys and values", "computed by", "of bf16: a page", *(f"{int(ctx):,} tokens" for ctx in contexts)]
    head += ["increase of perplexity", "KL divergence", "same top-1"]
    lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
    how = {"exact": "", "rounded": "without rotation", "shipped": "the program, in bf16"}
    sizes = {row["kv"]: [f"{row['page']:.3f}", *(f"{row[ctx]:.3f}" for ctx in contexts)] for row in memory}
    for group in ("exact", "rounded", "shipped"):
        for run in (run for run in runs if run["group"] == group and run.get("factor", 1) == 1):
            cells = [run["kv"], how[group], *sizes[run["kv"]], _increase(run)]
            lines.append(_row(*cells, f"{run['kl_nats']:.6f}", f"{run['top1_percent']:.2f} %"))
    return "\n".join(lines) + "\n"


def _outliers(runs: Sequence[Run]) -> str:
    lines = [
        "| outliers | int4 without rotation: perplexity | KL | int4: perplexity | KL | removed of the KL | k8v4: KL "
        "| int8: KL |",
        "| ---: |" + " ---: |" * 7,
    ]
    for factor in factors(runs):
        plain, int4 = (outlier_run(runs, "int4", factor, is_rotated=is_rotated) for is_rotated in (False, True))
        others = [outlier_run(runs, kv, factor, is_rotated=True) for kv in ("k8v4", "int8")]
        cells = [f"{factor} x", _increase(plain), f"{plain['kl_nats']:.5f}", _increase(int4), f"{int4['kl_nats']:.5f}"]
        cells += [f"{100 * removed(plain['kl_nats'], int4['kl_nats']):.0f} %"]
        lines.append(_row(*cells, *(f"{run['kl_nats']:.6f}" for run in others)))
    return "\n".join(lines) + "\n"


def _increase(run: Run) -> str:
    return f"{run['increase_percent']:+.2f} % (±{run['standard_error_percent']:.2f})"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"

"""What `benchmarks.quality` measured, as tables in docs/quality.md. Runs nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "quality.json"
PAGE = Path(__file__).parent.parent / "docs" / "quality.md"
BEGIN, END = "<!-- tables: written by `python -m benchmarks.quality` -->", "<!-- end of the tables -->"

Run = Mapping[str, Any]


def save(result: Mapping[str, Any]) -> None:
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")


def with_tables(text: str, result: Mapping[str, Any]) -> str:
    """The page with what stands between its markers replaced."""
    return with_section(text, BEGIN, END, tables(result))


def with_section(text: str, begin: str, end: str, content: str) -> str:
    """The page with what stands between these markers replaced."""
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return before + begin + "\n\n" + content + "\n" + end + after


def tables(result: Mapping[str, Any]) -> str:
    runs, base = result["runs"], result["base"]
    return "\n".join(
        [
            f"{result['text']}: {result['predicted_tokens']:,} tokens, in windows of {result['ctx']} that each start "
            f"without context. bf16: perplexity {base['perplexity']:.3f}, {base['bytes'] / 1e6:.2f} MB.",
            "",
            "### Blocks alone, embedding and head in bf16",
            "",
            _table(runs, "exact", embeddings=("bf16",)),
            "### Embedding and head",
            "",
            _table(runs, "exact", embeddings=("int8", "int4-g64")),
            "### As it is computed",
            "",
            _table(runs, "int8", "product"),
            "### Conversion",
            "",
            _conversion(result["conversion"]),
        ]
    )


def _table(runs: Sequence[Run], *activations: str, embeddings: Sequence[str] = ()) -> str:
    chosen = [
        run for run in runs if run["activations"] in activations and (not embeddings or run["embedding"] in embeddings)
    ]
    how = {"exact": "", "int8": "INT8 activations", "product": "the program, in bf16"}
    several = len(activations) > 1
    head = ["blocks", "embedding, head", *(["computed by"] if several else [])]
    head += ["MB", "perplexity", "increase", "KL divergence", "same top-1"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " --- |" * (1 + several) + " ---: |" * 5]
    for run in chosen:
        cells = [run["blocks"], run["embedding"], *([how[run["activations"]]] if several else [])]
        cells += [
            f"{run['bytes'] / 1e6:.2f}",
            f"{run['perplexity']:.3f}",
            f"{run['increase_percent']:+.2f} % (±{run['standard_error_percent']:.2f})",
            f"{run['kl_nats']:.5f}",
            f"{run['top1_percent']:.2f} %",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _conversion(rows: Sequence[Run]) -> str:
    lines = [
        "| format | squared error, normal weights | tiny's weights | ns a weight |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        speed = f"{row['ns_a_weight']['median']:.1f}" if row["ns_a_weight"] else ""
        lines.append(f"| {row['format']} | {row['error_normal']:.6f} | {row['error_tiny']:.6f} | {speed} |")
    return "\n".join(lines) + "\n"

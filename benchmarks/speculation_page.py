"""What `benchmarks.speculation` measured, as tables in docs/speculation.md. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Spread
from benchmarks.quality_page import with_section

PAGE = Path(__file__).parent.parent / "docs" / "speculation.md"
BEGIN, END = "<!-- tables: written by `python -m benchmarks.speculation` -->", "<!-- end of the tables -->"

Row = Mapping[str, Any]


def write(result: Mapping[str, Any]) -> None:
    """What is there of it: parts that were not measured have no table."""
    parts = {"texts": _texts, "oracle": _oracle, "never": _never}
    content = "\n".join(line for part, table in parts.items() if part in result for line in table(result[part]))
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), BEGIN, END, content), encoding="utf-8")


def _texts(part: Mapping[str, Any]) -> Iterable[str]:
    yield from _heading(
        "Tokens a pass, on texts",
        f"The built-in model, {part['draft_tokens']} guesses at once at every step, whether they pay or not. "
        f"`skip` leaves out a quarter or half of its blocks, those that {part['trials']} trials on other "
        "passages of the book found to be needed the least.",
    )
    yield "| text | temperature | ngram | skip, 25% | ngram+skip, 25% | skip, 50% | ngram+skip, 50% |"
    yield "|---|---|---|---|---|---|---|"
    columns = [("ngram", 0.0), *((who, share) for share in (0.25, 0.5) for who in ("skip", "ngram+skip"))]
    for text, temperature in dict.fromkeys((row["text"], row["temperature"]) for row in part["rows"]):
        cells = []
        for who, share in columns:
            row = _one(part["rows"], text=text, temperature=temperature, who=who, skipped_share=share)
            cells.append(f"{row['tokens_per_pass']['median']:.2f} ({row['accepted']:.0%} right)")
        yield f"| {text} | {temperature} | {' | '.join(cells)} |"
    yield ""


def _oracle(part: Mapping[str, Any]) -> Iterable[str]:
    yield from _heading(
        "By the share of guesses that are right",
        f"A model of the shape of {part['shape']} in INT4, and guesses that are right with a probability "
        "alpha, k at once, at no cost: times plain decoding, and what that is of E * t_1 / t_round, with E = (1 - "
        "alpha^(k+1)) / (1 - alpha) and the times of the steps of the same round.",
    )
    yield "| alpha | k | resident | of the formula | streamed from the disk | of the formula |"
    yield "|---|---|---|---|---|---|"
    for alpha, k in dict.fromkeys((row["alpha"], row["k"]) for row in part["rows"]):
        cells = []
        for placement in ("resident", "streamed"):
            row = _one(part["rows"], alpha=alpha, k=k, placement=placement)
            cells += [_shown(row["speedup"]), _shown(row["share"])]
        yield f"| {alpha} | {k} | {' | '.join(cells)} |"
    yield ""


def _never(part: Mapping[str, Any]) -> Iterable[str]:
    yield from _heading(
        "Where nobody can guess",
        "Times plain decoding, and what two plain runs differ by in the same rounds. random: a prompt of "
        "random tokens and answers drawn at temperature 3; wrong: a lookup whose offers are always wrong; "
        "switching: text that repeats itself and text that does not in turn.",
    )
    yield "| model | text | who guesses | of plain decoding | plain of plain |"
    yield "|---|---|---|---|---|"
    for row in part["rows"]:
        cells = (row["placement"], row["text"], row["who"], _shown(row["of_plain"]), _shown(row["noise"]))
        yield f"| {' | '.join(cells)} |"
    yield ""


def _heading(title: str, text: str) -> Iterable[str]:
    return f"### {title}", "", text, ""


def _one(rows: Sequence[Row], **values: object) -> Row:
    return next(row for row in rows if all(row[key] == value for key, value in values.items()))


def _shown(value: Mapping[str, float]) -> str:
    return str(Spread(**value))

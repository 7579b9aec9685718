"""Plans with several graphics cards side by side: `localllm plan MODEL --gpu CARD --gpu CARD`, or `--gpu all`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from localllm.chat import plan_text
from localllm.cli.output import Output
from localllm.config import format_bytes, format_figure
from localllm.offload.planner.card_sheets import NONE, CardSheet
from localllm.runtime.other_machines import estimates

if TYPE_CHECKING:
    from localllm.engine.model_plan import Planned

_TITLES = ("CARD", "MEMORY", "GPU/RAM/DISK %", "CONTEXT", "TOK/S", "FIRST", "BOUND BY")
_NUMBERS = ("MEMORY", "GPU/RAM/DISK %", "CONTEXT", "TOK/S", "FIRST")
_WORTH = 1.1  # a next step that gains less is not one


class CardRow(NamedTuple):
    """card: None where the CPU computes alone."""

    card: CardSheet | None
    planned: Planned


def card_fields(card: CardSheet | None, weights: str) -> dict[str, Any] | None:
    """Return a card in the JSON form, and the rates that are expected of it; None for none."""
    if card is None:
        return None
    rates = card.rates(weights)
    return {
        "name": card.name,
        "year": card.year,
        "compute_capability": ".".join(map(str, card.capability)),
        "memory_bytes": card.memory_bytes,
        "memory_gbs": card.memory_gbs,
        "fp32_tflops": card.fp32_tflops,
        "bf16_tflops": card.bf16_tflops,
        "int8_tops": card.int8_tops,
        "pcie": {"generation": card.pcie[0], "lanes": card.pcie[1]},
        "is_uncertain": card.uncertain,
        "expected": {
            "matrix_gbs": round(rates.matrix_gbs, 1),
            "compute_gops": round(rates.compute_gops),
            "link_gbs": round(rates.link_gbs, 1),
        },
    }


def show_cards(output: Output, rows: Sequence[CardRow]) -> None:
    """Print a row a card, which of them is the smallest that holds everything, and what a larger one brings."""
    shape = rows[0].planned.shape
    sequences = max(row.planned.plan.sequences for row in rows if row.planned.plan is not None)
    together = f", tok/s of up to {sequences} sequences together" if sequences > 1 else ""
    # Small models are not quantized, and have the type that the card multiplies.
    sizes = {row.planned.shape.weights: format_bytes(row.planned.shape.num_bytes) for row in rows}
    forms = " or ".join(f"{size} of {weights}" for weights, size in sizes.items())
    output.line(f"{shape.name}: {forms} weights{together}")
    output.line()
    smallest = _smallest_whole(rows)
    output.table(_TITLES, [_cells(row, row is smallest) for row in rows], optional=("BOUND BY",), numbers=_NUMBERS)
    output.line()
    output.line(_verdict(rows, smallest))
    for estimate in estimates((row.card, row.planned.shape.weights) for row in rows):
        output.line(f"estimate: {estimate}")


def _cells(row: CardRow, is_smallest: bool) -> list[str]:
    card, planned = row
    name = NONE if card is None else card.name
    memory = "" if card is None else f"{card.memory_gib:g} GiB"
    if planned.plan is None:
        return [name, memory, "does not fit", "-", "-", "-", "-"]
    assert planned.decode_tok_s is not None and planned.ttft_s is not None
    return [
        f"{name} *" if is_smallest else name,
        memory,
        "/".join(f"{share:.0f}" for share in plan_text.tier_percents(planned.plan)),
        str(planned.plan.ctx),
        format_figure(planned.decode_tok_s.mid),
        plan_text.short_duration(planned.ttft_s.mid),
        planned.plan.bound_by,
    ]


def _smallest_whole(rows: Sequence[CardRow]) -> CardRow | None:
    """Return the card with the least memory that holds everything, of several such the fastest; None for none."""
    return min((row for row in rows if _is_whole(row)), key=lambda row: (_memory(row), -_tok_s(row)), default=None)


def _verdict(rows: Sequence[CardRow], smallest: CardRow | None) -> str:
    if smallest is None:
        return "None of these cards holds it all."
    larger = [row for row in rows if _memory(row) > _memory(smallest) and _tok_s(row) > _WORTH * _tok_s(smallest)]
    step = min(larger, key=lambda row: (_memory(row), -_tok_s(row)), default=None)
    holds = "* least memory that holds it all"
    if step is None or step.card is None:
        return f"{holds}; no larger card is much faster"
    return f"{holds}; a step up: {step.card.name}, {format_figure(_tok_s(step) / _tok_s(smallest), 2)} x as fast"


def _is_whole(row: CardRow) -> bool:
    return row.card is not None and row.planned.plan is not None and row.planned.plan.is_whole


def _memory(row: CardRow) -> float:
    return 0.0 if row.card is None else row.card.memory_gib


def _tok_s(row: CardRow) -> float:
    return 0.0 if row.planned.decode_tok_s is None else row.planned.decode_tok_s.mid

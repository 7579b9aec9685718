"""The plans of a model on machines that are not here: this one with other graphics cards, by their data sheets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from localllm.config import ResolvedSettings, format_bytes, format_figure
from localllm.errors import Fix, UsageError
from localllm.offload.planner.card_sheets import CardSheet, OtherMachine
from localllm.offload.planner.plan import GIB
from localllm.runtime.engine_loader import effective_config, refuse_idle, refuse_idle_vram
from localllm.runtime.plan_request import Goal, job_of, shape_and_files

if TYPE_CHECKING:
    from localllm.engine.model_plan import Considered


@dataclass(frozen=True)
class CardPlan:
    """card: None where the CPU computes alone."""

    card: CardSheet | None
    considered: Considered


def considered_elsewhere(
    name: str,
    resolved: ResolvedSettings,
    goal: Goal,
    cards: Iterable[CardSheet | None],
    say: Callable[[str], None],
    tell: Callable[[str], None],
) -> Iterator[CardPlan]:
    """Yield the plan with each card. A `--ram` that was typed is the memory of that machine. say, tell: as
    `plan_request.considered` has them.

    Raises ModelNotFoundError, and UsageError for what cannot be honoured.
    """
    from localllm.engine.model_plan import consider

    cards, once = list(cards), cache(tell)  # of each line
    _require_cap_on_a_card(resolved, cards)
    shape, files = shape_and_files(name)
    refuse_idle(resolved, shape.config, shape.name)
    config, ram_bytes = resolved.settings.engine, None
    if resolved.origins["ram"].kind == "flag":
        ram_bytes, config = config.ram, replace(config, ram=None)
    for number, card in enumerate(cards, 1):
        say(f"planning: card {number} of {len(cards)}")
        wanted, other = config if card is not None else replace(config, vram=None), OtherMachine(card, ram_bytes)
        wanted = effective_config(resolved, shape.config, wanted, other.device, once)
        yield CardPlan(card, consider(shape, files, wanted, say, job=job_of(goal, resolved), other=other))


def estimates(planned: Iterable[tuple[CardSheet | None, str]]) -> list[str]:
    """Return what plans rest on, in lines of a narrow terminal; none where the CPU computes alone.

    planned: cards, each with the format of the weights there.
    """
    found = [(card, weights) for card, weights in planned if card is not None]
    if not found:
        return []
    sheets, shares = [card for card, _ in found], [card.shares(weights) for card, weights in found]
    memory, peak, link = (_range({share[part] for share in shares}) for part in range(3))
    unsure = [card.name for card in sheets if card.uncertain]
    what = f"{sheets[0].name}'s data sheet" if len(sheets) == 1 else "data sheets"
    return [
        f"{what} times {memory} (memory), {peak} (peak), {link} (link)",
        "no kernel was timed on a card yet; CPU and disk are this machine's",
        *(["its peak depends on its power limit, and may be half of that"] if len(sheets) == 1 and unsure else []),
    ]


def _range(shares: set[float]) -> str:
    return " to ".join(format_figure(share, 2) for share in sorted({min(shares), max(shares)}))


def _require_cap_on_a_card(resolved: ResolvedSettings, cards: list[CardSheet | None]) -> None:
    """Raise UsageError for a typed `--vram` that caps none of the cards."""
    vram = resolved.settings.engine.vram
    if vram is None or resolved.origins["vram"].kind != "flag":
        return
    largest = max((card for card in cards if card is not None), key=lambda card: card.memory_gib, default=None)
    if largest is None:
        refuse_idle_vram(resolved)
    elif vram > largest.memory_bytes:
        raise UsageError(
            f"--vram {vram / GIB:.2f}GiB is more than {largest.name} has",
            why=f"it has {format_bytes(largest.memory_bytes)} of memory",
            fix=Fix.without("--vram"),
        )

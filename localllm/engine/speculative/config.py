"""Who drafts for a model, as the user chose."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from localllm.engine.residency import Residency
from localllm.engine.speculative.choice import Speculate as Speculate
from localllm.engine.speculative.drafter import Drafter, ModelDrafter, SkipDrafter
from localllm.engine.speculative.ngram import NgramLookup
from localllm.engine.speculative.speculator import Speculation
from localllm.offload.planner.plan import Plan


def speculation(
    speculate: Speculate, residency: Residency, plan: Plan | None, drafter: ModelDrafter | None = None
) -> Speculation:
    """plan: the plan that the model was loaded by. drafter: the second model, if there is one."""
    lookup = NgramLookup() if speculate.who in ("auto", "ngram") else None
    drafters: list[Drafter] = [SkipDrafter(lambda: residency.runner)] if speculate.who in ("auto", "skip") else []
    drafters += [] if drafter is None else [drafter]
    growing = None if plan is None else growth(plan)
    return Speculation(residency, lookup, drafters, speculate.most_tokens, adapts=speculate.adapts, growth=growing)


def growth(plan: Plan) -> Callable[[int, int], float]:
    """Return by how much rows make a step longer, as the plan expects, halved: what looks good is tried and
    measured."""

    @cache
    def of(sequences: int, rows: int) -> float:
        depth = plan.prompt_tokens
        longer = plan.costs.decode_s(depth, rows) / plan.costs.decode_s(depth, sequences)
        return 1 + (longer - 1) / 2

    return of

"""Who drafts for a model, as the user chose."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

from localllm.engine.residency import Residency
from localllm.engine.speculative.choice import AUTO as AUTO
from localllm.engine.speculative.choice import OFF as OFF
from localllm.engine.speculative.choice import Speculate as Speculate
from localllm.engine.speculative.draft_model import ModelDrafter
from localllm.engine.speculative.drafter import Drafter
from localllm.engine.speculative.ngram import NgramLookup
from localllm.engine.speculative.skip import SkipDrafter
from localllm.engine.speculative.speculator import Speculation
from localllm.offload.planner.plan import Plan


class Speculating(Protocol):
    def __call__(self, residency: Residency, plan: Plan | None) -> Speculation:
        """plan: the plan that the model was loaded by, if one was made."""
        ...


def speculation(
    speculate: Speculate,
    residency: Residency,
    plan: Plan | None,
    drafter: ModelDrafter | None = None,
) -> Speculation:
    """drafter: the second model, if there is one."""
    drafters: list[Drafter] = []
    lookup = NgramLookup() if speculate.who in ("auto", "ngram") else None
    if speculate.who in ("auto", "skip"):
        drafters.append(SkipDrafter(lambda: residency.runner))
    if drafter is not None:
        drafters.append(drafter)
    return Speculation(
        residency,
        lookup,
        drafters,
        speculate.most_tokens,
        adapts=speculate.adapts,
        growth=None if plan is None else growth(plan),
    )


NO_DRAFTS: Speculating = partial(speculation, Speculate("off"))


def growth(plan: Plan) -> Callable[[int, int], float]:
    """Return by how much rows make a step longer, as the plan expects, halved: what looks good is tried and
    measured."""

    @cache
    def of(sequences: int, rows: int) -> float:
        depth = plan.prompt_tokens
        longer = plan.costs.decode_s(depth, rows) / plan.costs.decode_s(depth, sequences)
        return 1 + (longer - 1) / 2

    return of

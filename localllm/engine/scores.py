"""How well plans came true: what predictions are corrected by on this machine."""

from __future__ import annotations

import statistics
from collections import defaultdict

from localllm.engine.events import FinishedEvent
from localllm.offload.plan import Bound, Plan
from localllm.offload.profile import keep, kept_profile

_LEAST_TOKENS = 8  # of an answer whose rate says something
_MOST_CACHED = 0.05  # of the blocks: copies from the page cache say nothing of the disk


class Scores:
    """The answers of one engine that ran alone, each under one plan."""

    def __init__(self) -> None:
        self._ratios: dict[Bound, list[float]] = defaultdict(list)

    def take(self, answer: FinishedEvent, plan: Plan | None) -> None:
        """An answer that came to its end. One under no plan, or one whose plan knew too little, is not counted."""
        usage, measured = answer.usage, answer.timings.decode_tok_s
        if plan is None or not _is_telling(plan) or measured is None or usage.completion_tokens < _LEAST_TOKENS:
            return
        depth = usage.prompt_tokens + usage.completion_tokens // 2
        self._ratios[plan.costs.bound_by()].append(1 / measured / plan.costs.decode_s(depth))

    def keep(self) -> None:
        """Corrects the profile in the cache directory by the median of each kind."""
        profile = kept_profile()
        for bound, ratios in self._ratios.items():
            profile = profile.scored(bound, statistics.median(ratios))
        if self._ratios:
            keep(profile)


def _is_telling(plan: Plan) -> bool:
    rates = plan.costs.rates
    return rates.is_measured and (not plan.streamed_bytes or rates.cached_share < _MOST_CACHED)

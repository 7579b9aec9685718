"""How well a plan came true: what its predictions are corrected by on this machine."""

from __future__ import annotations

import statistics
from collections import defaultdict

from localllm.engine.events import FinishedEvent
from localllm.offload.plan import Bound, Plan
from localllm.offload.profile import keep, kept_profile

_LEAST_TOKENS = 8  # of an answer whose rate says something
_MOST_CACHED = 0.05  # of the blocks: copies from the page cache say nothing of the disk


class Scores:
    """The answers of one engine. Those that ran beside others, or under no plan, are not counted."""

    def __init__(self, plan: Plan | None) -> None:
        is_telling = plan is not None and plan.costs.rates.is_measured and plan.costs.rates.cached_share < _MOST_CACHED
        self._plan = plan if is_telling else None
        self._ratios: dict[Bound, list[float]] = defaultdict(list)

    def take(self, answer: FinishedEvent, *, alone: bool) -> None:
        """An answer that came to its end."""
        plan, usage, measured = self._plan, answer.usage, answer.timings.decode_tok_s
        if plan is None or not alone or measured is None or usage.completion_tokens < _LEAST_TOKENS:
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

"""Measured runs beside their plans: by the ratios, predictions are corrected on this machine."""

from __future__ import annotations

import statistics
from collections import defaultdict

from localllm.engine.events import FinishedEvent
from localllm.offload.planner import other_work
from localllm.offload.planner.calibration import Term
from localllm.offload.planner.plan import Plan
from localllm.offload.planner.profile import keep, kept_profile

_LEAST_TOKENS = 8  # of an answer whose rate says something
# Of a prompt whose reading does: a shorter one waits for its matrices as a step of one token does, and for what is
# compiled or loaded when it is first called.
_LEAST_PROMPT = 128
_MOST_CACHED = 0.05  # of the blocks: copies from the page cache say nothing of the disk


class Scores:
    """The answers of one engine that ran alone, each from its beginning to its end under one plan."""

    def __init__(self) -> None:
        self._seen = other_work.counted()
        self._ratios: dict[tuple[str, Term], list[float]] = defaultdict(list)

    def take(self, answer: FinishedEvent, plan: Plan | None, plain_s: float | None = None) -> None:
        """Take a finished answer. It is not counted if it ran under no plan, if its plan knew too little, or if other
        programs worked meanwhile.

        plain_s: the seconds of a step without drafts, where the answer had drafts.
        """
        before, self._seen = self._seen, other_work.counted()
        if plan is None or other_work.is_much(other_work.others(before, self._seen)):
            return
        rates = plan.costs.rates
        if not rates.is_measured or (plan.streamed_bytes and rates.cached_share >= _MOST_CACHED):
            return
        usage, timings, costs = answer.usage, answer.timings, plan.costs
        is_plain = answer.speculation is None or not answer.speculation.drafted
        step_s = plain_s if not is_plain or timings.decode_tok_s is None else 1 / timings.decode_tok_s
        if step_s is not None and timings.decode_tok_s is not None and usage.completion_tokens >= _LEAST_TOKENS:
            depth = usage.prompt_tokens + usage.completion_tokens // 2
            if not costs.brought_bytes(depth):  # what keys and values from elsewhere take is in no such term
                self._add(plan, costs.step_term(), step_s, costs.decode_s(depth))
        if timings.prefill_tok_s and usage.prompt_tokens >= _LEAST_PROMPT and not usage.cached_tokens:
            measured_s = usage.prompt_tokens / timings.prefill_tok_s
            self._add(plan, costs.prompt_term(usage.prompt_tokens), measured_s, costs.prompt_s(usage.prompt_tokens))

    def keep(self) -> None:
        """Correct the profile in the cache directory: the median of the answers of each kind counts as one run."""
        profile = kept_profile()
        for (weights, term), ratios in self._ratios.items():
            profile = profile.scored(weights, term, statistics.median(ratios))
        if self._ratios:
            keep(profile)

    def _add(self, plan: Plan, term: Term, measured_s: float, predicted_s: float) -> None:
        ratio = measured_s / predicted_s * plan.costs.corrections.of(term)
        self._ratios[plan.shape.weights, term].append(ratio)

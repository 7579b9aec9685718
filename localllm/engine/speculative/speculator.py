"""Drafts in the engine's loop: which tokens a step verifies beside those that it must compute, and what became of them.

Knows sequences and chunks. Knows no logits: the engine samples every token as it would without drafts, and accepts
those that were drafted alike.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from localllm.engine.memory import is_out_of_memory
from localllm.engine.residency import Residency
from localllm.engine.scheduler import Scheduled
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.choice import Speculate
from localllm.engine.speculative.controller import (
    Acceptance,
    Controller,
    Cooldown,
    Option,
    Situation,
    StepTimes,
    cooldown_steps,
    unknown_growth,
)
from localllm.engine.speculative.drafter import NO_DRAFT, Draft, Drafter, SkipDrafter
from localllm.engine.speculative.ngram import NgramLookup
from localllm.engine.step_types import Chunk
from localllm.kernels.sizes import PAGE_TOKENS
from localllm.models.architecture import ModelConfig
from localllm.offload.planner.plan import Plan
from localllm.settings import DRAFT_TOKENS, MOST_DRAFT_TOKENS

_MANY_UNREAD = 64  # tokens that a drafter has not prefilled: it is not tried out for the price of that


@dataclass
class _Round:
    """The drafts of the step that is under way."""

    sequences: Sequence[Running]
    lengths: Sequence[int]  # of the sequences before it
    offers: Sequence[Draft]
    drafts: Sequence[Draft]
    option: Option | None
    acceptances: Sequence[Acceptance]
    draft_s: float = 0.0
    hindsight_s: float = 0.0  # for what would have been offered in the cooldown before it


class Speculation:
    """name: of the drafters, as people know them. is_on: whether anybody drafts."""

    def __init__(
        self,
        residency: Residency,
        lookup: NgramLookup | None,
        drafters: Sequence[Drafter],
        draft_tokens: int = DRAFT_TOKENS,
        new_controller: Callable[[], Controller] = lambda: Controller(StepTimes()),
    ) -> None:
        """new_controller: makes what decides how many tokens are drafted, for the model as it is placed then."""
        self.name = "+".join(each.name for each in (lookup, *drafters) if each is not None)
        self._residency = residency
        self._lookup = lookup if draft_tokens > 0 else None
        self._drafters = list(drafters) if draft_tokens > 0 else []
        self.is_on = self._lookup is not None or bool(self._drafters)
        self._draft_tokens = draft_tokens
        self._new_controller = new_controller
        self._controller = new_controller()
        self._acceptance = Acceptance()
        self._acceptances: dict[int, Acceptance] = {}  # by request
        self._model = weakref.ref(residency.model)
        self._round: _Round | None = None
        self._cooldown: Cooldown | None = None

    def drafted(self, scheduled: Scheduled, is_cancelled: Callable[[], bool] = lambda: False) -> Scheduled:
        """Return the chunks with drafts behind their tokens, where each has one token and it is worth it.

        A drafter for which there is too little memory is given up. Raises as a forward does; no sequence has changed
        then.
        """
        self._round = None
        if self._cooldown is not None and self._cooldown.takes(scheduled):
            return scheduled
        cooled_until = time.perf_counter()
        self._end_cooldown()
        hindsight_s = time.perf_counter() - cooled_until
        # Each sequence has one token more after the step, behind one of its answer.
        if not self.is_on or not all(
            chunk.num_tokens == 1 and chunk.end == len(chunk.token_ids) and sequence.num_completion_tokens > 0
            for sequence, chunk in scheduled
        ):
            return scheduled
        if self._model() is not self._residency.model:  # moved: it takes another time now
            self._model = weakref.ref(self._residency.model)
            self._controller = self._new_controller()
        if self._lookup is not None:
            self._lookup.read([sequence for sequence, _ in scheduled])
        began = time.perf_counter()  # a long prompt is read once
        this = self._round = self._look([sequence for sequence, _ in scheduled])
        this.draft_s, this.hindsight_s = time.perf_counter() - began, hindsight_s
        if this.option is not None:
            try:
                this.drafts = self._drafts(this.option, this, is_cancelled)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._give_up_drafters()
        return [
            (sequence, _with_draft(chunk, draft.token_ids) if draft.token_ids else chunk)
            for (sequence, chunk), draft in zip(scheduled, this.drafts, strict=True)
        ]

    def _look(self, sequences: Sequence[Running]) -> _Round:
        """Decide what to verify in this step; nothing is drafted yet that takes time."""
        limits = [min(self._draft_tokens, draft_limit(sequence, self._residency.config)) for sequence in sequences]
        offers = [NO_DRAFT] * len(sequences) if self._lookup is None else self._lookup.offers(sequences, limits)
        offers = [within_grammar(*each) for each in zip(sequences, offers, limits, strict=True)]
        acceptances = [self._acceptance_of(sequence) for sequence in sequences]
        option = None
        if max(limits) > 0:
            ready = [drafter.name for drafter in self._drafters if drafter.is_ready]
            unread = frozenset(each.name for each in self._drafters if each.num_unread(sequences) > _MANY_UNREAD)
            most_rows = max(MOST_DRAFT_TOKENS + 1, 2 * len(sequences))
            option = self._controller.choose(Situation(acceptances, limits, offers, most_rows, unread), ready)
        lengths = [len(sequence.token_ids) for sequence in sequences]
        return _Round(sequences, lengths, offers, [NO_DRAFT] * len(sequences), option, acceptances)

    def learn(self, step_s: float) -> None:
        """Learn from the step that has ended: every token that it gave has been sampled.

        step_s: what it took, without what was done before it.
        """
        this, self._round = self._round, None
        if this is None:
            if self._cooldown is not None:
                self._cooldown.learn(step_s)
            return
        tokens = 0
        for index, (sequence, length) in enumerate(zip(this.sequences, this.lengths, strict=True)):
            sampled, draft = sequence.token_ids[length:], this.drafts[index]
            tokens += max(1, len(sampled))
            seen = draft if draft.token_ids else this.offers[index]
            if seen.token_ids:
                this.acceptances[index].learn(seen.source, seen.token_ids, sampled)
        rows = len(this.sequences) + sum(len(draft.token_ids) for draft in this.drafts)
        begins_ahead = self._residency.runner.begins_ahead
        # A step that could have been begun ahead, and was not, is not a measure of those that are.
        if this.option is not None or not self._controller.is_settled or not begins_ahead:
            self._controller.learn(this.option, rows, tokens, len(this.sequences), this.draft_s, step_s)
        if this.option is None and self._controller.is_settled:
            looking_s = this.draft_s + this.hindsight_s
            self._cooldown = Cooldown(this.sequences, cooldown_steps(looking_s, step_s, begins_ahead=begins_ahead))

    def forget(self, sequence: Running) -> None:
        self._acceptances.pop(sequence.request_id, None)
        if self._lookup is not None:
            self._lookup.forget(sequence)
        for drafter in self._drafters:
            drafter.forget(sequence)

    def gives_way(self, error: Exception) -> bool:
        """Return whether memory ran out in a step that had drafts: there are none from now on, and the step is worth
        another try."""
        this = self._round
        if this is None or not is_out_of_memory(error) or not any(draft.token_ids for draft in this.drafts):
            return False
        self._lookup = None
        self._give_up_drafters()
        return True

    def _give_up_drafters(self) -> None:
        given_up, self._drafters = self._drafters, []
        self.is_on = self._lookup is not None
        for drafter in given_up:
            drafter.close()

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()

    @property
    def plain_s(self) -> float | None:
        """The measured time of a step of one sequence without drafts, if known."""
        return self._controller.plain_s

    @property
    def rests(self) -> bool:
        """Whether the next step of the same sequences will have no drafts."""
        return not self.is_on or (self._cooldown is not None and self._cooldown.num_left > 0)

    def _end_cooldown(self) -> None:
        """Learn from the steps of a cooldown, and from what a lookup would have offered meanwhile."""
        cooldown, self._cooldown = self._cooldown, None
        if cooldown is None or not cooldown.num_steps:
            return
        self._controller.learn_plain(len(cooldown.sequences), cooldown.num_steps, cooldown.seconds)
        if self._lookup is None:
            return
        for sequence, since in zip(cooldown.sequences, cooldown.lengths, strict=True):
            if sequence.finish_reason is None:
                for offer, sampled in self._lookup.hindsight(sequence, since, self._draft_tokens):
                    if offer.token_ids:
                        self._acceptance_of(sequence).learn(offer.source, offer.token_ids, sampled)

    def _acceptance_of(self, sequence: Running) -> Acceptance:
        return self._acceptances.setdefault(sequence.request_id, Acceptance(self._acceptance))

    def _drafts(self, option: Option, this: _Round, is_cancelled: Callable[[], bool]) -> list[Draft]:
        drafts = [
            replace(offer, token_ids=offer.token_ids[:count]) if is_offered else NO_DRAFT
            for offer, count, is_offered in zip(this.offers, option.counts, option.are_offered, strict=True)
        ]
        missing = [i for i, is_offered in enumerate(option.are_offered) if not is_offered and option.counts[i]]
        if option.drafter is None or not missing:
            return drafts
        drafter = next(drafter for drafter in self._drafters if drafter.name == option.drafter)
        sequences = [this.sequences[i] for i in missing]
        drafter.read(sequences, is_cancelled)  # once for each prompt: no part of what a token takes
        began = time.perf_counter()
        found = drafter.propose(sequences, [option.counts[i] for i in missing], option.least, is_cancelled)
        draft_s = time.perf_counter() - began
        this.draft_s += draft_s
        for i, draft in zip(missing, found, strict=True):
            drafts[i] = draft
        longest = max(len(draft.token_ids) for draft in found)
        if longest:
            self._controller.learn_drafting(drafter.name, len(missing), longest, draft_s)
        return drafts


def within_grammar(sequence: Running, offer: Draft, limit: int) -> Draft:
    """Return what a grammar leaves no choice about, at most `limit` tokens; else what it allows of an offer."""
    constraint = sequence.constraint
    if constraint is None or limit <= 0:
        return offer
    answer = sequence.answer_ids
    if forced := constraint.forced(answer)[:limit]:
        return Draft(forced, "grammar")
    return replace(offer, token_ids=constraint.cut(answer, offer.token_ids))


def draft_limit(sequence: Running, config: ModelConfig) -> int:
    """Return how many tokens may be drafted: the last token that they can give is the last that the sequence may have,
    and none is computed by another RoPE, or behind other pages, than the token in its place would have been."""
    length = len(sequence.token_ids)
    most = sequence.max_length - length - 1
    for rope in config.ropes:
        trained = rope.original_max_position_embeddings or 0
        if rope.kind == "dynamic" or (rope.kind == "longrope" and length <= trained):
            most = min(most, trained - length - 1)
    if sequence.kv is not None and sequence.kv.masses is not None:  # a page may leave when another is full
        most = min(most, -length % PAGE_TOKENS)
    return max(0, most)


def _with_draft(chunk: Chunk, draft: Sequence[int]) -> Chunk:
    token_ids = [*chunk.token_ids, *draft]
    return replace(chunk, token_ids=token_ids, num_tokens=1 + len(draft), num_drafted=len(draft))


def speculation(
    speculate: Speculate,
    residency: Residency,
    plan: Plan | None,
    new_drafter: Callable[[Residency], Drafter] | None = None,
) -> Speculation:
    """plan: the plan that the model was loaded by. new_drafter: makes the second model, or the head, if there is
    one."""
    lookup = NgramLookup() if speculate.who in ("auto", "ngram") else None
    drafters: list[Drafter] = [SkipDrafter(lambda: residency.runner)] if speculate.who in ("auto", "skip") else []
    drafters += [] if new_drafter is None else [new_drafter(residency)]
    growing = unknown_growth if plan is None else growth(plan)
    return Speculation(residency, lookup, drafters, speculate.most_tokens, lambda: Controller(StepTimes(growing)))


def growth(plan: Plan) -> Callable[[int, int], float]:
    """Return by how much rows make a step longer, as the plan expects, halved: what looks good is tried and
    measured."""

    @cache
    def of(sequences: int, rows: int) -> float:
        depth = plan.prompt_tokens
        longer = plan.costs.decode_s(depth, rows) / plan.costs.decode_s(depth, sequences)
        return 1 + (longer - 1) / 2

    return of

"""Guesses in the engine's loop: which tokens a step verifies beside the ones that it must compute, and what came of it.

Knows sequences and chunks. Knows no logits: the engine draws every token as it would without guesses, and keeps those
that were guessed right.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from localllm.cache.paged_kv import PagedKV
from localllm.engine.drawing import Scheduled
from localllm.engine.memory import is_out_of_memory
from localllm.engine.residency import Residency
from localllm.engine.runner import Chunk
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.acceptance import Acceptance
from localllm.engine.speculative.controller import Chooser, Controller, FixedCount, Option, Situation, others_of
from localllm.engine.speculative.cooldown import Rest, rest_steps
from localllm.engine.speculative.drafter import NO_DRAFT, Draft, Drafter, Lookup
from localllm.engine.speculative.skip import SkipDrafter
from localllm.engine.speculative.skip_set import SkipSet
from localllm.engine.speculative.step_times import StepTimes
from localllm.models.config import ModelConfig
from localllm.settings import DRAFT_TOKENS, MOST_DRAFT_TOKENS

# Of the time, for trials: where blocks are fetched one takes hardly longer than a step, and finds what is worth more.
# Less of it as there are more of them.
_TRIALS_SHARE, _STREAMED_TRIALS_SHARE, _MANY_TRIALS = 0.004, 0.008, 100
_TRIAL_STEPS = 4  # that a trial is taken to last, before there was one
_MANY_UNREAD = 64  # tokens that a drafter has not read: it is not tried out for the price of that


@dataclass
class _Round:
    """What is going on in this step. lengths: of the sequences before it."""

    sequences: Sequence[Running]
    lengths: Sequence[int]
    offers: Sequence[Draft]
    drafts: Sequence[Draft]
    option: Option | None
    acceptances: Sequence[Acceptance]
    guess_s: float = 0.0
    hindsight_s: float = 0.0  # for what would have been offered in the rest before it
    num_others: int = 0  # guesses of a branch


class Speculation:
    """name: of those who guess, as people know them."""

    def __init__(
        self,
        residency: Residency,
        lookup: Lookup | None,
        drafters: Sequence[Drafter],
        draft_tokens: int = DRAFT_TOKENS,
        *,
        skip_set: SkipSet | None = None,
        forks: bool = True,
        adapts: bool = True,
        growth: Callable[[int, int], float] | None = None,
    ) -> None:
        """skip_set: that one of them leaves out, to be improved meanwhile. forks: there is memory for a second end of a
        sequence, for other guesses and for trials. adapts: how many are guessed is what pays; else as many as may be.
        growth: as `StepTimes` has it."""
        self.name = "+".join(each.name for each in (lookup, *drafters) if each is not None)
        self._residency = residency
        self._lookup = lookup if draft_tokens > 0 else None
        self._drafters = list(drafters) if draft_tokens > 0 else []
        self._draft_tokens = draft_tokens
        self._skip_set, self._forks = skip_set if forks else None, forks
        self._adapts, self._growth = adapts, growth
        self._elapsed_s = self._step_s = 0.0  # of decoding, and of its last step
        self._trials_s = self._trial_s = 0.0  # of all trials, and of the last one
        self._chooser = self._new_chooser()
        self._acceptance = Acceptance()
        self._acceptances: dict[int, Acceptance] = {}  # by request
        self._model = weakref.ref(residency.model)
        self._round: _Round | None = None
        self._rest: Rest | None = None
        self._skipped = frozenset[str]()
        self._branch: PagedKV | None = None  # of the sequence whose guesses are being verified

    @property
    def is_on(self) -> bool:
        return self._lookup is not None or bool(self._drafters)

    def drafted(self, scheduled: Scheduled, cancelled: Callable[[], bool] = lambda: False) -> Scheduled:
        """The chunks with guesses behind their tokens, where each has one token and it is worth it. A drafter for which
        there is too little memory is let go of. Raises as a forward does; no sequence has changed then."""
        self._round = None
        self._end_branch()  # of a step that was given up
        if self._rest is not None and self._rest.takes(scheduled):
            return scheduled
        rested_until = time.perf_counter()
        self._end_rest()
        hindsight_s = time.perf_counter() - rested_until
        if not self.is_on or not all(_is_answering(sequence, chunk) for sequence, chunk in scheduled):
            return scheduled
        if self._model() is not self._residency.model:  # moved: it takes another time now
            self._model = weakref.ref(self._residency.model)
            self._chooser = self._new_chooser()
        if self._skip_set is not None and len(scheduled) == 1:
            with self._giving_up():
                self._try_skipping(self._skip_set, scheduled[0][0], cancelled)
        if self._lookup is not None:
            self._lookup.read([sequence for sequence, _ in scheduled])
        started = time.perf_counter()  # trials have time of their own, and a long prompt is read once
        this = self._round = self._look([sequence for sequence, _ in scheduled])
        this.guess_s, this.hindsight_s = time.perf_counter() - started, hindsight_s
        if this.option is not None:
            with self._giving_up():
                this.drafts = self._guessed(this.option, this, cancelled)
        chunks = [_with_draft(chunk, draft.token_ids) for (_, chunk), draft in zip(scheduled, this.drafts, strict=True)]
        if this.option is not None and this.option.others and chunks[0].num_drafted:
            with self._giving_up():
                chunks = [self._with_branch(chunks[0], scheduled[0][1], this)]
        return [(sequence, chunk) for (sequence, _), chunk in zip(scheduled, chunks, strict=True)]

    def _with_branch(self, chunk: Chunk, plain: Chunk, this: _Round) -> Chunk:
        """The chunk of the one sequence, with other guesses beside its own, where they begin otherwise."""
        assert this.option is not None
        offer, draft = this.offers[0], this.drafts[0]
        others = (offer.others if this.option.are_offered[0] else offer.token_ids)[: this.option.others]
        if others[0] == draft.token_ids[0]:
            return chunk
        self._branch = plain.kv.branch(plain.kv.length + 1 + len(others))
        this.num_others = len(others)
        return replace(chunk, branch=_with_draft(replace(plain, kv=self._branch), others))

    def _end_branch(self) -> None:
        if self._branch is not None:
            self._branch.close()
            self._branch = None

    def _look(self, sequences: Sequence[Running]) -> _Round:
        """What is done in this step, and nothing guessed yet that takes time."""
        limits = [min(self._draft_tokens, room(sequence, self._residency.config)) for sequence in sequences]
        offers = [NO_DRAFT] * len(sequences) if self._lookup is None else self._lookup.offers(sequences, limits)
        offers = [within_grammar(*each) for each in zip(sequences, offers, limits, strict=True)]
        acceptances = [self._acceptance_of(sequence) for sequence in sequences]
        option = None
        if max(limits) > 0:
            self._notice_skipped()
            ready = [drafter.name for drafter in self._drafters if drafter.is_ready]
            unread = frozenset(each.name for each in self._drafters if each.num_unread(sequences) > _MANY_UNREAD)
            most_rows = max(MOST_DRAFT_TOKENS + 1, 2 * len(sequences))
            situation = Situation(acceptances, limits, offers, most_rows, self._forks, unread)
            option = self._chooser.choose(situation, ready)
        lengths = [len(sequence.token_ids) for sequence in sequences]
        return _Round(sequences, lengths, offers, [NO_DRAFT] * len(sequences), option, acceptances)

    def _notice_skipped(self) -> None:
        """Other blocks that are left out take another time."""
        names = frozenset[str]() if self._skip_set is None else self._skip_set.names()
        if names != self._skipped:
            self._skipped = names
            self._chooser.forget_guesses(SkipDrafter.name)

    def learn(self, step_s: float) -> None:
        """From the step that has ended: every token that it gave has been drawn. step_s: what it took, without what was
        done before it."""
        this, self._round = self._round, None
        self._end_branch()
        if this is None:
            if self._rest is not None:
                self._rest.learn(step_s)
            return
        tokens = 0
        for index, (sequence, length) in enumerate(zip(this.sequences, this.lengths, strict=True)):
            said, draft = sequence.token_ids[length:], this.drafts[index]
            tokens += max(1, len(said))
            seen = draft if draft.token_ids else this.offers[index]
            if seen.token_ids:
                this.acceptances[index].learn(seen.source, seen.token_ids, said)
            others = self._others(this, index)
            if others and said and said[0] != seen.token_ids[0] != others[0]:
                this.acceptances[index].learn(others_of(seen.source), others, said)
        self._elapsed_s, self._step_s = self._elapsed_s + this.guess_s + step_s, step_s
        rows = len(this.sequences) + sum(len(draft.token_ids) for draft in this.drafts)
        rows += 1 + this.num_others if this.num_others else 0
        is_telling = this.option is not None or not self._chooser.is_settled or not self._residency.runner.begins_ahead
        if is_telling:  # a step that could have been begun ahead, and was not, is no measure of those that are
            self._chooser.learn(this.option, rows, tokens, len(this.sequences), this.guess_s, step_s)
        if this.option is None and self._chooser.is_settled:
            looking_s, begins_ahead = this.guess_s + this.hindsight_s, self._residency.runner.begins_ahead
            self._rest = Rest(this.sequences, rest_steps(looking_s, step_s, begins_ahead=begins_ahead))

    @staticmethod
    def _others(this: _Round, index: int) -> Sequence[int]:
        """What might have been guessed beside the draft of a sequence, or beside what was offered."""
        offer, draft = this.offers[index], this.drafts[index]
        is_offered = not draft.token_ids or draft.source == offer.source
        return offer.others if is_offered else offer.token_ids

    def forget(self, sequence: Running) -> None:
        self._end_branch()
        self._acceptances.pop(sequence.request_id, None)
        if self._lookup is not None:
            self._lookup.forget(sequence)
        for drafter in self._drafters:
            drafter.forget(sequence)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """What computes guesses is let go of where memory runs out inside."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._give_up()

    def gives_way(self, error: Exception) -> bool:
        """Whether memory ran out in a step that had guesses: there are none from now on, and the step is worth another
        try."""
        this = self._round
        if this is None or not is_out_of_memory(error) or not any(draft.token_ids for draft in this.drafts):
            return False
        self._end_branch()
        self._give_up()
        self._lookup = None
        return True

    def _give_up(self) -> None:
        if self._skip_set is not None:
            self._skip_set.close()
        given_up, self._drafters, self._skip_set, self._forks = self._drafters, [], None, False
        for drafter in given_up:
            drafter.close()

    def close(self) -> None:
        self._end_branch()
        for drafter in self._drafters:
            drafter.close()
        if self._skip_set is not None:
            self._skip_set.close()

    def _try_skipping(self, skip_set: SkipSet, sequence: Running, cancelled: Callable[[], bool]) -> None:
        share = _STREAMED_TRIALS_SHARE if skip_set.slow else _TRIALS_SHARE
        share *= _MANY_TRIALS / (_MANY_TRIALS + len(skip_set.harm.trials))
        trial_s = self._trial_s or _TRIAL_STEPS * self._step_s
        is_affordable = self._trials_s + trial_s <= share * self._elapsed_s
        if not is_affordable or not skip_set.is_due(sequence) or self._chooser.is_hopeless(SkipDrafter.name, 1):
            return
        started = time.perf_counter()
        try:
            skip_set.try_on(sequence, cancelled)
            skip_set.names()  # what it taught is thought over in its time
        finally:
            self._trial_s = time.perf_counter() - started
            self._trials_s += self._trial_s

    @property
    def plain_s(self) -> float | None:
        """What a step of one sequence takes without guesses, where that is known."""
        return self._chooser.plain_s

    @property
    def rests(self) -> bool:
        """Whether the next step of the same sequences will have no guesses."""
        return not self.is_on or (self._rest is not None and self._rest.num_left > 0)

    def _end_rest(self) -> None:
        """What a lookup would have offered meanwhile is seen now."""
        rest, self._rest = self._rest, None
        if rest is None or not rest.num_steps:
            return
        self._elapsed_s += rest.seconds
        self._chooser.learn_plain(len(rest.sequences), rest.num_steps, rest.seconds)
        if self._lookup is None:
            return
        for sequence, since in zip(rest.sequences, rest.lengths, strict=True):
            if sequence.finish_reason is None:
                for offer, said in self._lookup.hindsight(sequence, since, self._draft_tokens):
                    if offer.token_ids:
                        self._acceptance_of(sequence).learn(offer.source, offer.token_ids, said)

    def _new_chooser(self) -> Chooser:
        if not self._adapts:
            return FixedCount()
        return Controller(StepTimes() if self._growth is None else StepTimes(self._growth))

    def _acceptance_of(self, sequence: Running) -> Acceptance:
        return self._acceptances.setdefault(sequence.request_id, Acceptance(self._acceptance))

    def _guessed(self, option: Option, this: _Round, cancelled: Callable[[], bool]) -> list[Draft]:
        drafts = [
            replace(offer, token_ids=offer.token_ids[:count]) if is_offered else NO_DRAFT
            for offer, count, is_offered in zip(this.offers, option.counts, option.are_offered, strict=True)
        ]
        asked = [i for i, is_offered in enumerate(option.are_offered) if not is_offered and option.counts[i]]
        if option.drafter is None or not asked:
            return drafts
        drafter = next(drafter for drafter in self._drafters if drafter.name == option.drafter)
        sequences = [this.sequences[i] for i in asked]
        drafter.read(sequences, cancelled)  # once for each prompt: no part of what a guess takes
        started = time.perf_counter()
        found = drafter.propose(sequences, [option.counts[i] for i in asked], option.least, cancelled)
        guess_s = time.perf_counter() - started
        this.guess_s += guess_s
        for i, draft in zip(asked, found, strict=True):
            drafts[i] = draft
        longest = max(len(draft.token_ids) for draft in found)
        if longest:
            self._chooser.learn_guesses(drafter.name, len(asked), longest, guess_s)
        return drafts


def within_grammar(sequence: Running, offer: Draft, limit: int) -> Draft:
    """What a grammar leaves no choice about, at most `limit` tokens; else of an offer what it allows."""
    constraint = sequence.constraint
    if constraint is None or limit <= 0:
        return offer
    said = sequence.answer_ids
    if forced := constraint.forced(said)[:limit]:
        return Draft(forced, "grammar")
    token_ids, others = constraint.cut(said, offer.token_ids), constraint.cut(said, offer.others)
    return (
        replace(offer, token_ids=token_ids, others=others) if token_ids else replace(offer, token_ids=others, others=())
    )


def room(sequence: Running, config: ModelConfig) -> int:
    """How many guesses may follow a sequence: the last token that they can give is the last that it may have, and none
    is computed by another RoPE than its draw would have been."""
    length = len(sequence.token_ids)
    most = sequence.max_length - length - 1
    for rope in config.ropes:
        trained = rope.original_max_position_embeddings or 0
        if rope.kind == "dynamic" or (rope.kind == "longrope" and length <= trained):
            most = min(most, trained - length - 1)
    return max(0, most)


def _is_answering(sequence: Running, chunk: Chunk) -> bool:
    """Whether the step gives it one token more, behind one of its answer."""
    return chunk.num_tokens == 1 and chunk.end == len(chunk.token_ids) and sequence.num_completion_tokens > 0


def _with_draft(chunk: Chunk, draft: Sequence[int]) -> Chunk:
    if not draft:
        return chunk
    token_ids = [*chunk.token_ids, *draft]
    return replace(chunk, token_ids=token_ids, num_tokens=1 + len(draft), num_drafted=len(draft))

"""`--overflow grow`: the context of a loaded model becomes longer; blocks give their memory to keys and values.

Between two requests, on the thread that owns the device. What fails on the way leaves everything as it was. The engine
imports this by name when a request first asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from localllm.engine.events import Event, FinishedEvent, GrownEvent
from localllm.engine.kv_allocator import KVAllocator
from localllm.engine.memory import is_out_of_memory, out_of_memory
from localllm.engine.residency import Residency
from localllm.engine.scheduler import Scheduler
from localllm.engine.sequence import Sequence as Running
from localllm.errors import ContextOverflowError, DoesNotFitError, Fix, LocalLLMError
from localllm.offload.placement import BlockPlacement
from localllm.offload.planner.plan import Plan
from localllm.text.eviction import wanted_room

_STEP_TOKENS = 256  # a context that is not twice the one before ends at a multiple of this


class Growing(Protocol):
    """The engine whose context becomes longer."""

    ctx: int
    residency: Residency
    scheduler: Scheduler
    kv_allocator: KVAllocator
    fixes_for: Callable[[int], list[Fix]]

    def planned(self, ctx: int) -> Plan:
        """Return the best plan for this context in the memory of now. Raises DoesNotFitError."""
        ...

    def fit(self, plan: Plan) -> None:
        """Take the context and the limits of a plan by which the model is placed by now."""
        ...

    def fail(self, sequence: Running, error: Exception) -> FinishedEvent: ...


@dataclass(frozen=True)
class Needed:
    prompt_tokens: int
    max_tokens: int | None  # of the answer; None for as many as there is room for


class Moved(NamedTuple):
    """Blocks that went down for a longer context, by where they now come from at every step."""

    from_disk: int
    from_memory: int


def ask_for_growth(sequence: Running) -> None:
    """Mark a sequence whose prompt leaves its answer too little of the context: nothing else runs when it is
    admitted."""
    room = wanted_room(sequence.ctx, sequence.request.sampling.max_tokens)
    sequence.wants_growth = sequence.num_prompt_tokens + room > sequence.ctx


def grow_for(engine: Growing, sequence: Running) -> list[Event]:
    """Make the context longer for a sequence that waits, or let it do with what there is. Raises as
    `Residency.move`."""
    sequence.fit(engine.ctx)  # another one may have made it longer since
    ask_for_growth(sequence)
    if not sequence.wants_growth:
        return []
    needed, residency = Needed(sequence.num_prompt_tokens, sequence.request.sampling.max_tokens), engine.residency
    before = engine.ctx
    try:
        plan, moved = _grow(residency, engine.planned, needed, before, engine.kv_allocator.give_up_ram)
    except DoesNotFitError as error:
        residency.restore()  # where the way back found no room either
        engine.kv_allocator.share_ram(residency.plan)  # as before
        if needed.prompt_tokens >= before:
            fixes = engine.fixes_for(min(residency.config.longest_context, needed.prompt_tokens + 512))
            return [engine.fail(sequence, _cannot_grow(needed.prompt_tokens, before, error, fixes))]
        sequence.wants_growth = False
        return []
    engine.kv_allocator.share_ram(plan)
    engine.fit(plan)
    for waiting in engine.scheduler.waiting:  # this one, and others of the same prompt: they need not wait for it
        if waiting.wants_growth:
            waiting.fit(engine.ctx)
            ask_for_growth(waiting)
    sequence.wants_growth = False
    is_sure = plan.costs.rates.is_measured and residency.plan is plan
    return [GrownEvent(sequence.request_id, before, plan.ctx, *moved, plan.decode_tok_s if is_sure else None)]


def _grow(
    residency: Residency, planned: Callable[[int], Plan], needed: Needed, ctx: int, give_up: Callable[[], bool]
) -> tuple[Plan, Moved]:
    """Go on with a longer context, twice as long at least where memory allows. Raises DoesNotFitError where none of use
    fits: the model goes on as it was then.

    give_up: lets go of what a longer context is worth more than, and returns whether there was any.
    """
    try:
        return _grown(residency, planned, needed, ctx)
    except DoesNotFitError:
        if not give_up():
            raise
    return _grown(residency, planned, needed, ctx)


def _grown(residency: Residency, planned: Callable[[int], Plan], needed: Needed, ctx: int) -> tuple[Plan, Moved]:
    refusal: DoesNotFitError | None = None
    for longer in _contexts(needed, ctx, residency.config.longest_context):
        before = residency.blocks
        try:
            plan = planned(longer)
            if residency.placed is None and plan.blocks != before:
                raise DoesNotFitError(
                    f"a context of {longer} tokens does not fit beside the model",
                    why="it is computed from its checkpoint, and none of its blocks can be moved",
                )
            _go_on_by(residency, plan)
        except (DoesNotFitError, MemoryError) as error:
            shown = error if isinstance(error, DoesNotFitError) else out_of_memory(residency.device, error)
            refusal = refusal or shown
            continue
        return plan, _moved(before, residency.blocks)
    raise refusal or DoesNotFitError("the context cannot grow", why=f"the model was trained for {ctx} tokens")


def _cannot_grow(num_tokens: int, ctx: int, error: DoesNotFitError, fixes: Sequence[Fix]) -> ContextOverflowError:
    """fixes: the flags with which a longer context would fit."""
    return ContextOverflowError(
        f"the prompt has {num_tokens} tokens, the context {ctx}, and it cannot grow",
        why=f"{error.what}: {error.why}" if error.why else error.what,
        fix=fixes or "shorten the prompt",
    )


def _contexts(needed: Needed, ctx: int, longest: int) -> list[int]:
    """Return the contexts to try, the longest first: twice what there is, or the power of two that holds what is
    needed; what is needed; where the prompt would not fit otherwise, what it takes with a short answer."""
    wanted = needed.prompt_tokens + wanted_room(ctx, needed.max_tokens)
    least = needed.prompt_tokens + 1 if needed.prompt_tokens >= ctx else wanted
    tried = [max(2 * ctx, 1 << (wanted - 1).bit_length()), _rounded(wanted), _rounded(least)]
    if needed.prompt_tokens < longest:
        tried = [min(longest, amount) for amount in tried]
    return [amount for amount in dict.fromkeys(tried) if ctx < amount <= longest]


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // _STEP_TOKENS) * _STEP_TOKENS


def _go_on_by(residency: Residency, plan: Plan) -> None:
    """Raises DoesNotFitError where memory is not what the plan took it for; everything is as it was then."""
    before, blocks = residency.plan, residency.blocks
    try:
        residency.take(plan)
        _reserve(residency, plan.ctx)
    except (MemoryError, RuntimeError, LocalLLMError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        residency.kv_pages.shrink()
        if before is not None:
            residency.take(before)
        elif residency.placed is not None:
            residency.move(blocks)
        if isinstance(error, LocalLLMError) and not isinstance(error, DoesNotFitError):
            raise
        raise error if isinstance(error, DoesNotFitError) else out_of_memory(residency.device, error) from None


def _reserve(residency: Residency, ctx: int) -> None:
    """Take the memory for keys and values of so many tokens; blocks give way for it as for a forward."""
    while True:
        try:
            return residency.new_kv(ctx).close()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not residency.give_way(error, 0):
                raise


def _moved(before: Sequence[BlockPlacement], after: Sequence[BlockPlacement]) -> Moved:
    """Count the blocks that moved. The embedding, which comes first, is looked up row by row wherever it is."""
    pairs = zip(before[1:], after[1:], strict=True)
    tiers = [(old.tier, new.tier) for old, new in pairs if old.tier != new.tier]
    return Moved(sum(new == "disk" for _, new in tiers), sum((old, new) == ("vram", "ram") for old, new in tiers))

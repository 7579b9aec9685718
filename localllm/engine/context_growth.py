"""The context of a loaded model becomes longer: planned anew, blocks give their memory to keys and values.

Between two requests, on the thread that owns the device. What fails on the way leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localllm.engine.events import GrownEvent
from localllm.engine.kv_allocator import KVSupply
from localllm.engine.memory import is_out_of_memory, out_of_memory
from localllm.engine.residency import Residency
from localllm.engine.sequence import Sequence as Running
from localllm.errors import ContextOverflowError, DoesNotFitError, LocalLLMError
from localllm.offload.placement import BlockPlacement
from localllm.offload.planner.plan import Plan
from localllm.text.eviction import wanted_room

_STEP_TOKENS = 256  # a context that is not twice the one before ends at a multiple of this


@dataclass(frozen=True)
class Needed:
    """max_tokens: of the answer, None for as many as there is room for."""

    prompt_tokens: int
    max_tokens: int | None


class Moved(NamedTuple):
    """Blocks that went down for a longer context, by where they now come from at every step."""

    from_disk: int
    from_memory: int


class Grown(NamedTuple):
    """plan: by which the model rests now."""

    plan: Plan
    event: GrownEvent


def grow_for(
    sequence: Running,
    ctx: int,
    residency: Residency,
    kv_supply: KVSupply,
    planned: Callable[[int], Plan],
    flags_for: Callable[[int], str],
) -> Grown | None:
    """More context for a request that wants it; None where it has to do with what there is. Raises ContextOverflowError
    where its prompt does not fit into that, and as `Residency.move` does."""
    needed = Needed(sequence.num_prompt_tokens, sequence.request.sampling.max_tokens)
    try:
        plan, moved = _grow(residency, planned, needed, ctx, kv_supply.give_up_ram)
    except DoesNotFitError as error:
        residency.restore()  # where the way back found no room either
        kv_supply.share_ram(residency.plan)  # as before
        if needed.prompt_tokens < ctx:
            return None
        flags = flags_for(min(residency.config.longest_context, needed.prompt_tokens + 512))
        raise _cannot_grow(needed.prompt_tokens, ctx, error, flags) from None
    kv_supply.share_ram(plan)
    is_sure = plan.costs.rates.is_measured and residency.plan is plan
    return Grown(plan, GrownEvent(sequence.request_id, ctx, plan.ctx, *moved, plan.decode_tok_s if is_sure else None))


def _grow(
    residency: Residency, planned: Callable[[int], Plan], needed: Needed, ctx: int, give_up: Callable[[], bool]
) -> tuple[Plan, Moved]:
    """The model goes on with a longer context, twice as long at least where memory allows. Raises DoesNotFitError
    where none of use fits: it goes on as it was then.

    give_up: lets go of what a longer context is worth more than; whether there was any.
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
            told = error if isinstance(error, DoesNotFitError) else out_of_memory(residency.device, error)
            refusal = refusal or told
            continue
        return plan, _moved(before, residency.blocks)
    raise refusal or DoesNotFitError("the context cannot grow", why=f"the model was trained for {ctx} tokens")


def _cannot_grow(num_tokens: int, ctx: int, error: DoesNotFitError, flags: str) -> ContextOverflowError:
    """flags: with which a longer context would fit, "" where none are."""
    return ContextOverflowError(
        f"the prompt has {num_tokens} tokens, the context {ctx}, and it cannot grow",
        why=f"{error.what}: {error.why}" if error.why else error.what,
        fix=flags or "shorten the prompt",
    )


def _contexts(needed: Needed, ctx: int, longest: int) -> list[int]:
    """Those that are tried, the longest first: twice what there is, or the power of two that holds what is needed;
    what is needed; where the prompt would not fit otherwise, what it takes with a short answer."""
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
    """Keys and values of so many tokens have their memory from here on; blocks give way for it as for a forward."""
    while True:
        try:
            return residency.new_kv(ctx).close()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not residency.give_way(error, 0):
                raise


def _moved(before: Sequence[BlockPlacement], after: Sequence[BlockPlacement]) -> Moved:
    """Of an embedding, which comes first, single rows are looked up wherever it is."""
    pairs = zip(before[1:], after[1:], strict=True)
    tiers = [(old.tier, new.tier) for old, new in pairs if old.tier != new.tier]
    return Moved(sum(new == "disk" for _, new in tiers), sum((old, new) == ("vram", "ram") for old, new in tiers))

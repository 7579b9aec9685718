"""`--overflow grow`: the context of a loaded model becomes longer; blocks give their memory to keys and values.

Between two requests, on the thread that owns the device. What fails on the way leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localllm.engine.events import GrownEvent
from localllm.engine.memory import is_out_of_memory, out_of_memory
from localllm.engine.residency import Residency
from localllm.engine.sequence import Sequence as Running
from localllm.engine.step import StepLoop
from localllm.errors import ContextOverflowError, DoesNotFitError, Fix, LocalLLMError
from localllm.offload.planner.plan import Plan
from localllm.text.eviction import wanted_room

_STEP_TOKENS = 256  # a context that is not twice the one before ends at a multiple of this


def grow_for(
    loop: StepLoop,
    sequence: Running,
    *,
    ctx: int,
    planned: Callable[[int], Plan],
    fixes_for: Callable[[int], list[Fix]],
) -> tuple[Plan, GrownEvent] | None:
    """Make room for a longer context than `ctx`, for a sequence that wants that. Return None where there is none, and
    the sequence can do without. Raises ContextOverflowError where its prompt alone is too long, and as
    `Residency.move`.

    planned: makes the best plan for a context.
    fixes_for: returns the flags with which a longer context fits.
    """
    residency, allocator = loop.residency, loop.kv_allocator
    num_tokens, longest = sequence.num_prompt_tokens, residency.config.longest_context
    tried = contexts(num_tokens, sequence.request.sampling.max_tokens, ctx, longest)
    try:
        try:
            plan, from_disk, from_memory = _grown(residency, planned, tried)
        except DoesNotFitError:
            if not allocator.give_up_ram():  # a longer context is worth more than pages for later prompts
                raise
            plan, from_disk, from_memory = _grown(residency, planned, tried)
    except DoesNotFitError as error:
        residency.restore()  # where the way back found no room either
        allocator.share_ram(residency.plan)  # as before
        if num_tokens < ctx:
            return None
        raise ContextOverflowError(
            f"the prompt has {num_tokens} tokens, the context {ctx}, and it cannot grow",
            why=f"{error.what}: {error.why}" if error.why else error.what,
            fix=fixes_for(min(longest, num_tokens + 512)) or "shorten the prompt",
        ) from None
    allocator.share_ram(plan)
    is_sure = plan.costs.rates.is_measured and residency.plan is plan
    decode_tok_s = plan.decode_tok_s if is_sure else None
    return plan, GrownEvent(sequence.request_id, ctx, plan.ctx, from_disk, from_memory, decode_tok_s)


def contexts(prompt_tokens: int, max_tokens: int | None, ctx: int, longest: int) -> list[int]:
    """Return the contexts to try, the longest first: twice what there is, or the power of two that holds what is
    needed; what is needed; where the prompt would not fit otherwise, what it takes with a short answer.

    max_tokens: of the answer; None for as many as there is room for.
    """
    wanted = prompt_tokens + wanted_room(ctx, max_tokens)
    least = prompt_tokens + 1 if prompt_tokens >= ctx else wanted
    rounded = (-(-amount // _STEP_TOKENS) * _STEP_TOKENS for amount in (wanted, least))
    tried = [max(2 * ctx, 1 << (wanted - 1).bit_length()), *rounded]
    if prompt_tokens < longest:
        tried = [min(longest, amount) for amount in tried]
    return [amount for amount in dict.fromkeys(tried) if ctx < amount <= longest]


def _grown(residency: Residency, planned: Callable[[int], Plan], contexts: Sequence[int]) -> tuple[Plan, int, int]:
    """Go on with the longest of these contexts that fits. Return its plan, and the numbers of blocks that come from the
    disk, and from memory, at every step since. Raises DoesNotFitError where none fits: the model goes on as it was."""
    refusal: DoesNotFitError | None = None
    for longer in contexts:
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
        # The embedding, which comes first, is looked up row by row wherever it is.
        pairs = zip(before[1:], residency.blocks[1:], strict=True)
        moves = [(old.tier, new.tier) for old, new in pairs if old.tier != new.tier]
        return plan, sum(new == "disk" for _, new in moves), moves.count(("vram", "ram"))
    longest = residency.config.longest_context
    raise refusal or DoesNotFitError("the context cannot grow", why=f"the model was trained for {longest} tokens")


def _go_on_by(residency: Residency, plan: Plan) -> None:
    """Raise DoesNotFitError where memory is not what the plan took it for; everything is as it was then."""
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

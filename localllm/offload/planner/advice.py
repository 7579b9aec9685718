"""Advise what would make a model faster on this machine, or let it run at all: other plans, searched like the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from types import MappingProxyType

from localllm.config import format_bytes, format_figure
from localllm.errors import Fix
from localllm.offload.planner.model_shape import ModelShape
from localllm.offload.planner.plan import GIB, Plan, cap
from localllm.offload.planner.search import Search

_WORTH = 1.05  # what gains less is not said
_AS_LARGE = 0.75  # of the bytes of another model: about as large


def advise(
    search: Search,
    plan: Plan,
    int4: Callable[[], Search] | None,
    others: Iterable[ModelShape],
    int8: Callable[[], Search] | None = None,
) -> list[str]:
    """Return changes, each with the flag or the name and what comes of it, what helps most first.

    int4, int8: give the search for the same model in another format, and may measure how fast that is; None where it is
        what was planned, or no better. INT8 is for a model that fits as it is.
    others: other models, in INT4.
    """
    if plan.is_whole:
        return _helping(plan, [] if int8 is None else [_in_format(int8(), plan.ctx, "int8")])
    packed = search if int4 is None else int4()
    ctx = max(256, 1 << ((plan.ctx - 1).bit_length() - 2))
    shorter = replace(search, ctx=ctx).fitting if ctx < plan.ctx else None
    other = _largest_that_fits(packed, (each for each in others if each.num_bytes < plan.shape.num_bytes))
    found = [
        *_more_memory(search, plan),
        *_spilled(search, plan),
        (shorter, f"--ctx {ctx}: a shorter context leaves room for {'experts' if plan.experts else 'weights'}"),
        (other, f"{_command_of(search, other) if other else ''}: fits into this memory as a whole"),
    ]
    return _helping(plan, found if int4 is None else [*found, _in_format(packed, plan.ctx, "int4")])


def _in_format(search: Search, ctx: int, weights: str) -> tuple[Plan | None, str]:
    """Return the plan of the same model in another format, and the flag for it."""
    return replace(search, ctx=ctx).fitting, f"--weights {weights}: {format_bytes(search.shape.num_bytes)} of weights"


def _helping(plan: Plan, found: Iterable[tuple[Plan | None, str]]) -> list[str]:
    """Return what makes the model faster, and how fast, the best first."""
    helping = [
        (better.decode_tok_s, f"{change}, about {format_figure(better.decode_tok_s)} tok/s")
        for better, change in found
        if better is not None and better.decode_tok_s > _WORTH * plan.decode_tok_s
    ]
    return [change for _, change in sorted(helping, key=lambda pair: -pair[0])]


def other_model(search: Search, others: Iterable[ModelShape]) -> list[str]:
    """Return the largest model that fits where this one does not at all."""
    fitting = _largest_that_fits(search, others)
    return [] if fitting is None else [f"{_command_of(search, fitting)}: fits into this memory"]


def fixes_for_context(search: Search, ctx: int, smaller: Mapping[str, ModelShape] = MappingProxyType({})) -> list[Fix]:
    """Return the flags with which the model fits with so long a context, as alternatives: `--ctx`, and a larger cap or
    another format of keys and values where it takes one; none where nothing that this machine has would do.

    smaller: the same model with each of the `--kv` that take less, the largest first.
    """
    longer = replace(search, ctx=ctx)
    if longer.fitting is not None:
        return [Fix.flag("--ctx", ctx)]
    caps = [Fix.flag("--ctx", ctx, *fix.words) for fix in longer.fixes() if fix.words[0] in ("--ram", "--vram")]
    formats = (kv for kv, shape in smaller.items() if replace(longer, shape=shape).fitting is not None)
    return [*caps[:1], *(Fix.flag("--ctx", ctx, "--kv", kv) for kv in islice(formats, 1))]


def _largest_that_fits(search: Search, others: Iterable[ModelShape]) -> Plan | None:
    """Return the plan of the largest of these models that stays in memory as a whole, of those about as large the
    fastest; None where none does."""
    plans: list[Plan] = []
    for shape in sorted(others, key=lambda shape: -shape.num_bytes):
        if plans and shape.num_bytes < _AS_LARGE * plans[0].shape.num_bytes:
            break
        plan = replace(search, shape=shape, ctx=min(2048, shape.default_ctx)).fitting
        if plan is not None and plan.is_whole:
            plans.append(plan)
    return max(plans, key=lambda plan: plan.decode_tok_s, default=None)


def _more_memory(search: Search, plan: Plan) -> Iterator[tuple[Plan, str]]:
    """Yield the cap that keeps everything in the fast memory, where the machine has so much; else a higher cap, if it
    has more than the plan may use, and of a mixture also how much it lacks."""
    better = replace(search.without_limit(), ctx=plan.ctx).fitting
    if better is None:
        return
    needed, room = better.total_bytes(better.fast), search.machine.fast_memory
    on_card = better.fast == "vram"
    place = "on the GPU" if on_card else "in memory"
    gain = f"{'every block stays' if plan.experts is None or on_card else 'all experts stay'} {place}"
    missing = format_bytes(needed - room.most_bytes)
    # Of itself it would take a longer context where that costs little of the speed.
    ctx = f" --ctx {plan.ctx}" if search.job is None and plan.ctx < better.shape.default_ctx else ""
    flags = f"--{better.fast} {cap(needed)}{ctx}"
    if needed <= room.most_bytes:
        yield better, f"{flags}: {gain}"
    elif needed <= room.total_bytes:
        kind = "the GPU's memory" if on_card else "memory"
        yield better, f"{flags}, once {missing} more of {kind} are free (close other programs): {gain}"
    elif plan.experts is not None and not on_card:  # of a dense model too much is missing to be bought
        yield better, f"{missing} more memory than is free, in a larger machine: {gain}"
    if plan.limits[plan.fast] < room.most_bytes < needed:
        roomier = replace(search.with_fast_memory(room.most_bytes), ctx=plan.ctx).fitting
        if roomier is not None:
            more = "more blocks stay" if plan.experts is None or on_card else "more experts stay"
            yield roomier, f"--{plan.fast} up to {format_bytes(room.most_bytes)}: {more} {place}"


def _spilled(search: Search, plan: Plan) -> Iterator[tuple[Plan, str]]:
    """Yield the plan in which keys and values rest elsewhere: faster behind a short text, and maybe not behind all of
    the context, so that both steps are said."""
    spilling = search.spilling()
    better = None if spilling is None else replace(spilling, ctx=plan.ctx).fitting
    if better is not None:
        steps = " instead of ".join(f"{format_figure(each.costs.decode_s(plan.ctx, 1))} s" for each in (better, plan))
        gain = f"keys and values leave room for weights, and behind {plan.ctx:,} tokens a step takes {steps}"
        yield better, f"--kv-offload auto: {gain}; behind {better.prompt_tokens}"


def _command_of(search: Search, plan: Plan) -> str:
    """Return what shows the plan of another model, in the same memory, with the context that was found to fit."""
    machine = search.machine
    limits = {"ram": (machine.memory.ram_bytes, machine.memory.most_bytes)}
    if machine.card is not None:
        limits["vram"] = (machine.card.memory.vram_bytes, machine.card.memory.most_bytes)
    given = {name: limit for name, (limit, most) in limits.items() if limit < most}
    caps = "".join(
        f" --{name} {f'{at / GIB:g}GiB' if at % GIB == 0 else f'{at >> 20}MiB'}" for name, at in given.items()
    )
    ctx = f" --ctx {plan.ctx}" if plan.ctx < plan.shape.default_ctx else ""
    device = "".join(f" {flag}" for flag in machine.plan_flags)
    goal = " --goal throughput" if search.job is not None else ""
    return f"localllm plan {plan.shape.name}{caps}{ctx}{device}{goal}"

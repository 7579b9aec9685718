"""The words for a plan, on a line as on a screen: its blocks by tier, what a step waits for, how sure it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from localllm.config import format_bytes, format_figure, format_time

if TYPE_CHECKING:
    from localllm.engine.model_plan import DraftGain, Planned, Prediction
    from localllm.offload.placement import BlockPlacement, ExpertCount, Tier
    from localllm.offload.planner.model_shape import ModelShape
    from localllm.offload.planner.plan import Plan

Tone = Literal["plain", "good", "fair", "poor"]

_SHORT_S = 0.1


@dataclass(frozen=True)
class Kind:
    """A block by its tier and who computes it: its sign on the map, its tone, what it means."""

    sign: str
    tone: Tone
    meaning: str


_SOME_EXPERTS = Kind("+", "fair", "in memory with some of their experts, the others on the disk")
_FROM_DISK = Kind(".", "poor", "read from the disk at every step")
# The fastest first.
KINDS: Mapping[tuple[str, str], Kind] = {
    ("vram", "gpu"): Kind("@", "good", "on the GPU"),
    ("ram", "split"): Kind("%", "good", "in memory, computed by the CPU and the GPU"),
    ("ram", "cpu"): Kind("#", "good", "in memory, computed by the CPU"),
    ("ram", "slots"): Kind("+", "good", "in memory, with the experts in use on the GPU"),
    ("ram", "gpu"): Kind(">", "fair", "in memory, copied to the GPU at every step"),
    ("disk", "experts"): _SOME_EXPERTS,
    ("disk", "rows"): Kind("-", "good", "on the disk, looked up row by row"),
    ("disk", "gpu"): _FROM_DISK,
    ("disk", "cpu"): _FROM_DISK,
}
MEMORIES: Mapping[Tier, str] = {"vram": "GPU memory", "ram": "memory"}
BOUNDS: Mapping[str, str] = {
    "memory": "reading the weights from memory",
    "compute": "computing",
    "disk": "reading blocks from the disk",
    "link": "copying blocks to the GPU",
}


def measured(planned: Planned) -> str:
    """Return when the plan's rates were measured, and which of them beside other work; "" where none were."""
    return "" if planned.measured_at_s is None else when_measured(planned.measured_at_s, planned.measured_busy)


def when_measured(at_s: float, busy: Sequence[str]) -> str:
    """at_s: as `time.time` has it. busy: figures that were measured beside other work."""
    return format_time(at_s) + (f", while the machine was busy: {', '.join(busy)}" if busy else "")


def kind(block: BlockPlacement) -> Kind:
    if block.tier == "disk" and block.name == "embed":
        return KINDS["disk", "rows"]
    how = "slots" if block.is_slotted else "experts" if block.held_bytes else block.exec
    return KINDS[block.tier, how]


def counted(plan: Plan) -> dict[Kind, int]:
    """Return how many blocks there are of each kind, the fastest first; kinds without blocks are left out."""
    counts = Counter(map(kind, plan.blocks))
    return {each: counts[each] for each in dict.fromkeys(KINDS.values()) if counts[each]}


def bound(plan: Plan) -> str:
    """Return what a step waits for."""
    return "reading experts from the disk" if plan.bound_by == "disk" and plan.experts else BOUNDS[plan.bound_by]


def read_from_disk(plan: Plan) -> str:
    """Return what is read from the disk while a model writes."""
    if not plan.experts:
        return f"{format_bytes(plan.streamed_bytes)} are read at every step"
    return f"about {format_bytes(plan.streamed_bytes)} of experts are read for each token"


def long_texts(plan: Plan) -> str:
    """Return what becomes of keys and values of a long text, and what a token attends to; "" where all stay and are
    read."""
    shape, kept = plan.shape, ""
    if shape.held_tokens < plan.ctx:
        kept = f"keys and values of {shape.held_tokens:,} tokens at most are in memory; earlier ones leave"
    if shape.chosen_tokens is not None and shape.chosen_tokens < plan.ctx:
        kept = f"a token of an answer attends to {shape.chosen_tokens:,} tokens at most in each layer and key head"
    return "; ".join(filter(None, (_spilled(plan), kept)))


def _spilled(plan: Plan) -> str:
    """Return how keys and values are shared out between the fastest memory and what is below it; "" where all are where
    they are used."""
    shape, resident = plan.shape, plan.shape.resident_tokens
    on_card = plan.costs.card is not None
    share = plan.costs.work.kv_share if on_card else 1.0
    num_bytes = round(share * shape.spilled_bytes(plan.kv_tokens, plan.sequences))
    if resident is None or not num_bytes:
        return ""
    near, below, brings = ("on the GPU", "in memory", "copies") if on_card else ("in memory", "on the disk", "reads")
    rest = f"keys and values of {resident:,} tokens are {near}, those before them {below}"
    step = short_duration(plan.costs.decode_s(plan.ctx, plan.sequences))
    if plan.costs.brings_chosen(plan.ctx):
        brought = plan.costs.brought_bytes(plan.ctx, plan.sequences)
        what = f"reads what is chosen, about {format_bytes(brought)} of {format_bytes(num_bytes)},"
    else:
        what = f"{brings} {format_bytes(num_bytes)}"
    return f"{rest}; behind {plan.ctx:,} tokens a step {what} and takes about {step}"


def mixture(shape: ModelShape) -> str:
    """Return how little of a mixture a token takes: "30.5B parameters, 3.3B active: ..."; "" of any other model."""
    if not shape.mixtures:
        return ""
    _, experts = shape.mixtures[0]
    total, active = map(_amount, (shape.num_weights, shape.num_active_weights))
    return (
        f"{total} parameters, {active} active: a token is computed by {experts.active} of the {experts.count} experts "
        f"in each of {len(shape.mixtures)} layers, and reads {format_bytes(shape.token_bytes)}"
    )


def hybrid(shape: ModelShape) -> str:
    """Return what a hybrid keeps of a sequence: "24 of 32 layers keep a state ..."; "" of any other model."""
    if not shape.state_layers:
        return ""
    state, token = format_bytes(shape.snapshot_bytes), format_bytes(shape.kv_bytes_per_token)
    layers = shape.num_layers
    kept = f"{state} in a snapshot of all of them however long the text is"
    if not shape.keeps_tokens:
        return f"all layers keep a state in place of keys and values, {kept}"
    if shape.state_layers == layers:
        return f"all layers keep a state beside keys and values, {kept}; a token takes {token}"
    return (
        f"{shape.state_layers} of {layers} layers keep a state in place of keys and values, {kept}; a token takes "
        f"{token} in the others"
    )


def _amount(count: int) -> str:
    """ "30.5B", "9.0M"."""
    return f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"


EXPERTS_IN = {"ram": "in memory", "vram": "in VRAM"}  # by the tier of their slots


def experts_in_memory(experts: ExpertCount) -> str:
    """Return how many there are in memory: "3,869 of 6,144 in memory", or "in VRAM"."""
    where = EXPERTS_IN[experts.tier]
    if experts.in_memory == experts.total:
        return f"all {experts.total:,} {where}"
    return f"{experts.in_memory:,} of {experts.total:,} {where}"


def expected_hits(plan: Plan) -> str:
    """Return how many of the experts that a token wants are expected in memory; "" where all of them are."""
    if not plan.costs.work.missed_bytes:
        return ""
    source = f"learnt from {plan.learnt_tokens:,} tokens" if plan.learnt_tokens else "a usual rate"
    return f"{plan.hit_rate:.0%} of those that a token wants are expected there ({source})"


def band(prediction: Prediction) -> str:
    """ "about 12.3 (9.8 to 15.4)"."""
    low, mid, high = map(format_figure, (prediction.low, prediction.mid, prediction.high))
    return f"about {mid} ({low} to {high})"


def duration(prediction: Prediction) -> str:
    """`band` of seconds: "about 2.1 (1.7 to 2.6) s"; in ms where that is short."""
    if prediction.mid >= _SHORT_S:
        return f"{band(prediction)} s"
    in_ms = replace(prediction, **{part: 1000 * getattr(prediction, part) for part in ("low", "mid", "high")})
    return f"{band(in_ms)} ms"


def short_duration(seconds: float) -> str:
    """ "2.1 s", "83 ms"."""
    return f"{format_figure(seconds, 2)} s" if seconds >= _SHORT_S else f"{format_figure(1000 * seconds, 2)} ms"


def tier_percents(plan: Plan) -> tuple[float, float, float]:
    """Return how much of the matrices that a step computes with is on the GPU, in memory, and on the disk."""
    blocks = plan.blocks if plan.shape.is_tied else plan.blocks[1:]
    whole = sum(block.num_bytes for block in blocks)
    in_part = sum(block.device_bytes + block.slotted_bytes for block in blocks)
    on_card = in_part + sum(block.num_bytes for block in blocks if block.tier == "vram")
    on_disk = sum(block.num_bytes - block.held_bytes for block in blocks if block.tier == "disk")
    return 100 * on_card / whole, 100 * (whole - on_card - on_disk) / whole, 100 * on_disk / whole


def drafting(found: DraftGain) -> str:
    """Return what a drafter would give."""
    if found.gain is None or found.alpha is None:
        return f"{found.drafter}: {found.why_not}"
    leaving = f" leaving out {found.skipped} blocks" if found.skipped else ""
    share = f"where {found.alpha:.0%} of the draft tokens are accepted"
    if found.gain.speedup < 1.05:  # which would read as 1 times
        return f"{found.drafter}{leaving} does not pay {share}"
    gained = f"about {format_figure(found.gain.tok_s)} tok/s, {format_figure(found.gain.speedup, 2)} times as fast"
    return f"{found.drafter}{leaving}: {gained}, {share}"

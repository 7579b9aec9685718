"""Charts of a plan: the map of its blocks, its ledger as bars, its changes. Knows columns, no widgets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from textual.content import Content

from localllm.chat import plan_text as words
from localllm.chat.text import error_rows, one_line, visible
from localllm.config import format_bytes, format_figure
from localllm.errors import LocalLLMError
from localllm.tui.widgets.bars import bar, split_bar

if TYPE_CHECKING:
    from localllm.engine.engine_info import EngineFacts
    from localllm.engine.model_plan import Planned
    from localllm.offload.placement import Tier
    from localllm.offload.planner.plan import Plan

_LABEL = 13  # columns
_GAP = 3
_MOST_BAR = 60
_SAME = 0.05  # two rates that differ by less are equal
_MOST_ROWS = 4  # of a map whose blocks have two columns each
# Keyed by the sign of a kind of blocks. Some themes have one colour for primary, accent and warning: never two of them
# side by side.
_TILES: Mapping[str, str] = {
    "@": "$text-success on $success-muted",
    "%": "$text on $secondary-darken-2",
    "+": "$text-secondary on $secondary-muted",
    "#": "$text-primary on $primary-muted",
    ">": "$text-warning on $warning-muted",
    "-": "$foreground on $panel",
    ".": "$text-error on $error-muted",
}
_OWNERS: Mapping[str, str] = {
    "weights": "$primary",
    "kv": "$secondary",
    "program": "$foreground-muted",
    "context": "$foreground-muted",
    "activations": "$success",
    "logits": "$success-lighten-2",
    "workspace": "$secondary-darken-2",
    "graphs": "$secondary-darken-1",
    "staging": "$error",
    "loading": "$error-darken-2",
    "draft": "$success-darken-2",
    "adapters": "$success-darken-1",
    "kept pages": "$secondary-lighten-2",
    "states": "$secondary-lighten-1",
    "snapshots": "$secondary-darken-3",
    "embedding": "$primary-darken-2",
    "experts": "$primary-lighten-2",
}
_OTHER = "$foreground"
_MEANT: Mapping[str, str] = {"kv": "keys and values", "context": "CUDA", "draft": "drafting"}


def title(planned: Planned) -> Content:
    shape, plan = planned.shape, planned.plan
    ctx = "" if plan is None else f", {plan.ctx:,} tokens of context"
    return Content(f"plan  {visible(one_line(shape.name))}: {format_bytes(shape.num_bytes)} of {shape.weights}{ctx}")


def block_map(plan: Plan, columns: int) -> Content:
    """Every block in the order of a forward pass, and a legend."""
    width = 2 if 2 * len(plan.blocks) <= _MOST_ROWS * columns else 1
    per_row = max(1, columns // width)
    rows = [
        Content.assemble(
            *((kind.sign.ljust(width), _TILES[kind.sign]) for kind in map(words.kind, plan.blocks[begin:][:per_row]))
        )
        for begin in range(0, len(plan.blocks), per_row)
    ]
    legend = [
        Content.styled(kind.sign.ljust(2), _TILES[kind.sign]) + Content(f" {count} {kind.meaning}")
        for kind, count in words.counted(plan).items()
    ]
    return Content("\n").join([*rows, *_flowing(legend, columns)])


def ledger(plan: Plan, columns: int) -> Content:
    """The bytes of each owner in each tier."""
    rows: list[Content] = []
    for tier, name in words.MEMORIES.items():
        if (limit := plan.limits.get(tier)) is None:
            continue
        owners = plan.ledger[tier]
        amount = f"  {format_bytes(plan.total_bytes(tier))} of {format_bytes(limit)}"
        length = max(4, min(_MOST_BAR, columns - _LABEL - len(amount)))
        styles = {owner: _OWNERS.get(owner, _OTHER) for owner in owners}
        shares = {owner: count / limit for owner, count in owners.items()}
        rows.append(_labelled(name, split_bar(shares, length, styles) + Content(amount)))
        rows += _indented(_flowing([_owner(owner, count) for owner, count in owners.items()], columns - _LABEL))
    kept = words.hybrid(plan.shape)
    return Content("\n").join([*rows, *_disk(plan, columns), *(_paragraph("", Content(kept), columns) if kept else ())])


def _disk(plan: Plan, columns: int) -> Iterator[Content]:
    streamed, looked_up = plan.streamed_bytes, plan.ledger["disk"].get("embedding", 0)
    if streamed:
        amount = f"  {words.read_from_disk(plan)}"
        length = max(4, min(_MOST_BAR, columns - _LABEL - len(amount)))
        yield _labelled("disk", bar(streamed / plan.shape.num_bytes, length, "$error") + Content(amount))
    else:
        yield _labelled("disk", Content.styled("nothing is read from it at a step", "$foreground-muted"))
    if looked_up:
        yield from _indented([_owner("embedding", looked_up) + Content(", looked up row by row")])


def experts(plan: Plan, facts: EngineFacts | None, columns: int) -> Content:
    """The experts of a mixture: those of blocks that are in memory as a whole, those that have slots there, and those
    on the disk. facts: of the running model, which tell how often a wanted one was in memory."""
    count = plan.experts
    assert count is not None
    amount = f"  {words.experts_in_memory(count)}"
    length = max(4, min(_MOST_BAR, columns - _LABEL - len(amount)))
    styles = {"resident": _OWNERS["weights"], "slots": _OWNERS["experts"]}
    shares = {"resident": count.resident / count.total, "slots": count.slots / count.total}
    texts = [words.mixture(plan.shape), words.expected_hits(plan)]
    if facts is not None and facts.hit_rate is not None:
        texts.append(f"{facts.hit_rate:.0%} of the {facts.experts_wanted:,} that were wanted so far were there")
    rows = [_labelled("experts", split_bar(shares, length, styles) + Content(amount))]
    return Content("\n").join(
        [*rows, *(row for text in filter(None, texts) for row in _paragraph("", Content(text), columns))]
    )


def _owner(owner: str, count: int) -> Content:
    name = _MEANT.get(owner, owner)
    return Content.styled("■ ", _OWNERS.get(owner, _OTHER)) + Content(f"{name} {format_bytes(count)}")


def advice(planned: Planned, columns: int, *, is_advised: bool) -> Content:
    """The gain of speculation, the uncertain figures, and better settings."""
    fixes = [] if planned.refusal is None else list(map(str, planned.refusal.fixes))  # shown by the refusal
    better = [advice for advice in planned.advice if advice not in fixes] if is_advised else ["…"]
    groups = {
        "drafts": [words.drafting(found) for found in planned.speculation],
        "measured": list(filter(None, [words.measured(planned)])),
        "estimated": list(planned.estimates),
        "better": better,
    }
    rows = [
        row
        for label, texts in groups.items()
        for number, text in enumerate(texts)
        for row in _paragraph(label if number == 0 else "", Content(visible(one_line(text))), columns)
    ]
    return Content("\n").join(rows)


def predicted(planned: Planned, before: Planned | None, measured_tok_s: float | None, columns: int) -> Content:
    """The predicted speed beside the current one. before: as the model runs. measured_tok_s: of its last answer."""
    if planned.plan is None:
        assert planned.refusal is not None
        return refusal(planned.refusal, columns)
    assert planned.decode_tok_s is not None and planned.ttft_s is not None
    plan, rate, wait = planned.plan, planned.decode_tok_s, planned.ttft_s
    together = f" of {plan.sequences} sequences together" if plan.sequences > 1 else ""
    decode = Content.styled(words.band(rate), "bold") + Content(f" tok/s{together}, bound by ")
    decode += Content(words.bound(plan))
    first = Content(f"{words.duration(wait)}, after a prompt of {plan.prompt_tokens:,} tokens")
    rows = [*_paragraph("decode", decode, columns), *_paragraph("first token", first, columns)]
    if before is not None and before.decode_tok_s is not None:
        rows += _paragraph("now", _beside(rate.mid, before.decode_tok_s.mid, measured_tok_s), columns)
    return Content("\n").join(rows)


def _beside(tok_s: float, before_tok_s: float, measured_tok_s: float | None) -> Content:
    measured = "" if measured_tok_s is None else f" ({format_figure(measured_tok_s)} in the last answer)"
    now = Content(f"about {format_figure(before_tok_s)} tok/s{measured}")
    ratio = tok_s / before_tok_s
    if abs(ratio - 1) < _SAME:
        return now
    if ratio < 1:
        return now + Content.styled(f", this is {format_figure(1 / ratio, 2)} times slower", "$text-warning")
    return now + Content.styled(f", this is {format_figure(ratio, 2)} times as fast", "$text-success")


def changed(plan: Plan, running: Plan | None, now: Plan | None, notes: Sequence[Content], columns: int) -> Content:
    """The differences from the running plan, and notes.

    now: the running settings planned now: the machine may have more or less free memory than when the model was loaded.
    """
    if running is None or now is None:
        return Content("\n").join(notes)
    pairs = [
        ("context", f"{running.ctx:,}", f"{plan.ctx:,}"),
        ("KV", running.shape.kv, plan.shape.kv),
        ("weights", running.shape.weights, plan.shape.weights),
        *((name, _total(now, tier), _total(plan, tier)) for tier, name in words.MEMORIES.items()),
        ("experts in memory", _in_memory(running), _in_memory(plan)),
        ("disk a step", format_bytes(running.streamed_bytes), format_bytes(plan.streamed_bytes)),
    ]
    parts = [
        Content.styled(f"{name} ", "$foreground-muted") + Content(f"{old} → ") + Content.styled(new, "bold")
        for name, old, new in pairs
        if old != new
    ]
    if num_moved := _num_moved(plan, running):
        parts.append(Content.styled(f"{num_moved}", "bold") + Content(" blocks elsewhere"))
    rows = _flowing(parts, columns) or [Content.styled("as it runs now", "$foreground-muted")]
    return Content("\n").join([*rows, *notes])


def _total(plan: Plan, tier: Tier) -> str:
    return format_bytes(plan.total_bytes(tier))


def _in_memory(plan: Plan) -> str:
    return "" if plan.experts is None else f"{plan.experts.in_memory:,}"


def _num_moved(plan: Plan, before: Plan) -> int:
    places = {block.name: (block.tier, block.exec) for block in before.blocks}
    return sum(places.get(block.name) != (block.tier, block.exec) for block in plan.blocks)


def refusal(error: LocalLLMError, columns: int) -> Content:
    """The reason why there is no plan, in the lines of an error."""
    rows = [_paragraph(f"{label}:", Content(visible(value)), columns) for label, value in error_rows(error)]
    return Content("\n").join(itertools.chain.from_iterable(rows)).stylize("$text-error", 0, len("error:"))


def _labelled(label: str, content: Content) -> Content:
    return Content.styled(label.ljust(_LABEL), "$foreground-muted") + content


def _indented(rows: Sequence[Content]) -> list[Content]:
    return [Content(" " * _LABEL) + row for row in rows]


def _paragraph(label: str, content: Content, columns: int) -> list[Content]:
    first, *others = content.wrap(max(20, columns - _LABEL))
    return [_labelled(label, first), *_indented(others)]


def _flowing(parts: Sequence[Content], columns: int) -> list[Content]:
    rows: list[Content] = []
    for part in parts:
        if rows and rows[-1].cell_length + _GAP + part.cell_length <= columns:
            rows[-1] += Content(" " * _GAP) + part
        else:
            rows.append(part)
    return rows

"""The status lines: model, context, speed, memory, and why it is slow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localllm.chat.context import ContextUsage
from localllm.config import format_bytes, format_figure
from localllm.engine.engine_info import EngineFacts
from localllm.engine.events import FinishedEvent
from localllm.tui.bars import bar, fitting, split_bar

_BAR = 10  # columns
_SLOW = 0.1  # of the time of the steps, from which on waiting is told of
_PARTS = {  # in their order on the bar
    "template": "$primary-darken-2",
    "system": "$secondary",
    "history": "$primary",
    "question": "$primary-lighten-2",
    "answer": "$accent",
}
_TIERS = {"vram": "VRAM", "ram": "RAM"}
_BOUND = {"disk": ("disk", "reading blocks from the disk"), "link": ("link", "copying blocks to the GPU")}


@dataclass(frozen=True)
class AnswerRun:
    """An answer that streams or has ended. num_tokens in elapsed_s: since its first."""

    num_tokens: int = 0
    elapsed_s: float = 0.0
    finished: FinishedEvent | None = None

    @property
    def tok_s(self) -> float | None:
        if self.finished is not None and self.finished.timings.decode_tok_s is not None:
            return self.finished.timings.decode_tok_s
        return (self.num_tokens - 1) / self.elapsed_s if self.num_tokens > 1 and self.elapsed_s > 0 else None


def model_line(model: str, usage: ContextUsage | None) -> list[tuple[int, Content]]:
    """Model and context, each part with its rank: those of the highest rank are dropped first."""
    parts = [(0, Content.styled(model, "bold"))]
    if usage is not None:
        parts.append((1, _context(usage)))
        share = usage.used / usage.limit
        style = "$text-error" if share > 0.95 else "$text-warning" if share >= 0.8 else ""
        parts.append((1, Content.styled(f"{min(usage.used, usage.limit):,}/{usage.limit:,}", style)))
        shown = [f"{name} {usage.parts[name]:,}" for name in ("system", "history", "answer") if usage.parts.get(name)]
        parts.append((2, Content.styled(" ".join(shown), "$foreground-muted")))
    return parts


def speed_line(run: AnswerRun) -> list[tuple[int, Content]]:
    """Speed and times of the answer, ranked as in `model_line`."""
    parts = []
    if (rate := run.tok_s) is not None:
        parts.append((1, Content(f"{format_figure(rate)} tok/s")))
    if run.finished is not None:
        parts += _finished(run.finished)
    return parts


def growing(usage: ContextUsage, run: AnswerRun) -> ContextUsage:
    """The use of the context with the tokens of the answer that streams."""
    if run.finished is not None or not run.num_tokens:
        return usage
    answer = usage.parts.get("answer", 0) + run.num_tokens
    return replace(usage, used=usage.used + run.num_tokens, parts={**usage.parts, "answer": answer})


def _context(usage: ContextUsage) -> Content:
    return split_bar({name: usage.parts.get(name, 0) / usage.limit for name in _PARTS}, _BAR, _PARTS)


def _finished(finished: FinishedEvent) -> list[tuple[int, Content]]:
    parts = []
    if finished.timings.ttft_s is not None:
        parts.append((3, Content(f"first {finished.timings.ttft_s:.2f} s")))
    parts.append((4, Content(f"cached {finished.usage.cached_tokens:,}/{finished.usage.prompt_tokens:,}")))
    speculation = finished.speculation
    if speculation is not None and speculation.drafted and speculation.tokens_per_pass is not None:
        parts.append((5, Content(f"{format_figure(speculation.tokens_per_pass)}/pass")))
    return parts


def memory_line(facts: EngineFacts | None, run: AnswerRun, columns: int) -> Content:
    """Memory by tier, and why it is slow; shortened to the columns."""
    if facts is None:
        return Content()
    gap = Content("  ")
    for is_short in (False, True):
        parts = [part for part in _memory(facts, is_short=is_short) if part.cell_length]
        why = why_slow(facts, run.finished, is_short=is_short)
        shown = gap.join([*parts, Content.styled(why, "$text-warning")] if why else parts)
        if shown.cell_length <= columns:
            break
    return shown


def _memory(facts: EngineFacts, *, is_short: bool) -> Iterator[Content]:
    for tier, name in _TIERS.items():
        if limit := facts.limits.get(tier):
            used = sum(facts.ledger.get(tier, {}).values())
            figures = f"{used / limit:.0%}" if is_short else f"{format_bytes(used)}/{format_bytes(limit)}"
            shown = bar(used / limit, _BAR // 2 if is_short else _BAR)
            yield Content.styled(f"{name} ", "$foreground-muted") + shown + Content(f" {figures}")
    disk = Content.styled("disk ", "$foreground-muted")
    if facts.streamed_bytes:
        each = "" if is_short else " a step"
        yield disk + Content.styled(f"{format_bytes(facts.streamed_bytes)}{each}", "$text-warning")
    elif facts.limits:
        yield disk + Content.styled("–", "$foreground-muted")


def why_slow(facts: EngineFacts, finished: FinishedEvent | None, *, is_short: bool = False) -> str:
    """The wait of a step, measured if there was an answer; "" where it is neither for the disk nor for the link."""
    name, what = _BOUND.get(facts.bound_by, ("blocks", "blocks on their way"))
    if finished is None:
        if facts.bound_by not in _BOUND:
            return ""
        return f"waits for the {name}" if is_short else f"each token waits for {what}"
    split = finished.timings.split
    total_s = split.compute_s + split.wait_s + split.sample_s
    if not total_s or split.wait_s < _SLOW * total_s:
        return ""
    rate = f"{split.copied_bytes / split.copy_s / 1e9:.1f} GB/s" if split.copy_s else ""
    share = f"{split.wait_s / total_s:.0%}"
    if is_short:
        return f"{share} waits for the {name}" + (f", {rate}" if rate else "")
    return f"{share} of the time waits for {what}" + (f" at {rate}" if rate else "")


class Status(Widget):
    DEFAULT_CSS = "Status { height: 2; padding: 0 1; background: $panel; color: $foreground; }"
    facts: reactive[EngineFacts | None] = reactive(None)
    usage: reactive[ContextUsage | None] = reactive(None)
    run_now: reactive[AnswerRun] = reactive(AnswerRun())
    model_text: reactive[str] = reactive("no model")

    def render(self) -> Content:
        columns = self.content_size.width
        usage = None if self.usage is None else growing(self.usage, self.run_now)
        lines = [model_line(self.model_text, usage), speed_line(self.run_now)]
        if self.size.height < len(lines) + 1:
            lines = [[*lines[0], *lines[1]]]
        rows = [fitting(line, columns) for line in lines]
        return Content("\n").join([*rows, memory_line(self.facts, self.run_now, columns)])

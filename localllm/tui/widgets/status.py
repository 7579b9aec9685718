"""The lines around the composer: progress, notes that go by themselves, an error that stays; below it the status:
model, context, speed, memory, and why it is slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from textual import events
from textual.content import Content
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static

from localllm.chat.context import ContextUsage
from localllm.chat.plan_text import EXPERTS_IN
from localllm.chat.text import error_rows, one_line
from localllm.config import format_bytes, format_figure
from localllm.engine.engine_info import EngineFacts
from localllm.engine.events import FinishedEvent
from localllm.errors import LocalLLMError
from localllm.tui.widgets.bars import bar, fitting, split_bar

_ACTIVITY_BAR = 24  # columns


class Activity(Widget):
    """One line of progress; hidden where nothing runs."""

    text = reactive("")
    share: reactive[float | None] = reactive(None)

    def progress(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show `done` of `total`; 0 where they are not known."""
        self.text = one_line(text)
        self.share = done / total if total else None
        self.display = True

    def clear(self) -> None:
        self.display = False

    def render(self) -> Content:
        if self.share is None:
            return Content(f"{self.text} …")
        return bar(self.share, _ACTIVITY_BAR) + Content(f" {self.share:4.0%}  {self.text}")


_NOTE_S = 8.0
_MOST_NOTES = 4  # lines; the oldest go


class Notice(Static):
    def __init__(self) -> None:
        super().__init__()
        self._timer: Timer | None = None
        self._notes: list[Content] = []
        self.error: LocalLLMError | None = None

    def note(self, text: str, *, is_warning: bool = False, for_s: float = _NOTE_S) -> None:
        """Show a line, below an error that is shown."""
        note = Content.styled(one_line(text), "$text-warning" if is_warning else "")
        others = [each for each in self._notes if each != note]
        self._show_notes([*others, note][-_MOST_NOTES:], for_s)

    def lines(self, lines: list[str]) -> None:
        """Show several lines in place of the present ones."""
        self._show_notes([Content(one_line(line)) for line in lines], _NOTE_S)

    def show_error(self, error: LocalLLMError) -> None:
        self.error = error
        self._draw()

    def withdraw(self, text: str) -> None:
        """Remove a note that is no longer true."""
        kept = [note for note in self._notes if note.plain != text]
        if len(kept) < len(self._notes):
            self._notes = kept
            self._draw()

    def close_error(self) -> None:
        """Remove the error. Notes stay until their time is over: a warning is shown once."""
        self.error = None
        self._draw()

    def close(self) -> bool:
        """Remove the error, or without one the notes. Returns False where nothing was shown."""
        if self.error is not None:
            self.close_error()
            return True
        was_shown = bool(self._notes)
        self._end_notes()
        return was_shown

    def clear(self) -> None:
        self.error = None
        self._end_notes()

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.close()

    def _show_notes(self, notes: list[Content], for_s: float) -> None:
        self._notes = notes
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(for_s, self._end_notes)
        self._draw()

    def _end_notes(self) -> None:
        self._notes = []
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        self._draw()

    def _draw(self) -> None:
        rows = self._notes
        if self.error is not None:
            shown = [
                Content.styled(f"{label + ':':<7}", "bold") + Content(value) for label, value in error_rows(self.error)
            ]
            rows = [*shown, Content.styled("esc closes", "$foreground-muted"), *rows]
        self.update(Content("\n").join(rows))
        self.set_class(bool(rows), "-shown")
        self.set_class(self.error is not None, "-error")


_BAR = 10  # columns
_SLOW = 0.1  # of the time of the steps, from which on waiting is told of
_PARTS = {  # in their order on the bar
    "template": "$foreground-muted",
    "system": "$secondary-darken-2",
    "files": "$secondary-lighten-2",
    "history": "$secondary",
    "question": "$primary-darken-2",
    "answer": "$primary",
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


@dataclass(frozen=True)
class StatusPart:
    """rank: those of the highest are dropped first where room is short. meaning: for the help; "" for a bar."""

    rank: int
    shown: Content
    meaning: str = ""


def model_line(model: str, usage: ContextUsage | None) -> list[StatusPart]:
    """Model and context."""
    parts = [StatusPart(0, Content.styled(model, "bold"), "the model, and the format of its weights")]
    if usage is not None:
        shares = {name: usage.parts.get(name, 0) / usage.limit for name in _PARTS}
        parts.append(StatusPart(1, split_bar(shares, _BAR, _PARTS)))
        share = usage.used / usage.limit
        style = "$text-error" if share > 0.95 else "$text-warning" if share >= 0.8 else ""
        figures = f"{min(usage.used, usage.limit):,} of {usage.limit:,} tokens"
        parts.append(StatusPart(1, Content.styled(figures, style), "how full the context is; /tokens says by what"))
        shown = [
            f"{name} {usage.parts[name]:,}"
            for name in ("system", "files", "history", "answer")
            if usage.parts.get(name)
        ]
        parts.append(
            StatusPart(6, Content.styled(" ".join(shown), "$foreground-muted"), "how many tokens each of these takes")
        )
    return parts


def speed_line(run: AnswerRun) -> list[StatusPart]:
    """Speed and times of the answer."""
    parts = []
    if (rate := run.tok_s) is not None:
        text = f"{format_figure(rate)} tok/s"
        parts.append(StatusPart(1, Content(text), "tokens a second; a word is one or two"))
    if (finished := run.finished) is not None:
        if finished.timings.ttft_s is not None:
            text = f"first word {finished.timings.ttft_s:.2f} s"
            parts.append(StatusPart(3, Content(text), "from the question to the answer's first word"))
        text = f"{finished.usage.cached_tokens:,} of {finished.usage.prompt_tokens:,} cached"
        parts.append(StatusPart(4, Content(text), "tokens of the prompt taken from the cache"))
        speculation = finished.speculation
        if speculation is not None and speculation.drafted and speculation.tokens_per_pass is not None:
            text = f"{format_figure(speculation.tokens_per_pass)} tokens a step"
            parts.append(StatusPart(5, Content(text), "more than 1 where drafted tokens were right"))
    return parts


def growing(usage: ContextUsage, run: AnswerRun) -> ContextUsage:
    """The use of the context with the tokens of the answer that streams."""
    if run.finished is not None or not run.num_tokens:
        return usage
    answer = usage.parts.get("answer", 0) + run.num_tokens
    return replace(usage, used=usage.used + run.num_tokens, parts={**usage.parts, "answer": answer})


def memory_line(facts: EngineFacts | None, run: AnswerRun, columns: int) -> list[StatusPart]:
    """Memory by tier, and why it is slow; shortened to the columns."""
    if facts is None:
        return []
    for is_short in (False, True):
        parts = list(_memory(facts, is_short=is_short))
        if why := why_slow(facts, run.finished, is_short=is_short):
            parts.append(StatusPart(0, Content.styled(why, "$text-warning"), "the plan shows what would help"))
        if joined(parts).cell_length <= columns:
            break
    return parts


def joined(parts: Sequence[StatusPart]) -> Content:
    return Content("  ").join(part.shown for part in parts)


def _memory(facts: EngineFacts, *, is_short: bool) -> Iterator[StatusPart]:
    for tier, name in _TIERS.items():
        if limit := facts.limits.get(tier):
            used = sum(facts.ledger.get(tier, {}).values())
            figures = f"{used / limit:.0%}" if is_short else f"{format_bytes(used)} of {format_bytes(limit)}"
            shown = bar(used / limit, _BAR // 2 if is_short else _BAR)
            label = Content.styled(f"{name} ", "$foreground-muted")
            what = "GPU memory" if tier == "vram" else "memory"
            yield StatusPart(0, label + shown + Content(f" {figures}"), f"{what} used, of what the model may have")
    disk = Content.styled("disk ", "$foreground-muted")
    if facts.num_experts > facts.experts_in_memory:
        where = "" if is_short else f" {EXPERTS_IN[facts.experts_tier]}"
        share = Content(f"{facts.experts_in_memory / facts.num_experts:.0%}{where}")
        label = Content.styled("experts ", "$foreground-muted")
        yield StatusPart(0, label + share, "of the model's experts are in memory")
        if facts.hit_rate is not None:
            rate = Content.styled(f"{facts.hit_rate:.0%}", "$text-warning")
            label = Content.styled("hits ", "$foreground-muted")
            yield StatusPart(0, label + rate, "of the wanted experts were there")
    elif facts.streamed_bytes:
        each = "" if is_short else " a step"
        amount = Content.styled(f"{format_bytes(facts.streamed_bytes)}{each}", "$text-warning")
        yield StatusPart(0, disk + amount, "read from the disk for every token")
    elif facts.limits:
        yield StatusPart(0, disk + Content.styled("–", "$foreground-muted"), "nothing is read while it answers")


def why_slow(facts: EngineFacts, finished: FinishedEvent | None, *, is_short: bool = False) -> str:
    """The wait of a step, measured if there was an answer; "" where it is neither for the disk nor for the link."""
    name, what = _BOUND.get(facts.bound_by, ("blocks", "blocks on their way"))
    if facts.num_experts > facts.experts_in_memory and facts.experts_tier == "ram":
        what = "reading experts from the disk"
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
    facts: reactive[EngineFacts | None] = reactive(None)
    usage: reactive[ContextUsage | None] = reactive(None)
    run_now: reactive[AnswerRun] = reactive(AnswerRun())
    model_text: reactive[str] = reactive("no model")

    def watch_run_now(self, run: AnswerRun) -> None:
        self.set_class(not speed_line(run), "-idle")

    def render(self) -> Content:
        columns = self.content_size.width
        lines = self._lines(columns)
        if self.size.height < len(lines) or not lines[1]:
            lines = [[*lines[0], *lines[1]], lines[2]]
        rows = [fitting([(part.rank, part.shown) for part in line], columns) for line in lines[:-1]]
        return Content("\n").join([*rows, joined(lines[-1])])

    @property
    def parts(self) -> list[StatusPart]:
        """What it shows, at its shortest, for the help."""
        return [part for line in self._lines(0) for part in line if part.meaning and part.shown.plain]

    def _lines(self, columns: int) -> list[list[StatusPart]]:
        usage = None if self.usage is None else growing(self.usage, self.run_now)
        memory = memory_line(self.facts, self.run_now, columns)
        return [model_line(self.model_text, usage), speed_line(self.run_now), memory]

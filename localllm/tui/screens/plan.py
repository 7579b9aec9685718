"""The plan of the model that is talked with, as a picture, and what it would be under other settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from localllm.config import format_bytes
from localllm.settings import KV_FORMATS, Settings
from localllm.tui import plan_drawing as drawing
from localllm.tui.replanning import (
    NOW,
    Bounded,
    Bounds,
    Busy,
    DeskPlanning,
    NotPlanned,
    Planning,
    Replanned,
    Replanner,
    Wish,
)
from localllm.tui.widgets.activity import Activity
from localllm.tui.widgets.drawn import Drawn
from localllm.tui.widgets.key_bar import KeyBar
from localllm.tui.widgets.notice import Notice
from localllm.tui.widgets.slider import Slider, Stop

if TYPE_CHECKING:
    from localllm.chat.context import ContextUsage
    from localllm.engine.planning import Planned
    from localllm.offload.planner.plan import Plan
    from localllm.runtime.selection import Selection
    from localllm.tui.desk import Desk

_WEIGHTS = ("auto", "bf16", "bf12", "int8", "int4", "nf4")
_LEAST_CTX = 256
_LEAST_CAP_BYTES = 256 << 20
_END = 1 << 20  # stops: more than any slider has
_KEYS = {
    "plan.up plan.down": "choose",
    "plan.less plan.more": "change",
    "plan.apply": "apply",
    "plan.reset": "reset",
    "plan.close": "leave",
    "plan.page_down": "scroll",
    "app.help": "help",
}


class PlanScreen(Screen[None]):
    CSS = """
    PlanScreen {
        & > #title { height: 1; padding: 0 1; background: $panel; color: $text-muted; }
        & > #body { height: 1fr; layout: vertical; }
        & #wishes { height: auto; max-height: 70%; }
        & #sliders { height: auto; padding: 0 1; border-bottom: solid $border-blurred; }
        & #predicted, & #changed { padding: 0 1; }
        & #picture { height: 1fr; padding: 0 1; border-top: solid $border-blurred; }
        & #picture Drawn { margin: 0 0 1 0; }
        &.-stale #predicted, &.-stale #changed, &.-stale #picture { text-opacity: 50%; }
        &.-wide #body { layout: horizontal; }
        &.-wide #wishes { width: 2fr; max-width: 90; height: 1fr; max-height: 100%; }
        &.-wide #picture { width: 3fr; border-top: none; border-left: solid $border-blurred; }
    }
    """
    BINDINGS = [
        Binding("up", "choose(-1)", "the setting above", id="plan.up"),
        Binding("down", "choose(1)", "the setting below", id="plan.down"),
        Binding("left", "move(-1)", "less of it", id="plan.less"),
        Binding("right", "move(1)", "more of it", id="plan.more"),
        Binding("home", f"move({-_END})", "the least of it", id="plan.least"),
        Binding("end", f"move({_END})", "the most of it", id="plan.most"),
        Binding("enter,a", "apply", "load the model with these settings", id="plan.apply"),
        Binding("r", "reset", "back to what runs now", id="plan.reset"),
        Binding("pageup", "page(-1)", "scroll the picture up", id="plan.page_up"),
        Binding("pagedown", "page(1)", "scroll the picture down", id="plan.page_down"),
        Binding("escape", "close", "leave without a change", id="plan.close"),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]

    def __init__(self, desk: Desk, selection: Selection, planning: Planning | None = None) -> None:
        """planning: in the place of the desk's own."""
        super().__init__()
        self._desk = desk
        self._selection = selection
        self._planning = planning or DeskPlanning(desk, selection)
        self._replanner: Replanner | None = None
        self._before: Planned | None = None  # as the model runs
        self._shown: Replanned | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="title")
        with Container(id="body"):
            with VerticalScroll(id="wishes", can_focus=False):
                yield Vertical(id="sliders")
                yield Drawn(id="predicted")
                yield Drawn(id="changed")
            with VerticalScroll(id="picture", can_focus=False):
                yield Drawn(id="map")
                yield Drawn(id="ledger")
                yield Drawn(id="said")
        yield Activity()
        yield Notice()
        yield KeyBar(_KEYS)

    @property
    def sliders(self) -> dict[str, Slider]:
        """By the setting that each of them is."""
        return {slider.key: slider for slider in self.query(Slider)}

    @property
    def wish(self) -> Wish:
        """What the sliders say, beside what runs now."""
        moved = {key: slider.value for key, slider in self.sliders.items() if slider.is_moved}
        goal = moved.pop("goal", NOW.goal)
        return Wish({key: _as_in_a_file(key, value) for key, value in moved.items()}, goal)

    @property
    def planned(self) -> Planned | None:
        """What is shown."""
        return None if self._shown is None else self._shown.planned

    @property
    def shown_wish(self) -> Wish | None:
        """Whose plan that is; None where there is none yet, or the last wish could not be honoured."""
        return None if self._shown is None else self._shown.wish

    @property
    def notice(self) -> Notice:
        return self.query_one(Notice)

    def on_mount(self) -> None:
        self.query_one("#title", Static).update(Content("plan"))
        self.query_one(Activity).progress("planning")
        self._replanner = Replanner(self._planning, self.post_message)

    def on_unmount(self) -> None:
        if self._replanner is not None:
            self._replanner.close()

    # What the plans' thread tells

    @on(Bounded)
    async def _on_bounded(self, message: Bounded) -> None:
        plan = self._desk.plan
        sliders = list(_sliders(self._selection.settings, message.bounds, None if plan is None else plan.ctx))
        await self.query_one("#sliders").mount(*sliders)
        sliders[0].focus()

    @on(Replanned)
    def _on_replanned(self, message: Replanned) -> None:
        if message.wish == NOW:
            self._before = message.planned
        if message.wish == self.wish:
            self.query_one(Activity).clear()
            if self.notice.error is not None:  # of another wish
                self.notice.clear()
            self._shown = message
            self.remove_class("-stale")
            self._show(message)

    @on(NotPlanned)
    def _on_not_planned(self, message: NotPlanned) -> None:
        if message.wish == self.wish:
            self.query_one(Activity).clear()
            self._shown = None
            self.notice.tell(message.error)

    @on(Busy)
    def _on_busy(self, message: Busy) -> None:
        self.query_one(Activity).progress(message.text)

    @on(Slider.Moved)
    def _on_moved(self) -> None:
        assert self._replanner is not None
        self.set_class(self.shown_wish != self.wish, "-stale")
        self._replanner.want(self.wish)

    def _show(self, message: Replanned) -> None:
        planned, before, measured = message.planned, self._before, self._desk.answering.tok_s
        is_advised = message.is_advised
        self.query_one("#title", Static).update(drawing.title(planned))
        self._drawn("predicted").show(lambda columns: drawing.predicted(planned, before, measured, columns))
        self._drawn("said").show(lambda columns: drawing.said(planned, columns, is_advised=is_advised))
        plan = planned.plan
        if plan is None:
            for name in ("changed", "map", "ledger"):
                self._drawn(name).show(None)
            return
        now = before.plan if before is not None else None
        running, told = self._desk.plan or now, _beside(message.wish, plan, self._desk.usage)
        self._drawn("changed").show(lambda columns: _changes(plan, running, now or running, told, columns))
        self._drawn("map").show(lambda columns: drawing.block_map(plan, columns))
        self._drawn("ledger").show(lambda columns: drawing.ledger(plan, columns))

    def _drawn(self, name: str) -> Drawn:
        return self.query_one(f"#{name}", Drawn)

    # Keys

    def action_choose(self, step: int) -> None:
        sliders = list(self.query(Slider))
        at = next((number for number, slider in enumerate(sliders) if slider.has_focus), -step)
        if sliders:
            sliders[(at + step) % len(sliders)].focus()

    def action_move(self, step: int) -> None:
        if isinstance(self.focused, Slider):
            self.focused.move(step)

    def action_reset(self) -> None:
        for slider in self.query(Slider):
            slider.reset()

    def action_page(self, step: int) -> None:
        picture = self.query_one("#picture", VerticalScroll)
        picture.scroll_relative(y=step * max(1, picture.size.height - 1), animate=False)

    def action_apply(self) -> None:
        wish = self.wish
        if not wish.changes:
            batch = "; the goal is that of `localllm run --batch`" if wish.goal != NOW.goal else ""
            self.notice.note(f"nothing is changed{batch}")
        elif self.shown_wish == wish and self.planned is not None and self.planned.plan is None:
            self.notice.note("nothing is applied: the model does not fit with these settings")
        elif self.notice.error is not None:
            self.notice.note("nothing is applied: these settings cannot be honoured")
        elif self._desk.selection is not self._selection:
            key = self._desk.key_names["app.plan"]
            why = "the model was loaded anew meanwhile"
            self.notice.note(f"nothing is applied: {why}; leave, and {key} shows its plan")
        elif self._desk.answering.is_under_way:
            self.notice.note(self._desk.answering.busy_text)
        else:
            changes = dict(wish.changes)
            self._desk.do(lambda: self._desk.use(None, changes))
            self.dismiss()

    def action_close(self) -> None:
        if not self.notice.close():
            self.dismiss()


@dataclass(frozen=True)
class _Scale:
    """Of a setting that is an amount. unset: what it is called where the setting leaves it open; that stands behind
    `open_amount`."""

    key: str
    label: str
    amounts: Sequence[int]
    unset: str
    open_amount: int
    shown: Callable[[int], str]


def _sliders(settings: Settings, bounds: Bounds, ctx: int | None) -> Iterator[Slider]:
    """ctx: of the model that runs."""
    longest = bounds.longest_ctx
    contexts = [*(1 << power for power in range(longest.bit_length()) if 1 << power >= _LEAST_CTX), longest]
    yield _scale(settings, _Scale("ctx", "context", contexts, "auto", ctx or 0, lambda count: f"{count:,}"))
    yield _choice(settings, "kv", "KV", KV_FORMATS)
    yield _choice(settings, "weights", "weights", _WEIGHTS)
    yield _scale(settings, _cap("ram", "RAM cap", bounds.ram_bytes))
    if bounds.vram_bytes is not None:
        yield _scale(settings, _cap("vram", "VRAM cap", bounds.vram_bytes))
    goals = [Stop("latency", "latency"), Stop("throughput", "throughput")]
    yield Slider("goal", "goal", goals, 0, is_scale=False)


def _cap(key: str, label: str, most_bytes: int) -> _Scale:
    return _Scale(key, label, tuple(_caps(most_bytes)), "none", sys.maxsize, format_bytes)


def _scale(settings: Settings, scale: _Scale) -> Slider:
    """The amounts, what is set among them, and that nothing is set."""
    value = getattr(settings, scale.key)
    amounts = sorted({*scale.amounts, *([] if value is None else [value])})
    stops = [Stop(each, scale.shown(each)) for each in amounts]
    stops.insert(sum(each <= scale.open_amount for each in amounts), Stop(None, scale.unset))
    index = next(number for number, stop in enumerate(stops) if stop.value == value)
    return Slider(scale.key, scale.label, stops, index, is_scale=True)


def _choice(settings: Settings, key: str, label: str, values: tuple[str, ...]) -> Slider:
    value = getattr(settings, key)
    known = dict.fromkeys((*values, value))
    stops = [Stop(each, each) for each in known]
    return Slider(key, label, stops, list(known).index(value), is_scale=False)


def _caps(most_bytes: int) -> Iterator[int]:
    """Round amounts, each a third or a half more than the one before."""
    power = _LEAST_CAP_BYTES
    while power <= most_bytes:
        yield power
        if power * 3 // 2 <= most_bytes:
            yield power * 3 // 2
        power *= 2


def _as_in_a_file(key: str, value: Any) -> Any:
    return f"{value >> 20}MiB" if key in ("ram", "vram") and value is not None else value


def _beside(wish: Wish, plan: Plan, usage: ContextUsage | None) -> list[tuple[str, str]]:
    """What is to be known before it is applied, each with its style. usage: of the conversation."""
    told = []
    if usage is not None and usage.used >= plan.ctx:
        told.append((f"the chat has {usage.used:,} tokens, more than this context takes", "$text-warning"))
    packing = plan.shape.packing
    if packing is not None and not (packing.is_for_streaming and plan.is_whole):
        told.append(("the model is packed for it first, once", "$text-warning"))
    if wish.goal != NOW.goal:
        batch = "as `localllm run --batch` would have it; a chat goes on with one answer at a time"
        told.append((batch, "$foreground-muted"))
    return told


def _changes(
    plan: Plan, running: Plan | None, now: Plan | None, told: Sequence[tuple[str, str]], columns: int
) -> Content:
    rows = [] if running is None or now is None else [drawing.changed(plan, running, now, columns)]
    rows += [Content.styled(text, style) for text, style in told]
    return Content("\n").join(rows)

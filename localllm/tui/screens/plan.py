"""The plan of the chat's model as a picture, and its plan under other settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from textual import events, getters, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from localllm.config import format_bytes
from localllm.runtime.selection import Selection
from localllm.settings import KV_FORMATS, WEIGHTS, Settings
from localllm.tui import plan_charts as charts
from localllm.tui.chat_worker import ChatWorker
from localllm.tui.plan_worker import AS_IT_RUNS, BoundsFound, PlanDelayed, PlanFound, PlanRefused, PlanWish, PlanWorker
from localllm.tui.widgets.bars import KeyBar
from localllm.tui.widgets.status import Activity, Notice

_LABEL = 11  # columns
_VALUE = 11  # columns
_MOST_TRACK = 44
_GAP = 2  # between two words


@dataclass(frozen=True)
class SliderStop:
    """A value of a slider; None where the model or the machine decides."""

    value: Any
    text: str


class Slider(Widget, can_focus=True):
    """Words side by side, or a track with a knob."""

    index: reactive[int] = reactive(0)

    class Moved(Message):
        pass

    def __init__(self, key: str, label: str, stops: Sequence[SliderStop], index: int, *, is_scale: bool) -> None:
        """key: of the setting. index: the present stop. is_scale: the stops are amounts, shown as a track."""
        super().__init__(id=key)
        self.key = key
        self.stops = stops
        self._label = label
        self._is_scale = is_scale
        self._at_first = index
        self.set_reactive(Slider.index, index)

    @property
    def value(self) -> Any:
        return self.stops[self.index].value

    @property
    def is_moved(self) -> bool:
        return self.index != self._at_first

    def move(self, step: int) -> None:
        self._go(self.index + step)

    def reset(self) -> None:
        self._go(self._at_first)

    def _go(self, index: int) -> None:
        index = max(0, min(len(self.stops) - 1, index))
        if index != self.index:
            self.index = index
            self.set_class(self.is_moved, "-moved")
            self.post_message(self.Moved())

    def render(self) -> Content:
        sign = "▸" if self.has_focus else " "
        label = Content.styled(f"{sign} {self._label}".ljust(_LABEL), "bold $text-accent" if self.has_focus else "")
        return label + (self._track() if self._is_scale else self._words())

    def _track(self) -> Content:
        columns = self._columns
        knob, first = self._column_of(self.index), self._column_of(self._at_first)
        line = ["━" if column < knob else "─" for column in range(columns)]
        line[first] = "┃"  # as it is at present
        line[knob] = "●"
        drawn = Content("".join(line)).stylize("$primary", 0, knob).stylize("bold $text-accent", knob, knob + 1)
        return drawn + Content.styled(f"  {self.stops[self.index].text}", "bold")

    def _words(self) -> Content:
        styles = {self._at_first: "underline", self.index: "bold $text-primary on $primary-muted"}
        words = [Content.styled(stop.text, styles.get(index, "")) for index, stop in enumerate(self.stops)]
        return Content(" " * _GAP).join(words)

    @property
    def _columns(self) -> int:
        return max(2, min(_MOST_TRACK, self.content_size.width - _LABEL - _VALUE))

    def _column_of(self, index: int) -> int:
        return round(index * (self._columns - 1) / max(1, len(self.stops) - 1))

    def _index_at(self, column: int) -> int | None:
        """The stop nearest to a column of the widget; None beside all of them."""
        column -= _LABEL
        if column < 0:
            return None
        if self._is_scale:
            return round(min(column, self._columns - 1) * (len(self.stops) - 1) / (self._columns - 1))
        end = 0
        for index, stop in enumerate(self.stops):
            end += len(stop.text) + _GAP
            if column < end:
                return index
        return None

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self.focus()
        self.capture_mouse()
        self._draw_to(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self.app.mouse_captured is self:
            self._draw_to(event.x)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        self.release_mouse()

    def _draw_to(self, x: int) -> None:
        index = self._index_at(x - self.gutter.left)
        if index is not None:
            self._go(index)


if TYPE_CHECKING:
    from localllm.engine.model_plan import Planned

_LEAST_CTX = 256
_LEAST_CAP_BYTES = 256 << 20
_END = 1 << 20  # more stops than any slider has
_KEYS = {
    "plan.up plan.down": "choose",
    "plan.less plan.more": "change",
    "plan.apply": "apply",
    "plan.reset": "reset",
    "plan.close": "leave",
    "plan.page_down": "scroll",
    "app.help": "help",
    "app.leave": "quit",
}


class Chart(Widget):
    """Content drawn anew for each width; hidden where there is none."""

    _draw: Callable[[int], Content] | None = None

    def show(self, draw: Callable[[int], Content] | None) -> None:
        """draw: called with the number of columns."""
        self._draw = draw
        self.display = draw is not None
        self.refresh(layout=True)

    def render(self) -> Content:
        columns = self.content_size.width
        return Content() if self._draw is None or columns < 1 else self._draw(columns)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 0 if self._draw is None or width < 1 else len(self._draw(width).wrap(width))


class PlanScreen(Screen[None]):
    BINDINGS = [
        Binding("up", "choose(-1)", "the setting above", id="plan.up"),
        Binding("down", "choose(1)", "the setting below", id="plan.down"),
        Binding("left", "move(-1)", "decrease it", id="plan.less"),
        Binding("right", "move(1)", "increase it", id="plan.more"),
        Binding("home", f"move({-_END})", "set it to the minimum", id="plan.least"),
        Binding("end", f"move({_END})", "set it to the maximum", id="plan.most"),
        Binding("enter,a", "apply", "load the model with these settings", id="plan.apply"),
        Binding("r", "reset", "reset to the running settings", id="plan.reset"),
        Binding("pageup", "page(-1)", "scroll up", id="plan.page_up"),
        Binding("pagedown", "page(1)", "scroll down", id="plan.page_down"),
        Binding("escape", "close", "close without a change", id="plan.close"),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]

    notice = getters.query_one(Notice)
    activity = getters.query_one(Activity)

    def __init__(self, chat: ChatWorker, selection: Selection, planner: PlanWorker | None = None) -> None:
        super().__init__()
        self._chat = chat
        self._selection = selection
        self._planner = planner or PlanWorker(chat, selection)
        self._before: Planned | None = None  # as the model runs
        self._shown: PlanFound | None = None

    def compose(self) -> ComposeResult:
        yield Static("plan", id="title")
        with Container(id="body"):
            with VerticalScroll(id="wishes", can_focus=False):
                yield Vertical(id="sliders")
                yield Chart(id="predicted")
                yield Chart(id="changed")
            with VerticalScroll(id="picture", can_focus=False):
                yield Chart(id="map")
                yield Chart(id="ledger")
                yield Chart(id="experts")
                yield Chart(id="advice")
        yield Activity()
        yield Notice()
        yield KeyBar(_KEYS)

    @property
    def sliders(self) -> dict[str, Slider]:
        return {slider.key: slider for slider in self.query(Slider)}

    @property
    def wish(self) -> PlanWish:
        """The settings of the sliders that differ from what runs."""
        moved = {key: slider.value for key, slider in self.sliders.items() if slider.is_moved}
        goal = moved.pop("goal", AS_IT_RUNS.goal)
        for cap in ("ram", "vram"):
            if moved.get(cap) is not None:
                moved[cap] = f"{moved[cap] >> 20}MiB"  # as in a file
        return PlanWish(moved, goal)

    @property
    def planned(self) -> Planned | None:
        return None if self._shown is None else self._shown.planned

    @property
    def shown_wish(self) -> PlanWish | None:
        """The wish of the shown plan; None before the first, or where the last wish was refused."""
        return None if self._shown is None else self._shown.wish

    def on_mount(self) -> None:
        self.activity.progress("planning")
        if self._chat.model_name is None:
            key = self._chat.key_names["plan.apply"]
            self.notice.note(f"no model is loaded: this is the plan of {self._selection.files.name}; {key} loads it so")
        self._plan(AS_IT_RUNS)

    @work(thread=True, exclusive=True, group="plan")
    def _plan(self, wish: PlanWish) -> None:
        self._planner.plan(wish, self.post_message)

    async def on_bounds_found(self, message: BoundsFound) -> None:
        plan = self._chat.plan
        sliders = list(_sliders(self._selection.settings, message, None if plan is None else plan.ctx))
        await self.query_one("#sliders").mount(*sliders)
        sliders[0].focus()

    def on_plan_found(self, message: PlanFound) -> None:
        if message.wish == AS_IT_RUNS:
            self._before = message.planned
        if message.wish == self.wish:
            self.activity.clear()
            if self.notice.error is not None:  # of another wish
                self.notice.clear()
            self._shown = message
            self.remove_class("-stale")
            self._show(message)

    def on_plan_refused(self, message: PlanRefused) -> None:
        if message.wish == self.wish:
            self.activity.clear()
            self._shown = None
            self.notice.show_error(message.error)

    def on_plan_delayed(self, message: PlanDelayed) -> None:
        self.activity.progress(message.text)

    def on_slider_moved(self) -> None:
        self.set_class(self.shown_wish != self.wish, "-stale")
        self._plan(self.wish)

    def _show(self, found: PlanFound) -> None:
        planned, before, measured = found.planned, self._before, self._chat.answers.tok_s
        self.query_one("#title", Static).update(charts.title(planned))
        drawn: dict[str, Callable[[int], Content] | None] = {
            "predicted": lambda columns: charts.predicted(planned, before, measured, columns),
            "advice": lambda columns: charts.advice(planned, columns, is_advised=found.is_advised),
            "changed": None,
            "map": None,
            "ledger": None,
            "experts": None,
        }
        if (plan := planned.plan) is not None:
            now = before.plan if before is not None else None
            running, notes = self._chat.plan or now, list(self._notes(found))
            drawn["changed"] = lambda columns: charts.changed(plan, running, now or running, notes, columns)
            drawn["map"] = lambda columns: charts.block_map(plan, columns)
            drawn["ledger"] = lambda columns: charts.ledger(plan, columns)
            if plan.experts is not None:
                drawn["experts"] = lambda columns: charts.experts(plan, self._chat.answers.facts, columns)
        for name, draw in drawn.items():
            self.query_one(f"#{name}", Chart).show(draw)

    def _notes(self, found: PlanFound) -> Iterator[Content]:
        plan, usage = found.planned.plan, self._chat.usage
        assert plan is not None
        if usage is not None and usage.used >= plan.ctx:
            text = f"the chat has {usage.used:,} tokens, more than this context takes"
            yield Content.styled(text, "$text-warning")
        packing = plan.shape.packing
        if packing is not None and not (packing.is_for_streaming and plan.is_whole):
            yield Content.styled("the model is packed for it first, once", "$text-warning")
        if found.wish.goal != AS_IT_RUNS.goal:
            text = "as `localllm run --batch` would have it; a chat goes on with one answer at a time"
            yield Content.styled(text, "$foreground-muted")

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
        if not wish.changes and self._chat.model_name is not None:
            batch = "; the goal is that of `localllm run --batch`" if wish.goal != AS_IT_RUNS.goal else ""
            self.notice.note(f"nothing is changed{batch}")
        elif self.shown_wish == wish and self.planned is not None and self.planned.plan is None:
            self.notice.note("nothing is applied: the model does not fit with these settings")
        elif self.notice.error is not None:
            self.notice.note("nothing is applied: these settings cannot be honoured")
        elif self._chat.selection is not self._selection:
            key = self._chat.key_names["app.plan"]
            why = "the model was loaded anew meanwhile"
            self.notice.note(f"nothing is applied: {why}; leave, and {key} shows its plan")
        elif self._chat.answers.is_under_way:
            self.notice.note(self._chat.answers.busy_text)
        else:
            changes = dict(wish.changes)
            self._chat.do(lambda: self._chat.use(None, changes))
            self.dismiss()

    def action_close(self) -> None:
        if not self.notice.close():
            self.dismiss()


def _sliders(settings: Settings, bounds: BoundsFound, ctx: int | None) -> Iterator[Slider]:
    """The sliders, at the values of the settings. ctx: of the model that runs."""

    def scale(key: str, label: str, amounts: Iterable[int], shown: Callable[[int], str], unset: SliderStop) -> Slider:
        """unset: stands behind the amounts up to its own; its value becomes None."""
        value = getattr(settings, key)
        every = sorted({*amounts, *([] if value is None else [value])})
        stops = [SliderStop(each, shown(each)) for each in every]
        stops.insert(sum(each <= unset.value for each in every), SliderStop(None, unset.text))
        return Slider(key, label, stops, [stop.value for stop in stops].index(value), is_scale=True)

    def words(key: str, label: str, values: Sequence[str]) -> Slider:
        value = getattr(settings, key)
        known = list(dict.fromkeys((*values, value)))
        return Slider(key, label, [SliderStop(each, each) for each in known], known.index(value), is_scale=False)

    longest, no_cap = bounds.longest_ctx, SliderStop(sys.maxsize, "none")
    contexts = [*(1 << power for power in range(longest.bit_length()) if 1 << power >= _LEAST_CTX), longest]
    yield scale("ctx", "context", contexts, lambda count: f"{count:,}", SliderStop(ctx or 0, "auto"))
    yield words("kv", "KV", KV_FORMATS)
    yield words("weights", "weights", [name for name in WEIGHTS if "-g" not in name])
    yield scale("ram", "RAM cap", _caps(bounds.ram_bytes), format_bytes, no_cap)
    if bounds.vram_bytes is not None:
        yield scale("vram", "VRAM cap", _caps(bounds.vram_bytes), format_bytes, no_cap)
    goals = [SliderStop(goal, goal) for goal in ("latency", "throughput")]
    yield Slider("goal", "goal", goals, 0, is_scale=False)


def _caps(most_bytes: int) -> Iterator[int]:
    """Round amounts, each a third or a half more than the one before."""
    power = _LEAST_CAP_BYTES
    while power <= most_bytes:
        yield from (cap for cap in (power, power * 3 // 2) if cap <= most_bytes)
        power *= 2

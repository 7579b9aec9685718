"""The plan screen, key by key: what would be is shown before anything is applied."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from textual.pilot import Pilot

from localllm.engine import model_plan as engine_planning
from localllm.engine import planner
from localllm.engine.engine_info import EngineFacts
from localllm.engine.model_plan import Considered, DraftGain, Planned, Prediction
from localllm.errors import DoesNotFitError, LocalLLMError, UsageError
from localllm.offload.planner.machine import Machine, Memory, Rates
from localllm.offload.planner.model_shape import BlockShape, ExpertShape, ModelShape
from localllm.offload.planner.plan import GIB, JobShape, Plan, with_kept_pages
from localllm.offload.planner.profile import FormatRates, Profile
from localllm.offload.planner.search import Search
from localllm.offload.planner.speculation_gain import Gain
from localllm.quant.recipe import RECIPES
from localllm.settings import parse_bytes
from localllm.tui.app import ChatApp
from localllm.tui.model_loader import serve
from localllm.tui.plan_worker import AS_IT_RUNS, BoundsFound, PlanWish, PlanWorker
from localllm.tui.screens.plan import PlanScreen
from localllm.tui.widgets.bars import KeyBar
from localllm.tui.widgets.status import AnswerRun, joined, memory_line
from tests.patience import PATIENCE_S
from tests.thinning import every_other
from tests.tui.support import FakeService, assert_shown, chatting, press, say, shown, texts, until

pytestmark = pytest.mark.usefixtures("home")

_MIB = 1 << 20


def model_shape(name: str, kv: str, num_experts: int = 0) -> ModelShape:
    """12 layers of 60 MiB: 720 MiB of blocks. num_experts: of each MLP, a megabyte each; a token has four."""
    experts = ExpertShape(num_experts, 4, _MIB) if num_experts else None
    kinds = itertools.cycle((("attention", 20), ("mlp", 40)))
    names = [f"layers.{index // 2}" for index in range(24)]
    blocks = [
        BlockShape(f"{layer}.{kind}", size * _MIB, size, experts if kind == "mlp" else None)
        for layer, (kind, size) in zip(names, kinds, strict=False)
    ]
    return ModelShape(
        name=name,
        weights="int4-g64",
        kv="int8" if kv == "auto" else kv,
        embed=BlockShape("embed", 30 * _MIB, 0),
        blocks=tuple(blocks),
        head=BlockShape("head", 30 * _MIB, 90_000),
        kv_bytes_per_token=10_000 if kv == "int4" else 20_000,
        default_ctx=4096,
        row_bytes=1000,
        state_bytes=16,
        logits_bytes=128,
        batch_rows=(64, 8),
    )


@dataclass
class FakePlanner(PlanWorker):
    """A machine that has 2 GiB of memory free, and rates that are known. gate: nothing is planned before it is set."""

    name: str = "the model"
    num_experts: int = 0
    is_hybrid: bool = False
    vram_bytes: int | None = None
    reason: str = ""  # why a measurement has to wait
    measures: str = ""
    error: LocalLLMError | None = None  # of every wish but AS_IT_RUNS
    advice: tuple[str, ...] = ()
    wishes: list[PlanWish] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    advice_gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.advice_gate.set()

    def bounds(self) -> BoundsFound:
        return BoundsFound(longest_ctx=20_000, ram_bytes=3 * GIB, vram_bytes=self.vram_bytes)

    def considered(self, wish: PlanWish, before_measurement: Callable[[str], None]) -> Considered:
        if self.measures:
            before_measurement(self.measures)
        self.wishes.append(wish)
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None and wish != AS_IT_RUNS:
            raise self.error
        return Considered(self._planned(wish), self._advise)

    def _advise(self) -> list[str]:
        assert self.advice_gate.wait(PATIENCE_S)
        return list(self.advice)

    def why_wait(self, *, measures: bool) -> str:
        return self.reason if measures else ""

    def _planned(self, wish: PlanWish) -> Planned:
        shape = model_shape(self.name, wish.changes.get("kv", "auto"), self.num_experts)
        if self.is_hybrid:
            shape = replace(shape, num_layers=12, state_layers=9, recurrent_bytes=7 * _MIB, snapshot_bytes=6 * _MIB)
        ram_bytes = parse_bytes(wish.changes.get("ram")) or 2 * GIB
        memory = Memory(ram_bytes, 300 * _MIB, 2 * GIB, 3 * GIB)
        job = JobShape(4, 1024, 1024) if wish.goal == "throughput" else None
        search = Search(shape, Machine(memory, Rates(40.0, 1200.0, 1.5)), wish.changes.get("ctx"), job)
        try:
            plan = with_kept_pages(search.best()) if self.is_hybrid else search.best()
        except DoesNotFitError as error:
            return Planned(shape, None, [], error)
        bands, notes = (_band(plan.decode_tok_s), _band(plan.ttft_s)), ["measured on a busy machine: disk"]
        return Planned(shape, plan, [], None, *bands, notes, [DraftGain("ngram", 0.8, Gain(3, 99.0, 2.5))])


def _band(amount: float) -> Prediction:
    return Prediction(amount / 1.25, amount, amount * 1.25)


@asynccontextmanager
async def planning(
    fake: FakePlanner, service: Any = None, *, question: str = "", size: tuple[int, int] = (100, 30), **settings: Any
) -> AsyncIterator[tuple[ChatApp, Pilot[None], PlanScreen]]:
    """The screen on a machine that is known, with its first plan unless that is held up. question: asked before."""
    async with chatting(service, size=size, **settings) as (app, pilot):
        await until(pilot, lambda: app.worker.selection is not None and not app.worker.is_loading)
        assert app.worker.selection is not None
        if question:
            await say(pilot, question)
        PlanWorker.__init__(fake, app.worker, app.worker.selection)
        screen = PlanScreen(app.worker, app.worker.selection, fake)
        app.push_screen(screen)
        if fake.gate.is_set() and not fake.reason:
            await settled(pilot, screen)
        yield app, pilot, screen


@asynccontextmanager
async def unapplied(
    fake: FakePlanner, *service: Any, **more: Any
) -> AsyncIterator[tuple[ChatApp, Pilot[None], PlanScreen]]:
    """`planning`, at whose end no model but the first was loaded."""
    said = service[0] if service else FakeService()
    async with planning(fake, said, **more) as found:
        yield found
    assert said.loads == ["tiny"]


async def settled(pilot: Pilot[None], screen: PlanScreen, *keys: str) -> Plan | None:
    """The plan for what the sliders say, behind these keys."""
    await pilot.press(*keys)
    await until(pilot, lambda: screen.sliders and screen.shown_wish == screen.wish)
    assert screen.planned is not None
    return screen.planned.plan


async def test_the_plan_of_the_running_model_is_a_picture_with_its_figures() -> None:
    async with planning(FakePlanner(advice=("--ctx 1024: a shorter context",)), size=(128, 45)) as (app, pilot, screen):
        plan = await settled(pilot, screen)
        assert plan is not None and screen.planned is not None and screen.planned.decode_tok_s is not None
        await until(pilot, "--ctx 1024: a shorter context")
        assert_shown(
            app,
            "# # # ",
            "the model: 780.0 MiB of int4-g64, 4,096 tokens of context",
            "26 in memory, computed by the CPU",
            f"weights {round(plan.ledger['ram']['weights'] / _MIB)}.0 MiB",
            "keys and values 78.1 MiB",
            "of 2.0 GiB",
            "nothing is read from it at a step",
            "tok/s, bound by reading the weights from memory",
            "s, after a prompt of 512 tokens",
            "ngram: about 99 tok/s, 2.5 times as fast, where 80% of the draft tokens are accepted",
            "measured on a busy machine: disk",
            "as it runs now",
        )


async def test_the_experts_of_a_mixture_are_counted_by_where_they_are_and_how_often_they_were_there() -> None:
    async with planning(FakePlanner(num_experts=40), FakeService(), size=(128, 60)) as (app, pilot, screen):
        assert_shown(app, "experts", "all 480 in memory", "by 4 of the 40 experts in each of 12 layers")
        app.worker.answers.facts = EngineFacts(1, "", "", experts_wanted=1200, expert_hits=900)
        await pilot.press("down", "down", "down", *["left"] * 5)
        plan = await settled(pilot, screen)
        assert plan is not None and plan.experts is not None and 0 < plan.experts.slots < 480
        assert_shown(
            app,
            "12 in memory with some of their experts, the others on the disk",
            f"{plan.experts.slots} of 480 in memory",
            f"experts in memory 480 → {plan.experts.slots}",
            "of those that a token wants are expected there (a usual rate)",
            "75% of the 1,200 that were wanted so far were there",
            "of experts are read for each token",
        )


async def test_a_hybrid_tells_what_its_layers_keep() -> None:
    async with planning(FakePlanner(is_hybrid=True), size=(128, 60)) as (app, pilot, screen):
        plan = await settled(pilot, screen)
        assert plan is not None and plan.ledger["ram"]["snapshots"] == 16 * 6 * _MIB
        assert_shown(
            app, "states 7.0 MiB", "snapshots 96.0 MiB", "9 of 12 layers keep a state", "6.0 MiB in a snapshot"
        )


async def test_the_plan_is_there_before_its_advice() -> None:
    fake = FakePlanner(advice=("--ram 3GiB: more",))
    fake.advice_gate.clear()
    async with planning(fake, size=(150, 45)) as (app, pilot, _):
        assert "tok/s, bound by" in shown(app) and "--ram 3GiB: more" not in shown(app)
        fake.advice_gate.set()
        await until(pilot, "--ram 3GiB: more")


async def test_a_slider_shows_what_would_change_before_anything_is_applied() -> None:
    async with unapplied(FakePlanner(), size=(128, 45)) as (app, pilot, screen):
        await pilot.press("down", "down", "down", *["left"] * 5)
        assert screen.wish == PlanWish({"ram": "768MiB"})
        plan = await settled(pilot, screen)
        assert plan is not None and plan.streamed
        assert_shown(
            app,
            f"{len(plan.streamed)} read from the disk at every step",
            "bound by reading blocks from the disk",
            "times slower",
            f"disk a step 0 B → {plan.streamed_bytes // _MIB}.0 MiB",
            " blocks elsewhere",
        )


async def test_of_quick_changes_the_first_and_the_last_alone_are_planned() -> None:
    fake = FakePlanner()
    async with planning(fake) as (_, pilot, screen):
        fake.gate.clear()
        await press(pilot, "right", until=lambda: len(fake.wishes) == 2)
        await pilot.press("right", "right", "right", "right")
        fake.gate.set()
        plan = await settled(pilot, screen)
        assert [wish.changes.get("ctx") for wish in fake.wishes] == [None, 256, 4096]
        assert plan is not None and plan.ctx == 4096


async def test_enter_loads_the_model_with_the_settings_and_the_conversation_stays() -> None:
    service = FakeService(["Hello."])
    async with planning(FakePlanner(), service, question="Hi") as (app, pilot, screen):
        await settled(pilot, screen, "right", "right", "down", "right", "down", "right", "down", "left")
        await press(pilot, "enter", until=lambda: len(service.loads) == 2 and not app.worker.is_loading)
        assert app.screen is app.chat and app.worker.selection is not None
        settings = app.worker.selection.settings
        assert (settings.ctx, settings.kv, settings.weights, settings.ram) == (512, "bf16", "bf16", 3 * GIB)
        assert texts(app) == [("user", "Hi"), ("assistant", "Hello.")]
        await say(pilot, "And?")


async def test_a_setting_is_given_back_to_the_plan_where_one_was_set() -> None:
    service = FakeService()
    async with planning(FakePlanner(), service, ctx=3000) as (app, pilot, screen):
        assert screen.sliders["ctx"].value == 3000
        await pilot.press("home")
        assert screen.wish == PlanWish({"ctx": None})
        await press(pilot, "a", until=lambda: len(service.loads) == 2)
        await until(pilot, lambda: app.worker.selection is not None and app.worker.selection.settings.ctx is None)


async def test_r_goes_back_to_what_runs_now_and_enter_has_nothing_to_do_then() -> None:
    async with unapplied(FakePlanner()) as (app, pilot, screen):
        await pilot.press("end", "down", "end")
        assert screen.wish == PlanWish({"ctx": 20_000, "kv": "int4"})
        await pilot.press("r")
        assert screen.wish == AS_IT_RUNS
        await settled(pilot, screen)
        assert "as it runs now" in shown(app)
        await pilot.press("enter")
        assert app.screen is screen and "nothing is changed" in shown(app)


@pytest.mark.parametrize("key", every_other(["escape", "f2"]))
async def test_leaving_changes_nothing(key: str) -> None:
    async with unapplied(FakePlanner()) as (app, pilot, screen):
        await settled(pilot, screen, "right")
        await pilot.press(key)
        assert app.screen is app.chat


async def test_where_nothing_fits_the_refusal_is_shown_and_nothing_is_applied() -> None:
    async with unapplied(FakePlanner(advice=("localllm plan tiny: fits into this memory",))) as (app, pilot, screen):
        assert await settled(pilot, screen, "down", "down", "down", "home") is None
        await until(pilot, "localllm plan tiny: fits")
        assert_shown(app, "error:", "why:", "fix:", "more:", "--ram ")
        await pilot.press("enter")
        assert app.screen is screen and "nothing is applied" in shown(app)


async def test_a_wish_that_cannot_be_honoured_is_a_notice_and_another_wish_closes_it() -> None:
    error = UsageError("no [b]such[/b] thing", why="so", fix="--ctx 1")
    async with unapplied(FakePlanner(error=error)) as (app, pilot, screen):
        await press(pilot, "right", until=lambda: screen.notice.error is not None)
        assert "error: no [b]such[/b] thing" in shown(app) and "fix:   --ctx 1" in shown(app)
        await pilot.press("enter")
        assert app.screen_stack[-1] is screen
        await press(pilot, "left", until=lambda: screen.notice.error is None)
        await pilot.press("escape")
        assert app.screen is app.chat


async def test_everything_can_be_done_with_the_mouse() -> None:
    service = FakeService()
    async with planning(FakePlanner(), service) as (app, pilot, screen):
        context, kv, row = screen.sliders["ctx"], screen.sliders["kv"], screen.query_one(KeyBar)
        await pilot.click(kv, offset=(kv.render().plain.index("k8v4") + 1, 0))
        assert screen.wish == PlanWish({"kv": "k8v4"}) and kv.has_focus
        track = context.render().plain.index("●")
        await pilot.mouse_down(context, offset=(track + 2, 0))
        await pilot.hover(context, offset=(track + 40, 0))
        assert context.index > 5
        await pilot.hover(context, offset=(track + 4, 0))
        await pilot.mouse_up(context, offset=(track + 4, 0))
        assert context.value == 256
        await pilot.hover(context, offset=(track + 40, 0))
        assert context.value == 256
        keys = str(row.render())
        await pilot.click(row, offset=(keys.index("reset") + 2, 0))
        assert screen.wish == AS_IT_RUNS
        await pilot.click(kv, offset=(kv.render().plain.index("int4") + 1, 0))
        await settled(pilot, screen)
        await pilot.click(row, offset=(keys.index("apply") + 2, 0))
        await until(pilot, lambda: len(service.loads) == 2)
        assert app.worker.selection is not None and app.worker.selection.settings.kv == "int4"


@pytest.mark.parametrize("vram_bytes", [None, 24 * GIB])
async def test_a_cap_on_the_memory_of_a_gpu_is_offered_where_there_is_one(vram_bytes: int | None) -> None:
    async with planning(FakePlanner(vram_bytes=vram_bytes)) as (_, _, screen):
        assert ("vram" in screen.sliders) == (vram_bytes is not None)
        if vram_bytes is not None:
            screen.sliders["vram"].move(-1)
            assert screen.wish.changes == {"vram": f"{24 << 10}MiB"}


async def test_the_goal_changes_the_picture_but_nothing_that_a_chat_could_be_loaded_with() -> None:
    async with unapplied(FakePlanner()) as (app, pilot, screen):
        plan = await settled(pilot, screen, "up", "right")
        assert plan is not None and plan.sequences == 4
        assert "of 4 sequences together" in shown(app) and "localllm run --batch" in shown(app)
        await pilot.press("enter")
        assert app.screen is screen


async def test_a_measurement_is_told_and_waits_for_what_would_disturb_it() -> None:
    fake = FakePlanner(measures="measuring the memory", reason="the answer to end")
    async with planning(fake) as (app, pilot, screen):
        await until(pilot, "waiting for the answer to end")
        assert not fake.wishes
        fake.gate.clear()
        fake.reason = ""
        await until(pilot, "measuring the memory")
        fake.gate.set()
        await settled(pilot, screen)
        assert "measuring" not in shown(app)


async def test_nothing_is_applied_while_an_answer_is_written() -> None:
    service = FakeService(["word " * 2000], pause_s=0.01)
    async with unapplied(FakePlanner(), service) as (app, pilot, screen):
        app.worker.do(lambda: app.worker.say("Go on"))
        await until(pilot, lambda: app.worker.answers.is_under_way)
        await press(pilot, "right", "enter", until="an answer is being written")
        assert app.screen is screen
        app.worker.answers.stop()


async def test_nothing_is_applied_to_a_model_whose_plan_is_not_shown() -> None:
    service = FakeService()
    async with planning(FakePlanner(), service) as (app, pilot, screen):
        app.worker.do(lambda: app.worker.use(None, {"ctx": 1000}))
        await until(pilot, lambda: len(service.loads) == 2 and not app.worker.is_loading)
        await press(pilot, "right", "enter", until="loaded anew meanwhile")
        assert app.screen is screen
    assert len(service.loads) == 2


@pytest.mark.parametrize("theme", every_other(["localllm-dark", "localllm-light"]))
async def test_a_small_screen_shows_the_sliders_and_the_prediction_and_scrolls_the_picture(theme: str) -> None:
    async with planning(FakePlanner(name="[bold]a\x1b[31m name"), theme=theme, size=(80, 24)) as (app, pilot, screen):
        assert_shown(app, "context", "RAM cap", "goal", "tok/s, bound by", "⏎ apply", "[bold]a", "26 in memory")
        assert "\x1b" not in shown(app) and "busy machine" not in shown(app)
        await pilot.press("pagedown", "pagedown")
        assert "busy machine" in shown(app)
        assert screen.query_one("#picture").scroll_offset.y > 0


async def test_leaving_does_not_wait_for_a_measurement() -> None:
    fake = FakePlanner()
    fake.gate.clear()
    async with planning(fake) as (app, pilot, _):
        await until(pilot, lambda: fake.wishes)
        await pilot.press("escape")
        assert app.screen is app.chat
    fake.gate.set()


async def test_the_real_model_is_planned_and_loaded_anew_beside_its_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = dict.fromkeys(RECIPES, FormatRates(45.0, 1200.0, 0))
    profile = Profile("this machine", 45.0, 3.0, formats=rates)
    for module in (planner, engine_planning):
        monkeypatch.setattr(module, "kept_profile", lambda: profile)
    async with chatting(serve, device="cpu", max_tokens=8, seed=1, size=(120, 40)) as (app, pilot):
        await say(pilot, "Where did the fox go?")
        said = texts(app)
        assert app.worker.plan is not None and app.worker.host_bytes >= app.worker.plan.ledger["ram"]["weights"]
        await press(pilot, "f2", until=PlanScreen)
        screen = app.screen
        assert isinstance(screen, PlanScreen)
        now = await settled(pilot, screen)
        assert now is not None and now.is_whole and "tiny: " in shown(app)
        assert now.blocks == app.worker.plan.blocks and "in the last answer" in shown(app)
        plan = await settled(pilot, screen, "home")
        assert plan is not None and plan.ctx == 256 < now.ctx
        await press(pilot, "enter", until=lambda: app.worker.plan is not None and app.worker.plan.ctx == 256)
        assert texts(app) == said
        await say(pilot, "And then?")
        assert len(texts(app)) == 4


async def test_a_model_that_is_not_loaded_has_a_plan_and_is_loaded_by_it() -> None:
    service = FakeService()
    service.failure = DoesNotFitError("tiny does not fit", why="too little memory", fix="localllm plan tiny")
    async with planning(FakePlanner(), service) as (app, pilot, screen):
        assert app.worker.model_name is None and screen.planned is not None
        assert_shown(app, "no model is loaded: this is the plan of tiny; enter loads it so")
        service.failure = None
        await press(pilot, "enter", until=lambda: app.worker.model_name is not None)
        assert app.screen is app.chat and service.loads == ["tiny", "tiny"]


async def test_a_plan_is_shown_before_the_first_model_is_asked_for() -> None:
    async with chatting() as (app, pilot):
        await pilot.pause()  # the first model is asked for
        with patch.object(type(app.worker), "selection", None), patch.object(PlanScreen, "_plan"):
            await press(pilot, "f2", until=PlanScreen)


def test_a_plan_says_nothing_of_advice_until_it_is_asked_for() -> None:
    advise, planned = Mock(return_value=["--ctx 1024"]), FakePlanner()._planned(AS_IT_RUNS)
    found = Considered(planned, advise)
    assert found.planned.advice == [] and not advise.called
    assert found.advised() == replace(planned, advice=["--ctx 1024"])


def test_the_status_line_says_how_many_experts_are_in_memory_and_how_often_a_wanted_one_was() -> None:
    facts = EngineFacts(
        1, "", "", ledger={"ram": {"weights": 1}}, limits={"ram": 2}, bound_by="disk", streamed_bytes=9 * _MIB,
        num_experts=480, experts_in_memory=120,
    )  # fmt: skip
    line = joined(memory_line(facts, AnswerRun(), 200)).plain
    assert "experts 25% in memory" in line and "hits" not in line and "a step" not in line
    assert line.endswith("each token waits for reading experts from the disk")
    facts = replace(facts, experts_wanted=1000, expert_hits=900)
    assert "experts 25% in memory  hits 90%" in joined(memory_line(facts, AnswerRun(), 200)).plain
    whole = replace(facts, experts_in_memory=480, streamed_bytes=0)
    assert "experts" not in joined(memory_line(whole, AnswerRun(), 200)).plain

"""The screen of the models, key by key: the hub, the disk and the machine are what a test says they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList

from localllm import hub
from localllm.errors import AccessError, LocalLLMError, ModelNotFoundError, UsageError
from localllm.hub import InstalledModel, ModelFiles, PackedWeights, PullProgress, Removal
from localllm.registry import load_registry
from localllm.runtime.fit_check import Verdict
from localllm.tui.app import ChatApp
from localllm.tui.screens.dialogs import ChoiceDialog
from localllm.tui.screens.models import ModelsScreen
from localllm.tui.widgets.model_table import DownloadView, ModelDetails, ModelTable
from tests.patience import PATIENCE_S
from tests.tui.support import FakeService, assert_shown, chatting, press, send, shown, texts, until

pytestmark = pytest.mark.usefixtures("home", "machine")

GIB = 1 << 30
PART = 100  # bytes between two looks of a pull at its gate
FITS = Verdict("fits", 12.3, 8192, "int4-g64", memory_bytes=4 * GIB)
VERDICTS = {"llama-3.3-70b": Verdict("offloads", 0.184, 4096, "int4-g64"), "phi-4": Verdict("too large", why="4 GiB")}


class FakeDisk:
    """What is here, and what is done with it. A pull moves on a part whenever `let` allows one."""

    def __init__(self) -> None:
        packed = (PackedWeights("int4-g64", Path("/packed"), 4 * GIB, "whole"),)
        entry = load_registry().find("qwen3-8b")
        self.models = [
            InstalledModel("tiny", Path(hub.locate("tiny").directory), 13 << 20),
            InstalledModel("qwen3-8b", Path("/qwen"), 16 * GIB, "Qwen/Qwen3-8B", "a" * 40, entry=entry, packed=packed),
        ]
        self.let = threading.Semaphore(0)
        self.done: dict[str, int] = {}
        self.begun: list[str] = []
        self.failure: LocalLLMError | None = None
        self.removed: list[tuple[str, bool]] = []

    def list_models(self) -> list[InstalledModel]:
        return list(self.models)

    def pull(self, name: str, *, offline: bool, progress: Callable[[PullProgress], None]) -> ModelFiles:
        self.begun.append(name)
        total = 10 * PART
        progress(PullProgress("listing", note="https://hub"))
        while (done := self.done.get(name, 0)) < total:
            while not self.let.acquire(timeout=0.02):
                progress(PullProgress("downloading", "model.safetensors", done, total, done, total))
            if self.failure is not None:
                raise self.failure
            self.done[name] = done + PART
        self.models.append(InstalledModel(name, Path("/new"), total, "org/new", "b" * 40))
        return ModelFiles(Path("/new"), name)

    def removal(self, name: str, *, packed_only: bool = False) -> Removal:
        model = next(model for model in self.models if model.name == name)
        packed_bytes = sum(packed.size_bytes for packed in model.packed)
        if name == "tiny" and not packed_only:
            raise UsageError("the built-in model is not removed", why="it is in the package", fix="localllm list")
        size_bytes = 0 if packed_only else model.size_bytes

        def delete() -> int:
            self.removed.append((name, packed_only))
            self.models.remove(model)
            return size_bytes + packed_bytes

        return Removal(size_bytes, packed_bytes, delete)


@pytest.fixture
def disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDisk:
    fake = FakeDisk()
    for name in ("list_models", "pull", "removal"):
        monkeypatch.setattr(hub, name, getattr(fake, name))
    monkeypatch.setattr("localllm.hub.repo_cache.free_bytes", lambda _folder: 1 << 40)
    return fake


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Has `act(name, say)` come before each verdict."""

    def judging(act: Callable[..., object]) -> None:
        def judge(name: str, resolved: Any, say: Callable[[str], None]) -> Verdict:
            act(name, say)
            return VERDICTS.get(name, FITS)

        monkeypatch.setattr("localllm.runtime.fit_check.judge", judge)

    return judging


@pytest.fixture
def machine(disk: FakeDisk, judge: Any) -> None:
    judge(lambda *_: None)


def screen_of(app: ChatApp) -> ModelsScreen:
    screen = app.screen
    assert isinstance(screen, ModelsScreen)
    return screen


def highlighted(app: ChatApp) -> str:
    line = screen_of(app).query_one(ModelTable).line
    return "" if line is None else line.name


async def open_models(pilot: Pilot[None], name: str = "") -> ModelsScreen:
    """The screen with its rows, and this model highlighted."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    await pilot.press("f3")
    await until(pilot, lambda: isinstance(app.screen, ModelsScreen) and app.screen.query_one(ModelTable).num_shown > 20)
    if name:
        screen_of(app).query_one(ModelTable).highlight(name)
        await pilot.pause()
    return screen_of(app)


@asynccontextmanager
async def models(
    *service: Any, model: str = "", **settings: Any
) -> AsyncIterator[tuple[ChatApp, Pilot[None], ModelsScreen]]:
    """`chatting`, with the screen, its rows, and this model highlighted."""
    async with chatting(*service, **settings) as (app, pilot):
        yield app, pilot, await open_models(pilot, model)


async def answer(pilot: Pilot[None], text: str) -> None:
    """Chooses the reply that begins so."""
    await until(pilot, lambda: isinstance(pilot.app.screen, ChoiceDialog))
    replies = pilot.app.screen.query_one(OptionList)
    drawn = [str(option.prompt) for option in replies.options]
    replies.highlighted = next(index for index, prompt in enumerate(drawn) if prompt.startswith(text))
    await press(pilot, "enter", until=lambda: not isinstance(pilot.app.screen, ChoiceDialog))


async def begin_pull(pilot: Pilot[None], name: str, disk: FakeDisk) -> ModelsScreen:
    screen = await open_models(pilot, name)
    await pilot.press("p")
    await answer(pilot, "download it")
    await until(pilot, lambda: name in disk.begun)
    return screen


async def test_all_models_are_listed_with_what_they_would_do_here_and_details_where_there_is_room() -> None:
    async with models(size=(200, 120)) as (app, pilot, _):
        await until(pilot, lambda: "0.18" in shown(app) and "…" not in shown(app))
        rows = [line.split() for line in shown(app).splitlines() if line.split()]
        lines = {row[row[0] in ("●", "*")]: " ".join(row) for row in rows}
        assert lines["tiny"].startswith("● tiny here 4.0 GiB 12")
        assert lines["qwen3-8b"].startswith("qwen3-8b here 4.0 GiB 12 40k apache-2.0 int4-g64 4.0 GiB")
        assert lines["llama-3.3-70b"].startswith("llama-3.3-70b 131.5 GiB 0.18 128k llama3.3 (gated)")
        assert lines["phi-4"].startswith("phi-4 27.4 GiB no 16k mit")
        await until(pilot, lambda: "attention heads" in shown(app) and "12.3 tok/s in int4-g64" in shown(app))


async def test_the_least_important_columns_go_where_there_is_no_room() -> None:
    async with models(size=(80, 24), model="llama-3.3-70b") as (app, pilot, _):
        await until(pilot, "0.18")
        assert "context" in shown(app) and "packed" not in shown(app)
        await pilot.resize_terminal(50, 24)
        await until(pilot, lambda: "context" not in shown(app))
        assert "llama-3.3-70b" in shown(app) and "0.18" in shown(app)


async def test_what_is_here_comes_first_then_what_suits_this_machine_best() -> None:
    async with models(size=(100, 120)) as (app, pilot, screen):
        await until(pilot, lambda: "…" not in shown(app))
        names = [line.name for line in screen.table.lines]
        assert names[:3] == ["qwen3-8b", "tiny", "qwen3.5-122b-a10b"] and names[-2:] == ["llama-3.3-70b", "phi-4"]
        assert [line.name for line in screen.table.lines if line.is_best] == ["qwen3.5-122b-a10b"]
        assert "* qwen3.5-122b-a10b" in shown(app)


async def test_rows_are_there_before_their_verdicts(judge: Any) -> None:
    gate = threading.Event()
    judge(lambda _, say: (say("measuring the disk"), gate.wait(PATIENCE_S)))
    async with models() as (app, pilot, _):
        await until(pilot, "measuring the disk")
        assert "qwen3-8b" in shown(app) and " 12 " not in shown(app)
        gate.set()
        await until(pilot, lambda: " 12 " in shown(app) and "measuring" not in shown(app))


async def test_nothing_is_measured_and_no_other_model_chosen_while_an_answer_is_written(judge: Any) -> None:
    measured = threading.Event()
    judge(lambda _, say: (say("measuring the disk"), measured.set()))
    async with chatting(FakeService(["word " * 400], pause_s=0.05)) as (app, pilot):
        await send(pilot, "Go on", until=lambda: app.chat.is_answering)
        await open_models(pilot, "qwen3-8b")
        await until(pilot, "once it has nothing else to do")
        await press(pilot, "enter", until="an answer is being written")
        assert isinstance(app.screen, ModelsScreen) and not measured.is_set()
        app.worker.answers.stop()
        await until(pilot, measured.is_set)


async def test_a_verdict_is_found_out_once(judge: Any) -> None:
    judged: list[str] = []
    judge(lambda name, _: judged.append(name))
    async with models() as (_, pilot, screen):
        count = screen.query_one(ModelTable).num_shown
        await until(pilot, lambda: len(judged) == count)
        await pilot.press("f3")
        await open_models(pilot)
        await until(pilot, " 12 ")
        assert len(judged) == count


async def test_what_is_typed_filters_and_enter_chooses_an_installed_model_for_the_chat() -> None:
    service = FakeService(["One.", "Two."])
    async with chatting(service, asked="Hello") as (app, pilot):
        await open_models(pilot)
        await pilot.press("slash", *"wen3-8")
        assert screen_of(app).query_one(ModelTable).num_shown == 2  # the other is also called deepseek-r1-0528-qwen3-8b
        app.worker.use = lambda word, changes=None: service.loads.append(word)  # type: ignore[method-assign, assignment]
        await press(pilot, "enter", until=lambda: app.screen is app.chat)
        await until(pilot, lambda: service.loads[-1] == "qwen3-8b")
        assert texts(app) == [("user", "Hello"), ("assistant", "One.")]


async def test_a_name_that_no_model_has_is_said_to_be_one_and_escape_leaves_the_filter_then_the_screen() -> None:
    async with models() as (app, pilot, screen):
        await press(pilot, "slash", *"qqq", until="no name has 'qqq' in it")
        await press(pilot, "backspace", "backspace", "backspace", until="in all")
        await pilot.press(*"phi", "down")
        assert highlighted(app).startswith("phi") and screen.query_one(ModelTable).num_shown == 3
        await pilot.press("escape")
        assert screen.query_one(ModelTable).num_shown > 20
        await press(pilot, "escape", until=lambda: app.screen is app.chat)


async def test_a_pull_shows_how_far_it_is_and_is_paused_and_gone_on_with(disk: FakeDisk) -> None:
    async with chatting() as (app, pilot):
        await begin_pull(pilot, "gemma-3-1b", disk)
        disk.let.release(3)
        await until(pilot, lambda: "pulling 30%" in shown(app) and "300 B of 1000 B" in shown(app))
        assert "model.safetensors" in shown(app)
        await press(pilot, "p", until="paused 30%")
        await pilot.press("p")
        disk.let.release(7)
        await until(pilot, "gemma-3-1b is here")
        assert disk.begun == ["gemma-3-1b", "gemma-3-1b"]
        await until(pilot, lambda: not app.downloads.all and not app.screen.query(DownloadView))


def where(app: ChatApp, word: str) -> tuple[int, int] | None:
    """(column, row) of a word beside the file that is being fetched; None while it is not shown."""
    lines = enumerate(shown(app).splitlines())
    return next(((line.index(word) + 1, y) for y, line in lines if "model.safetensors" in line and word in line), None)


async def test_a_pull_is_paused_and_cancelled_by_the_mouse(disk: FakeDisk) -> None:
    async with chatting() as (app, pilot):
        await begin_pull(pilot, "gemma-3-1b", disk)
        for word, state in (("pause", "paused"), ("cancel", "what is there is kept")):
            await until(pilot, lambda word=word: where(app, word) is not None)
            place = where(app, word)
            assert place is not None
            await pilot.click(offset=place)
            await until(pilot, state)
        assert app.downloads.all == ()


async def test_a_pull_goes_on_behind_the_chat_which_tells_of_its_end(disk: FakeDisk) -> None:
    async with chatting() as (app, pilot):
        await begin_pull(pilot, "gemma-3-1b", disk)
        await press(pilot, "f3", until=lambda: app.screen is app.chat)
        disk.let.release(10)
        await until(pilot, "gemma-3-1b is here")


async def test_a_pull_that_fails_is_told_in_four_lines_and_can_be_begun_again(disk: FakeDisk) -> None:
    disk.failure = AccessError("[b]gated[/b] \x1b[31m", why="its licence is not accepted", fix="open the page")
    async with chatting() as (app, pilot):
        screen = await begin_pull(pilot, "gemma-3-1b", disk)
        disk.let.release()
        await until(pilot, lambda: screen.notice.error is not None)
        assert_shown(
            app, "[b]gated[/b] \\x1b[31m", "why:   its licence is not accepted", "fix:   open the page", "more:"
        )
        disk.failure = None
        disk.let.release(10)
        await press(pilot, "p", until="gemma-3-1b is here")


async def test_leaving_stops_a_pull_that_keeps_what_it_has(disk: FakeDisk) -> None:
    async with chatting() as (app, pilot):
        await begin_pull(pilot, "gemma-3-1b", disk)
        disk.let.release(2)
        await until(pilot, "pulling 20%")
    (transfer,) = app.downloads.all
    assert transfer.state == "paused" and disk.done["gemma-3-1b"] == 2 * PART


async def test_a_repository_that_nobody_listed_can_be_pulled(disk: FakeDisk) -> None:
    async with models() as (app, pilot, _):
        await pilot.press("slash")
        screen_of(app).filter_input.value = "someone/else-1b"
        await pilot.press("enter")
        await answer(pilot, "download it")
        disk.let.release(10)
        await until(pilot, lambda: disk.begun == ["someone/else-1b"])


async def test_a_model_is_packed_in_the_chosen_format_and_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[str] = []

    def pack_model(files: ModelFiles, weights: Any, converting: Callable[[int, int], None], *_: Any) -> None:
        packed.append(weights.name)
        while True:
            converting(3 * GIB, 4 * GIB)
            threading.Event().wait(0.02)

    monkeypatch.setattr("localllm.engine.weights.pack_model", pack_model)
    async with models(model="tiny") as (app, pilot, _):
        await pilot.press("z")
        await answer(pilot, "int8")
        await until(pilot, "packing 75%")
        assert packed == ["int8"] and "3.0 GiB of 4.0 GiB" in shown(app)
        await press(pilot, "c", until="what is there is kept")
        assert app.downloads.all == ()


async def test_delete_names_what_goes_and_tells_what_was_freed(disk: FakeDisk) -> None:
    async with models(model="qwen3-8b") as (app, pilot, _):
        await press(pilot, "d", until=ChoiceDialog)
        assert "16.0 GiB of Qwen/Qwen3-8B" in shown(app) and "frees 20.0 GiB" in shown(app)
        await pilot.press("enter")  # what is highlighted keeps it
        await until(pilot, "nothing was deleted")
        assert disk.removed == []
        await pilot.press("d")
        await answer(pilot, "delete it")
        await until(pilot, "deleted qwen3-8b: 20.0 GiB freed")
        assert disk.removed == [("qwen3-8b", False)]


async def test_a_list_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_models() -> list[InstalledModel]:
        raise ModelNotFoundError("the folder is gone", why="a disk was taken out", fix="put it in")

    monkeypatch.setattr(hub, "list_models", list_models)
    async with chatting() as (_, pilot):
        await press(pilot, "f3", until="the folder is gone")


async def test_a_list_that_is_read_while_the_screen_is_removed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chatting() as (app, pilot):
        await press(pilot, "f3", until=ModelsScreen)
        screen = app.screen
        assert isinstance(screen, ModelsScreen)

        async def read_until_the_table_is_gone(*_: object) -> list[Any]:
            while screen.query(ModelTable):
                await asyncio.sleep(0)
            return []

        monkeypatch.setattr(screen, "_in_thread", read_until_the_table_is_gone)
        screen._list()
        await pilot.pause()


async def test_what_is_packed_can_be_deleted_alone(disk: FakeDisk) -> None:
    async with models(model="qwen3-8b") as (_, pilot, _):
        await pilot.press("d")
        await answer(pilot, "delete what is packed alone")
        await until(pilot, "deleted what was packed of qwen3-8b: 4.0 GiB freed")
        assert disk.removed == [("qwen3-8b", True)]


async def test_what_cannot_be_deleted_says_why(disk: FakeDisk) -> None:
    async with models(model="tiny") as (app, pilot, screen):
        await press(pilot, "d", until=lambda: screen.notice.error is not None)
        assert "the built-in model is not removed" in shown(app)


async def test_the_loaded_model_is_not_deleted_without_a_word(disk: FakeDisk) -> None:
    disk.models[0] = InstalledModel("tiny", Path("/tiny"), 1, packed=(PackedWeights("int8", Path("/p"), GIB, "whole"),))
    async with models(model="tiny") as (app, pilot, _):
        await press(pilot, "d", until=ChoiceDialog)
        assert "It is loaded now" in shown(app)


async def test_details_tell_what_is_known_of_a_model() -> None:
    async with models(model="tiny", size=(90, 40)) as (app, pilot, screen):
        assert not screen.query_one(ModelDetails).display
        await press(pilot, "i", until=lambda: "vocabulary" in shown(app) and "apache-2.0" in shown(app))
        await press(pilot, "up", until=lambda: screen.query_one(ModelDetails).model == "qwen3-8b")
        await pilot.press("i")
        assert not screen.query_one(ModelDetails).display


async def test_a_click_highlights_and_another_chooses_and_asks_where_the_model_is_not_here(disk: FakeDisk) -> None:
    async with models(size=(100, 120)) as (app, pilot, _):
        row = next(y for y, line in enumerate(shown(app).splitlines()) if "llama-3.3-70b" in line)
        await pilot.click(offset=(5, row))
        await until(pilot, lambda: highlighted(app) == "llama-3.3-70b")
        await pilot.click(offset=(5, row))
        await until(pilot, ChoiceDialog)
        assert_shown(app, "meta-llama/Llama-3.3-70B-Instruct", "llama3.3", "gated", "about 131.5 GiB", "HF_TOKEN")
        await pilot.press("escape")
        await pilot.pause()
        assert disk.begun == []


async def test_the_line_of_keys_can_be_clicked_and_shows_the_users_own() -> None:
    async with models(keys={"models.filter": "ctrl+f"}) as (app, pilot, screen):
        last = shown(app).splitlines()[-1]
        assert "^f filter" in last
        await pilot.click(offset=(last.index("filter"), 29))
        await until(pilot, lambda: screen.filter_input.has_focus)


@pytest.mark.parametrize("typed", ["https://huggingface.co/Qwen/Qwen3-8B", "hf.co/qwen/qwen3-8b", "Qwen/Qwen3-8B@main"])
async def test_the_address_of_a_model_that_is_here_finds_it(typed: str) -> None:
    async with models() as (_, pilot, screen):
        await pilot.press("slash")
        screen.filter_input.value = typed
        await until(pilot, lambda: screen.table.lines and screen.table.lines[0].name == "qwen3-8b")
        assert all(line.row.is_here or "8b" in line.name for line in screen.table.lines)


@pytest.mark.parametrize(("key", "begun"), [("y", ["gemma-3-1b"]), ("n", [])])
async def test_the_question_before_a_pull_is_answered_by_a_letter(disk: FakeDisk, key: str, begun: list[str]) -> None:
    async with chatting() as (_, pilot):
        await open_models(pilot, "gemma-3-1b")
        await press(pilot, "p", until=ChoiceDialog)
        await press(pilot, key, until=ModelsScreen)
        await until(pilot, lambda: disk.begun == begun)

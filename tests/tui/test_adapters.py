"""Adapters on the full screen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localllm.chat.adapters import with_adapters
from localllm.chat.recorder import look_up
from localllm.config import load_settings
from localllm.errors import AdapterError
from localllm.hub.adapters import AdapterFiles
from localllm.runtime.presets import save_preset
from localllm.runtime.selection import selected
from localllm.tui.app import ChatApp, Start
from tests.adapter_support import write_peft
from tests.tui.support import FakeService, assert_shown, chatting, command, running, say, send, shown, until

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def fox(tmp_path: Path) -> Path:
    return write_peft(tmp_path / "fox", base="tiny")


async def test_the_model_is_shown_with_its_adapters_on_a_narrow_screen_and_requests_have_them(fox: Path) -> None:
    service = FakeService()
    async with chatting(service, size=(80, 24)) as (app, pilot):
        await command(pilot, f"/adapter {fox}:0.5", until="tiny int4-g64 + fox:0.5")
        await say(pilot, "one")
        [ref] = service.requests[0].adapters
        assert (ref.path, ref.scale, ref.name) == (str(fox), 0.5, "fox")
        assert_shown(app, "tiny int4-g64 + fox:0.5")
        await command(pilot, "/adapter off", until="adapters: none")
        assert "fox" not in shown(app)
        await say(pilot, "two")
        assert service.requests[1].adapters == ()


async def test_a_switch_tells_its_cost(fox: Path) -> None:
    async with chatting(asked="one") as (app, pilot):
        await command(pilot, f"/adapter {fox}", until="tokens of this chat are computed anew")
        assert_shown(app, "adapters: fox")


async def test_a_wrong_adapter_is_refused_and_the_chat_stays(fox: Path) -> None:
    service = FakeService()
    async with chatting(service, asked="one") as (_, pilot):
        await command(pilot, "/adapter nosuch", until="the adapter nosuch is not on this disk")
        await say(pilot, "two")
        assert service.requests[1].adapters == ()


async def test_a_loaded_model_drops_an_adapter_that_it_cannot_have_and_says_so(
    fox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = FakeService()

    def refuse(request: object) -> None:
        raise AdapterError("the adapter fox does not fit tiny", why="it is of another width")

    monkeypatch.setattr(service.engine, "check", refuse)
    async with chatting(service, adapter=(str(fox),)) as (app, pilot):
        await until(pilot, "going on without the adapter fox")
        assert "+ fox" not in shown(app)


async def test_a_resumed_chat_has_the_adapters_of_its_last_answer_and_names_one_that_is_gone(fox: Path) -> None:
    async with chatting(asked="one", adapter=(str(fox),)) as (app, pilot):
        first = app.chat.session_id
    async with chatting(asked="two") as (app, pilot):
        await command(pilot, f"/sessions {first}", until="tiny int4-g64 + fox")
        await until(pilot, "adapters: fox, as of its last answer")
    fox.rename(fox.with_name("elsewhere"))
    assert look_up(app.worker, first or "").adapters == (str(fox),)
    async with chatting(asked="three") as (app, pilot):
        await command(pilot, f"/sessions {first}", until="going on without the adapter fox")
        assert "+ fox" not in shown(app).splitlines()[-3]


async def test_a_chat_resumed_on_the_line_names_an_adapter_that_is_gone_on_the_screen(fox: Path) -> None:
    async with chatting(asked="one", adapter=(str(fox),)) as (app, _):
        resumed = look_up(app.worker, app.chat.session_id or "")
    fox.rename(fox.with_name("elsewhere"))
    selection = selected(load_settings({}), None)
    selection = replace(selection, resolved=with_adapters(selection.resolved, ()))  # as `chat --resume` selects it
    async with running(ChatApp(Start(selection, load_settings({}), resumed), FakeService())) as pilot:
        await until(pilot, "going on without the adapter fox")


async def test_names_of_adapters_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [AdapterFiles(Path(name), name, f"maker/{name}", "c", "tiny", 8, 1) for name in ("fox", "owl")]
    monkeypatch.setattr("localllm.tui.commands.list_adapters", lambda: here)
    async with chatting() as (app, pilot):
        await pilot.press(*"/adapter f", "tab")
        assert app.chat.composer.text == "/adapter fox"
        await pilot.press("ctrl+c", *"/adapter + o", "tab")
        assert app.chat.composer.text == "/adapter + owl"
        await pilot.press("ctrl+c", *"/adapter of", "tab")
        assert app.chat.composer.text == "/adapter off"
        await send(pilot, "/adapter owl:2")
        await until(pilot, "the adapter owl is not on this disk")


async def test_behind_a_minus_the_adapters_of_the_chat_complete(fox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frog = AdapterFiles(Path("frog"), "f", "maker/f", "c", "tiny", 8, 1)
    monkeypatch.setattr("localllm.tui.commands.list_adapters", lambda: [frog])
    twin = write_peft(fox.parent / "other" / "fox", base="tiny")
    async with chatting(adapter=(str(fox),)) as (app, pilot):
        await until(pilot, "tiny int4-g64 + fox")
        await pilot.press(*"/adapter - f", "tab")
        assert app.chat.composer.text == "/adapter - fox"
        await pilot.press("ctrl+c")
        await command(pilot, f"/adapter + {twin}", until="adapters:")
        await pilot.press(*"/adapter - ", "down", "tab")
        assert app.chat.composer.text == f"/adapter - {twin}"


async def test_show_names_the_adapters_and_that_there_are_none(fox: Path) -> None:
    async with chatting() as (_, pilot):
        await command(pilot, "/show", until="adapters: none")
        await command(pilot, f"/adapter {fox}", until="adapters: fox")
        await command(pilot, "/show", until="adapters: fox")


async def test_a_preset_brings_its_adapters_and_takes_them_with_it(fox: Path) -> None:
    owl = write_peft(fox.with_name("owl"), base="tiny")
    save_preset("foxy", {"model": "tiny", "adapter": [str(fox)]}, replaces=False)
    service = FakeService()
    async with chatting(service) as (app, pilot):
        await command(pilot, "/model foxy", until="loaded tiny + fox: ")
        await command(pilot, f"/adapter {owl}", until="tiny int4-g64 + owl")
        app.chat.worker.do(lambda: app.chat.worker.use(None, {"ctx": 512}))  # as the plan does
        await until(pilot, "loaded tiny + owl: ")
        await command(pilot, "/adapter off", until="adapters: none")
        await command(pilot, "/model tiny", until="loaded tiny: ")
        await command(pilot, "/model foxy", until="loaded tiny + fox: ")
        await command(pilot, "/model tiny", until="loaded tiny: ")
        assert "+ fox" not in shown(app).splitlines()[-3]

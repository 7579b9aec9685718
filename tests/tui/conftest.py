"""A home of its own for each test of the full-screen chat."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual._compositor import Compositor
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session", autouse=True)
def style_sheets() -> Iterator[None]:
    """Are parsed once: each test has an app of its own, and the sheets of all its widgets take a third of a second."""
    parsed: dict[tuple[Any, ...], list[RuleSet]] = {}
    parse = Stylesheet._parse_rules

    def parse_once(self: Stylesheet, *sheet: Any, **about: Any) -> list[RuleSet]:
        key = (frozenset(self._variables.items()), sheet, frozenset(about.items()))
        if key not in parsed:
            parsed[key] = parse(self, *sheet, **about)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_naps() -> Iterator[None]:
    """A pilot looks every 10 ms, not every 20, whether a key has had its effect: that was a third of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("textual._wait.SLEEP_GRANULARITY", 1 / 100)
        patch.setattr("textual._wait.SLEEP_IDLE", 1 / 1000)
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_drawn_for_nobody(request: pytest.FixtureRequest) -> Iterator[None]:
    """A screen without a terminal is drawn only for a test that looks at it: the rest, which Textual draws and drops,
    was a quarter of the time. Pictures are taken of screens that are drawn as they are on a terminal."""
    if request.path.stem == "test_pictures":
        yield
        return
    render = Compositor.render_update

    def render_what_is_looked_at(self: Compositor, full: bool = False, *rest: Any, **how: Any) -> Any:
        if full:
            return render(self, full, *rest, **how)
        self._dirty_regions.clear()
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compositor, "render_update", render_what_is_looked_at)
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path

"""Pictures of the full-screen chat, in docs/screens: each screen at three sizes, dark and light.

    python -m tools.chat_screens            writes those that changed; the tests compare them
    python -m tools.chat_screens --real     writes the README's, docs/picture-*.svg: a chat with the built-in model

What they show is made up, so that each run draws the same. Nothing of the README's is: its speeds are of the machine
that drew it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from localllm import hub
from localllm.config import load_settings
from localllm.engine.events import SpeculationStats, StepSplit, Timings, Usage
from localllm.history import Conversation, History, Said, history_file
from localllm.hub import InstalledModel, ModelDescription, ModelFiles, PackedWeights
from localllm.registry import load_registry
from localllm.runtime.fit_check import Verdict
from localllm.runtime.selection import selected
from localllm.tui.app import ChatApp, Start
from localllm.tui.key_scopes import checked_keys
from localllm.tui.model_loader import serve
from localllm.tui.plan_worker import AS_IT_RUNS, PlanWorker
from localllm.tui.screens.plan import PlanScreen
from localllm.tui.themes import DARK, LIGHT
from tests.tui.support import FakeService, chat_app, running, say, shown, until
from tests.tui.test_plan_screen import FakePlanner

FOLDER = Path(__file__).parent.parent / "docs" / "screens"
VERSIONS = FOLDER / "versions.json"
SIZES = {"80x24": (80, 24), "120x40": (120, 40), "200x60": (200, 60)}
THEMES = {"dark": DARK.name, "light": LIGHT.name}

_QUESTIONS = ("Tell me a tale about a fox who finds a lantern.", "And what became of the lantern?")
_REAL_SIZE = (110, 36)
_LOOK_S = 0.05
_ANSWER = """<think>
The user wants a function and how fast it is. Memoised recursion is the shortest.
</think>

A number of this sequence is the sum of the **two before it**:

```python
from functools import cache


@cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
```

| how | additions for $n = 90$ | grows as |
|---|--:|:-:|
| plain recursion | $4.7 \\times 10^{18}$ | $\\varphi^n$ |
| with `cache` | 89 | $n$ |

- [x] `cache` keeps each result, so that it is computed once.
- [ ] For a very large *n* use a loop: Python's recursion ends at 1,000 calls.
"""
_CHATS = (
    ("Bread without kneading", "How does bread rise without kneading?", "Time does what hands do."),
    ("Tides", "Why are there two tides a day?", "The moon pulls the near side more than the earth, and the earth more "
     "than the far side: water stands higher on both."),
    ("A tale for tonight", "Tell me of a fox.", "A fox lived by a pond, and the moon was in it every night."),
)  # fmt: skip
_GIB = 1 << 30
_LEDGER = {
    "vram": {"weights": 5 * _GIB, "keys and values": _GIB, "workspace": 300 << 20},
    "ram": {"weights": 9 * _GIB, "program": 700 << 20},
    "disk": {"weights": 3 * _GIB},
}


def _service() -> FakeService:
    split = StepSplit(compute_s=2.1, wait_s=1.4, sample_s=0.1, copy_s=2.9, copied_bytes=9_000_000_000)
    finished = {
        "usage": Usage(412, 384, 237),
        "timings": Timings(ttft_s=0.42, decode_tok_s=11.8, split=split),
        "speculation": SpeculationStats("ngram+skip", 120, 84, 60, 2.4),
    }
    service = FakeService([_ANSWER], finished=finished)
    plan = SimpleNamespace(
        ledger=_LEDGER, limits={"vram": 8 * _GIB, "ram": 16 * _GIB}, bound_by="disk", streamed_bytes=3 * _GIB
    )
    service.engine.current_plan = plan
    return service


def _app(pilot: Pilot[Any]) -> ChatApp:
    assert isinstance(pilot.app, ChatApp)
    return pilot.app


async def _welcome(pilot: Pilot[Any]) -> None:
    welcome = _app(pilot).chat.transcript.welcome
    await until(pilot, lambda: welcome.machine and "6  A tale for tonight" in shown(_app(pilot)))


async def _chat(pilot: Pilot[Any]) -> None:
    await say(pilot, "How do I compute Fibonacci numbers in Python, and how fast is it?")
    await until(pilot, "▸ How do I compute")


async def _help(pilot: Pilot[Any]) -> None:
    await _chat(pilot)
    await pilot.press("f1")


async def _plan(pilot: Pilot[Any]) -> None:
    app = _app(pilot)
    assert app.worker.selection is not None
    advice = ("--ram 1.1GiB: about 45 tok/s", "--kv int4: twice the context in the same memory")
    planning = FakePlanner("gemma-3-1b", advice=advice)
    engine: Any = app.worker.session.engine
    engine.current_plan = planning._planned(AS_IT_RUNS).plan
    PlanWorker.__init__(planning, app.worker, app.worker.selection)
    screen = PlanScreen(app.worker, app.worker.selection, planning)
    app.push_screen(screen)
    await until(pilot, lambda: bool(screen.sliders) and screen.shown_wish == screen.wish)
    await pilot.press("down", "down", "down", *["left"] * 5)
    await until(pilot, lambda: screen.shown_wish == screen.wish)
    await until(pilot, lambda: "twice the context" in shown(app))


async def _models(pilot: Pilot[Any]) -> None:
    await pilot.press("f3")
    await until(pilot, "* qwen")  # the best is marked once all are judged
    await pilot.press("down")


def _keep_chats() -> None:
    """Chats of other days, one of them pinned."""
    for number, (title, question, answer) in enumerate(_CHATS):
        said = (Said(f"q{number}", None, "user", question), Said(f"a{number}", f"q{number}", "assistant", answer))
        kept_at = time.time() - 7250 * (number + 1)
        facts = {"pinned": True} if number == 2 else {}
        about = (f"chat{number}", f"chat-{number}", title, "qwen3-8b", None, kept_at, kept_at, f"a{number}")
        with History.open(history_file()) as history:
            history.add(Conversation(*about, said, facts))


async def real_pictures() -> dict[str, str]:
    """Ask the built-in model, and return the screen as SVG, dark and light. Nothing of it is made up."""
    resolved = load_settings({"seed": 1, "device": "cpu"})
    selection = selected(resolved, "tiny")
    start = Start(selection, resolved, None, None, {}, DARK.name, checked_keys(resolved), "", False, False)
    app, found = ChatApp(start, serve, nullcontext), {}
    async with app.run_test(size=_REAL_SIZE) as pilot:
        while app.chat.status.facts is None:
            await pilot.pause(_LOOK_S)
        for question in _QUESTIONS:
            await _ask(pilot, app, question)
        for field in app.screen.query(TextArea):
            field.cursor_blink = False
        for tone, theme in THEMES.items():
            app.theme = theme
            await pilot.pause(_LOOK_S)
            found[tone] = drawn(app)
    app.close(2.0)
    return found


async def _ask(pilot: Pilot[None], app: ChatApp, question: str) -> None:
    """Type a question, and wait for the end of its answer."""
    num_turns = app.chat.num_turns
    await pilot.press(*("space" if letter == " " else letter for letter in question), "enter")
    while app.chat.num_turns < num_turns + 2 or app.chat.is_answering:
        await pilot.pause(_LOOK_S)


Scene = Callable[[Pilot[Any]], Awaitable[None]]
SCENES: dict[str, Scene] = {
    "welcome": _welcome, "chat": _chat, "help": _help, "plan": _plan, "models": _models,
}  # fmt: skip


async def pictures(name: str) -> dict[str, str]:
    """A scene's pictures as SVG, by the names of their files. Run it with a home folder that is empty."""
    found = {}
    _keep_chats()
    with _machine():
        app = chat_app(_service())
        async with running(app, SIZES["120x40"]) as pilot:
            await until(pilot, lambda: app.chat.status.facts is not None)
            await SCENES[name](pilot)
            for field in app.screen.query(Input):
                field.cursor_blink = False
            for size, (columns, rows) in SIZES.items():
                await pilot.resize_terminal(columns, rows)
                for tone, theme in THEMES.items():
                    app.theme = theme
                    await pilot.pause(0.05)
                    found[f"{name}-{size}-{tone}.svg"] = drawn(app)
    return found


@contextmanager
def _machine() -> Iterator[None]:
    """A machine that is made up, and what is on its disk."""
    line = "8 cores; 24.1 GiB of 31.2 GiB memory free; NVIDIA GeForce RTX 4070, 7.2 GiB free"
    packed = PackedWeights("int4-g64", Path("/packed"), 4 * _GIB, "whole")
    here = [
        InstalledModel("tiny", Path(hub.locate("tiny").directory), 13 << 20),
        InstalledModel("qwen3-8b", Path("/qwen"), 16 * _GIB, "Qwen/Qwen3-8B", "a" * 40, packed=(packed,)),
    ]
    with (
        patch("localllm.tui.chat_worker.machine_line", lambda: line),
        patch.object(hub, "list_models", lambda: here),
        patch("localllm.runtime.fit_check.judge", _judged),
        patch.object(hub, "describe", _described),
        patch("localllm.hub.repo_cache.free_bytes", lambda _folder: 500 * _GIB),  # what does not fit is no best model
    ):
        yield


def _described(name: str) -> ModelDescription:
    entry = load_registry().find(name)
    packed = PackedWeights("int4-g64", Path("/packed"), 4 * _GIB, "whole")
    files = ModelFiles(Path("/home/you/.cache/huggingface/hub/models--Qwen--Qwen3-8B"), name, "Qwen/Qwen3-8B", "a" * 40)
    return ModelDescription(
        name, files, entry, "Qwen/Qwen3-8B", "a" * 40, 16 * _GIB, 0, "qwen3", 36, 4096, 32, 8, 151_936, 40_960,
        packed=(packed,),
    )  # fmt: skip


def _judged(name: str, _resolved: Any, _say: Any) -> Verdict:
    billions = next((entry.parameters for entry in load_registry().entries if entry.name == name), None) or 0.007
    if billions > 60:
        return Verdict("too large", why="it needs 36.9 GiB")
    memory_bytes = int(billions * 1e9 * 0.57)
    if billions > 9:
        return Verdict("offloads", 90 / billions**1.6, 8192, "int4-g64", memory_bytes=memory_bytes)
    return Verdict("fits", 480 / (billions + 0.5), 8192, "int4-g64", memory_bytes=memory_bytes)


def versions() -> dict[str, str]:
    """Versions of the libraries that draw: others draw a line or a colour otherwise."""
    return {name: version(name) for name in ("textual", "rich", "Pygments", "markdown-it-py")}


def drawn(app: ChatApp) -> str:
    """The screen as SVG, without a font from the network, and with names that do not change from picture to picture."""
    svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", app.export_screenshot(title="localllm"), flags=re.DOTALL)
    return re.sub(r"terminal-\d+", "terminal", svg.replace("Fira Code, monospace", "monospace"))


def main() -> None:
    if "--real" in sys.argv:
        with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, {"LOCALLLM_HOME": home}):
            for tone, svg in asyncio.run(real_pictures()).items():
                (FOLDER.parent / f"picture-{tone}.svg").write_text(svg, encoding="utf-8")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    VERSIONS.write_text(json.dumps(versions(), indent=1) + "\n")
    for name in SCENES:
        with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, {"LOCALLLM_HOME": home}):
            for file, svg in asyncio.run(pictures(name)).items():
                if not (FOLDER / file).exists() or (FOLDER / file).read_text(encoding="utf-8") != svg:
                    (FOLDER / file).write_text(svg, encoding="utf-8")
                    print(f"wrote {file}")


if __name__ == "__main__":
    main()

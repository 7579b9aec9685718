"""Pictures of the full-screen chat, in docs/screens: each screen at two sizes, dark and light.

    python -m tools.chat_screens            writes those that changed; the tests compare them

What they show is made up, so that each run draws the same.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from textual.pilot import Pilot

from localllm.engine.events import SpeculationStats, StepSplit, Timings, Usage
from localllm.errors import DoesNotFitError
from localllm.tui.app import ChatApp
from tests.tui.support import FakeService, chat_app, running, say, until

FOLDER = Path(__file__).parent.parent / "docs" / "screens"
SIZES = {"80x24": (80, 24), "160x50": (160, 50)}
THEMES = {"dark": "textual-dark", "light": "textual-light"}

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

| how | additions for n = 90 |
|---|---|
| plain recursion | about 4.7 * 10^18 |
| with `cache` | 89 |

- `cache` keeps each result, so that it is computed once.
- For a very large *n* use a loop: Python's recursion ends at 1,000 calls.
"""
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
    service.engine.plan = service.engine.residency.plan = plan
    return service


def _app(pilot: Pilot[Any]) -> ChatApp:
    assert isinstance(pilot.app, ChatApp)
    return pilot.app


async def _welcome(pilot: Pilot[Any]) -> None:
    await until(pilot, lambda: _app(pilot).chat.transcript.welcome.machine != "")


async def _chat(pilot: Pilot[Any]) -> None:
    await say(pilot, "How do I compute Fibonacci numbers in Python, and how fast is it?")


async def _error(pilot: Pilot[Any]) -> None:
    await _chat(pilot)
    why = "36.9 GiB are needed, 11.2 GiB of GPU memory and 24 GiB of memory are free"
    _app(pilot).chat.notice.tell(
        DoesNotFitError("llama-3.3-70b does not fit", why=why, fix="localllm plan llama-3.3-70b")
    )


async def _commands(pilot: Pilot[Any]) -> None:
    await _chat(pilot)
    await pilot.press("/", "s")


async def _help(pilot: Pilot[Any]) -> None:
    await pilot.press("f1")


Scene = Callable[[Pilot[Any]], Awaitable[None]]
SCENES: dict[str, Scene] = {
    "welcome": _welcome, "chat": _chat, "error": _error, "commands": _commands, "help": _help,
}  # fmt: skip


async def pictures(name: str) -> dict[str, str]:
    """A scene's pictures as SVG, by the names of their files. Run it with a home folder that is empty."""
    found = {}
    with patch(
        "localllm.tui.desk.machine_line", lambda: "8 cores; 24.1 GiB of 31.2 GiB memory free; RTX 4070, 8 GiB free"
    ):
        app = chat_app(_service())
        async with running(app, SIZES["160x50"]) as pilot:
            await until(pilot, lambda: app.chat.status.facts is not None)
            await SCENES[name](pilot)
            for size, (columns, rows) in SIZES.items():
                await pilot.resize_terminal(columns, rows)
                for tone, theme in THEMES.items():
                    app.theme = theme
                    await pilot.pause(0.05)
                    found[f"{name}-{size}-{tone}.svg"] = _plain(app.export_screenshot(title="localllm"))
    return found


def _plain(svg: str) -> str:
    """Without a font from the network, and with names that do not change from picture to picture."""
    svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"terminal-\d+", "terminal", svg.replace("Fira Code, monospace", "monospace"))


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in SCENES:
        with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, {"LOCALLLM_HOME": home}):
            for file, svg in asyncio.run(pictures(name)).items():
                if not (FOLDER / file).exists() or (FOLDER / file).read_text(encoding="utf-8") != svg:
                    (FOLDER / file).write_text(svg, encoding="utf-8")
                    print(f"wrote {file}")


if __name__ == "__main__":
    main()

"""A conversation of 500 messages: opened, and scrolled through. `benchmarks.chat_screen` runs it; prints JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from benchmarks.chat_screen import markdown
from localllm.cli.screen import tune

_MESSAGES, _PAGES, _PAGE_S = 500, 150, 0.1


async def _measured(session_id: str) -> dict[str, float]:
    from tests.tui.support import chat_app, running, until

    app = chat_app()
    async with running(app, (160, 50)) as pilot:
        await until(pilot, lambda: app.chat.status.facts is not None)
        began = time.perf_counter()
        app.worker.do(lambda: app.worker.open(session_id))
        views = app.chat.transcript
        await until(
            pilot, lambda: app.chat.num_turns == _MESSAGES and views.views and views.views[-1].region.height > 1
        )
        open_s = time.perf_counter() - began
        waits: list[float] = []

        async def watch() -> None:
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.005)
                waits.append(time.perf_counter() - before - 0.005)

        watching = asyncio.create_task(watch())
        for _ in range(_PAGES):
            app.chat.action_page(-1)
            await asyncio.sleep(_PAGE_S)
        watching.cancel()
    waits.sort()
    return {"open_s": open_s, "page_p95_ms": 1e3 * waits[int(0.95 * len(waits))], "page_max_ms": 1e3 * waits[-1]}


def main() -> None:
    os.environ["LOCALLLM_HOME"] = sys.argv[1]
    tune()
    from localllm.history import History, history_file

    history_file().parent.mkdir(parents=True)
    with History.open(history_file()) as history, history.together():
        session, parent = history.begin("long", "tiny", None), None
        for number in range(_MESSAGES):
            is_answer = number % 2 == 1
            text = markdown(150, number) if is_answer else f"question {number}"
            parent = history.append(session, parent, "assistant" if is_answer else "user", text)
    print(json.dumps(asyncio.run(_measured(session.id))))


if __name__ == "__main__":
    main()

"""How often an answer is drawn."""

from __future__ import annotations

import threading
import time

import pytest
from textual._compositor import Compositor

from localllm.chat.answer import Answer
from localllm.engine.events import FinishedEvent, Timings, TokenEvent, Usage
from localllm.runtime.engine_handle import RequestStream
from localllm.tui import answer_worker
from localllm.tui.answer_worker import StreamThrottle
from tests.patience import PATIENCE_S
from tests.tui.support import FakeService, chatting, until


@pytest.mark.parametrize(("cost_s", "interval_s"), [(0.001, 0.07), (0.03, 0.15), (2.0, 0.25)])
def test_an_answer_is_drawn_as_often_as_a_fifth_of_a_core_allows(
    cost_s: float, interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent_s = 5.0
    monkeypatch.setattr(answer_worker.time, "thread_time", lambda: spent_s)
    throttle = StreamThrottle()
    throttle.drawn()
    spent_s += cost_s
    throttle.drawn()
    assert throttle.interval_s == pytest.approx(interval_s)
    throttle.begin()  # what has been drawn since, of the prompt's progress too, was not the answer
    spent_s += cost_s
    throttle.drawn()
    assert throttle.interval_s == pytest.approx(0.07)


def test_the_end_of_an_answer_is_not_waited_for_as_its_words_are() -> None:
    stream, throttle = RequestStream(0, lambda _: None), StreamThrottle()
    throttle.interval_s = PATIENCE_S
    end = FinishedEvent(0, "stop", Usage(1, 0, 2), Timings())
    stream.events.put(TokenEvent(0, 1, "one"))
    threading.Timer(0.1, lambda: stream.events.put(TokenEvent(0, 2, "two"))).start()
    threading.Timer(0.2, lambda: stream.events.put(end)).start()
    answer, began = Answer(1), time.monotonic()
    for batch in throttle.batches(stream):
        for event in batch:
            answer.take(event)
    assert answer.text == "onetwo" and answer.finished is end and time.monotonic() - began < PATIENCE_S


@pytest.mark.usefixtures("home")
async def test_a_line_more_lays_the_screen_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chatting(FakeService(), size=(80, 24)) as (app, pilot):
        await until(pilot, lambda: app.chat.status.facts is not None)
        view = await app.chat.transcript.begin_answer(is_thinking=False)
        await view.append("line\\\n" * 20 + "end")
        for _ in range(5):
            await pilot.pause(0.02)
        layouts: list[int] = []
        reflow = Compositor.reflow
        monkeypatch.setattr(Compositor, "reflow", lambda *arguments: (layouts.append(1), reflow(*arguments))[1])
        height = view.region.height
        await view.append(" and\\\nmore")
        await until(pilot, lambda: view.region.height > height)
        for _ in range(5):
            await pilot.pause(0.02)
        assert len(layouts) == 1
        assert view.region.bottom <= app.chat.transcript.region.bottom  # the end is to be seen
        await view.end()

"""Behind the screen: a queue of jobs, how often an answer is drawn, pulls and conversions that keep what they have."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

import pytest
from textual._compositor import Compositor
from textual.message import Message

from localllm import hub
from localllm.chat.answer import Answer
from localllm.config import ResolvedSettings
from localllm.engine.events import FinishedEvent, Timings, TokenEvent, Usage
from localllm.errors import BugError
from localllm.hub import HubSettings
from localllm.hub.packed import packed_recipes
from localllm.runtime.engine_handle import RequestStream
from localllm.tui import answer_worker, download_worker
from localllm.tui.answer_worker import StreamThrottle
from localllm.tui.download_worker import Download, DownloadChanged, DownloadWorker, State
from localllm.tui.job_queue import DaemonExecutor, JobQueue
from tests.fake_hub import FakeHub
from tests.hub.support import PIECE, QUICK, REPO, assert_whole, single_model, use
from tests.patience import PATIENCE_S, wait_for
from tests.tui.support import FakeService, chatting, until


def started(jobs: JobQueue, first: object = None) -> threading.Thread:
    thread = threading.Thread(target=jobs.run, args=(first,), daemon=True)
    thread.start()
    wait_for(lambda: jobs._is_begun)
    return thread


def test_the_first_is_done_before_what_was_asked_for_while_it_was_not_known_and_all_before_the_end() -> None:
    done: list[str] = []
    jobs = JobQueue()
    jobs.add(lambda: done.append("early"))
    started(jobs, lambda: done.append("first"))
    jobs.add(lambda: time.sleep(0.1))
    jobs.add(lambda: done.append("late"))
    jobs.close(5.0)
    assert done == ["first", "early", "late"]


def test_a_job_that_takes_too_long_holds_nobody_up_and_one_that_never_began_neither() -> None:
    ended = threading.Event()
    jobs = JobQueue()
    started(jobs, ended.wait)
    jobs.close(0.05)
    ended.set()
    JobQueue().close(5.0)


def test_a_thread_of_a_worker_is_not_waited_for_at_the_end() -> None:
    ended = threading.Event()
    with DaemonExecutor() as executor:  # which waits for the threads of the library's own
        future = executor.submit(ended.wait)
    assert not future.done()
    ended.set()
    assert future.result(5.0)


@pytest.mark.parametrize(("cost_s", "interval_s"), [(0.001, 0.07), (0.03, 0.15), (2.0, 0.25)])
def test_answers_are_drawn_as_a_fifth_of_a_core_allows(
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


SETTINGS = ResolvedSettings()


class Told:
    """What the downloads post, in order."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Message] = queue.Queue()
        self.downloads = DownloadWorker(
            self.messages.put, lambda run: threading.Thread(target=run, daemon=True).start()
        )

    def until(self, state: State, least_bytes: int = 0) -> Download:
        while True:
            message = self.messages.get(timeout=PATIENCE_S)
            assert isinstance(message, DownloadChanged)
            download = message.download
            if download.state == state and download.step.done >= least_bytes:
                return download
            assert state == "failed" or download.error is None, download.error


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def fake(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake.reset({REPO: single_model(8 * PIECE)})
    fake.seconds_per_chunk = 0.02
    use(HubSettings(tmp_path / "cache", fake.endpoint, retry=QUICK), monkeypatch)
    return fake


def test_a_paused_pull_goes_on_at_the_byte_where_it_stopped(told: Told, fake: FakeHub, tmp_path: Path) -> None:
    told.downloads.pull(REPO, SETTINGS)
    download = told.until("running", least_bytes=PIECE)
    assert download.rate_bytes_s > 0 and download.left_s is not None and download.step.file == "model.safetensors"
    told.downloads.pause(download)
    told.until("paused")
    fake.seconds_per_chunk = 0.0
    (paused,) = told.downloads.all
    told.downloads.resume(paused)
    told.until("ended")
    weights = [record for record in fake.requests if record.path.endswith("model.safetensors")]
    assert weights[-1].range_start >= PIECE
    (snapshot,) = (tmp_path / "cache").glob("models--*/snapshots/*")
    assert_whole(snapshot, fake.repositories[REPO])


def test_what_was_cancelled_is_forgotten_and_what_it_fetched_is_kept(told: Told, fake: FakeHub, tmp_path: Path) -> None:
    told.downloads.pull(REPO, SETTINGS)
    told.downloads.cancel(told.until("running", least_bytes=PIECE))
    told.downloads.settle(told.until("cancelled"))
    assert told.downloads.all == ()
    (partial_file,) = (tmp_path / "cache").rglob("*.incomplete")
    assert partial_file.stat().st_size >= PIECE // 2


def test_closing_waits_until_what_runs_has_stopped(told: Told, fake: FakeHub) -> None:
    told.downloads.pull(REPO, SETTINGS)
    told.until("running", least_bytes=1)
    told.downloads.close(5.0)
    assert [download.state for download in told.downloads.all] == ["paused"]


def test_what_is_already_on_its_way_is_not_begun_twice(told: Told, fake: FakeHub) -> None:
    told.downloads.pull(REPO, SETTINGS)
    told.until("running", least_bytes=1)
    told.downloads.pull(REPO, SETTINGS)
    assert len(told.downloads.all) == 1
    told.downloads.close(5.0)
    assert sum("/api/models/" in record.path for record in fake.requests) == 1


def test_what_nobody_foresaw_is_told_as_a_bug(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(hub, "pull", pull)
    told.downloads.pull(REPO, SETTINGS)
    assert isinstance(told.until("failed").error, BugError)


@pytest.mark.usefixtures("home", "empty_cache")
def test_a_stopped_conversion_goes_on_and_is_whole(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hear, stopped = download_worker._Run._progress, threading.Event()

    def held(run: download_worker._Run, step: download_worker.DownloadStep) -> None:
        hear(run, step)
        if step.done:
            stopped.wait(PATIENCE_S)  # without which the conversion may end before it can be stopped

    monkeypatch.setattr(download_worker, "_PAUSE_S", 0.0)
    monkeypatch.setattr(download_worker._Run, "_progress", held)
    told.downloads.pack("tiny", "int8", SETTINGS)
    told.downloads.pause(told.until("running", least_bytes=1))
    stopped.set()
    paused = told.until("paused")
    assert packed_recipes(hub.locate("tiny")) == []
    told.downloads.resume(paused)
    assert "tiny is packed: int8" in told.until("ended").result
    assert packed_recipes(hub.locate("tiny")) == ["int8"]

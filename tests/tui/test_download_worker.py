"""Pulls and conversions on their threads: stopped anywhere, they keep what they have and go on from there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from textual.message import Message

from localllm import hub
from localllm.config import ResolvedSettings
from localllm.errors import BugError
from localllm.hub import HubSettings
from localllm.hub.packed import packed_recipes
from localllm.tui import download_worker
from localllm.tui.download_worker import Download, DownloadChanged, DownloadWorker, State
from tests.fake_hub import FakeHub, serve
from tests.hub.support import PIECE, QUICK, REPO, assert_whole, single_model
from tests.patience import PATIENCE_S

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
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import close_session

    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    with serve() as server:
        server.reset({REPO: single_model(8 * PIECE)})
        server.seconds_per_chunk = 0.02
        settings = HubSettings(tmp_path / "cache", server.endpoint, retry=QUICK)
        monkeypatch.setattr(hub, "pull", partial(hub.pull, hub=settings))
        yield server
    close_session()


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


@pytest.mark.usefixtures("home")
def test_a_conversion_that_was_stopped_goes_on_and_is_whole(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
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

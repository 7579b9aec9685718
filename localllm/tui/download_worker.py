"""Pulls and conversions, each in a thread worker of the app: they go on behind other screens. Knows no widgets.

A stop raises an exception out of the progress callback: what was fetched or packed stays on the disk, and the next run
goes on from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from textual.message import Message

from localllm.chat.text import Pace
from localllm.config import ResolvedSettings, format_bytes
from localllm.errors import BugError, LocalLLMError
from localllm.runtime.download import fetch
from localllm.tui.messages import Post

if TYPE_CHECKING:
    from localllm.hub import PullProgress

_PAUSE_S = 0.1  # between two messages of progress

Kind = Literal["pull", "pack"]
State = Literal["running", "stopping", "paused", "ended", "failed", "cancelled"]


@dataclass(frozen=True)
class DownloadStep:
    """The progress of a download, in bytes; 0 where it is not known. file_done, file_total: of the current file. note:
    what is unusual, or happens before there are figures."""

    done: int = 0
    total: int = 0
    file: str = ""
    file_done: int = 0
    file_total: int = 0
    note: str = ""


@dataclass(frozen=True)
class Download:
    """A download at one moment. weights: the format that is packed. result: the outcome in words."""

    name: str
    kind: Kind
    weights: str = ""
    state: State = "running"
    step: DownloadStep = DownloadStep()
    rate_bytes_s: float = 0.0
    result: str = ""
    error: LocalLLMError | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.weights

    @property
    def is_running(self) -> bool:
        return self.state in ("running", "stopping")

    @property
    def is_over(self) -> bool:
        """Return whether nothing is left to resume."""
        return self.state in ("ended", "cancelled")

    @property
    def share(self) -> float | None:
        return self.step.done / self.step.total if self.step.total else None

    @property
    def left_s(self) -> float | None:
        """Seconds to the end; None where they cannot be foreseen."""
        if self.state != "running" or self.rate_bytes_s <= 0 or not self.step.total:
            return None
        return (self.step.total - self.step.done) / self.rate_bytes_s


@dataclass
class DownloadChanged(Message):
    download: Download


Progress = Callable[[DownloadStep], None]
Work = Callable[[Progress], str]  # runs to its end, and returns the result in words


class _StoppedError(Exception):
    pass


class _Run:
    """A download from its start until it ends or is stopped. `run` is the body of a thread worker."""

    def __init__(self, download: Download, work: Work, post: Post) -> None:
        self.download = download
        self.work = work
        self.ended = threading.Event()
        self._post = post
        self._lock = threading.RLock()  # progress and a stop come from two threads
        self._stops_as: State | None = None
        self._pace = Pace()
        self._posted_s = 0.0
        self._change(error=None, rate_bytes_s=0.0, state="running")

    def stop(self, state: State) -> bool:
        """End at the next progress, in `state`. Returns False where it has ended."""
        with self._lock:
            if not self.download.is_running:
                return False
            self._stops_as = state
            self._change(state="stopping")
        return True

    def run(self) -> None:
        try:
            result = self.work(self._progress)
        except _StoppedError:
            self._change(state=self._stops_as)
        except LocalLLMError as error:
            self._change(state="failed", error=error)
        except Exception as error:
            what = f"this is a bug in localllm: {type(error).__name__}"
            self._change(state="failed", error=BugError(what, why=str(error)))
        else:
            self._change(state="ended", result=result)
        finally:
            self.ended.set()

    def _progress(self, step: DownloadStep) -> None:
        now_s = time.monotonic()
        with self._lock:
            if self._stops_as is not None:
                raise _StoppedError
            rate_bytes_s = self._pace.after(now_s, step.done)
            self.download = replace(self.download, step=step, rate_bytes_s=rate_bytes_s)
            if now_s - self._posted_s >= _PAUSE_S:
                self._posted_s = now_s
                self._post(DownloadChanged(self.download))

    def _change(self, **changes: Any) -> None:
        with self._lock:
            self.download = replace(self.download, **changes)
            self._post(DownloadChanged(self.download))


class DownloadWorker:
    """Downloads that run, are paused or have failed, by the model's name and the format. Called from one thread."""

    def __init__(self, post: Post, start: Callable[[Callable[[], None]], object]) -> None:
        """post: called from the workers' threads. start: starts a thread worker."""
        self._post = post
        self._start = start
        self._runs: dict[tuple[str, str], _Run] = {}

    @property
    def all(self) -> tuple[Download, ...]:
        return tuple(run.download for run in list(self._runs.values()))

    @property
    def is_running(self) -> bool:
        return any(download.is_running for download in self.all)

    def of(self, name: str) -> Download | None:
        """The download of a model; of several the one that runs."""
        found = [download for download in self.all if download.name == name]
        return next((download for download in found if download.is_running), found[0] if found else None)

    def pull(self, name: str, resolved: ResolvedSettings) -> None:
        self._begin(Download(name, "pull"), lambda progress: _pull(name, resolved, progress))

    def pack(self, name: str, weights: str, resolved: ResolvedSettings) -> None:
        """weights: the recipe's name."""
        self._begin(Download(name, "pack", weights), lambda progress: _pack(name, weights, resolved, progress))

    def pause(self, download: Download) -> None:
        if (run := self._runs.get(download.key)) is not None:
            run.stop("paused")

    def cancel(self, download: Download) -> None:
        """Stop and forget a download. Its files stay on the disk."""
        run = self._runs.get(download.key)
        if run is None or not run.stop("cancelled"):
            self._runs.pop(download.key, None)
            self._post(DownloadChanged(replace(download, state="cancelled")))

    def resume(self, download: Download) -> None:
        if (run := self._runs.get(download.key)) is not None:
            self._begin(run.download, run.work)

    def settle(self, download: Download) -> None:
        run = self._runs.get(download.key)
        if run is not None and download.is_over and run.download.is_over:
            del self._runs[download.key]

    def close(self, timeout_s: float) -> None:
        """Stop all of them, and wait for that at most `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        running = [run for run in self._runs.values() if run.stop("paused")]
        for run in running:
            run.ended.wait(max(0.0, end_s - time.monotonic()))

    def _begin(self, download: Download, work: Work) -> None:
        before = self._runs.get(download.key)
        if before is None or not before.download.is_running:
            run = self._runs[download.key] = _Run(download, work, self._post)
            self._start(run.run)


def _pull(name: str, resolved: ResolvedSettings, progress: Progress) -> str:
    def tell(now: PullProgress) -> None:
        note = "" if now.phase == "downloading" else f"{now.phase} {now.note}".strip()
        progress(DownloadStep(now.done_bytes, now.total_bytes, now.file, now.file_done_bytes, now.file_bytes, note))

    fetch(name, resolved, tell)
    return f"{name} is here"


def _pack(name: str, weights: str, resolved: ResolvedSettings, progress: Progress) -> str:
    from localllm import hub
    from localllm.engine.weights import choose_weights, pack_model
    from localllm.hub.packed import own_bytes, packed_directory
    from localllm.models.families import load_config
    from localllm.quant.recipe import recipe_of

    files = hub.locate(name, offline=True)
    progress(DownloadStep(note="looking at the checkpoint"))
    sizes = choose_weights(weights, files, load_config(files.directory))
    pack_model(
        files,
        recipe_of(sizes),
        lambda done, total: progress(DownloadStep(done, total)),
        lambda process: progress(DownloadStep(note=f"process {process} is packing it; waiting for that")),
        resolved.settings.ram,
    )
    return f"{name} is packed: {sizes.name}, {format_bytes(own_bytes(packed_directory(files, sizes.name)))}"

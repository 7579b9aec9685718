"""Pulls and conversions, each on a thread of its own: they go on while another screen is looked at. Knows no widgets.

Whoever stops one raises out of what it tells its progress to: what was fetched or packed stays on the disk, and to
begin again is to go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from textual.message import Message

from localllm.config import ResolvedSettings, format_bytes
from localllm.errors import BugError, LocalLLMError
from localllm.frontend.fetching import fetch
from localllm.frontend.pace import Pace

if TYPE_CHECKING:
    from localllm.hub import PullProgress

_PAUSE_S = 0.1  # between two messages of progress

Kind = Literal["pull", "pack"]
State = Literal["running", "stopping", "paused", "ended", "failed", "cancelled"]


@dataclass(frozen=True)
class DownloadStep:
    """How far it is. done, total: bytes, 0 where that is not known; file_done, file_total: of the file that is worked
    on. note: what is out of the ordinary, or what is done before there are figures."""

    done: int = 0
    total: int = 0
    file: str = ""
    file_done: int = 0
    file_total: int = 0
    note: str = ""


@dataclass(frozen=True)
class Download:
    """One of them as it is now. weights: the format that is packed. told: what came of it."""

    name: str
    kind: Kind
    weights: str = ""
    state: State = "running"
    step: DownloadStep = DownloadStep()
    rate_bytes_s: float = 0.0
    told: str = ""
    error: LocalLLMError | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.weights

    @property
    def is_running(self) -> bool:
        return self.state in ("running", "stopping")

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to go on with."""
        return self.state in ("ended", "cancelled")

    @property
    def share(self) -> float | None:
        return self.step.done / self.step.total if self.step.total else None

    @property
    def left_s(self) -> float | None:
        """Until it is done; None where that cannot be foreseen."""
        if self.state != "running" or self.rate_bytes_s <= 0 or not self.step.total:
            return None
        return (self.step.total - self.step.done) / self.rate_bytes_s


@dataclass
class DownloadChanged(Message):
    transfer: Download


Hear = Callable[[DownloadStep], None]
Work = Callable[[Hear], str]  # does it to its end, and says what came of it
Post = Callable[[Message], object]


class _StoppedError(Exception):
    """It was told to stop."""


class _Run:
    """A transfer's thread, from its beginning until it ends or is stopped."""

    def __init__(self, transfer: Download, work: Work, post: Post) -> None:
        self.transfer = transfer
        self.work = work
        self._post = post
        self._lock = threading.RLock()  # the thread tells how far it is while it is told to stop
        self._stops_as: State | None = None
        self._pace = Pace()
        self._posted_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"{transfer.kind} {transfer.name}", daemon=True)

    def start(self) -> None:
        self._move(error=None, rate_bytes_s=0.0, state="running")
        self._thread.start()

    def stop(self, state: State) -> bool:
        """Ends the thread at its next progress; `state` is what the transfer is in then. False where it has ended."""
        with self._lock:
            if not self.transfer.is_running:
                return False
            self._stops_as = state
            self._move(state="stopping")
        return True

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            told = self.work(self._hear)
        except _StoppedError:
            assert self._stops_as is not None
            self._move(state=self._stops_as)
        except LocalLLMError as error:
            self._move(state="failed", error=error)
        except Exception as error:
            bug = BugError(f"this is a bug in localllm: {type(error).__name__}", why=str(error))
            self._move(state="failed", error=bug)
        else:
            self._move(state="ended", told=told)

    def _hear(self, step: DownloadStep) -> None:
        now_s = time.monotonic()
        with self._lock:
            if self._stops_as is not None:
                raise _StoppedError
            rate_bytes_s = self._pace.after(now_s, step.done)
            self.transfer = replace(self.transfer, step=step, rate_bytes_s=rate_bytes_s)
            if now_s - self._posted_s >= _PAUSE_S:
                self._posted_s = now_s
                self._post(DownloadChanged(self.transfer))

    def _move(self, **changes: Any) -> None:
        with self._lock:
            self.transfer = replace(self.transfer, **changes)
            self._post(DownloadChanged(self.transfer))


class DownloadWorker:
    """All that go on, are paused or have failed, by the model's name and the format. Asked from one thread."""

    def __init__(self, post: Post) -> None:
        """post: hears of all that moves, from the threads."""
        self._post = post
        self._runs: dict[tuple[str, str], _Run] = {}

    @property
    def all(self) -> tuple[Download, ...]:
        return tuple(run.transfer for run in list(self._runs.values()))

    @property
    def is_running(self) -> bool:
        return any(transfer.is_running for transfer in self.all)

    def of(self, name: str) -> Download | None:
        """What is done with a model; of several the one that runs."""
        found = [transfer for transfer in self.all if transfer.name == name]
        return next((transfer for transfer in found if transfer.is_running), found[0] if found else None)

    def pull(self, name: str, resolved: ResolvedSettings) -> None:
        self._begin(Download(name, "pull"), lambda hear: _pull(name, resolved, hear))

    def pack(self, name: str, weights: str, resolved: ResolvedSettings) -> None:
        """weights: the recipe's name."""
        self._begin(Download(name, "pack", weights), lambda hear: _pack(name, weights, resolved, hear))

    def pause(self, transfer: Download) -> None:
        self._stop(transfer, "paused")

    def cancel(self, transfer: Download) -> None:
        """What was fetched or packed stays on the disk."""
        if not self._stop(transfer, "cancelled"):
            self._runs.pop(transfer.key, None)
            self._post(DownloadChanged(replace(transfer, state="cancelled")))

    def resume(self, transfer: Download) -> None:
        run = self._runs.get(transfer.key)
        if run is not None and not run.transfer.is_running:
            self._begin(run.transfer, run.work)

    def settle(self, transfer: Download) -> None:
        """Forgets one that is over."""
        run = self._runs.get(transfer.key)
        if run is not None and transfer.is_over and run.transfer.is_over:
            del self._runs[transfer.key]

    def close(self, timeout_s: float) -> None:
        """Has all of them stop, and waits for that no longer than this."""
        end_s = time.monotonic() + timeout_s
        running = [run for run in self._runs.values() if run.transfer.is_running]
        for run in running:
            run.stop("paused")
        for run in running:
            run.join(max(0.0, end_s - time.monotonic()))

    def _begin(self, transfer: Download, work: Work) -> None:
        before = self._runs.get(transfer.key)
        if before is None or not before.transfer.is_running:
            run = self._runs[transfer.key] = _Run(transfer, work, self._post)
            run.start()

    def _stop(self, transfer: Download, state: State) -> bool:
        run = self._runs.get(transfer.key)
        return run is not None and run.stop(state)


def _pull(name: str, resolved: ResolvedSettings, hear: Hear) -> str:
    def tell(progress: PullProgress) -> None:
        is_plain = progress.phase == "downloading"
        note = "" if is_plain else f"{progress.phase} {progress.note}".strip()
        sizes = progress.done_bytes, progress.total_bytes
        hear(DownloadStep(*sizes, progress.file, progress.file_done_bytes, progress.file_bytes, note))

    fetch(name, resolved, tell)
    return f"{name} is here"


def _pack(name: str, weights: str, resolved: ResolvedSettings, hear: Hear) -> str:
    from localllm import hub
    from localllm.engine.weights import pack_model
    from localllm.hub.packed import own_bytes, packed_directory
    from localllm.quant.recipe import recipe

    files = hub.locate(name, offline=True)
    hear(DownloadStep(note="looking at the checkpoint"))
    pack_model(
        files,
        recipe(weights),
        lambda done, total: hear(DownloadStep(done, total)),
        lambda process: hear(DownloadStep(note=f"process {process} is packing it; waiting for that")),
        resolved.settings.ram,
    )
    return f"{name} is packed: {weights}, {format_bytes(own_bytes(packed_directory(files, weights)))}"

"""The streams of the simulated card: each does its work in order, and as late, or as early, as a schedule has it.

Nothing is done beside the program: work is done by whoever waits for it, or where the schedule is eager for it. So a
wait that is missing is a fault in every run, not in one of a thousand. Work takes time on a clock of its own, which
events read: a slow link is slow there, and no test waits for it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, get_args

import torch
from torch.utils._python_dispatch import _disable_current_modes

Schedule = Literal["lazy", "copies-early", "copies-late", "random", "eager"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
"""lazy: nothing is done before somebody waits for it: what the host writes too early is seen.
copies-early: copies are done at once, computations late: what writes to memory that is still being read is seen.
copies-late: computations are done at once, copies late: what reads memory before a copy has come is seen.
random: drawn, by the seed. eager: all at once, as if every call waited."""

Span = tuple[int, int]  # address and bytes, of the host


class Work:
    """One thing that a stream does, behind `needs`. `run` is gone once it is done. reads: what it reads, or writes, of
    the host's memory."""

    __slots__ = ("ended_at", "is_done", "needs", "reads", "run", "seconds", "stream")

    def __init__(
        self,
        stream: Stream,
        run: Callable[[], object] | None,
        needs: Sequence[Work],
        seconds: float,
        reads: Sequence[Span],
    ) -> None:
        self.stream, self.run, self.needs, self.seconds, self.reads = stream, run, needs, seconds, reads
        self.is_done, self.ended_at = False, 0.0

    def do(self) -> None:
        if self.run is not None:
            with _disable_current_modes(), torch.inference_mode():
                self.run()
        self.ended_at = max((self.stream.busy_until, *(work.ended_at for work in self.needs))) + self.seconds
        self.stream.busy_until = self.ended_at
        self.is_done, self.run, self.needs = True, None, ()


class Stream:
    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline, self.name = timeline, name
        self.last: Work | None = None  # that was given
        self.busy_until = 0.0  # on the card's clock, as far as its work is done

    def add(
        self,
        run: Callable[[], object] | None,
        needs: Sequence[Work] = (),
        seconds: float = 0.0,
        reads: Sequence[Span] = (),
    ) -> Work:
        with self.timeline.lock:
            before = [self.last] if self.last is not None and not self.last.is_done else []
            self.last = work = Work(self, run, [*before, *needs], seconds, reads)
            self.timeline.given(work)
        return work


class Timeline:
    """All streams of a card. compute: the one that is there from the start."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        assert schedule in SCHEDULES, f"there is no schedule {schedule!r}"
        self.schedule, self._choose = schedule, random.Random(seed)
        self.lock = threading.RLock()  # threads that read from the disk wait for events, too
        self.compute = Stream(self, "compute")
        self.streams = [self.compute]
        self._touching: list[Work] = []  # what is pending, or was a while ago, and reads the host's memory

    def new_stream(self) -> Stream:
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def given(self, work: Work) -> None:
        """Do what the schedule does once a stream is given work."""
        if work.reads:
            self._touching = [*(other for other in self._touching if not other.is_done), work]
        is_computing = work.stream is self.compute
        at_once = {"eager": True, "copies-early": not is_computing, "copies-late": is_computing}
        if at_once.get(self.schedule, False):
            self.finish(work)
        elif self.schedule == "random":
            while self._choose.random() < 0.5:
                self._do_some()

    def finish(self, work: Work | None) -> None:
        """Do a piece of work, and all that comes before it."""
        waiting = [work] if work is not None else []
        with self.lock:
            while waiting:
                if waiting[-1].is_done:
                    waiting.pop()
                elif missing := [needed for needed in waiting[-1].needs if not needed.is_done]:
                    waiting += missing
                else:
                    waiting.pop().do()

    def finish_all(self) -> None:
        for stream in self.streams:
            self.finish(stream.last)

    def touches(self, address: int, num_bytes: int) -> bool:
        """Return whether work that is not done reads, or writes, this memory of the host."""
        return any(
            begin < address + num_bytes and address < begin + count
            for work in self._touching
            if not work.is_done
            for begin, count in work.reads
        )

    def _do_some(self) -> None:
        """Do one piece of work of a stream that is drawn, the pieces before it too."""
        pending = [stream.last for stream in self.streams if stream.last is not None and not stream.last.is_done]
        with suppress(IndexError):
            work = self._choose.choice(pending)
            for _ in range(self._choose.randrange(8)):  # not always the last one: how far a stream gets is drawn, too
                work = next((needed for needed in work.needs if not needed.is_done), work)
            self.finish(work)

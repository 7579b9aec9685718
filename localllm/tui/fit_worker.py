"""What a model would do on this machine, found out on a thread of its own, and kept while the program runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from localllm.config import ResolvedSettings

if TYPE_CHECKING:
    from localllm.frontend.model_rows import ModelRow
    from localllm.frontend.verdict import Verdict

_PAUSE_S = 0.2  # between two looks whether the machine is quiet

# Of the name: whether it is here, what is packed of it, and what the settings ask for.
_Key = tuple[str, bool, tuple[str, ...], str]


@dataclass
class FitFound(Message):
    name: str


@dataclass
class FitMeasuring(Message):
    """text: what of this machine is measured; "" once that is done."""

    text: str


class _ClosedError(Exception):
    """Nobody waits for it any more."""


class FitWorker:
    """post: hears of each. is_busy: whether the machine computes, when measuring it would say nothing true."""

    def __init__(self, post: Callable[[Message], object], is_busy: Callable[[], bool]) -> None:
        self._post = post
        self._is_busy = is_busy
        self._known: dict[_Key, Verdict] = {}
        self._asked: set[_Key] = set()
        self._queue: queue.SimpleQueue[tuple[_Key, ResolvedSettings] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_measuring = False

    def of(self, row: ModelRow, resolved: ResolvedSettings) -> Verdict | None:
        """None where it is not known yet."""
        return self._known.get(_key(row, resolved))

    def want(self, rows: Iterable[ModelRow], resolved: ResolvedSettings) -> None:
        """Finds out what is not known of these, in their order. Returns at once."""
        for row in rows:
            key = _key(row, resolved)
            if key not in self._asked:
                self._asked.add(key)
                self._queue.put((key, resolved))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="verdicts", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._queue.put(None)

    def _run(self) -> None:
        from localllm.frontend.verdict import Verdict, judge

        while (wanted := self._queue.get()) is not None:
            key, resolved = wanted
            try:
                self._known[key] = judge(key[0], resolved, self._wait_for_quiet)
            except _ClosedError:
                return
            except Exception as error:
                self._known[key] = Verdict("unknown", why=f"{type(error).__name__}: {error}")
            if self._is_measuring:
                self._is_measuring = False
                self._post(FitMeasuring(""))
            self._post(FitFound(key[0]))

    def _wait_for_quiet(self, text: str) -> None:
        """Before each measurement."""
        self._is_measuring = True
        if self._is_busy():
            self._post(FitMeasuring("this machine is measured once it has nothing else to do"))
        while self._is_busy() and not self._closed.is_set():
            self._closed.wait(_PAUSE_S)
        if self._closed.is_set():
            raise _ClosedError
        self._post(FitMeasuring(text))


def _key(row: ModelRow, resolved: ResolvedSettings) -> _Key:
    packed = tuple(packed.weights for packed in row.packed if packed.state == "whole")
    return row.name, row.is_here, packed, repr(resolved.settings)

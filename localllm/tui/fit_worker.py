"""How models would fit this machine, found by a worker and cached while the program runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from textual.app import App
from textual.message import Message
from textual.worker import get_current_worker

from localllm.config import ResolvedSettings

if TYPE_CHECKING:
    from localllm.runtime.fit_check import Verdict
    from localllm.runtime.model_catalog import ModelRow

_PAUSE_S = 0.2  # between two looks at whether the machine is idle

# The name, whether the model is here, its packed formats, and the settings.
_Key = tuple[str, bool, tuple[str, ...], str]


@dataclass
class FitFound(Message):
    name: str


@dataclass
class FitMeasuring(Message):
    """text: the measurement that runs; "" once it is done."""

    text: str


class _CancelledError(Exception):
    """The worker was cancelled."""


class FitWorker:
    """Posts FitFound for each model, and FitMeasuring around a measurement of the machine."""

    def __init__(self, app: App[None], is_busy: Callable[[], bool]) -> None:
        """is_busy: whether the machine computes, when a measurement would be wrong."""
        self._app = app
        self._is_busy = is_busy
        self._known: dict[_Key, Verdict] = {}
        self._one_at_a_time = threading.Lock()
        self._is_measuring = False

    def of(self, row: ModelRow, resolved: ResolvedSettings) -> Verdict | None:
        """The verdict on a model; None while it is not known."""
        return self._known.get(_key(row, resolved))

    def want(self, rows: Iterable[ModelRow], resolved: ResolvedSettings) -> None:
        """Find the missing verdicts in the order of the rows. Returns at once."""
        keys = [_key(row, resolved) for row in rows]
        work = partial(self._find, [key for key in keys if key not in self._known], resolved)
        self._app.run_worker(work, thread=True, exclusive=True, group="fit")

    def _find(self, keys: list[_Key], resolved: ResolvedSettings) -> None:
        from localllm.runtime.fit_check import Verdict, judge

        worker = get_current_worker()
        for key in keys:
            with self._one_at_a_time:  # a cancelled worker ends its model first
                if worker.is_cancelled:
                    return
                if key in self._known:
                    continue
                try:
                    self._known[key] = judge(key[0], resolved, self._wait_for_quiet)
                except _CancelledError:
                    return
                except Exception as error:
                    self._known[key] = Verdict("unknown", why=f"{type(error).__name__}: {error}")
                if self._is_measuring:
                    self._is_measuring = False
                    self._app.post_message(FitMeasuring(""))
                self._app.post_message(FitFound(key[0]))

    def _wait_for_quiet(self, text: str) -> None:
        """Wait before a measurement. Raises _CancelledError."""
        worker = get_current_worker()
        self._is_measuring = True
        if self._is_busy():
            self._app.post_message(FitMeasuring("this machine is measured once it has nothing else to do"))
        while self._is_busy() and not worker.cancelled_event.wait(_PAUSE_S):
            pass
        if worker.is_cancelled:
            raise _CancelledError
        self._app.post_message(FitMeasuring(text))


def _key(row: ModelRow, resolved: ResolvedSettings) -> _Key:
    packed = tuple(packed.weights for packed in row.packed if packed.state == "whole")
    return row.name, row.is_here, packed, repr(resolved.settings)

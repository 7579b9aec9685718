"""Plans of a model under changed settings, and how models would fit this machine: found by workers.

Of quick changes only the last is planned; verdicts are cached while the program runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from textual.app import App
from textual.message import Message
from textual.worker import get_current_worker

from localllm.config import ResolvedSettings
from localllm.engine.events import ignore
from localllm.errors import LocalLLMError
from localllm.runtime.error_origins import named, with_origins
from localllm.runtime.plan_request import Goal, considered, with_changes
from localllm.runtime.selection import Selection, told_of
from localllm.tui.chat_worker import ChatWorker

if TYPE_CHECKING:
    from localllm.engine.model_plan import Considered, Planned
    from localllm.runtime.fit_check import Verdict
    from localllm.runtime.model_catalog import ModelRow

_LOOK_S = 0.1  # between two looks at what a plan waits for
_REST_S = 0.15  # without another wish, before advice is computed: that takes longer than a plan


@dataclass(frozen=True)
class PlanWish:
    """changes: of the model's settings, as a file would have them."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    goal: Goal = "latency"


AS_IT_RUNS = PlanWish()


@dataclass
class BoundsFound(Message):
    """The largest values to wish for. vram_bytes: None where no GPU is used."""

    longest_ctx: int
    ram_bytes: int
    vram_bytes: int | None


@dataclass
class PlanFound(Message):
    wish: PlanWish
    planned: Planned
    is_advised: bool = False  # the advice has been computed


@dataclass
class PlanRefused(Message):
    """The wish cannot be honoured."""

    wish: PlanWish
    error: LocalLLMError


@dataclass
class PlanDelayed(Message):
    """text: what takes time before there is a plan."""

    text: str


class _CancelledError(Exception):
    """The worker was cancelled: another wish has come, or the screen was left."""


class PlanWorker:
    """Plans of the model that the chat has, which would release its memory first."""

    def __init__(self, chat: ChatWorker, selection: Selection) -> None:
        self._chat = chat
        self._selection = selection
        self._one_at_a_time = threading.Lock()
        self._has_bounds = False

    def plan(self, wish: PlanWish, post: Callable[[Message], object]) -> None:
        """Post BoundsFound once, then PlanFound without and with advice, or PlanRefused. The body of an exclusive
        thread worker: a cancelled one posts nothing more."""
        worker = get_current_worker()

        def wait(*, measures: bool) -> None:
            reason = ""
            while (now := self.why_wait(measures=measures)) and not worker.is_cancelled:
                if now != reason:
                    reason = now
                    post(PlanDelayed(f"waiting for {reason}"))
                worker.cancelled_event.wait(_LOOK_S)
            if worker.is_cancelled:
                raise _CancelledError

        def before_measurement(text: str) -> None:
            wait(measures=True)  # beside an answer everything would seem slow
            post(PlanDelayed(text))

        try:
            with self._one_at_a_time:
                if not self._has_bounds:
                    post(self.bounds())
                    self._has_bounds = True
                wait(measures=False)
                found = self.considered(wish, before_measurement)
                post(PlanFound(wish, found.planned))
            if not worker.cancelled_event.wait(_REST_S):
                post(PlanFound(wish, found.advised(), is_advised=True))
        except _CancelledError:
            return
        except Exception as error:
            post(PlanRefused(wish, told_of(error, self._selection.files, self._selection.resolved)))

    def bounds(self) -> BoundsFound:
        import psutil
        import torch

        from localllm.engine.memory import choose_device
        from localllm.engine.planner import has_card
        from localllm.models.shapes import find_shape
        from localllm.offload.planner.machine_memory import cgroup_limit_bytes

        device = choose_device(self._selection.settings.device)
        vram_bytes = torch.cuda.get_device_properties(device).total_memory if has_card(device) else None
        total_bytes = int(psutil.virtual_memory().total)
        longest_ctx = find_shape(self._selection.model_name).config.longest_context
        return BoundsFound(longest_ctx, min(total_bytes, cgroup_limit_bytes() or total_bytes), vram_bytes)

    def considered(self, wish: PlanWish, before_measurement: Callable[[str], None]) -> Considered:
        """The plan for a wish. before_measurement: called with what is measured."""
        resolved = with_changes(self._selection.resolved, wish.changes)
        name, say, tell = self._selection.model_name, before_measurement, ignore  # what the load has told already
        found = considered(name, resolved, wish.goal, say, tell, self._chat.host_bytes)
        if found.planned.refusal is not None:
            with_origins(named(found.planned.refusal, self._selection.files), resolved)
        return found

    def why_wait(self, *, measures: bool) -> str:
        """The activity that has to end before a plan, or a measurement, would be right; or ""."""
        if self._chat.is_loading:
            return "the model to be loaded"
        return "the answer to end" if measures and self._chat.answers.is_under_way else ""


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

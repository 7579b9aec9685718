"""Plans of a model under changed settings, made by a worker: of quick changes only the last is planned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from textual.message import Message
from textual.worker import get_current_worker

from localllm.errors import LocalLLMError
from localllm.runtime.error_origins import with_origins
from localllm.runtime.plan_request import Goal, considered, with_changes
from localllm.runtime.selection import Selection, named, told_of
from localllm.tui.chat_worker import ChatWorker

if TYPE_CHECKING:
    from localllm.engine.model_plan import Considered, Planned

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
    """Another wish has come, or the screen was left."""


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
        resolved, say = with_changes(self._selection.resolved, wish.changes), before_measurement
        found = considered(self._selection.model_name, resolved, wish.goal, say, say, self._chat.host_bytes)
        if found.planned.refusal is not None:
            with_origins(named(found.planned.refusal, self._selection.files), resolved)
        return found

    def why_wait(self, *, measures: bool) -> str:
        """The activity that has to end before a plan, or a measurement, would be right; or ""."""
        if self._chat.is_loading:
            return "the model to be loaded"
        return "the answer to end" if measures and self._chat.answers.is_under_way else ""

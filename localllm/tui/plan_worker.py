"""Plans on a thread of their own: of the wishes that come while one is planned, the last. Knows no widgets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from textual.message import Message

from localllm.frontend.origins import with_origins
from localllm.frontend.planning import Goal, considered, with_changes
from localllm.frontend.selection import Selection, named, told_of
from localllm.tui.model_loader import Post

if TYPE_CHECKING:
    from localllm.engine.planning import Considered, Planned
    from localllm.errors import LocalLLMError
    from localllm.tui.chat_worker import ChatWorker

_LOOK_S = 0.1  # between two looks at what is waited for
_REST_S = 0.15  # without another wish, before what would be better is looked for: that takes longer than a plan


@dataclass(frozen=True)
class PlanWish:
    """changes: of the settings under which the model runs, as a file would have them."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    goal: Goal = "latency"


AS_IT_RUNS = PlanWish()  # as the model runs


@dataclass(frozen=True)
class PlanBounds:
    """The most that can be wished for. vram_bytes: None where no GPU is used."""

    longest_ctx: int
    ram_bytes: int
    vram_bytes: int | None


@dataclass
class BoundsFound(Message):
    bounds: PlanBounds


@dataclass
class PlanFound(Message):
    """is_advised: what would be better was looked for."""

    wish: PlanWish
    planned: Planned
    is_advised: bool


@dataclass
class PlanRefused(Message):
    """What was wished for cannot be honoured."""

    wish: PlanWish
    error: LocalLLMError


@dataclass
class PlanDelayed(Message):
    """What takes its time before there is a plan."""

    text: str


class Planning(Protocol):
    """What is asked for plans; on the thread of those."""

    def bounds(self) -> PlanBounds: ...

    def considered(self, wish: PlanWish, say: Callable[[str], None]) -> Considered:
        """say: hears what is measured, before it is."""
        ...

    def why_wait(self, *, measures: bool) -> str:
        """What has to end before a plan, or a measurement, would be right; "" where nothing has."""
        ...

    def told(self, wish: PlanWish, error: Exception) -> LocalLLMError: ...


@dataclass(frozen=True)
class ModelPlanning:
    """Of the worker's model, which would make room for itself under other settings."""

    worker: ChatWorker
    selection: Selection

    def bounds(self) -> PlanBounds:
        import psutil
        import torch

        from localllm.engine.loading import has_card
        from localllm.engine.memory import choose_device
        from localllm.models.shapes import find_shape
        from localllm.offload.machine_memory import cgroup_limit_bytes

        device = choose_device(self.selection.settings.device)
        vram_bytes = torch.cuda.get_device_properties(device).total_memory if has_card(device) else None
        total_bytes = int(psutil.virtual_memory().total)
        longest_ctx = find_shape(self.selection.model_name).config.longest_context
        return PlanBounds(longest_ctx, min(total_bytes, cgroup_limit_bytes() or total_bytes), vram_bytes)

    def considered(self, wish: PlanWish, say: Callable[[str], None]) -> Considered:
        resolved = with_changes(self.selection.resolved, wish.changes)
        found = considered(self.selection.model_name, resolved, wish.goal, say, say, self.worker.host_bytes)
        if found.planned.refusal is not None:
            with_origins(named(found.planned.refusal, self.selection.files), resolved)
        return found

    def why_wait(self, *, measures: bool) -> str:
        if self.worker.is_loading:
            return "the model to be loaded"
        return "the answer to end" if measures and self.worker.answering.is_under_way else ""

    def told(self, wish: PlanWish, error: Exception) -> LocalLLMError:
        return told_of(error, self.selection.files, self.selection.resolved)


class _ClosedError(Exception):
    """Nobody waits for a plan any more."""


class PlanWorker:
    """Posts Bounded, then Replanned or NotPlanned for NOW and for each wish that no other has overtaken."""

    def __init__(self, planning: Planning, post: Post) -> None:
        self._planning = planning
        self._post = post
        self._changed = threading.Condition()
        self._wish: PlanWish | None = None  # the next
        self._is_closed = False
        # A daemon, as a measurement takes seconds and no one leaving should wait for it.
        threading.Thread(target=self._run, name="planning", daemon=True).start()

    def want(self, wish: PlanWish) -> None:
        """In the place of what was wished for before."""
        with self._changed:
            self._wish = wish
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            try:
                self._post(BoundsFound(self._planning.bounds()))
            except Exception as error:
                self._post(PlanRefused(AS_IT_RUNS, self._planning.told(AS_IT_RUNS, error)))
                return
            wish = AS_IT_RUNS
            while True:
                self._plan(wish)
                wish = self._next()
        except _ClosedError:
            return

    def _plan(self, wish: PlanWish) -> None:
        try:
            self._await(measures=False)
            found = self._planning.considered(wish, self._say)
            self._post(PlanFound(wish, found.planned, is_advised=False))
            if not self._is_overtaken(_REST_S):
                self._post(PlanFound(wish, found.advised(), is_advised=True))
        except _ClosedError:
            raise
        except Exception as error:
            self._post(PlanRefused(wish, self._planning.told(wish, error)))

    def _next(self) -> PlanWish:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._wish is not None)
            wish, self._wish = self._wish, None
            if self._is_closed or wish is None:
                raise _ClosedError
            return wish

    def _is_overtaken(self, within_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed or self._wish is not None, within_s)

    def _say(self, text: str) -> None:
        self._await(measures=True)  # beside an answer everything would seem slow
        self._post(PlanDelayed(text))

    def _await(self, *, measures: bool) -> None:
        reason = ""
        while (now := self._planning.why_wait(measures=measures)) and not self._is_closed:
            if now != reason:
                reason = now
                self._post(PlanDelayed(f"waiting for {reason}"))
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _LOOK_S)
        if self._is_closed:
            raise _ClosedError

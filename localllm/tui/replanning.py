"""Plans on a thread of their own: of the wishes that come while one is planned, the last. Knows no widgets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from textual.message import Message

from localllm.runtime.error_origins import with_origins
from localllm.runtime.plan_request import Goal, considered, with_changes
from localllm.runtime.selection import Selection, named, told_of
from localllm.tui.loading import Post

if TYPE_CHECKING:
    from localllm.engine.planning import Considered, Planned
    from localllm.errors import LocalLLMError
    from localllm.tui.desk import Desk

_LOOK_S = 0.1  # between two looks at what is waited for
_REST_S = 0.15  # without another wish, before what would be better is looked for: that takes longer than a plan


@dataclass(frozen=True)
class Wish:
    """changes: of the settings under which the model runs, as a file would have them."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    goal: Goal = "latency"


NOW = Wish()  # as the model runs


@dataclass(frozen=True)
class Bounds:
    """The most that can be wished for. vram_bytes: None where no GPU is used."""

    longest_ctx: int
    ram_bytes: int
    vram_bytes: int | None


@dataclass
class Bounded(Message):
    bounds: Bounds


@dataclass
class Replanned(Message):
    """is_advised: what would be better was looked for."""

    wish: Wish
    planned: Planned
    is_advised: bool


@dataclass
class NotPlanned(Message):
    """What was wished for cannot be honoured."""

    wish: Wish
    error: LocalLLMError


@dataclass
class Busy(Message):
    """What takes its time before there is a plan."""

    text: str


class Planning(Protocol):
    """What is asked for plans; on the thread of those."""

    def bounds(self) -> Bounds: ...

    def considered(self, wish: Wish, say: Callable[[str], None]) -> Considered:
        """say: hears what is measured, before it is."""
        ...

    def why_wait(self, *, measures: bool) -> str:
        """What has to end before a plan, or a measurement, would be right; "" where nothing has."""
        ...

    def told(self, wish: Wish, error: Exception) -> LocalLLMError: ...


@dataclass(frozen=True)
class DeskPlanning:
    """Of the desk's model, which would make room for itself under other settings."""

    desk: Desk
    selection: Selection

    def bounds(self) -> Bounds:
        import psutil
        import torch

        from localllm.engine.memory import choose_device
        from localllm.engine.planner import has_card
        from localllm.models.shapes import find_shape
        from localllm.offload.planner.machine_memory import cgroup_limit_bytes

        device = choose_device(self.selection.settings.device)
        vram_bytes = torch.cuda.get_device_properties(device).total_memory if has_card(device) else None
        total_bytes = int(psutil.virtual_memory().total)
        longest_ctx = find_shape(self.selection.model_name).config.longest_context
        return Bounds(longest_ctx, min(total_bytes, cgroup_limit_bytes() or total_bytes), vram_bytes)

    def considered(self, wish: Wish, say: Callable[[str], None]) -> Considered:
        resolved = with_changes(self.selection.resolved, wish.changes)
        found = considered(self.selection.model_name, resolved, wish.goal, say, say, self.desk.host_bytes)
        if found.planned.refusal is not None:
            with_origins(named(found.planned.refusal, self.selection.files), resolved)
        return found

    def why_wait(self, *, measures: bool) -> str:
        if self.desk.is_loading:
            return "the model to be loaded"
        return "the answer to end" if measures and self.desk.answering.is_under_way else ""

    def told(self, wish: Wish, error: Exception) -> LocalLLMError:
        return told_of(error, self.selection.files, self.selection.resolved)


class _ClosedError(Exception):
    """Nobody waits for a plan any more."""


class Replanner:
    """Posts Bounded, then Replanned or NotPlanned for NOW and for each wish that no other has overtaken."""

    def __init__(self, planning: Planning, post: Post) -> None:
        self._planning = planning
        self._post = post
        self._changed = threading.Condition()
        self._wish: Wish | None = None  # the next
        self._is_closed = False
        # A daemon, as a measurement takes seconds and no one leaving should wait for it.
        threading.Thread(target=self._run, name="planning", daemon=True).start()

    def want(self, wish: Wish) -> None:
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
                self._post(Bounded(self._planning.bounds()))
            except Exception as error:
                self._post(NotPlanned(NOW, self._planning.told(NOW, error)))
                return
            wish = NOW
            while True:
                self._plan(wish)
                wish = self._next()
        except _ClosedError:
            return

    def _plan(self, wish: Wish) -> None:
        try:
            self._await(measures=False)
            found = self._planning.considered(wish, self._say)
            self._post(Replanned(wish, found.planned, is_advised=False))
            if not self._is_overtaken(_REST_S):
                self._post(Replanned(wish, found.advised(), is_advised=True))
        except _ClosedError:
            raise
        except Exception as error:
            self._post(NotPlanned(wish, self._planning.told(wish, error)))

    def _next(self) -> Wish:
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
        self._post(Busy(text))

    def _await(self, *, measures: bool) -> None:
        reason = ""
        while (now := self._planning.why_wait(measures=measures)) and not self._is_closed:
            if now != reason:
                reason = now
                self._post(Busy(f"waiting for {reason}"))
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _LOOK_S)
        if self._is_closed:
            raise _ClosedError

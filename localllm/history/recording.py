"""An answer while it is being written: kept with every sentence, so that a kill costs the one that was not done.

A sentence takes 0.1 ms, the last one, which the disk is waited for, as long as that takes. Knows no terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from localllm.errors import HistoryError
from localllm.history.database import LockedError
from localllm.history.records import Session, State
from localllm.history.store import History

MOST_S = 0.5  # between two writes, where a sentence takes longer
_ENDS = frozenset(".!?…\n。！？")


class Recording:
    """One answer behind the message `parent`. What the history refuses is kept in `error`; nothing is raised.

    message: its number, None until something was said. facts: known before. clock: seconds, never set back.
    """

    def __init__(
        self,
        history: History,
        session: Session,
        parent: int | None,
        model: str | None,
        facts: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.message: int | None = None
        self.error: HistoryError | None = None
        self._history = history
        self._session = session
        self._parent = parent
        self._model = model
        self._facts = facts or {}
        self._clock = clock
        self._parts: list[str] = []
        self._written_at = -math.inf

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(self._parts)

    def hear(self, text: str) -> None:
        """Takes the next piece in."""
        if not text:
            return
        self._parts.append(text)
        if self.error is None and (not _ENDS.isdisjoint(text) or self._clock() - self._written_at >= MOST_S):
            self._attempt(self._write)

    def finish(self, state: State, facts: Mapping[str, Any]) -> None:
        """The answer has ended; the disk has it when this returns, unless there is an `error`. facts: more of them."""
        if self.error is None:
            self._attempt(lambda: self._finish(state, {**self._facts, **facts}))

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except HistoryError as error:
            self.error = error
        self._written_at = self._clock()

    def _write(self) -> None:
        try:
            if self.message is None:
                self.message = self._append("writing", self._facts)
            else:
                self._history.write(self.message, self.text)
        except LockedError:  # the next sentence brings this one along
            pass

    def _finish(self, state: State, facts: Mapping[str, Any]) -> None:
        if self.message is None:
            self.message = self._append(state, facts)
        else:
            self._history.finish(self.message, self.text, state, facts)

    def _append(self, state: State, facts: Mapping[str, Any]) -> int:
        return self._history.append(
            self._session, self._parent, "assistant", self.text, state=state, model=self._model, facts=facts
        )

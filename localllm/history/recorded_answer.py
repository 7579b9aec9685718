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
    """One answer behind the message `parent`. A refusal of the history is kept in `error`; nothing is raised.

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
        self._place = session, parent, "assistant"
        self._model = model
        self._facts = facts or {}
        self._clock = clock
        self._text = ""
        self._written_at = -math.inf

    def hear(self, text: str) -> None:
        self._text += text
        is_due = not _ENDS.isdisjoint(text) or self._clock() - self._written_at >= MOST_S
        if text and is_due and self.error is None:
            self._write("writing", self._facts)

    def finish(self, state: State, facts: Mapping[str, Any]) -> None:
        """End the answer; the disk has it when this returns, unless there is an `error`. facts: more of them."""
        if self.error is None:
            self._write(state, {**self._facts, **facts})

    def _write(self, state: State, facts: Mapping[str, Any]) -> None:
        try:
            if self.message is None:
                self.message = self._history.append(
                    *self._place, self._text, state=state, model=self._model, facts=facts
                )
            elif state == "writing":
                self._history.write(self.message, self._text)
            else:
                self._history.finish(self.message, self._text, state, facts)
        except HistoryError as error:
            if state != "writing" or not isinstance(error, LockedError):  # else the next sentence brings this along
                self.error = error
        self._written_at = self._clock()

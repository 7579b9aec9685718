"""What the screen is told of a loaded model, and of what was asked before there was one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.errors import HistoryError
from localllm.history import History, history_file, nothing_is_kept
from localllm.tui.messages import ModelFacts

if TYPE_CHECKING:
    from localllm.engine.facts import LoadedEngine

_MOST_ASKED, _LONGEST_ASKED = 500, 4000  # questions, characters, for the arrows and the search


def facts_of(name: str, engine: LoadedEngine) -> ModelFacts:
    """What the status line says of a loaded model. Raises EngineGoneError."""
    facts = engine.facts()
    return ModelFacts(
        name, facts.weights, facts.kv, facts.ctx, facts.ledger, facts.limits, facts.bound_by, facts.streamed_bytes
    )


def asked_before() -> tuple[str, ...]:
    """The questions of all kept chats, the latest first; those that nobody would want to write again are left out."""
    try:
        if nothing_is_kept():
            return ()
        with History.peek(history_file()) as history:
            found = history.questions(_MOST_ASKED)
    except HistoryError:  # of which whatever is kept next tells
        return ()
    return tuple(text for text in found if len(text) <= _LONGEST_ASKED)

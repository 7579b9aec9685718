"""Completions of words on a command line. The registry is imported when one is asked for."""

from __future__ import annotations


def complete_models(incomplete: str) -> list[str]:
    """Names of the registry and of installed models that begin so."""
    from localllm.registry import load_registry

    known = [name for entry in load_registry().entries for name in (entry.name, *entry.aliases)]
    return _beginning(incomplete, [*known, *_installed()])


def complete_installed(incomplete: str) -> list[str]:
    """Names of installed models that begin so."""
    return _beginning(incomplete, _installed())


def complete_weights(incomplete: str) -> list[str]:
    """Formats that weights can be kept in that begin so."""
    from localllm.settings import WEIGHTS

    return _beginning(incomplete, list(WEIGHTS))


def complete_speculate(incomplete: str) -> list[str]:
    """Return the drafters, models among them, that begin so."""
    from localllm.settings import DRAFT_MODEL, SPECULATE

    return _beginning(incomplete, [*SPECULATE, *(f"{DRAFT_MODEL}{name}" for name in _installed())])


def complete_connections(incomplete: str) -> list[str]:
    """Programs that begin so."""
    from localllm.runtime.client_configs import names

    return _beginning(incomplete, names())


def _installed() -> list[str]:
    from localllm import hub

    return [model.name for model in hub.list_models()]


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.casefold().startswith(incomplete.casefold())]


def complete_sessions(incomplete: str) -> list[str]:
    """Ids of kept chats that begin so."""
    from localllm.errors import HistoryError
    from localllm.history import History, history_file, nothing_is_kept

    try:
        if nothing_is_kept():
            return []
        with History.peek(history_file()) as history:
            return _beginning(incomplete, [session.id for session, _ in history.sessions()])
    except HistoryError:
        return []

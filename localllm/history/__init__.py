"""The history: every conversation as it happens, in one SQLite file under the user's data directory.

Knows sessions, messages and files. Knows no model, no terminal and no settings but the folder. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from localllm.config import user_directories
from localllm.history.database import DamagedError, LockedError
from localllm.history.recorded_answer import Recording
from localllm.history.records import Conversation, Hit, Message, Said, Session, State, clean, content_of, title_of
from localllm.history.store import LAST, GoneError, History, Removed

__all__ = [
    "LAST", "Conversation", "DamagedError", "GoneError", "History", "Hit", "LockedError", "Message", "Recording",
    "Removed", "Said", "Session", "State", "clean", "content_of", "history_file", "nothing_is_kept", "title_of",
]  # fmt: skip


def history_file() -> Path:
    """Return the path of the user's history, which need not exist."""
    return user_directories().data / "conversations.db"


def nothing_is_kept() -> bool:
    """Return whether there is no history yet; False where that cannot be seen: opening it says why."""
    try:
        history_file().stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False

"""A saved chat as a file."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

from localllm.chat.text_file import write_new
from localllm.chat.thoughts import kept_apart
from localllm.history import History, Session, exchange, history_file

_MOST_NAMED = 50  # characters of a title in a file's name


def export_chat(session_id: str, path: Path) -> None:
    """Write a chat as Markdown, or with every branch as JSON where the name ends so.

    Raises UsageError for a file that exists or cannot be written, HistoryError.
    """
    with History.open_to_read(history_file()) as history:
        text = exported(history, history.find(session_id), path)
    write_new(path, text)


def exported(history: History, session: Session, path: Path) -> str:
    """Return the text of a file of this name. Raises HistoryError."""
    if path.suffix.casefold() == ".json":
        value = exchange.as_json([history.conversation(session)], kept_apart)
        return json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    return exchange.as_markdown(session, history.path(session), kept_apart)


def proposed_name(title: str) -> str:
    """Return a file name made of a title, without an ending: letters and digits of any script, and hyphens."""
    words = re.sub(r"[\W_]+", "-", unicodedata.normalize("NFC", title)).strip("-").lower()
    return words[:_MOST_NAMED].rstrip("-") or "chat"

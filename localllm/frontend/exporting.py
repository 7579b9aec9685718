"""A kept chat as a file."""

from __future__ import annotations

import json
from pathlib import Path

from localllm.errors import UsageError
from localllm.history import History, exchange, history_file


def export_chat(session_id: str, path: Path) -> None:
    """Writes Markdown, or JSON with every branch where the name ends so. Raises UsageError for a file that is there
    already or cannot be written, HistoryError."""
    with History.open_to_read(history_file()) as history:
        session = history.find(session_id)
        if path.suffix.casefold() == ".json":
            text = json.dumps(exchange.as_json([history.conversation(session)]), ensure_ascii=False, indent=1) + "\n"
        else:
            text = exchange.as_markdown(session, history.path(session))
    write_new(path, text)


def write_new(path: Path, text: str) -> None:
    """Writes a file that was not there. Raises UsageError."""
    try:
        with path.open("x", encoding="utf-8", errors="replace") as stream:
            stream.write(text)
    except FileExistsError:
        why = "it would be lost"
        other = path.with_stem(f"{path.stem}-2")
        raise UsageError(f"{str(path)!r} is there already", why=why, fix=f"another name: {other}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "another folder, or name"
        raise UsageError(f"{str(path)!r} cannot be written", why=why, fix=fix) from None

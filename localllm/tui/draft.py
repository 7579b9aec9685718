"""What was written and not sent, kept until the next start."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from localllm.config import user_directories


def _path() -> Path:
    return user_directories().data / "draft"


def keep(text: str) -> None:
    """Keeps it, readable by its owner alone; nothing where it is empty. A disk that refuses is not told of."""
    path = _path()
    unfinished = path.with_name(f".draft.{os.getpid()}.tmp")
    with suppress(OSError):
        if not text.strip():
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as stream:
            stream.write(text)
        unfinished.replace(path)


def take() -> str:
    """What was kept, once; "" where nothing was."""
    path = _path()
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
    except OSError:
        return ""
    return text

"""A saved chat as a file."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import unicodedata
from contextlib import suppress
from pathlib import Path

from localllm.chat.thoughts import kept_apart
from localllm.errors import UsageError
from localllm.history import History, Session, exchange, history_file

_MOST_NAMED = 50  # characters of a title in a file's name


class ExistsError(UsageError):
    """A file is there already, and is left as it is."""


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


def write_new(path: Path, text: str) -> None:
    """Write a new file, or none where it cannot be written whole. Raises UsageError, ExistsError."""
    try:
        with path.open("x", encoding="utf-8", errors="replace") as stream:
            try:
                stream.write(text)
                stream.flush()
            except OSError:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        why = "it would be lost"
        other = path.with_stem(f"{path.stem}-2")
        raise ExistsError(f"{str(path)!r} is there already", why=why, fix=f"another name: {other}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "another folder, or name"
        raise UsageError(f"{str(path)!r} cannot be written", why=why, fix=fix) from None


def replace_file(path: Path, text: str) -> None:
    """Writes a file, over one that is there; beside the name first, so that no half file ever has it. Raises
    UsageError."""
    unfinished = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        look = "df -h" if path.parent.is_dir() else "mkdir -p"
        fix = f"{look} {shlex.quote(str(path.parent))}"
        raise UsageError(f"{str(path)!r} cannot be written", why=why, fix=fix) from error
    finally:
        with suppress(OSError, ValueError):
            unfinished.unlink(missing_ok=True)

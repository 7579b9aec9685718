"""Which kind of export a file is, and the conversations in it: our own, ChatGPT's, the latter also as its archive."""

from __future__ import annotations

import lzma
import re
import shlex
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm.config import format_bytes
from localllm.errors import Fix, UsageError
from localllm.history import chatgpt, exchange
from localllm.history.records import Conversation

MOST_BYTES = 1 << 30  # of one file, unpacked: a decade of chats
_BAD_ARCHIVES = (zipfile.BadZipFile, zlib.error, lzma.LZMAError)
_MEMBER = re.compile(r"(?:^|/)conversations[^/]*\.json$")


def read_conversations(path: Path) -> list[Conversation]:
    """All conversations of an export. Raises UsageError naming what is wrong with the file; then nothing was taken."""
    try:
        return [conversation for name, data in _texts(path) for conversation in _conversations(data, name)]
    except (OSError, ValueError, NotImplementedError, RuntimeError, EOFError, *_BAD_ARCHIVES) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        fix = f"ls -l {shlex.quote(str(path))}"
        raise UsageError(f"{str(path)!r} cannot be imported", why=why, fix=fix) from error


def _texts(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            yield str(path), _bounded(file.read(MOST_BYTES + 1), str(path))
            return
        with zipfile.ZipFile(file) as archive:
            names = sorted(name for name in archive.namelist() if _MEMBER.search(name))
            if not names:
                why = f"it has no conversations.json among its {len(archive.namelist())} files"
                fix = Fix.command("sessions", "import", "conversations.json")
                raise UsageError(f"{str(path)!r} is no export of chats", why=why, fix=fix)
            for name in names:
                with archive.open(name) as member:
                    yield f"{path}/{name}", _bounded(member.read(MOST_BYTES + 1), name)


def _bounded(data: bytes, name: str) -> bytes:
    if len(data) > MOST_BYTES:
        why = f"it has more than {format_bytes(MOST_BYTES)}"
        raise UsageError(f"{name!r} is too large", why=why, fix="import it in parts")
    return data


def _conversations(data: bytes, name: str) -> list[Conversation]:
    value: Any = exchange.parsed(data.decode("utf-8-sig"), repr(name))
    if isinstance(value, dict) and value.get("format") == exchange.FORMAT:
        return exchange.from_json(value)
    if chatgpt.is_export(value) or value == []:
        return chatgpt.conversations(value)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        why = "it is a single conversation without a history, as `/save` writes it and `/load` reads it"
        raise UsageError(f"{name!r} is no export of chats", why=why, fix=f"localllm chat, and there: /load {name}")
    why = "neither what `localllm sessions export` writes, nor ChatGPT's conversations.json"
    raise UsageError(f"{name!r} is no export of chats", why=why, fix=Fix.command("sessions", "import", "--help"))

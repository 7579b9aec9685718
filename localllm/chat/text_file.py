"""Text files that a user names: read and written whole, or refused with a fix."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

from localllm.config import format_bytes
from localllm.errors import Fix, UsageError
from localllm.whole_file import write_whole

MAX_INPUT_BYTES = 16 << 20  # about four million tokens: more than any context
ICONV = "iconv -f ISO-8859-1 -t UTF-8"


class ExistsError(UsageError):
    """A file is there already, and is left as it is."""


def typed_path(text: str) -> Path:
    """Return a typed path, with the home folder for its ~. Raises UsageError."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"there is no {text[:80]!r}", why=str(error), fix=f"./{text[:80]}, if that is its name"
        ) from None


def read_text_file(path: Path, flag: str) -> str:
    """Return the whole text of a file. Raises UsageError for one that is absent, binary or too large.

    flag: the option or command that names it, `--file` on a command line or `/load` in a chat.
    """
    try:
        if flag.startswith("/") and path.exists() and not path.is_file():  # a pipe would hold a chat up for ever
            raise UsageError(f"{flag} cannot read {str(path)!r}", why="it is not a file", fix=f"{flag} PATH")
        with path.open("rb") as stream:
            data = stream.read(MAX_INPUT_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or str(error)
        fix = f"{flag} PATH" if flag.startswith("/") else shlex.join(["ls", "-l", str(path.parent)])
        raise UsageError(f"{flag} cannot read {str(path)!r}", why=why, fix=fix) from error
    again = f"{flag} {shlex.quote(f'{path}.utf8')}"
    then = again if flag.startswith("/") else f"the same command with {again}"
    convert = f"{ICONV} {shlex.quote(str(path))} > {shlex.quote(f'{path}.utf8')}, then {then}"
    return as_text(data, f"{flag} {path}", convert, nul_allowed=False)


def as_text(
    data: bytes, source: str, convert: str | Fix, *, nul_allowed: bool = True, encoding: str = "utf-8-sig"
) -> str:
    """Return bytes as text. Raises UsageError, naming the source, for bytes that are too many or no text.

    convert: the command that makes UTF-8 of them.
    """
    if len(data) > MAX_INPUT_BYTES:
        why = f"it has more than {format_bytes(MAX_INPUT_BYTES)}; no context holds that"
        raise UsageError(f"{source} is too large", why=why, fix="use a part of it: head -c 1000000 FILE")
    if not nul_allowed and b"\0" in data:
        why = f"it has a NUL byte at offset {data.index(0)}: it is not text"
        raise UsageError(f"{source} is binary", why=why, fix="use its text alone: strings FILE")
    try:
        return data.decode(encoding)  # utf-8-sig: the mark that an editor puts in front is not part of the text
    except UnicodeDecodeError as error:
        why = f"{error.reason} at byte {error.start}"
        raise UsageError(f"{source} is not UTF-8 text", why=why, fix=convert) from error


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
    """Write a file as `write_whole` does. Raises UsageError."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        write_whole(path, text)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        look = "df -h" if path.parent.is_dir() else "mkdir -p"
        fix = f"{look} {shlex.quote(str(path.parent))}"
        raise UsageError(f"{str(path)!r} cannot be written", why=why, fix=fix) from error

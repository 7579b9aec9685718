"""The text of a file of any kind that has one: plain text in the usual encodings, and PDF.

Knows no chat. Never waits for a pipe or a device.
"""

from __future__ import annotations

import codecs
import difflib
import json
import mimetypes
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from localllm.chat import pdf_extraction
from localllm.chat.text_file import MAX_INPUT_BYTES
from localllm.config import format_bytes
from localllm.errors import Fix, UsageError
from localllm.present import is_there

MAX_PDF_BYTES = 256 << 20  # most of a large one is pictures
_PDF_PATIENCE_S = 300.0  # for a process that needs 30 s of the CPU at most
_PDF_MARK = b"%PDF-"
_MARK_WITHIN = 1024  # bytes from the start, where readers of PDF look for it
# A byte order mark in front: an editor's sign for the encoding.
_MARKED = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_MOST_UTF8_BYTES = 4  # of a character
_NOT_TEXT = re.compile("[\x00-\x06\x0e-\x1a\x1c-\x1f]")  # all control characters but \a\b\t\n\v\f\r and escape
_OFFICE = frozenset({".doc", ".docx", ".odp", ".ods", ".odt", ".ppt", ".pptx", ".rtf", ".xls", ".xlsx"})


def text_of_file(path: Path) -> tuple[str, str]:
    """Return the text of a file, and what is to be said about how it was read; "" where it is as it stands there.

    Raises UsageError for a file that cannot be read, is too large, or has no text.
    """
    try:
        with _opened(path) as file:
            begins = file.read(_MARK_WITHIN) or b""  # None: of the kernel's logs, which would be waited for
            file.seek(0)
            if _PDF_MARK in begins:
                return _text_of_pdf(path, file)
            data = file.read(MAX_INPUT_BYTES + 1) or b""
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or str(error)
        nearest = _nearest(path)
        fix = shlex.join(["ls", "-l", str(path.parent)]) if nearest is None else Fix.word(str(path), str(nearest))
        raise _refused(path, why, fix) from error
    return _decoded(path, data)


def _nearest(path: Path) -> Path | None:
    """Return the path in the same folder whose name is most like that of a file which is not there."""
    with suppress(OSError, ValueError):
        names = [] if is_there(path) else [each.name for each in path.parent.iterdir()]
        if nearest := difflib.get_close_matches(path.name, names, n=1):
            return path.with_name(nearest[0])
    return None


def is_pipe(path: Path) -> bool:
    """Return whether a path is neither a plain file nor a folder, but can be read: a pipe, or a device."""
    with suppress(OSError, ValueError):
        return not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode))
    return False


def _opened(path: Path) -> BinaryIO:
    """Open a plain file. Without O_NONBLOCK a pipe would be opened when somebody writes into it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise _refused(path, "it is a folder", f"name a file in it: {shlex.quote(str(path / 'NAME'))}")
    raise _refused(path, "it is a pipe or a device, and plain files alone are read", "name a plain file")


def _decoded(path: Path, data: bytes) -> tuple[str, str]:
    if len(data) > MAX_INPUT_BYTES and b"\0" not in data:
        part = f"head -c 1000000 {shlex.quote(str(path))} > part.txt"
        raise _refused(
            path, f"it has more than {format_bytes(MAX_INPUT_BYTES)}; no context holds that", f"a part: {part}"
        )
    encoding = next((name for mark, name in _MARKED if data.startswith(mark)), "utf-8")
    remark = "" if encoding.startswith("utf-8") else "read as UTF-16"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        text, remark = _otherwise_decoded(path, data, error)
    if (found := _NOT_TEXT.search(text)) is not None:
        raise _binary(path, f"it has the control character {found.group()!r} at character {found.start():,}")
    return text.replace("\r\n", "\n"), remark


def _otherwise_decoded(path: Path, data: bytes, error: UnicodeDecodeError) -> tuple[str, str]:
    whole = data[: error.start]
    if error.encoding == "utf-8" and len(data) - error.start < _MOST_UTF8_BYTES and not whole.isascii():
        return whole.decode(), "without its last character, which is cut"  # as `head -c` leaves a text
    try:
        return data.decode("cp1252"), "read as Latin-1 (Windows-1252), as it is not UTF-8"
    except UnicodeDecodeError:
        raise _binary(path, f"byte {data[error.start]:#04x} at offset {error.start:,} is none of UTF-8") from None


def _binary(path: Path, why: str) -> UsageError:
    quoted = shlex.quote(str(path))
    kind = (mimetypes.guess_type(path.name)[0] or "").partition("/")[0]
    if kind == "image":
        why = "it is an image, and this version gives a model text alone: vision is not supported"
        return _refused(path, why, f"its text, if it shows any: tesseract {quoted} {quoted}")
    if kind in ("audio", "video"):
        return _refused(path, f"it is {kind}, and this version gives a model text alone", "attach a transcript of it")
    if path.suffix.lower() in _OFFICE:
        return _refused(path, "it is a file of an office program", f"libreoffice --headless --convert-to pdf {quoted}")
    return _refused(path, f"it is binary: {why}", f"its text alone: strings {quoted} > strings.txt")


def _text_of_pdf(path: Path, file: BinaryIO) -> tuple[str, str]:
    quoted = shlex.quote(str(path))
    by_other = f"try another reader: pdftotext {quoted} text.txt"
    if (num_bytes := os.fstat(file.fileno()).st_size) > MAX_PDF_BYTES:
        why = f"it has {format_bytes(num_bytes)}; up to {format_bytes(MAX_PDF_BYTES)} are read"
        raise _refused(path, why, by_other)
    reply = _extracted_apart(path, file)
    if reply.get("error") == "encrypted":
        raise _refused(path, "it is encrypted", f"qpdf --decrypt --password=PASSWORD {quoted} decrypted.pdf")
    if "error" in reply:
        raise _refused(path, reply["error"], by_other)
    text, num_pages, num_empty = reply["text"], reply["pages"], reply["empty"]
    pages = "1 page" if num_pages == 1 else f"{num_pages:,} pages"
    if not text:
        raise _refused(path, f"its {pages} have no text: pictures, as of a scan", f"ocrmypdf {quoted} with-text.pdf")
    text = _NOT_TEXT.sub("", text.encode("utf-8", "replace").decode())
    return text, f"{pages}, {num_empty:,} without text" if num_empty else pages


def _extracted_apart(path: Path, file: BinaryIO) -> dict[str, Any]:
    """Return the reply of `pdf_extraction.extracted`, from a process of its own."""
    script = [sys.executable, "-P", pdf_extraction.__file__]
    again = "attach it again"
    try:
        process = subprocess.run(script, stdin=file, capture_output=True, timeout=_PDF_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise _refused(path, f"this machine is busy: it was not read in {_PDF_PATIENCE_S:.0f} s", again) from None
    except OSError as error:
        why = f"no process can be started to read it: {error.strerror or error}"
        raise _refused(path, why, again) from error
    if process.returncode == -signal.SIGXCPU:
        why = f"reading it takes more than the {pdf_extraction.CPU_S} s of the CPU that it may take"
        return {"error": why}
    if process.returncode:
        return {"error": f"the process that reads it ended with {process.returncode}"}
    reply: dict[str, Any] = json.loads(process.stdout)
    return reply


def _refused(path: Path, why: str, fix: str | Fix) -> UsageError:
    return UsageError(f"{str(path)!r} cannot be read", why=why, fix=fix)

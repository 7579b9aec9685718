"""What the model is asked: the prompt from arguments, files and a pipe, and which word of the line names the model.

Knows no tokenizer and no template.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from localllm.cli.output import Output, format_bytes
from localllm.errors import UsageError

MAX_INPUT_BYTES = 16 << 20  # about four million tokens: more than any context
_PATIENCE_S = 2.0  # a pipe that stays silent for longer is mentioned, for nobody may know that it is waited for


def split_positionals(
    positionals: Sequence[str], prompt_flag: str | None, is_model: Callable[[str], bool]
) -> tuple[str | None, str | None]:
    """The model and the prompt of `[MODEL] [PROMPT] [-p PROMPT]`; None where the line names none.

    One word alone is a model: it must exist, so that a typo is not taken for a question. Text with white space is a
    prompt, unless it names a model (a folder).
    """
    if len(positionals) == 2 and prompt_flag is not None:
        raise UsageError(
            "the prompt is given twice: as an argument and with -p/--prompt",
            why=f"the argument is {positionals[1]!r}, -p is {prompt_flag!r}",
            fix="localllm run MODEL -p PROMPT",
        )
    if len(positionals) == 2:
        return positionals[0], positionals[1]
    if not positionals:
        return None, prompt_flag
    word = positionals[0]
    is_prompt = (not word or any(character.isspace() for character in word)) and not is_model(word)
    if is_prompt and prompt_flag is not None:
        raise UsageError(
            "the prompt is given twice: as an argument and with -p/--prompt",
            why=f"the argument is {word!r}, -p is {prompt_flag!r}; a model's name has no blanks",
            fix="localllm run MODEL -p PROMPT",
        )
    return (None, word) if is_prompt else (word, prompt_flag)


def argument_text(text: str, flag: str) -> str:
    """An argument as UTF-8, whatever the locale. Raises UsageError for bytes that are none."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise UsageError(
            f"{flag} is no UTF-8 text", why=str(error), fix="iconv -t UTF-8 FILE | localllm run"
        ) from error


def read_text_file(path: Path, flag: str) -> str:
    """The whole of a text file. Raises UsageError, naming it, for one that is absent, binary or too large."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"{flag} cannot read {str(path)!r}", why=why, fix=f"ls -l {path.parent}") from error
    return _as_text(data, f"{flag} {path}", nul_allowed=False)


def read_stdin(output: Output) -> str | None:
    """All of standard input, or None where it is a terminal or closed. Raises UsageError as `read_text_file` does."""
    stream = sys.stdin
    if stream is None or stream.isatty():
        return None
    hint = threading.Timer(_PATIENCE_S, output.note, ["reading standard input to its end (`< /dev/null` gives none)"])
    hint.daemon = True
    if _is_pipe(stream):
        hint.start()
    try:
        data = stream.buffer.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError("standard input cannot be read", why=why, fix="localllm run -p TEXT < /dev/null") from error
    finally:
        hint.cancel()
    return _as_text(data, "standard input")


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def join_parts(parts: Sequence[str]) -> str:
    """The parts in their order, a blank line between each two."""
    *before, last = parts
    return "".join(part.rstrip("\n") + "\n\n" for part in before) + last


def _as_text(data: bytes, source: str, *, nul_allowed: bool = True) -> str:
    if len(data) > MAX_INPUT_BYTES:
        why = f"it has more than {format_bytes(MAX_INPUT_BYTES)}; no context holds that"
        raise UsageError(f"{source} is too large", why=why, fix="head -c 1000000 FILE | localllm run")
    if not nul_allowed and b"\0" in data:
        why = f"it has a NUL byte at offset {data.index(0)}: it is no text"
        raise UsageError(f"{source} is binary", why=why, fix="strings FILE | localllm run")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"{error.reason} at byte {error.start}"
        raise UsageError(f"{source} is no UTF-8 text", why=why, fix="iconv -t UTF-8 FILE | localllm run") from error

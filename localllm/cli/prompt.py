"""The prompt from arguments, files and a pipe, and the word of the line that names the model.

Knows no tokenizer and no template.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from localllm.chat.text_file import ICONV, MAX_INPUT_BYTES, as_text, read_text_file
from localllm.cli.output import Output
from localllm.errors import MODEL, Fix, UsageError

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
            fix=Fix.command("run", MODEL, "-p", "PROMPT"),
        )
    if len(positionals) == 2:
        return positionals[0], positionals[1]
    if not positionals:
        return None, prompt_flag
    word = positionals[0]
    is_prompt = (not word or has_blanks(word)) and not is_model(word)
    if is_prompt and prompt_flag is not None:
        raise UsageError(
            "the prompt is given twice: as an argument and with -p/--prompt",
            why=f"the argument is {word!r}, -p is {prompt_flag!r}; a model's name has no blanks",
            fix=Fix.command("run", MODEL, "-p", "PROMPT"),
        )
    return (None, word) if is_prompt else (word, prompt_flag)


def has_blanks(word: str) -> bool:
    """Return whether a word reads like a prompt: no model's name has white space, only a folder's may."""
    return any(character.isspace() for character in word)


def argument_text(text: str, flag: str) -> str:
    """An argument as UTF-8, whatever the locale. Raises UsageError for bytes that are none."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        fix = "write it into a file in UTF-8, and pipe that in"
        raise UsageError(f"{flag} is not UTF-8 text", why=str(error), fix=fix) from error


def read_input(path: Path, flag: str, output: Output) -> str:
    """A flag's file; `-` is standard input. Raises UsageError as `read_text_file` does."""
    if str(path) != "-":
        return read_text_file(path, flag)
    text = read_stdin(output)
    if text is None:
        raise UsageError(
            f"{flag} - has nothing to read", why="standard input is a terminal", fix=Fix.flag(flag, "FILE")
        )
    return text


def read_stdin(output: Output, *, encoding: str = "utf-8-sig") -> str | None:
    """All of standard input, or None where it is a terminal or closed. Raises UsageError as `read_text_file` does."""
    stream = sys.stdin
    if stream is None or stream.isatty():
        return None
    with patience(stream, output):
        data = stream.buffer.read(MAX_INPUT_BYTES + 1)
    return as_text(data, "standard input", Fix.again(f"{ICONV} FILE | "), encoding=encoding)


@contextmanager
def patience(stream: TextIO, output: Output) -> Iterator[None]:
    """While standard input is read: mentions a pipe that stays silent. Raises UsageError where it cannot be read."""
    hint = threading.Timer(_PATIENCE_S, output.note, ["reading standard input to its end (`< /dev/null` gives none)"])
    hint.daemon = True
    if _is_pipe(stream):
        hint.start()
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError("standard input cannot be read", why=why, fix=Fix.again(behind=" < /dev/null")) from error
    finally:
        hint.cancel()


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def join_parts(parts: Sequence[str]) -> str:
    """The parts in their order, a blank line between each two."""
    return "".join(part.rstrip("\n") + "\n\n" for part in parts[:-1]) + "".join(parts[-1:])

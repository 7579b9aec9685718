"""Files as a message names them: `@path`, a path that was dropped on the terminal, and what completes one.

Knows the disk. Knows no chat and no terminal.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

from localllm.chat.text_file import typed_path
from localllm.errors import UsageError
from localllm.present import is_file, is_folder, is_there

_BEGINS = r"(?<![^\s(\[{])@"  # at a word's start: a mail address has it inside
_REFERENCE = re.compile(_BEGINS + r'(?:"([^"\n]+)"|([^\s"]\S*))')
_PARTIAL = re.compile(_BEGINS + r'(?:"([^"\n]*)|([^\s"]\S*)?)$')
_PUNCTUATION = ".,;:!?)]}'\"…"  # behind a name in a sentence
_LOOKS_LIKE_PATH = re.compile(r"[^()<>{}\[\]=,;'\"]*(?:/[^()<>{}\[\]=,;'\"]*|\.\w{1,5})")
_NEEDS_QUOTES = re.compile(r"\s")
_MOST_MARKS = 4  # of punctuation behind a name
_LONGEST_PATH = 4096  # characters
_MOST_REMARKS = 3
_MOST_COMPLETIONS = 50
_MOST_ENTRIES = 5000  # of a folder, that are looked through at each key
_LONGEST_DROPPED = 8192  # characters


@dataclass(frozen=True)
class NamedFiles:
    """What a message names. files: the paths of what is there and no folder. remarks: on names that stay text."""

    files: tuple[str, ...]
    remarks: tuple[str, ...]


def references(message: str) -> NamedFiles:
    """Return the files that a message names by `@path`."""
    files, remarks = list[str](), list[str]()
    for found in _REFERENCE.finditer(message):
        if len(found[0]) > _LONGEST_PATH:
            continue
        path = next(filter(_is_there, _spellings(found)), None)
        if path is not None and not is_folder(_on_disk(path)):
            files.append(path)
        elif path is not None:
            remarks.append(f"@{path} is a folder, and stays text: @{path.rstrip('/')}/NAME attaches a file in it")
        elif (word := found[1] or found[2].rstrip(_PUNCTUATION)) == found[1] or _LOOKS_LIKE_PATH.fullmatch(word):
            remarks.append(f"there is no file {word[:80]!r}: it stays text")
    return NamedFiles(tuple(dict.fromkeys(files)), tuple(dict.fromkeys(remarks))[:_MOST_REMARKS])


def _spellings(found: re.Match[str]) -> Iterator[str]:
    """The path of a reference, and without each punctuation mark behind it."""
    path = found[1] or found[2]
    yield path
    for _ in range(0 if found[1] else _MOST_MARKS):
        if path[-1:] not in _PUNCTUATION or len(path) == 1:
            return
        path = path[:-1]
        yield path


def named_by(message: str) -> set[str]:
    """Return all that a message could name by `@path`, whether it is there or not."""
    return {path for found in _REFERENCE.finditer(message) for path in _spellings(found)}


def is_same(path: str, other: str) -> bool:
    """Return whether two typed paths name one file."""
    return path == other or _on_disk(path).absolute() == _on_disk(other).absolute()


def reference(path: str) -> str:
    """Return what names a file in a message: @notes.md, or @"my notes.md"."""
    return f'@"{path}"' if _NEEDS_QUOTES.search(path) or path[-1:] in _PUNCTUATION else f"@{path}"


def typed_paths(text: str) -> list[str]:
    """Return the paths behind a command, as a shell would take them: quoted, with backslashes, or file:// URLs. A path
    with blanks that is there needs neither."""
    if _is_there(text):
        return [text]
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation mark without its other
        return [text]
    return [unquote(urlsplit(word).path) if word.startswith("file://") else word for word in words]


def dropped(text: str) -> list[str]:
    """Return the files of a text that is nothing but their paths, as a terminal pastes what is dropped on it; none for
    any other. One word without a slash is taken for a word."""
    if len(text) > _LONGEST_DROPPED:
        return []
    paths = typed_paths(text.strip())
    are_files = all("/" in path and '"' not in path and is_file(_on_disk(path)) for path in paths)
    return paths if are_files else []


def completed(message: str) -> list[tuple[str, str]]:
    """Return how the `@path` that a message ends with may go on: (the whole message, the path)."""
    found = _PARTIAL.search(message)
    if found is None:
        return []
    head, slash, begun = (found[1] or found[2] or "").rpartition("/")
    folder = head + slash
    before, completions = message[: found.start()], list[tuple[str, str]]()
    for name, goes_on in _entries(folder, begun):
        path = f"{folder}{name}{'/' * goes_on}"
        named = reference(path)
        completions.append((before + (named.rstrip('"') if goes_on else f"{named} "), path))
    return completions


def _entries(folder: str, begun: str) -> list[tuple[str, bool]]:
    """The names in a folder that begin so, a whole one first, and whether each is a folder; hidden ones where a dot was
    typed."""
    try:
        with os.scandir(_on_disk(folder or ".")) as entries:
            found = [
                (entry.name, entry.is_dir())
                for entry in islice(entries, _MOST_ENTRIES)
                if entry.name.casefold().startswith(begun.casefold())
                and (begun.startswith(".") or not entry.name.startswith("."))
                and not set('"\n').intersection(entry.name)
            ]
    except OSError:
        return []
    return sorted(found, key=lambda each: (each[0] != begun, each))[:_MOST_COMPLETIONS]


def _is_there(path: str) -> bool:
    return is_there(_on_disk(path))


def _on_disk(path: str) -> Path:
    """A typed path with the home folder for its ~; as it is where there is none."""
    try:
        return typed_path(path)
    except UsageError:
        return Path(path)

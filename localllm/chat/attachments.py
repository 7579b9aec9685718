"""Files in front of a question: how a message quotes them, what they cost of a context, and how they are told apart
from what was typed.

Knows no terminal.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from localllm.chat.file_kinds import text_of_file
from localllm.chat.file_references import is_same, named_by, references
from localllm.chat.text import one_line
from localllm.chat.text_file import typed_path
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine

_SHORTEST_FENCE = 3
_QUOTED = re.compile(
    r"File (?P<path>[^\n]+):\n(?P<fence>`{3,})[^`\n]*\n(?P<text>.*?)\n(?P=fence)(?:\n\n|\Z)", re.DOTALL
)


@dataclass(frozen=True)
class Attachment:
    """A file that waits for the next question. path: as it was typed. remark: how it was read; "" for as it stands."""

    path: str
    text: str
    remark: str = ""

    @property
    def quoted(self) -> str:
        """The file as a message has it: its path, and a fenced block whose fence is longer than any in the text."""
        longest = max(map(len, re.findall("`+", self.text)), default=0)
        fence = "`" * max(_SHORTEST_FENCE, longest + 1)
        return f"File {one_line(self.path)}:\n{fence}{self._language}\n{self.text}\n{fence}"

    @property
    def _language(self) -> str:
        """The ending of the name, which renderers know as a language."""
        ending = PurePath(self.path).suffix[1:].lower()
        return ending if ending.isalnum() and ending != "pdf" else "text"


class FileReader:
    """Reads the files of questions to a model, and counts what they take of its context."""

    def __init__(self, engine: LoadedEngine | None, tell: Callable[[str], object]) -> None:
        """engine: None where none is loaded. tell: hears of the files that a question names."""
        self._engine = engine
        self._tell = tell
        self._counted: dict[Attachment, int] = {}

    def read(self, paths: Iterable[str], beside: Sequence[Attachment], *, grows: bool) -> list[Attachment]:
        """Return the files of these paths, without those that are there already.

        beside: the files that are.
        grows: whether the context does, as far as the model has one.
        Raises UsageError for a file that cannot be attached, or that the whole context does not hold.
        """
        files: list[Attachment] = []
        for path in paths:
            if not any(is_same(path, file.path) for file in (*beside, *files)):
                files.append(read_attachment(path))
                self._require_room(files[-1], grows=grows)
        return files

    def read_named(self, question: str, beside: Sequence[Attachment], *, grows: bool) -> list[Attachment]:
        """Return the files that a question names by `@path`, as `read` does, and tell their sizes."""
        named = references(question)
        files = self.read(named.files, beside, grows=grows)
        for note in (*named.remarks, *(f"{file.path}: {self.described(file)}" for file in files)):
            self._tell(note)
        return files

    def described(self, file: Attachment) -> str:
        """Return what a file costs, and how it was read: "1,240 tokens, 12 pages"."""
        num_tokens = self._num_tokens(file)
        size = f"{len(file.text):,} characters" if num_tokens is None else f"{num_tokens:,} tokens"
        return f"{size}, {file.remark}" if file.remark else size

    def _require_room(self, file: Attachment, *, grows: bool) -> None:
        """Raise UsageError for a file that the whole context does not hold, as far as that is known."""
        num_tokens = self._num_tokens(file)
        if num_tokens is None or self._engine is None:
            return
        longest = self._engine.config.longest_context
        room = longest if grows else self._engine.ctx
        if num_tokens >= room:
            why = f"it has {num_tokens:,} tokens, the context {room:,}"
            fixes = self._engine.fixes_for(min(longest, num_tokens + 512)) if num_tokens < longest else []
            what = f"{file.path!r} is larger than the context"
            raise UsageError(what, why=why, fix=[*fixes, f"attach a part of it: {_part_of(file, room / num_tokens)}"])

    def _num_tokens(self, file: Attachment) -> int | None:
        if self._engine is not None and file not in self._counted:
            self._counted[file] = len(self._engine.tokenizer.encode(file.quoted))
        return self._counted.get(file)


def _part_of(file: Attachment, share: float) -> str:
    """Return the command that makes a file of the beginning, which fills half of the context."""
    path = shlex.quote(file.path)
    if file.path.lower().endswith(".pdf"):
        return f"pdftotext -l 10 {path} part.txt"
    return f"head -c {int(len(file.text.encode()) * share / 2)} {path} > part.txt"


def read_attachment(path: str) -> Attachment:
    """Read a file that is named by a typed path. Raises UsageError, as `text_of_file` does."""
    text, remark = text_of_file(typed_path(path))
    return Attachment(path, text.rstrip("\n"), remark)


def length_of_files(message: str) -> int:
    """Return how many characters of a question are the files in front of it."""
    end = 0
    while (found := _QUOTED.match(message, end)) is not None:
        end = found.end()
    return end


def files_of(message: str) -> list[Attachment]:
    """Return the files in front of a question."""
    return [Attachment(found["path"], found["text"]) for found in _QUOTED.finditer(message[: length_of_files(message)])]


def kept_files(question: str, reworded: str) -> list[Attachment]:
    """Return the files of a question for another wording of it: all but those that it named and names no more."""
    named, still_named = named_by(typed_part(question)), named_by(reworded)
    return [file for file in files_of(question) if file.path not in named or file.path in still_named]


def typed_part(message: str) -> str:
    """Return a question without the files in front of it."""
    return message[length_of_files(message) :]


def folded(message: str) -> str:
    """Return a question with a line in place of each file in front of it: "+ notes.md (132 lines)"."""
    lines = [f"+ {file.path} ({_num_lines(file.text)})" for file in files_of(message)]
    return "\n".join([*lines, typed_part(message)])


def _num_lines(text: str) -> str:
    num_lines = text.count("\n") + 1
    return "1 line" if num_lines == 1 else f"{num_lines:,} lines"

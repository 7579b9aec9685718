"""What the screen remembers from one start to the next: nothing that was said, only how it looks."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from localllm.chat.text_file import replace_file
from localllm.config import user_directories
from localllm.errors import UsageError


@dataclass(frozen=True)
class ViewState:
    """lists_chats: the chats are listed beside the conversation where there is room."""

    lists_chats: bool = True

    @classmethod
    def load(cls) -> ViewState:
        """The saved state; the initial one where none can be read."""
        try:
            found = json.loads(_path().read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()
        return cls(lists_chats=not (isinstance(found, dict) and found.get("lists_chats") is False))

    def save(self) -> None:
        """Save it for the next start. Errors of the disk are ignored."""
        with suppress(OSError, UsageError):
            _path().parent.mkdir(parents=True, exist_ok=True)
            replace_file(_path(), json.dumps(asdict(self)) + "\n")


def _path() -> Path:
    return user_directories().data / "view.json"

"""A TOML file that a person writes: read within limits, and with the line on which a key stands."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import SettingsError
from localllm.present import is_there

_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class TomlFile:
    """A parsed TOML file that can still say on which line a key stands."""

    path: Path
    text: str
    data: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> TomlFile:
        """The file's content; empty where there is none, or none can be: its folder is a file, or is not to be entered.
        Raises SettingsError where it is unreadable or not TOML."""
        try:
            with path.open("rb") as file:
                raw = file.read(_LIMIT_BYTES + 1)
        except (OSError, ValueError) as error:
            if not is_there(path):
                return cls(path, "", {})
            raise SettingsError(f"{path} cannot be read", why=str(error), fix=f"ls -l {path}") from None
        if len(raw) > _LIMIT_BYTES:
            raise SettingsError(f"{path} is too large", why=f"more than {_LIMIT_BYTES} bytes", fix=f"ls -l {path}")
        try:
            text = raw.decode()
            return cls(path, text, tomllib.loads(text))
        except UnicodeDecodeError as error:
            line = raw[: error.start].count(b"\n") + 1
            raise SettingsError(
                f"{path}:{line} is not UTF-8", why=str(error), fix=f"mend line {line} of {path}"
            ) from None
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise SettingsError(f"{path} is not TOML", why=str(error), fix=f"mend that line of {path}") from None

    def where(self, *keys: str | int) -> str:
        """`path:line` of the key at `keys`, or `path` where no line can be named."""
        line = self._line(keys)
        return f"{self.path}:{line}" if line else str(self.path)

    def _line(self, keys: Sequence[str | int]) -> int | None:
        # tomllib keeps no positions. The first prefix of the file that parses and holds the key ends on the key's line;
        # only lines that spell the key are tried.
        spelled = next((key for key in reversed(keys) if isinstance(key, str)), "")
        lines = self.text.split("\n")
        candidate = None
        for number, line in enumerate(lines, 1):
            if spelled not in line:
                continue
            candidate = candidate or number  # a value of several lines: no prefix that ends here parses
            try:
                prefix = tomllib.loads("\n".join(lines[:number]))
            except tomllib.TOMLDecodeError:
                continue
            if _contains(prefix, keys):
                return number
        return candidate


def _contains(data: Any, keys: Sequence[str | int]) -> bool:
    for key in keys:
        if isinstance(key, int):
            if not isinstance(data, list) or key >= len(data):
                return False
        elif not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True

"""The settings by which other programs talk to a server of ours: the rows of client_configs.toml, filled in.

Every row says how far it was tested; tests run what is printed (docs/connect.md has the versions).
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Literal

PLACEHOLDER_KEY = "localllm"  # clients want one; a server without a key does not look at it
YOUR_KEY = "YOUR_API_KEY"
USUAL_CTX = 8192  # where it is not known
_ANSWER = 4  # of so many parts of the context one is for the answer, where a program divides it

Language = Literal["yaml", "json", "toml", "sh", "python", "javascript"]


@dataclass(frozen=True)
class Target:
    """The server: its address without a path, the model by the name it is asked for, the context in tokens, whether
    it takes tools, and what is to be sent as its key."""

    url: str
    model: str
    ctx: int = USUAL_CTX
    has_tools: bool = True
    key: str = PLACEHOLDER_KEY


@dataclass(frozen=True)
class Part:
    """A text and where it goes."""

    where: str
    language: Language
    template: str
    text: str = ""  # the template, of which nothing is left to be filled in


@dataclass(frozen=True)
class ClientConfig:
    """A row of the table, which says what each value is."""

    name: str
    title: str
    speaks: Literal["OpenAI", "Anthropic", "Ollama"]
    tested: str
    parts: tuple[Part, ...]
    is_agent: bool = False
    least_ctx: int = 0
    note: str = ""

    def filled(self, target: Target) -> tuple[Part, ...]:
        """Its parts, for this server."""
        return tuple(replace(part, text=_filled(part, target)) for part in self.parts)


def _filled(part: Part, target: Target) -> str:
    values = {
        "url": target.url,
        "v1": f"{target.url}/v1",
        "model": target.model,
        "openai_model": f"openai/{target.model}",
        "own_model": f"localllm/{target.model}",
        "key": target.key,
        "bearer": f"Bearer {target.key}",
    }
    tool_use = "[tool_use]" if target.has_tools else "[]"
    sizes = {"ctx": str(target.ctx), "answer": str(max(1, target.ctx // _ANSWER))}
    bare = {**sizes, "has_tools": json.dumps(target.has_tools), "tool_use": tool_use}
    quote: Callable[[str], str] = {"sh": shlex.quote, "toml": _toml}.get(part.language, json.dumps)
    quoted = {name: quote(value) for name, value in values.items()}
    return Template(part.template).substitute(quoted, **bare).strip("\n")


def _toml(text: str) -> str:
    """A basic string, which knows no surrogates."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _connections() -> tuple[ClientConfig, ...]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)["clients"]
    return tuple(ClientConfig(**row | {"parts": tuple(Part(**part) for part in row["parts"])}) for row in rows)


CONNECTIONS = _connections()


def names() -> list[str]:
    """Return the programs' names."""
    return [each.name for each in CONNECTIONS]

"""The settings by which other programs talk to a server of ours: the rows of client_configs.toml, filled in.

Every row says how far it was tested; tests run what is printed (docs/using/connect.md has the versions).
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

PLACEHOLDER_KEY = "localllm"  # clients want one; a server without a key does not look at it
YOUR_KEY = "YOUR_API_KEY"
USUAL_CTX = 8192  # where it is not known
_ANSWER = 4  # of so many parts of the context one is for the answer, where a program divides it

_PATIENCE_S = 10.0  # where nobody listens, that is known at once
_MOST_BYTES = 1 << 20

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


# A look at what answers at an address


@dataclass(frozen=True)
class ProbedModel:
    """ctx: its context in tokens; None: not told, or not loaded yet. has_tools: None: not told."""

    name: str
    ctx: int | None = None
    has_tools: bool | None = None


@dataclass(frozen=True)
class Answering:
    """What answers at an address.

    state: absent: nothing. locked: it wants another key. other: no server of models. ready: `models` are its.
    """

    state: Literal["absent", "locked", "other", "ready"]
    models: tuple[ProbedModel, ...] = ()


def ask_models(url: str, key: str | None) -> Answering:
    """Ask once what models there are: without a proxy, which would be asked for this machine, and learn the key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    opener = build_opener(ProxyHandler({}), _Nowhere())
    try:
        with opener.open(Request(f"{url}/v1/models", headers=headers), timeout=_PATIENCE_S) as reply:
            return _understood(reply.read(_MOST_BYTES))
    except HTTPError as error:
        error.close()
        return Answering("locked" if error.code == 401 else "other")
    except URLError:
        return Answering("absent")
    except (OSError, ValueError):
        return Answering("other")


class _Nowhere(HTTPRedirectHandler):
    """A server of models sends nobody elsewhere, and the key is for it alone."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _understood(data: bytes) -> Answering:
    found = json.loads(data)
    rows = found.get("data") if isinstance(found, Mapping) else None
    if not isinstance(rows, list):
        return Answering("other")
    models = [_model(row) for row in rows if isinstance(row, Mapping) and isinstance(row.get("id"), str)]
    return Answering("ready", tuple(models)) if models else Answering("other")


def _model(row: Mapping[str, Any]) -> ProbedModel:
    meta = row.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    ctx, capabilities = meta.get("n_ctx"), meta.get("capabilities")
    return ProbedModel(
        row["id"],
        ctx if isinstance(ctx, int) else None,
        "tools" in capabilities if isinstance(capabilities, list) else None,
    )

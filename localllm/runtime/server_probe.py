"""A look at what answers at an address: asked once, of any server that speaks OpenAI's dialect, with little
patience."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

_PATIENCE_S = 10.0  # where nobody listens, that is known at once
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class ProbedModel:
    """ctx: its context in tokens; None: not told, or not loaded yet. has_tools: None: not told."""

    name: str
    ctx: int | None = None
    has_tools: bool | None = None


@dataclass(frozen=True)
class Answering:
    """absent: nobody answers. locked: the server wants another key. other: it is no server of models. ready: these are
    its models."""

    state: Literal["absent", "locked", "other", "ready"]
    models: tuple[ProbedModel, ...] = ()


def ask_models(url: str, key: str | None) -> Answering:
    """GET /v1/models. Without a proxy, which would be asked for addresses of this machine, and would learn the key."""
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

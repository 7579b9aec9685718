"""GET /v1/models and /v1/models/{id}: at once, also while the model is being loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired

from typing_extensions import TypedDict

from localllm.server.capabilities import capabilities
from localllm.server.endpoint import Call, Endpoint
from localllm.server.pool import Pool
from localllm.server.replying import Json
from localllm.server.served import Served

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine


class Meta(TypedDict):
    """n_ctx: of the loaded model; null where it is not."""

    n_ctx: int | None
    n_ctx_train: int | None
    weights: str | None
    capabilities: list[str]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    display_name: str
    type: Literal["model"]
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    meta: NotRequired[Meta]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]
    has_more: bool
    first_id: str | None
    last_id: str | None


async def models(call: Call, _body: None) -> Json:
    """The names of the served models, and all others on this disk: a request for one loads it. Anthropic's libraries
    ask here, too, and look for fields of their own."""
    pool = call.pool
    data = await pool.on_disk(lambda: list(_listed(pool)))
    reply: ModelList = {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"],
        "last_id": data[-1]["id"],
    }
    return Json(reply)


async def model(call: Call, _body: None) -> Json:
    """Raises RequestError for a model that is not on this disk."""
    if call.request.scope["path"] == "/v1/models/":  # the list's own address
        return await models(call, None)
    name = call.request.path_params["model"]
    served = await call.pool.find(name)
    return Json(
        _described(call.pool, name, served.selection.files.repo, await call.pool.on_disk(lambda: _meta(served)))
    )


def _listed(pool: Pool) -> Iterator[Model]:
    for served in pool.models:
        meta = _meta(served)
        yield from (_described(pool, name, served.selection.files.repo, meta) for name in served.names)
    for row in pool.others():
        assert row.directory is not None
        yield _described(pool, row.name, row.repo, _meta_of(row.directory, None))


def _meta(served: Served) -> Meta:
    return _meta_of(served.selection.files.directory, served.engine_if_loaded)


def _described(pool: Pool, name: str, repo: str | None, meta: Meta) -> Model:
    return {
        "id": name,
        "object": "model",
        "created": int(pool.started_at),
        "owned_by": (repo or "localllm").partition("/")[0],
        "display_name": name,
        "type": "model",
        "created_at": pool.started_text,
        "lifecycle": "active",
        "max_input_tokens": meta["n_ctx"],
        "meta": meta,
    }


def _meta_of(directory: Path, engine: LoadedEngine | None) -> Meta:
    """What is known of the model without waiting for it."""
    meta: dict[str, Any] = {"n_ctx": None, "n_ctx_train": None, "weights": None}
    if engine is not None:
        meta |= {"n_ctx": engine.ctx, "n_ctx_train": engine.config.longest_context, "weights": engine.weights}
    return {**meta, "capabilities": capabilities(directory)}  # type: ignore[typeddict-item]


ENDPOINTS = (
    Endpoint("GET", "/v1/models", models, "The models that can be asked for", reply=ModelList),
    Endpoint("GET", "/v1/models/{model:path}", model, "One of them", reply=Model),
)

"""GET /v1/models and /v1/models/{id}: at once, also while the model is being loaded."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from localllm.server.endpoint import Call, Endpoint
from localllm.server.replying import Json
from localllm.server.served import Served


class Meta(TypedDict):
    """n_ctx: of the loaded model; null while it is being loaded."""

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
    """The names of the one model. Anthropic's libraries ask here, too, and look for fields of their own."""
    data = [_model(call.served, name) for name in call.served.names]
    reply: ModelList = {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"],
        "last_id": data[-1]["id"],
    }
    return Json(reply)


async def model(call: Call, _body: None) -> Json:
    """Raises RequestError for a model that is not served."""
    if call.request.scope["path"] == "/v1/models/":  # the list's own address
        return await models(call, None)
    name = call.served.require(call.request.path_params["model"])
    return Json(_model(call.served, name))


def _model(served: Served, name: str) -> Model:
    meta = _meta_of(served)
    return {
        "id": name,
        "object": "model",
        "created": int(served.started_at),
        "owned_by": (served.selection.files.repo or "localllm").partition("/")[0],
        "display_name": name,
        "type": "model",
        "created_at": served.started_text,
        "lifecycle": "active",
        "max_input_tokens": meta["n_ctx"],
        "meta": meta,
    }


def _meta_of(served: Served) -> Meta:
    """What is known of the model without waiting for it."""
    meta: dict[str, Any] = {"n_ctx": None, "n_ctx_train": None, "weights": None}
    engine = served.engine_if_loaded
    if engine is not None:
        meta |= {"n_ctx": engine.ctx, "n_ctx_train": engine.config.longest_context, "weights": engine.weights}
    return {**meta, "capabilities": ["completion", "chat", "embeddings"]}  # type: ignore[typeddict-item]


ENDPOINTS = (
    Endpoint("GET", "/v1/models", models, "The names under which the model is served", reply=ModelList),
    Endpoint("GET", "/v1/models/{model:path}", model, "One of them", reply=Model),
)

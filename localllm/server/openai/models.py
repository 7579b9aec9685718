"""GET /v1/models and /v1/models/{id}: at once, also while the model is being loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

from localllm import hub
from localllm.errors import LocalLLMError
from localllm.runtime.model_pool import ModelPool
from localllm.runtime.presets import Preset
from localllm.runtime.served_model import ServedModel
from localllm.server.bodies import ReplyBody
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.model_server import capabilities
from localllm.server.replies import JsonReply


class ModelMeta(ReplyBody):
    """n_ctx: null if the model is not loaded."""

    n_ctx: int | None = None
    n_ctx_train: int | None = None
    weights: str | None = None
    capabilities: list[str]


class ListedModel(ReplyBody):
    """parent: the model of one with adapters."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None = None
    display_name: str
    type: Literal["model"] = "model"
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    meta: ModelMeta


class ModelList(ReplyBody):
    object: Literal["list"] = "list"
    data: list[ListedModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


async def models(call: ApiCall, _body: None) -> JsonReply:
    """List the served models, presets, and all other models on this disk, which a request loads. Anthropic's libraries
    ask here, too, and look for fields of their own."""
    pool = call.pool

    def listed() -> Iterator[ListedModel]:
        presets = sorted(pool.presets(), key=lambda preset: preset.name != pool.preset)
        if presets and presets[0].name == pool.preset:  # what a request without a model asks for is the first of all
            yield _preset(pool, presets.pop(0))
        for served in pool.models:
            meta = _meta(served)
            repo = served.selection.files.repo
            yield from (_described(pool, name, repo, meta) for name in served.names)
            adapted = (f"{served.name}:{name}" for name in pool.adapters.of(served))
            yield from (_described(pool, name, repo, meta, served.name) for name in adapted)
        for preset in presets:
            with suppress(LocalLLMError):  # its model is not here any more
                yield _preset(pool, preset)
        for row in pool.others():
            assert row.directory is not None
            yield _described(pool, row.name, row.repo, ModelMeta(capabilities=capabilities(row.directory)))

    data = await pool.on_disk(lambda: list(listed()))
    return JsonReply(ModelList(data=data, first_id=data[0].id, last_id=data[-1].id))


async def model(call: ApiCall, _body: None) -> JsonReply:
    """Raises RequestError for a model that is not on this disk."""
    if call.request.scope["path"] == "/v1/models/":  # the list's own address
        return await models(call, None)
    name = call.request.path_params["model"]
    asked = await call.pool.asked(name)
    served, meta = asked.served, await call.pool.on_disk(lambda: _meta(asked.served))
    parent = served.name if asked.adapter else None
    return JsonReply(_described(call.pool, name, served.selection.files.repo, meta, parent))


def _preset(pool: ModelPool, preset: Preset) -> ListedModel:
    served, files = pool.known(preset.model), hub.locate(preset.model)
    meta = ModelMeta(capabilities=capabilities(files.directory)) if served is None else _meta(served)
    return _described(pool, preset.name, files.repo, meta)


def _meta(served: ServedModel) -> ModelMeta:
    """Return what is known of the model without waiting for it."""
    found, engine = capabilities(served.selection.files.directory), served.engine_if_loaded
    if engine is None:
        return ModelMeta(capabilities=found)
    longest = engine.config.longest_context
    return ModelMeta(n_ctx=engine.ctx, n_ctx_train=longest, weights=engine.weights, capabilities=found)


def _described(pool: ModelPool, name: str, repo: str | None, meta: ModelMeta, parent: str | None = None) -> ListedModel:
    return ListedModel(
        id=name,
        created=int(pool.started_at),
        parent=parent,
        owned_by=(repo or "localllm").partition("/")[0],
        display_name=name,
        created_at=pool.started_text,
        max_input_tokens=meta.n_ctx,
        meta=meta,
    )


ENDPOINTS = (
    Endpoint("GET", "/v1/models", models, "List the available models", reply=ModelList),
    Endpoint("GET", "/v1/models/{model:path}", model, "Show one model", reply=ListedModel),
)

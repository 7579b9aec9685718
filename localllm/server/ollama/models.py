"""The models on this disk, the one that is loaded, and what is known about each; and who this server is."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from localllm import hub
from localllm.engine.engine_info import EngineFacts
from localllm.errors import CheckpointError, ModelNotFoundError, TemplateError
from localllm.models.safetensors_header import tensors_of
from localllm.runtime.model_pool import ModelPool
from localllm.runtime.selection import sampling_defaults
from localllm.runtime.served_model import ServedModel
from localllm.server.bodies import Absent, OnlyFalse, ReplyBody
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import RequestError
from localllm.server.model_server import capabilities
from localllm.server.ollama.common import NamedBody, tagged, time_text
from localllm.server.replies import JsonReply
from localllm.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from localllm.hub import InstalledModel, ModelDescription, ModelFiles

_SPOKEN = "0.13.0"  # the version of Ollama whose interface this is: some clients want a later one than they found
_NEVER = "2999-12-31T23:59:59Z"  # when the model is unloaded
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
_PARAMETERS = {"repetition_penalty": "repeat_penalty"}  # as Ollama calls them


class OllamaVersion(ReplyBody):
    version: str


class OllamaDetails(ReplyBody):
    parent_model: str = ""
    format: Literal["safetensors"] = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListed(ReplyBody):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(ReplyBody):
    models: list[OllamaListed]


class OllamaLoaded(ReplyBody):
    """size, size_vram: bytes of weights."""

    name: str
    model: str
    size: int
    size_vram: int
    digest: str
    details: OllamaDetails
    expires_at: str
    context_length: int


class OllamaRunning(ReplyBody):
    models: list[OllamaLoaded]


class ShowBody(NamedBody):
    why: ClassVar = {
        "verbose": "neither tensors nor the vocabulary are told",
        **dict.fromkeys(("system", "template", "options"), "a model is shown as it is"),
    }

    # Ollama's own program sends these with nothing in them.
    system: Literal[""] | None = None
    template: Literal[""] | None = None
    options: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    verbose: OnlyFalse | None = None


class OllamaShown(ReplyBody):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str
    license: Absent[str] = None


async def root(_call: ApiCall, _body: None) -> Response:
    """Answer programs that look whether there is a server."""
    return PlainTextResponse("Ollama is running")


async def version(_call: ApiCall, _body: None) -> JsonReply:
    return JsonReply(OllamaVersion(version=_SPOKEN))


async def tags(call: ApiCall, _body: None) -> JsonReply:
    """List the served models under each of their names, and every other on this disk. Raises SettingsError for a broken
    models.toml."""
    pool = call.pool
    return JsonReply(OllamaTags(models=await pool.on_disk(lambda: list(_tags(pool)))))


async def running(call: ApiCall, _body: None) -> JsonReply:
    """List the loaded models, without those that are being loaded."""
    pool = call.pool
    # Not among what looks at the disk: an engine that does not answer keeps nobody else waiting.
    models = await asyncio.to_thread(lambda: [_running(pool, each) for each in pool.loaded])
    return JsonReply(OllamaRunning(models=models))


async def show(call: ApiCall, body: ShowBody) -> JsonReply:
    """Raises RequestError for a model that is not on this disk, CheckpointError for defaults out of range."""
    pool = call.pool
    return JsonReply(await pool.on_disk(lambda: _shown(pool, body.bare_name)))


async def delete(call: ApiCall, body: NamedBody) -> Response:
    """Raises RequestError for a model that is in use, or not on this disk; what `hub.remove` does."""
    await call.pool.on_disk(lambda: _delete(call.pool, body.bare_name))
    return Response()


def _tags(pool: ModelPool) -> Iterator[OllamaListed]:
    for served in pool.models:
        with suppress(ModelNotFoundError, RequestError):  # its files are gone: it cannot be had
            own = hub.describe(served.selection.model_name)
            yield from [_listed(pool, name, own) for name in served.names]
    known = {served.selection.files.directory for served in pool.models}
    for row in hub.list_models():
        if row.directory is not None and pool.known(row.name) is None and row.directory not in known:
            yield _listed(pool, row.name, hub.describe(row.name))


def _listed(pool: ModelPool, name: str, model: ModelDescription) -> OllamaListed:
    return OllamaListed(
        name=tagged(name),
        model=tagged(name),
        modified_at=_modified_at(model),
        size=model.size_bytes,
        digest=_digest(model),
        details=_details(pool, model),
    )


def _running(pool: ModelPool, served: ServedModel) -> OllamaLoaded:
    engine, model = served.engine_if_loaded, hub.describe(served.selection.model_name)
    facts = EngineFacts(0, "", "") if engine is None else engine.facts()
    expires_at = pool.residents.expires_at(served)
    return OllamaLoaded(
        name=tagged(served.name),
        model=tagged(served.name),
        size=facts.weight_bytes or model.size_bytes,
        size_vram=facts.ledger.get("vram", {}).get("weights", 0),
        digest=_digest(model),
        details=_details(pool, model),
        expires_at=_NEVER if expires_at is None else time_text(expires_at),
        context_length=facts.ctx,
    )


def _shown(pool: ModelPool, name: str) -> OllamaShown:
    served = pool.known(name)
    engine = None if served is None else served.engine_if_loaded
    if served is not None:
        origin, model = served.name, hub.describe(served.selection.model_name)
    else:
        row = _installed(name)
        if row is None or row.directory is None:
            raise _not_found(name)
        origin, model = row.name, hub.describe(row.name)
    return OllamaShown(
        modelfile=f"FROM {origin}\n",
        parameters=_parameters(model, None if engine is None else engine.ctx),
        template=_template(_files(model)),
        details=_details(pool, model),
        model_info=_model_info(model),
        capabilities=capabilities(_files(model).directory),
        modified_at=_modified_at(model),
        license=None if model.entry is None else model.entry.licence,
    )


def _delete(pool: ModelPool, name: str) -> None:
    row = _installed(name)
    if pool.known(name) is not None or (row is not None and any(_uses(each, row) for each in pool.models)):
        why, fix = "this server uses it", "stop the server first"
        raise RequestError(400, f"model {name[:200]!r} cannot be deleted", why=why, fix=fix, param="model")
    if row is None:
        raise _not_found(name)
    hub.remove(name)


def _uses(served: ServedModel, row: InstalledModel) -> bool:
    """Return whether the served model is that one, or takes its draft tokens from it."""
    own = served.selection.files
    is_own = row.repo == own.repo if row.repo else row.directory == own.directory
    return is_own or row.is_called(served.selection.settings.speculate)


def _installed(name: str) -> InstalledModel | None:
    """Return the model on this disk, whole or not, of this name. A client's word is no path to look at."""
    rows = [row for row in hub.list_models() if row.is_called(name)]
    return next((row for row in rows if row.name == name), rows[0] if rows else None)


def _not_found(name: str) -> RequestError:
    what, why, fix = f"model {name[:200]!r} not found", "it is not on this disk", "GET /api/tags lists those that are"
    return RequestError(404, what, why=why, fix=fix, param="model", name="model_not_found")


def _files(model: ModelDescription) -> ModelFiles:
    """Raises RequestError where they are gone meanwhile."""
    if model.files is None:
        raise _not_found(model.name)
    return model.files


def _modified_at(model: ModelDescription) -> str:
    return time_text(_files(model).directory.stat().st_mtime)


def _digest(model: ModelDescription) -> str:
    """Return a digest of name and revision: one of the contents would take minutes."""
    return hashlib.sha256(f"{model.name}@{model.revision}".encode()).hexdigest()


def _details(pool: ModelPool, model: ModelDescription) -> OllamaDetails:
    directory = _files(model).directory
    engines = (each.engine_if_loaded for each in pool.models if each.selection.files.directory == directory)
    engine = next(engines, None)
    family, dtype = model.model_type or "", model.dtype or ""
    return OllamaDetails(
        family=family,
        families=[family],
        parameter_size=_size_text(_parameter_count(model)),
        quantization_level=engine.weights if engine is not None else _DTYPES.get(dtype, dtype),
    )


def _parameter_count(model: ModelDescription) -> int:
    """Count the parameters in the files; 0 where these cannot be read."""
    count = 0
    with suppress(CheckpointError):
        for path in _files(model).directory.glob("*.safetensors"):
            count += sum(math.prod(spec.shape) for spec in tensors_of(path).values())
    return count


def _size_text(count: int) -> str:
    """8030261248: "8.0B"; "" where it is not known."""
    if not count:
        return ""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _model_info(model: ModelDescription) -> dict[str, str | int]:
    arch = model.model_type or "unknown"
    info: dict[str, Any] = {
        "general.architecture": arch,
        "general.parameter_count": _parameter_count(model) or None,
        f"{arch}.context_length": model.context,
        f"{arch}.embedding_length": model.hidden_size,
        f"{arch}.block_count": model.layers,
        f"{arch}.attention.head_count": model.attention_heads,
        f"{arch}.attention.head_count_kv": model.kv_heads,
        f"{arch}.vocab_size": model.vocabulary,
    }
    return {name: value for name, value in info.items() if value is not None}


def _template(files: ModelFiles) -> str:
    """Return "" where the model has no template, or a broken one."""
    try:
        sources = ChatTemplate.load(files.directory).sources
    except TemplateError:
        return ""
    return sources.get("default") or next(iter(sources.values()))


def _shown_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _parameters(model: ModelDescription, ctx: int | None) -> str:
    """ctx: that the server has for it."""
    defaults = {**sampling_defaults(model.entry, model.files), **({} if ctx is None else {"num_ctx": ctx})}
    lines = [f"{_PARAMETERS.get(name, name):<30} {_shown_number(value)}" for name, value in defaults.items()]
    stops = model.entry.stop if model.entry else ()
    return "\n".join([*lines, *(f"{'stop':<30} {json.dumps(text)}" for text in stops)])


ENDPOINTS = (
    Endpoint("GET", "/", root, "Whether there is a server"),
    Endpoint("GET", "/api/version", version, "The server's version", reply=OllamaVersion),
    Endpoint("GET", "/api/tags", tags, "The models on this disk", reply=OllamaTags),
    Endpoint("GET", "/api/ps", running, "The models that are loaded", reply=OllamaRunning),
    Endpoint("POST", "/api/show", show, "What is known about a model", ShowBody, OllamaShown),
    Endpoint("DELETE", "/api/delete", delete, "Delete a model from this disk", NamedBody),
)

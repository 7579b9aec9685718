"""POST /api/create and POST /api/copy: what they make of a model is a preset, which names the model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.responses import Response

from localllm.runtime.model_pool import ModelPool
from localllm.runtime.modelfile import NO_MESSAGES, NO_TEMPLATE, parameter_settings
from localllm.runtime.presets import save_preset
from localllm.server import fields
from localllm.server.bodies import Body, Ignored
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import RequestError, body_of
from localllm.server.fields import optional
from localllm.server.ollama.common import SUCCESS, NamedBody, StatusLine, bare, line
from localllm.server.replies import NDJSON, JsonReply, StreamReply

_NOT_CONVERTED = "models are used as they are; `localllm quantize` packs one"
_NO_FILES = "a preset is of what is here, and a request may not name files; `localllm create` takes them"


class CreateBody(NamedBody):
    why: ClassVar = {
        "template": NO_TEMPLATE,
        "adapters": _NO_FILES,
        "messages": NO_MESSAGES,
        "files": _NO_FILES,
        "path": _NO_FILES,
        "modelfile": "send its parts as 'from', 'system' and 'parameters'",
        **dict.fromkeys(("quantize", "quantization"), _NOT_CONVERTED),
    }

    from_: str | None = optional("The model, or a preset whose settings are taken over.", alias="from")
    system: str | None = optional("The system message of requests that have none.")
    parameters: dict[str, Any] | None = optional("As `options` of a chat; one without effect is refused.")
    license: Annotated[str | list[str] | None, Ignored("a preset keeps no licence")] = None
    template: Literal[""] | None = None
    messages: fields.Nothing = None
    quantize: Literal[""] | None = None
    stream: bool | None = optional("Default: true.")


class CopyBody(Body):
    source: Annotated[str, Field(min_length=1)]
    destination: Annotated[str, Field(min_length=1)]


async def create(call: ApiCall, body: CreateBody) -> Response:
    """Raises RequestError; ModelNotFoundError where the model is not on this disk; UsageError for a name that no preset
    can have, and for parameters that cannot be honoured."""
    name = body.bare_name
    if not body.from_:
        raise RequestError(400, "from: field required", param="from", name="missing_required_parameter")
    values = parameter_settings((key, value, f"parameters.{key}") for key, value in (body.parameters or {}).items())
    await _save(call.pool, name, body.from_, {**values, **({} if body.system is None else {"system": body.system})})
    if body.stream is False:
        return JsonReply(SUCCESS)

    async def pieces() -> AsyncIterator[bytes]:
        yield line(StatusLine(status="writing manifest"))
        yield line(SUCCESS)

    return StreamReply(pieces(), lambda failure: line(body_of(failure, "ollama")), lambda: None, NDJSON)


async def copy(call: ApiCall, body: CopyBody) -> Response:
    """Raises as `create`."""
    await _save(call.pool, bare(body.destination), body.source, {})
    return Response()


async def _save(pool: ModelPool, name: str, base: str, values: Mapping[str, Any]) -> None:
    """Save the preset, over one of that name. base: a name, never a path."""
    if not pool.on_demand:
        raise RequestError(400, "no preset can be saved", why="this server is one of several replicas, and has none")
    if pool.known(name) is not None:
        why = "this server has a model of that name"
        raise RequestError(
            400, f"a preset cannot be called {name[:80]!r}", why=why, param="model", name="invalid_value"
        )
    asked = await pool.asked(base)
    preset = asked.selection.preset
    beneath = {"model": asked.served.selection.model_name} if preset is None else preset.values
    adapters = {"adapter": asked.selection.settings.adapter} if asked.adapter else {}
    await pool.on_disk(lambda: save_preset(name, {**beneath, **adapters, **values}, replaces=True))


ENDPOINTS = (
    Endpoint("POST", "/api/create", create, "Make a preset of a model", CreateBody, StatusLine, StatusLine),
    Endpoint("POST", "/api/copy", copy, "Save a model or a preset under another name", CopyBody),
)

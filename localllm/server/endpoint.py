"""One address of the server: its body, its handler, its reply. The routes and the OpenAPI document are made of the same
list of these, and the models that the document describes are those that check requests."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from localllm.chat.cascade import Tried
from localllm.chat.compression import Judge, JudgeRead
from localllm.runtime.model_pool import ModelPool
from localllm.runtime.served_model import AskedModel, ServedModel
from localllm.server.bodies import Body, ReplyBody
from localllm.server.errors import Dialect, dialect_of
from localllm.server.fields import KeepAlive, keep_seconds
from localllm.server.model_server import ModelServer
from localllm.server.replies import EVENT_STREAM, NDJSON
from localllm.version import __version__

OPENAPI_PATH = "/openapi.json"
_REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True)
class ApiCall:
    """A request that was admitted. tried: the models of a cascade that were asked. judged: what the judge of `compress`
    has read for it, once for all of them."""

    request: Request
    server: ModelServer
    tried: list[Tried] = field(default_factory=list)
    judged: list[tuple[Judge, JudgeRead]] = field(default_factory=list)

    @property
    def pool(self) -> ModelPool:
        return self.server.pool

    async def model(self, name: str | None, keep_alive: KeepAlive = None) -> ServedModel:
        """Return the requested model, loaded. keep_alive: as requests have it. Raises RequestError."""
        return await self.server.model(name, keep_seconds(keep_alive))

    async def asked(self, name: str | None, keep_alive: KeepAlive = None) -> AskedModel:
        """As `model`, with the settings that its name stands for."""
        return await self.server.asked(name, keep_seconds(keep_alive), self.tried)


Handler = Callable[[ApiCall, Any], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """body: of a POST
    reply: what comes back as JSON; None where it is text
    stream: one piece of the streamed form
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handle: Handler
    summary: str
    body: type[Body] | None = None
    reply: Any = None
    stream: Any = None
    deprecated: bool = False

    @property
    def stream_type(self) -> str:
        return NDJSON if self.path.startswith("/api/") else EVENT_STREAM


class OpenAIErrorDetail(ReplyBody):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(ReplyBody):
    error: OpenAIErrorDetail


class AnthropicErrorDetail(ReplyBody):
    type: str
    message: str


class AnthropicError(ReplyBody):
    type: str
    error: AnthropicErrorDetail


class OllamaError(ReplyBody):
    error: str


_ERRORS: Mapping[Dialect, Any] = {"openai": OpenAIError, "anthropic": AnthropicError, "ollama": OllamaError}


def document(endpoints: Sequence[Endpoint], *, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these endpoints."""
    kinds = [kind for each in endpoints for kind in (each.body, each.reply, each.stream) if kind is not None]
    types = {id(kind): TypeAdapter(kind) for kind in (*kinds, *_ERRORS.values())}
    inputs: list[Any] = [(key, "validation", adapter) for key, adapter in types.items()]
    found, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REFERENCE)
    schemas = {key: schema for (key, _), schema in found.items()}
    security = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, path, schemas)
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "localllm", "version": __version__, "description": "A model on this machine."},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {}), "securitySchemes": security},
    }
    return {**described, "security": [{"key": []}]} if needs_key else described


def _operation(endpoint: Endpoint, path: str, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    dialect = dialect_of(path)
    content: dict[str, Any] = {}
    if endpoint.reply is not None:
        content["application/json"] = {"schema": schemas[id(endpoint.reply)]}
    else:
        content["text/plain"] = {"schema": {"type": "string"}}
    if endpoint.stream is not None and endpoint.stream_type == NDJSON:
        item = schemas[id(endpoint.stream)]
        lines = {"type": "string", "description": "One JSON object per line.", "contentSchema": item}
        content[NDJSON] = {"schema": lines}
    elif endpoint.stream is not None:
        item = schemas[id(endpoint.stream)]
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": item}
        either = {"anyOf": [{"type": "string", "const": "[DONE]"}, data]}
        properties = {"event": {"type": "string"}, "data": either}
        content[EVENT_STREAM] = {"schema": {"type": "object", "properties": properties, "required": ["data"]}}
    error = {"application/json": {"schema": schemas[id(_ERRORS[dialect])]}}
    operation: dict[str, Any] = {
        "operationId": "_".join([endpoint.method.lower(), *re.findall(r"\w+", path)]) or "root",
        "summary": endpoint.summary,
        "tags": [dialect],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in re.findall(r"\{(\w+)\}", path)
        ],
        "responses": {
            "200": {"description": "Done.", "content": content},
            "default": {"description": "The request was refused or failed.", "content": error},
        },
    }
    if endpoint.deprecated:
        operation["deprecated"] = True
    if endpoint.body is not None:
        body = {"application/json": {"schema": schemas[id(endpoint.body)]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation

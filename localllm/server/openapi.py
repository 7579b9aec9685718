"""The OpenAPI document, made from the endpoints: the models it describes are those that check requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from localllm.server.bodies import ReplyBody
from localllm.server.endpoint import Endpoint
from localllm.server.errors import Dialect, dialect_of
from localllm.server.replies import EVENT_STREAM
from localllm.version import __version__

PATH = "/openapi.json"
_REFERENCE = "#/components/schemas/{model}"


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


def document(endpoints: Iterable[Endpoint], *, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these endpoints."""
    listed = list(endpoints)
    schemas, components = _schemas(listed)
    paths: dict[str, dict[str, Any]] = {}
    for each in listed:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, path, schemas)
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "localllm", "version": __version__, "description": "A model on this machine."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
    return {**described, "security": [{"key": []}]} if needs_key else described


def _schemas(endpoints: Iterable[Endpoint]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return (the schema of each type, the definitions that they refer to)."""
    types: dict[str, Any] = {}
    for each in endpoints:
        for kind in (each.body, each.reply, each.stream, *_ERRORS.values()):
            if kind is not None:
                types.setdefault(_key(kind), kind)
    inputs: list[Any] = [(key, "validation", TypeAdapter(kind)) for key, kind in types.items()]
    found, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REFERENCE)
    return {key: schema for (key, _), schema in found.items()}, definitions.get("$defs", {})


def _key(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _operation(endpoint: Endpoint, path: str, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    dialect = dialect_of(path)
    content: dict[str, Any] = {}
    if endpoint.reply is not None:
        content["application/json"] = {"schema": schemas[_key(endpoint.reply)]}
    else:
        content["text/plain"] = {"schema": {"type": "string"}}
    if endpoint.stream is not None:
        schema = _stream_schema(endpoint.stream_type, schemas[_key(endpoint.stream)])
        content[endpoint.stream_type] = {"schema": schema}
    error = {"application/json": {"schema": schemas[_key(_ERRORS[dialect])]}}
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint, path),
        "summary": endpoint.summary,
        "tags": [dialect],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in re.findall(r"\{(\w+)\}", path)
        ],
        "responses": {
            "200": {"description": "Done.", "content": content},
            "default": {"description": "Refused, or failed.", "content": error},
        },
    }
    if endpoint.deprecated:
        operation["deprecated"] = True
    if endpoint.body is not None:
        body = {"application/json": {"schema": schemas[_key(endpoint.body)]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _stream_schema(media_type: str, item: Any) -> dict[str, Any]:
    """Return the schema of a server-sent event, whose data is JSON; or of lines of JSON."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": item}
    if media_type == EVENT_STREAM:
        either = {"anyOf": [{"type": "string", "const": "[DONE]"}, data]}
        return {"type": "object", "properties": {"event": {"type": "string"}, "data": either}, "required": ["data"]}
    return {"type": "string", "description": "Lines, each a JSON object.", "contentSchema": item}


def _operation_id(endpoint: Endpoint, path: str) -> str:
    return "_".join([endpoint.method.lower(), *re.findall(r"\w+", path)]) or "root"

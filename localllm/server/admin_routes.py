"""The endpoints at the server's Unix socket, for this user's own programs: `ps`, `load`, `stop`, and the engine that
`run` and `chat` attach to. Whoever can open the socket is let in: its folder is this user's alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from localllm.engine.engine_info import EngineFacts, EngineStatus
from localllm.errors import AdapterError, EngineStuckError, LocalLLMError, ModelNotFoundError
from localllm.hub.adapters import locate_adapter, split_scale
from localllm.runtime.engine_client import EngineClient
from localllm.runtime.served_adapters import GivenAdapter
from localllm.runtime.served_model import ServedModel
from localllm.server.bodies import Body
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import RequestError
from localllm.server.fields import KeepAlive, keep_seconds
from localllm.server.model_server import other_settings
from localllm.server.replies import JsonReply
from localllm.version import __version__

_WHAT_IS_LOADED = "localllm ps"


class AttachBody(Body):
    version: str
    model: str  # a name, or a folder of this user's
    directory: str  # of its files: a name may be another model's alias
    settings: dict[str, Any]  # of the engine, which its user has chosen
    private: bool  # nothing of the texts may be saved
    waits: bool  # until the model is loaded; else the reply is only whether its engine may be attached to


class ModelBody(Body):
    model: str | None = None
    keep_alive: KeepAlive = None
    adapter: str | None = None  # to be loaded or unloaded, beside the model: a name or a path, and :SCALE


class Doors:
    """Two applications: one for requests to an address, one for requests through the Unix socket."""

    def __init__(self, outer: ASGIApp, inner: ASGIApp) -> None:
        self._outer = outer
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        is_local = server is not None and server[1] is None  # of a Unix socket there is a path, and no port
        await (self._inner if is_local else self._outer)(scope, receive, send)


def endpoints(urls: list[str], stop: Callable[[], None]) -> tuple[Endpoint, ...]:
    """urls: at which others reach the server. stop: ends it."""

    async def rows(call: ApiCall, _body: None) -> JsonReply:
        models = await asyncio.gather(*(_row(call, each) for each in call.pool.models if each.handle is not None))
        return JsonReply({"version": __version__, "urls": urls, "models": models})

    async def end(_call: ApiCall, _body: ModelBody) -> JsonReply:
        asyncio.get_running_loop().call_later(0.05, stop)  # when the reply is on its way
        return JsonReply({"name": ""})

    return (
        Endpoint("GET", "/models", rows, "List the loaded models"),
        Endpoint("POST", "/find", find, "Find the name under which a model is served", ModelBody),
        Endpoint("POST", "/attach", attach, "Find the socket of a model's engine", AttachBody),
        Endpoint("POST", "/load", load, "Load a model", ModelBody),
        Endpoint("POST", "/unload", unload, "Unload a model", ModelBody),
        Endpoint("POST", "/stop", end, "End the server", ModelBody),
    )


async def find(call: ApiCall, body: ModelBody) -> JsonReply:
    """Find one of the server's own models: others on this disk are found without it. Raises RequestError."""
    served, cascade = call.pool.known(body.model or ""), call.server.cascade
    if served is None or (cascade is not None and cascade.has(body.model)):
        raise RequestError(404, "the server has no model of that name", name="model_not_found", param="model")
    return JsonReply({"name": served.selection.model_name})


async def attach(call: ApiCall, body: AttachBody) -> Response:
    """Load the model where it is not, and return its name, its engine's socket, "" where the caller does not wait, and
    the process. Raises RequestError where the engine is not as it is wanted."""
    if body.version != __version__:
        raise _refused(f"the server is version {__version__}, this program {body.version}")
    served = await call.pool.find_files(body.model, Path(body.directory))
    if served is None:
        raise _refused(f"the server finds another model by the name {body.model}")
    if body.private and not served.selection.private:
        raise _refused("the server stores computed prompts on the disk, which --private rules out")
    if (other := await other_settings(served, body.settings)) is not None:
        raise _refused(other)
    if not body.waits:
        return JsonReply({"name": served.name, "socket": "", "pid": None})
    await call.pool.ready(served)
    handle = served.handle
    if not isinstance(handle, EngineClient) or handle.peer.socket_path is None:
        raise _refused("the engine of the server cannot be reached from outside")
    return JsonReply({"name": served.name, "socket": str(handle.peer.socket_path), "pid": handle.peer.pid})


def _refused(why: str) -> RequestError:
    return RequestError(409, "this server's engine does not match the request", why=why, name="not_attachable")


async def load(call: ApiCall, body: ModelBody) -> JsonReply:
    """Load a model, and wait for it; with an adapter, that requests can name then. Raises AdapterError."""
    served = await call.pool.find_own(body.model)
    await call.server.make_ready(served, keep_seconds(body.keep_alive))
    if body.adapter is None:
        return JsonReply({"name": served.name})
    word, scale = split_scale(body.adapter)
    files = await call.pool.on_disk(lambda: locate_adapter(word, offline=True))
    given = GivenAdapter(files, scale, served)
    call.pool.adapters.add(given)
    try:
        await asyncio.to_thread(given.check)
    except LocalLLMError:
        call.pool.adapters.remove(served, files.name)
        raise
    return JsonReply({"name": f"{served.name}:{files.name}"})


async def unload(call: ApiCall, body: ModelBody) -> JsonReply:
    """Unload at once: running answers end with an error. An adapter leaves when no answer uses it."""
    try:
        served = await call.pool.find_own(body.model)
    except ModelNotFoundError as error:
        error.fix = _WHAT_IS_LOADED
        raise
    if served.handle is None:
        why = "there is nothing to unload"
        raise RequestError(409, f"{served.name} is not loaded", why=why, fix=_WHAT_IS_LOADED, name="not_loaded")
    if body.adapter is not None:
        return await _unload_adapter(call, served, body.adapter)
    await call.pool.residents.unload(served)
    return JsonReply({"name": served.name})


async def _unload_adapter(call: ApiCall, served: ServedModel, word: str) -> JsonReply:
    """word: the name by which requests name it, or where it is: its files may be gone."""
    given, path = call.pool.adapters.given_to(served), Path(word).resolve()
    name = next((each.files.name for each in given if each.files.path == path or each.files.hub_name == word), word)
    found, engine = call.pool.adapters.remove(served, name), served.engine()
    try:
        files = found.files if found else await call.pool.on_disk(lambda: locate_adapter(word, offline=True))
    except AdapterError:
        files = None
    num_gone = 0 if files is None else await asyncio.to_thread(engine.unload_adapter, str(files.path))
    if files is None or (found is None and not num_gone):
        what, why = f"{served.name}:{name} is not loaded", "there is nothing to unload"
        raise RequestError(409, what, why=why, fix=_WHAT_IS_LOADED, name="not_loaded")
    is_used = not num_gone and files.name in (await asyncio.to_thread(engine.status)).adapters
    return JsonReply({"name": f"{served.name}:{files.name}", "is_used": is_used})


async def _row(call: ApiCall, served: ServedModel) -> dict[str, Any]:
    """Describe a model that is "loaded", or "loading", or "silent": its engine does not answer, or that has "ended",
    and is loaded again by the next request. expires_at: in seconds since 1970. memory: bytes by tier, of the plan.
    adapters: the names of those in memory."""
    engine, handle = served.engine_if_loaded, served.handle
    state = "loaded" if engine is not None else "loading" if served.is_loading else "ended"
    pid = handle.peer.pid if isinstance(handle, EngineClient) and state != "ended" else None
    row: dict[str, Any] = {"name": served.name, "state": state, "pid": pid}
    row["expires_at"] = call.pool.residents.expires_at(served)
    if engine is None:
        return row

    def ask_engine() -> tuple[EngineStatus | None, EngineFacts]:
        try:
            return engine.status(), engine.facts()
        except EngineStuckError:
            return None, engine.facts()

    try:
        status, facts = await asyncio.to_thread(ask_engine)
    except LocalLLMError:
        return row if served.engine_if_loaded is engine else {**row, "state": "ended", "pid": None, "expires_at": None}
    memory = {tier: facts.held_bytes(tier) for tier in facts.ledger}
    row |= {"weights": facts.weights, "kv": facts.kv, "ctx": facts.ctx, "weight_bytes": facts.weight_bytes}
    row |= {"memory": memory, "limits": dict(facts.limits)}
    if status is None:
        return {**row, "state": "silent"}
    row["adapters"] = [*status.adapters]
    return {**row, "running": len(status.running), "waiting": status.num_waiting}

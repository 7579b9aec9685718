"""Lists, shows, fetches and deletes the models on this disk; lists the loaded ones; tells the server's version."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from localllm import hub
from localllm.config import shown_setting
from localllm.engine.engine_info import EngineFacts
from localllm.errors import CheckpointError, LocalLLMError, ModelNotFoundError, TemplateError
from localllm.history.records import UsedAdapter
from localllm.hub.adapters import split_scale
from localllm.hub.gguf_files import gguf_parameters
from localllm.hub.names import HubName
from localllm.hub.quants import quant_of
from localllm.models.checkpoints.safetensors_header import tensors_of
from localllm.registry import BUILT_IN, load_registry
from localllm.runtime.download import fetch
from localllm.runtime.model_pool import ModelPool
from localllm.runtime.modelfile import PARAMETERS, modelfile_of
from localllm.runtime.presets import Preset, delete_preset, is_preset
from localllm.runtime.selection import sampling_defaults
from localllm.runtime.served_model import ServedModel
from localllm.server.bodies import Absent, OnlyFalse, ReplyBody
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import RequestError, body_of, busy
from localllm.server.fields import optional
from localllm.server.model_server import capabilities
from localllm.server.ollama.common import SUCCESS, NamedBody, StatusLine, bare, line, tagged, time_text
from localllm.server.replies import NDJSON, JsonReply, StreamReply
from localllm.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from localllm.config import ResolvedSettings
    from localllm.hub import InstalledModel, ModelDescription, ModelFiles, PullProgress

_SPOKEN = "0.13.0"  # the version of Ollama whose interface this is: some clients want a later one than they found
_NEVER = "2999-12-31T23:59:59Z"  # when the model is unloaded
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
_PARAMETERS = {key: name for name, key in PARAMETERS.items()}  # as Ollama calls them
_TELL_S = 0.1  # between two lines of one file
_MOST_PULLS = 4  # at once
_MOST_WAITING = 100  # lines of a pull that its client has not read
_THREAD = "localllm-pull"


class OllamaVersion(ReplyBody):
    version: str


class OllamaDetails(ReplyBody):
    parent_model: str = ""
    format: Literal["gguf", "safetensors"] = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _ModelHead(ReplyBody):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaListed(_ModelHead):
    modified_at: str


class OllamaTags(ReplyBody):
    models: list[OllamaListed]


class OllamaLoaded(_ModelHead):
    """size, size_vram: bytes of weights."""

    size_vram: int
    expires_at: str
    context_length: int


class OllamaRunning(ReplyBody):
    models: list[OllamaLoaded]


class ShowBody(NamedBody):
    why: ClassVar = {
        "verbose": "tensors and vocabulary are not reported",
        **dict.fromkeys(("system", "template", "options"), "a request cannot override what is shown"),
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
    system: Absent[str] = None


class PullBody(NamedBody):
    why: ClassVar = {
        "insecure": "models come only from the hub that the server was started with",
        **dict.fromkeys(("username", "password"), "the server uses its own hub token"),
    }

    username: Literal[""] | None = None
    password: Literal[""] | None = None
    insecure: OnlyFalse | None = None
    stream: bool | None = optional("Default: true.")


class PullStoppedError(Exception):
    """Nobody waits for it any more."""


async def root(_call: ApiCall, _body: None) -> Response:
    """Answer programs that look whether there is a server."""
    return PlainTextResponse("Ollama is running")


async def version(_call: ApiCall, _body: None) -> JsonReply:
    return JsonReply(OllamaVersion(version=_SPOKEN))


async def tags(call: ApiCall, _body: None) -> JsonReply:
    """List the served models under each of their names, presets, and every other model on this disk. Raises
    SettingsError for a broken models.toml."""
    pool = call.pool

    def listed() -> Iterator[OllamaListed]:
        for served in pool.models:
            with suppress(ModelNotFoundError, RequestError):  # its files are gone: it cannot be had
                own = hub.describe(served.selection.model_name)
                yield from [_listed(pool, name, own) for name in served.names]
                yield from [_listed_adapted(pool, served, name, own) for name in pool.adapters.of(served)]
        for preset in pool.presets():
            with suppress(LocalLLMError, OSError):
                yield _listed_preset(pool, preset)
        known = {served.selection.files.directory for served in pool.models}
        for row in hub.list_models():
            if row.directory is not None and pool.known(row.name) is None and row.directory not in known:
                with suppress(OSError):  # it has just gone
                    yield _listed(pool, row.name, hub.described(row))

    return JsonReply(OllamaTags(models=await pool.on_disk(lambda: list(listed()))))


async def running(call: ApiCall, _body: None) -> JsonReply:
    """List the loaded models, without those that are being loaded."""
    pool = call.pool
    # Not on the pool's threads for the disk: an engine that does not answer must not delay other requests.
    models = await asyncio.to_thread(lambda: [_running(pool, each) for each in pool.loaded])
    return JsonReply(OllamaRunning(models=models))


async def show(call: ApiCall, body: ShowBody) -> JsonReply:
    """Raises RequestError for a model that is not on this disk, CheckpointError for defaults out of range."""
    pool, name, cascade = call.pool, body.bare_name, call.server.cascade
    if cascade is not None and cascade.has(name):
        name = cascade.models[-1].name  # who answers where no other does, and what the others have no room for
    return JsonReply(await pool.on_disk(lambda: _shown_adapted(pool, name) or _shown(pool, name)))


async def delete(call: ApiCall, body: NamedBody) -> Response:
    """Raises RequestError for a model that is in use, or not on this disk; what `hub.removal` does."""
    pool, name = call.pool, body.bare_name

    def deleted() -> None:
        if pool.on_demand and pool.known(name) is None and is_preset(name):  # also one that cannot be understood
            if name.casefold() == (pool.preset or "").casefold():
                why, fix = "the server was started with it", "stop the server first"
                raise RequestError(400, f"preset {name!r} cannot be deleted", why=why, fix=fix, param="model")
            delete_preset(name)
            return
        row = _installed(name)
        if pool.known(name) is not None or (row is not None and any(_uses(each, row) for each in pool.models)):
            why, fix = "this server uses it", "stop the server first"
            raise RequestError(400, f"model {name[:200]!r} cannot be deleted", why=why, fix=fix, param="model")
        if row is None:
            raise _not_found(name)
        hub.removal(name).delete()

    await pool.on_disk(deleted)
    return Response()


async def pull(call: ApiCall, body: PullBody) -> Response:
    """Raises RequestError for a name that cannot be pulled, and what ends a pull before its first line."""
    pool, name = call.pool, body.bare_name
    is_streamed = body.stream is not False
    if await pool.on_disk(lambda: _is_here(pool, name)):
        return Response(line(SUCCESS), media_type=NDJSON) if is_streamed else JsonReply(SUCCESS)
    if sum(thread.name == _THREAD for thread in threading.enumerate()) >= _MOST_PULLS:
        raise busy("the server is overloaded", f"{_MOST_PULLS} models are being downloaded")
    stopped = threading.Event()
    lines = _pulled(name, pool.first.selection.resolved, stopped)
    try:
        first = await anext(lines)
        if not is_streamed:
            async for _ in lines:
                pass
            return JsonReply(SUCCESS)
    except BaseException:
        stopped.set()
        raise

    async def pieces() -> AsyncIterator[bytes]:
        yield line(first)
        async for each in lines:
            yield line(each)

    return StreamReply(pieces(), lambda failure: line(body_of(failure, "ollama")), stopped.set, NDJSON)


async def _pulled(name: str, resolved: ResolvedSettings, stopped: threading.Event) -> AsyncIterator[StatusLine]:
    """Pull on a thread of its own; yield lines to the end. What was fetched stays where the pull is stopped, which it
    is at its next sign of life. Raises what `hub.pull` does."""
    loop, found = asyncio.get_running_loop(), asyncio.Queue[StatusLine | Exception]()
    last, noted_at = "", 0.0

    def note(each: StatusLine | Exception) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(found.put_nowait, each)

    def report(progress: PullProgress) -> None:
        nonlocal last, noted_at
        if stopped.is_set():
            raise PullStoppedError
        each, now = _line_of(name, progress), time.monotonic()
        is_whole = bool(progress.file_bytes) and progress.file_done_bytes == progress.file_bytes
        is_due = now - noted_at >= _TELL_S and found.qsize() < _MOST_WAITING
        if is_whole or each.status != last or is_due:
            last, noted_at = each.status, now
            note(each)

    def run() -> None:
        try:
            fetch(name, resolved, report)
            note(StatusLine(status="verifying sha256 digest"))  # each file's was, as it came
            note(SUCCESS)
        except PullStoppedError:
            return
        except Exception as error:
            note(error)

    threading.Thread(target=run, name=_THREAD, daemon=True).start()
    while True:
        each = await found.get()
        if isinstance(each, Exception):
            raise each
        yield each
        if each == SUCCESS:
            return


def _line_of(name: str, progress: PullProgress) -> StatusLine:
    if progress.phase == "listing":
        return StatusLine(status="pulling manifest")
    if progress.phase in ("waiting", "retrying"):
        return StatusLine(status=progress.note)
    digest = hashlib.sha256(f"{name}/{progress.file}".encode()).hexdigest()
    return StatusLine(
        status=f"pulling {progress.file}",
        digest=f"sha256:{digest}",
        total=progress.file_bytes,
        completed=progress.file_done_bytes,
    )


def _is_here(pool: ModelPool, name: str) -> bool:
    """Return whether the model is on this disk. Raises RequestError for a name that is neither a known one nor
    ORG/REPOSITORY: a client's word is not a path to look at."""
    if name == BUILT_IN or pool.known(name) is not None:
        return True
    registry = load_registry()
    if registry.find(name) is None and HubName.read(name) is None:
        near = registry.nearest(name[:200])
        fix = f"ask for {near[0]!r}" if near else "name it as ORG/REPOSITORY of the Hugging Face hub"
        why = "it is neither a known name nor ORG/REPOSITORY[:QUANT]"
        raise RequestError(404, f"model {name[:200]!r} not found", why=why, fix=fix, param="model")
    try:
        hub.locate(name, registry=registry, offline=pool.first.selection.settings.offline)
    except ModelNotFoundError:
        return False
    return True


def _head(pool: ModelPool, name: str, model: ModelDescription) -> dict[str, Any]:
    """Return what is listed of every model; the digest is of name and revision: one of contents would take minutes."""
    digest = hashlib.sha256(f"{model.name}@{model.revision}".encode()).hexdigest()
    details = _details(pool, model)
    return {"name": tagged(name), "model": tagged(name), "size": model.size_bytes, "digest": digest, "details": details}


def _listed(pool: ModelPool, name: str, model: ModelDescription) -> OllamaListed:
    return OllamaListed(**_head(pool, name, model), modified_at=_modified_at(model))


def _listed_preset(pool: ModelPool, preset: Preset) -> OllamaListed:
    head = _head(pool, preset.name, hub.describe(preset.model))
    details = head["details"].model_copy(update={"parent_model": _base_name(preset)})
    digest = hashlib.sha256(f"{head['digest']}{sorted(preset.values.items())}".encode()).hexdigest()
    modified_at = time_text(preset.path.stat().st_mtime)
    return OllamaListed(**{**head, "details": details, "digest": digest}, modified_at=modified_at)


def _listed_adapted(pool: ModelPool, served: ServedModel, adapter: str, model: ModelDescription) -> OllamaListed:
    listed = _listed(pool, f"{served.name}:{adapter}", model)
    details = listed.details.model_copy(update={"parent_model": served.name})
    digest = hashlib.sha256(f"{listed.digest}:{adapter}".encode()).hexdigest()
    return listed.model_copy(update={"details": details, "digest": digest})


def _base_name(preset: Preset) -> str:
    """Return the name of its model; of a folder or a file without where it is."""
    path = Path(preset.model)
    return path.name if path.is_absolute() else preset.model


def _running(pool: ModelPool, served: ServedModel) -> OllamaLoaded:
    engine, model = served.engine_if_loaded, hub.describe(served.selection.model_name)
    facts = EngineFacts(0, "", "") if engine is None else engine.facts()
    expires_at = pool.residents.expires_at(served)
    head = _head(pool, served.name, model)
    return OllamaLoaded(
        **{**head, "size": facts.weight_bytes or model.size_bytes},
        size_vram=facts.ledger.get("vram", {}).get("weights", 0),
        expires_at=_NEVER if expires_at is None else time_text(expires_at),
        context_length=facts.ctx,
    )


def _shown_adapted(pool: ModelPool, name: str) -> OllamaShown | None:
    """Return a model with an adapter behind its name; None for any other name."""
    found = [each for is_told in (True, False) for each in pool.adapters.splits(name, is_told=is_told)]
    for adapted in found if pool.known(name) is None else ():
        base = bare(adapted.base)
        if pool.adapters.setting(pool.known(base), adapted) is not None:
            with suppress(RequestError):
                shown = _shown(pool, base)
                details = shown.details.model_copy(update={"parent_model": base})
                modelfile = f"{shown.modelfile}ADAPTER {adapted.written}\n"
                return shown.model_copy(update={"modelfile": modelfile, "details": details})
    return None


def _shown(pool: ModelPool, name: str) -> OllamaShown:
    served = pool.known(name)
    preset = pool.preset_of(name)
    if preset is not None:
        served = pool.known(preset.model)
    engine = None if served is None else served.engine_if_loaded
    if preset is not None:
        origin, model = _base_name(preset), hub.describe(preset.model)
    elif served is not None:
        origin, model = served.name, hub.describe(served.selection.model_name)
    else:
        row = _installed(name)
        if row is None or row.directory is None:
            raise _not_found(name)
        origin, model = row.name, hub.describe(row.name)
    files, entry, template = _files(model), model.entry, ""
    with suppress(TemplateError):  # it has none, or a broken one
        sources = ChatTemplate.load(files.directory).sources
        template = sources.get("default") or next(iter(sources.values()))
    defaults: dict[str, Any] = {**sampling_defaults(entry, model.files)}
    if engine is not None:
        defaults["ctx"] = engine.ctx
    own = {} if preset is None else dict(preset.values)
    if adapters := own.get("adapter"):  # without where they are
        own["adapter"] = tuple(UsedAdapter(*split_scale(text)).shown for text in adapters)
    defaults |= {key: value for key, value in own.items() if key in _PARAMETERS and key != "stop"}
    values = [(_PARAMETERS.get(name, name), shown_setting(value)) for name, value in defaults.items()]
    values += [("stop", json.dumps(text)) for text in own.get("stop") or (entry.stop if entry else ())]
    return OllamaShown(
        modelfile=modelfile_of(origin, own),
        parameters="\n".join(f"{name:<30} {value}" for name, value in values),
        template=template,
        details=_details(pool, model),
        model_info=_model_info(model),
        capabilities=capabilities(files.directory),
        modified_at=_modified_at(model),
        license=None if entry is None else entry.licence,
        system=own.get("system"),
    )


def _uses(served: ServedModel, row: InstalledModel) -> bool:
    """Return whether the served model is that one, or takes its draft tokens from it."""
    own = served.selection.files
    is_whole_repository = row.repo is not None and row.gguf is None
    is_own = row.repo == own.repo if is_whole_repository else row.directory == own.directory
    return is_own or row.is_called(served.selection.settings.speculate)


def _installed(name: str) -> InstalledModel | None:
    """Return the model on this disk, whole or not, of this name. A client's word is not a path to look at."""
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
    files = _files(model)
    return time_text((files.gguf or files.directory).stat().st_mtime)


def _details(pool: ModelPool, model: ModelDescription) -> OllamaDetails:
    files = _files(model)
    directory = files.directory
    engines = (each.engine_if_loaded for each in pool.models if each.selection.files.directory == directory)
    engine, quant = next(engines, None), quant_of(files.gguf.name) if files.gguf else ""
    family, dtype, count = model.model_type or "", model.dtype or "", _parameter_count(model)
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
    return OllamaDetails(
        family=family,
        families=[family],
        parameter_size=size if count else "",
        format="gguf" if files.gguf else "safetensors",
        quantization_level=quant or (engine.weights if engine is not None else _DTYPES.get(dtype, dtype)),
    )


def _parameter_count(model: ModelDescription) -> int:
    """Count the parameters in the files; 0 where these cannot be read."""
    count = 0
    with suppress(CheckpointError):
        count = gguf_parameters(_files(model).directory)
        for path in _files(model).directory.glob("*.safetensors"):
            count += sum(math.prod(spec.shape) for spec in tensors_of(path).values())
    return count


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


ENDPOINTS = (
    Endpoint("GET", "/", root, "Check that the server runs"),
    Endpoint("GET", "/api/version", version, "The server's version", reply=OllamaVersion),
    Endpoint("GET", "/api/tags", tags, "List the models on this disk", reply=OllamaTags),
    Endpoint("GET", "/api/ps", running, "List the loaded models", reply=OllamaRunning),
    Endpoint("POST", "/api/show", show, "Show the details of a model", ShowBody, OllamaShown),
    Endpoint("POST", "/api/pull", pull, "Download a model", PullBody, StatusLine, StatusLine),
    Endpoint("DELETE", "/api/delete", delete, "Delete a model", NamedBody),
)

"""What belongs to no chat: health, metrics, and the questions that llama.cpp's clients ask a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from localllm import __version__
from localllm.engine.engine_info import EngineStatus
from localllm.engine.request import require_ids
from localllm.errors import LocalLLMError, TemplateError
from localllm.server.asking import told_chat
from localllm.server.bodies import Body
from localllm.server.endpoint import Call, Endpoint
from localllm.server.failures import busy
from localllm.server.fields import MAX_MESSAGES
from localllm.server.openai.messages import Message, chat_messages
from localllm.server.openai.tools import Tools, chosen
from localllm.server.replying import Json
from localllm.text.chat_template import ChatInput, ChatTemplate
from localllm.text.tokenizer_files import TokenizerFiles, special_roles

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.text.tokenizer import Tokenizer

METRICS_PATH = "/metrics"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_MOST_IDS = 1 << 20


class Health(TypedDict):
    status: Literal["ok"]


class GenerationSettings(TypedDict):
    n_ctx: int
    params: dict[str, Any]


class Props(TypedDict):
    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    modalities: dict[str, bool]
    is_sleeping: bool


class Slot(TypedDict):
    id: int
    id_task: int | None
    n_ctx: int
    is_processing: bool
    n_prompt_tokens: int
    n_prompt_tokens_processed: int
    n_decoded: int


class TokenizeBody(Body):
    content: Annotated[str, Field(max_length=_MOST_IDS)]
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: str | None = None


class TokenPiece(TypedDict):
    id: int
    piece: str | list[int]


class Tokens(TypedDict):
    tokens: list[int] | list[TokenPiece]


class DetokenizeBody(Body):
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=_MOST_IDS)]
    model: str | None = None


class Content(TypedDict):
    content: str


class TemplateBody(Body):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(max_length=32)] = None
    add_generation_prompt: bool | None = None
    model: str | None = None


class Prompt(TypedDict):
    prompt: str


async def health(call: Call, _body: None) -> Json:
    """503 while the model is being loaded, and while one's engine does not move on. One that has left, as nobody asked
    for it, is as good as loaded."""
    if call.pool.is_starting:
        call.pool.first.engine()
    stuck = next((each for each in call.pool.models if each.is_doubtful), None)
    if stuck is not None:
        raise busy(
            f"the engine of {stuck.name} does not move on", "somebody waits for it, and it says nothing", "stuck"
        )
    reply: Health = {"status": "ok"}
    return Json(reply)


async def metrics(call: Call, _body: None) -> Response:
    engines = [each.engine_if_loaded for each in call.pool.loaded]
    told = [await status_of(engine) for engine in engines if engine is not None]
    running, waiting = sum(len(each.running) for each in told), sum(each.num_waiting for each in told)
    text = call.pool.metrics.text(running, waiting, num_loaded=len(told))
    return Response(text, media_type=_PROMETHEUS)


async def props(call: Call, _body: None) -> Json:
    """Of a model that has left: as it was, and that it sleeps. It is not loaded for a question like this."""
    served = call.pool.first
    engine = served.engine_if_loaded
    if engine is None and (call.pool.is_starting or served.is_loading):
        served.engine()
    sampling, directory = served.sampling(), served.selection.files.directory
    ctx, weights = (served.was.ctx, served.was.weights) if engine is None else (engine.ctx, engine.weights)
    template, tokens = await served.off_loop(lambda: _files_say(directory) if engine is None else _says(engine))
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty")
    params = {name: getattr(sampling, name) for name in (*names, "presence_penalty", "max_tokens")}
    reply: Props = {
        "default_generation_settings": {"n_ctx": ctx, "params": params},
        "total_slots": served.capacity.parallel,
        "model_alias": served.name,
        "chat_template": template,
        "bos_token": tokens.get("bos_token", ""),
        "eos_token": tokens.get("eos_token", ""),
        "build_info": f"localllm {__version__}, {weights}",
        "modalities": {"vision": False, "audio": False},
        "is_sleeping": engine is None,
    }
    return Json(reply)


def _says(engine: LoadedEngine) -> tuple[str, Mapping[str, str]]:
    """Its chat template, "" where it has none, and its special tokens by their roles."""
    tokens = engine.tokenizer.special_tokens
    try:
        return next(iter(engine.template.sources.values())), tokens
    except TemplateError:
        return "", tokens


def _files_say(directory: Path) -> tuple[str, Mapping[str, str]]:
    """As `_says`, of a model that is not loaded; nothing where its files are gone or broken."""
    tokens: Mapping[str, str] = {}
    with suppress(LocalLLMError):
        tokens = special_roles(TokenizerFiles(directory).config())
        return next(iter(ChatTemplate.load(directory).sources.values())), tokens
    return "", tokens


async def slots(call: Call, _body: None) -> Json:
    """What is being computed: numbers, nothing of what it says."""
    served = call.pool.first
    engine = served.engine_if_loaded
    if engine is None and call.pool.is_starting:
        served.engine()
    status = EngineStatus() if engine is None else await status_of(engine)
    rows: list[Slot] = []
    for index in range(max(served.capacity.parallel, len(status.running))):
        slot = status.running[index] if index < len(status.running) else None
        rows.append(
            {
                "id": index,
                "id_task": None if slot is None else slot.request_id,
                "n_ctx": served.was.ctx if engine is None else engine.ctx,
                "is_processing": slot is not None,
                "n_prompt_tokens": 0 if slot is None else slot.num_prompt_tokens,
                "n_prompt_tokens_processed": 0 if slot is None else slot.num_read,
                "n_decoded": 0 if slot is None else slot.num_said,
            }
        )
    return Json(rows)


async def status_of(engine: LoadedEngine) -> EngineStatus:
    """What it is doing: nothing, where it has gone."""
    try:
        return await asyncio.to_thread(engine.status)
    except LocalLLMError:
        return EngineStatus()


async def tokenize(call: Call, body: TokenizeBody) -> Json:
    served = await call.model(body.model)
    tokenizer = served.engine().tokenizer
    return Json(await served.off_loop(lambda: _tokens(body, tokenizer)))


def _tokens(body: TokenizeBody, tokenizer: Tokenizer) -> Tokens:
    ids = tokenizer.encode(body.content, special=body.parse_special is not False, bos=bool(body.add_special))
    if not body.with_pieces:
        return {"tokens": ids}
    pieces: list[TokenPiece] = [{"id": token_id, "piece": _piece(tokenizer.token_bytes(token_id))} for token_id in ids]
    return {"tokens": pieces}


def _piece(data: bytes) -> str | list[int]:
    """As text where it is some; the bytes of a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(call: Call, body: DetokenizeBody) -> Json:
    """Raises UsageError for an id that the model does not have."""
    served = await call.model(body.model)
    engine = served.engine()
    require_ids(body.tokens, engine.config.vocab_size)
    text = await served.off_loop(lambda: engine.tokenizer.decode(body.tokens, skip_special=False))
    reply: Content = {"content": text}
    return Json(reply)


async def apply_template(call: Call, body: TemplateBody) -> Json:
    """The text that a chat's model would be given, special tokens written out. Raises TemplateError."""
    served = await call.model(body.model)
    engine = served.engine()
    generation = body.add_generation_prompt is not False
    given = ChatInput(chat_messages(body.messages), None, generation, body.chat_template_kwargs or {})
    tools = chosen(body.tools, None, None)
    text = await served.off_loop(lambda: engine.template.render_chat(told_chat(given, tools, engine)))
    reply: Prompt = {"prompt": text}
    return Json(reply)


ENDPOINTS = (
    Endpoint("GET", "/health", health, "200: the model is loaded", reply=Health),
    Endpoint("GET", METRICS_PATH, metrics, "For Prometheus"),
    Endpoint("GET", "/props", props, "The model and its defaults", reply=Props),
    Endpoint("GET", "/slots", slots, "What is being computed", reply=list[Slot]),
    Endpoint("POST", "/tokenize", tokenize, "A text's token ids", TokenizeBody, Tokens),
    Endpoint("POST", "/detokenize", detokenize, "The text of token ids", DetokenizeBody, Content),
    Endpoint("POST", "/apply-template", apply_template, "The text of a chat's prompt", TemplateBody, Prompt),
)

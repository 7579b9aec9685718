"""Routes beside the chats: health, metrics, and what llama.cpp's clients ask a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SkipValidation
from starlette.responses import Response
from typing_extensions import TypedDict

from localllm.engine.engine_info import EngineStatus
from localllm.engine.request import require_ids
from localllm.errors import LocalLLMError
from localllm.server.bodies import Body, ReplyBody
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import busy
from localllm.server.fields import MAX_MESSAGES
from localllm.server.generation_request import GenerationRequest, template_input, under_preset
from localllm.server.openai.prompt import OpenAIMessage, Tools, chat_messages, chosen
from localllm.server.replies import JsonReply
from localllm.text.chat_template import ChatInput, ChatTemplate
from localllm.text.tokenizer_files import TokenizerFiles, special_roles
from localllm.version import __version__

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine

METRICS_PATH = "/metrics"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_MOST_IDS = 1 << 20


class Health(ReplyBody):
    status: Literal["ok"] = "ok"


class GenerationSettings(ReplyBody):
    n_ctx: int
    params: dict[str, Any]


class Props(ReplyBody):
    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    modalities: dict[str, bool] = {"vision": False, "audio": False}  # noqa: RUF012
    is_sleeping: bool


class Slot(ReplyBody):
    id: int
    id_task: int | None = None
    n_ctx: int
    is_processing: bool = False
    n_prompt_tokens: int = 0
    n_prompt_tokens_processed: int = 0
    n_decoded: int = 0


class TokenizeBody(Body):
    content: Annotated[str, Field(max_length=_MOST_IDS)]
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: str | None = None


# A reply may have a million of these: dicts take half the memory of models.
class TokenPiece(TypedDict):
    id: int
    piece: str | list[int]


class TokensReply(ReplyBody):
    tokens: SkipValidation[list[int] | list[TokenPiece]]


class DetokenizeBody(Body):
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=_MOST_IDS)]
    model: str | None = None


class ContentReply(ReplyBody):
    content: str


class TemplateBody(Body):
    messages: Annotated[list[OpenAIMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(max_length=32)] = None
    add_generation_prompt: bool | None = None
    model: str | None = None


class PromptReply(ReplyBody):
    prompt: str


async def health(call: ApiCall, _body: None) -> JsonReply:
    """Raises RequestError while the model is being loaded, and while an engine makes no progress. A model that was
    unloaded because no request came for it counts as loaded."""
    if call.pool.is_starting:
        call.pool.first.engine()
    stuck = next((each for each in call.pool.models if each.is_doubtful), None)
    if stuck is not None:
        what, why = f"the engine of {stuck.name} makes no progress", "a request waits for it, and it reports nothing"
        raise busy(what, why, "stuck")
    return JsonReply(Health())


async def metrics(call: ApiCall, _body: None) -> Response:
    engines = [each.engine_if_loaded for each in call.pool.loaded]
    statuses = [await status_of(engine) for engine in engines if engine is not None]
    running, waiting = sum(len(each.running) for each in statuses), sum(each.num_waiting for each in statuses)
    text = call.server.metrics.text(running, waiting, num_loaded=len(statuses))
    return Response(text, media_type=_PROMETHEUS)


async def props(call: ApiCall, _body: None) -> JsonReply:
    """Describe the model; one that was unloaded as it was, asleep. It is not loaded for this."""
    asked = await call.pool.asked(None)
    served = asked.served
    engine = served.engine_if_loaded
    if engine is None and (call.pool.is_starting or served.is_loading):
        served.engine()
    sampling, directory = asked.sampling(), served.selection.files.directory
    ctx, weights = (
        (served.last_facts.ctx, served.last_facts.weights) if engine is None else (engine.ctx, engine.weights)
    )
    template, tokens = await call.pool.off_loop(lambda: _words(engine, directory))
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty")
    params = {name: getattr(sampling, name) for name in (*names, "presence_penalty", "max_tokens")}
    return JsonReply(
        Props(
            default_generation_settings=GenerationSettings(n_ctx=ctx, params=params),
            total_slots=call.server.capacity.parallel,
            model_alias=asked.name,
            chat_template=template,
            bos_token=tokens.get("bos_token", ""),
            eos_token=tokens.get("eos_token", ""),
            build_info=f"localllm {__version__}, {weights}",
            is_sleeping=engine is None,
        )
    )


def _words(engine: LoadedEngine | None, directory: Path) -> tuple[str, Mapping[str, str]]:
    """Return the chat template, "" where there is none, and the special tokens by their roles; of a model that is not
    loaded, as far as its files are there and whole."""
    tokens: Mapping[str, str] = {}
    with suppress(LocalLLMError):
        if engine is None:
            tokens = special_roles(TokenizerFiles(directory).config())
            return next(iter(ChatTemplate.load(directory).sources.values())), tokens
        tokens = engine.tokenizer.special_tokens
        return next(iter(engine.template.sources.values())), tokens
    return "", tokens


async def slots(call: ApiCall, _body: None) -> JsonReply:
    """List what is being computed: numbers, and no text."""
    served = call.pool.first
    engine = served.engine_if_loaded
    if engine is None and call.pool.is_starting:
        served.engine()
    status = EngineStatus() if engine is None else await status_of(engine)
    ctx = served.last_facts.ctx if engine is None else engine.ctx
    busy_slots = [
        Slot(
            id=index,
            id_task=each.request_id,
            n_ctx=ctx,
            is_processing=True,
            n_prompt_tokens=each.num_prompt_tokens,
            n_prompt_tokens_processed=each.num_read,
            n_decoded=each.num_said,
        )
        for index, each in enumerate(status.running)
    ]
    free_slots = [Slot(id=index, n_ctx=ctx) for index in range(len(busy_slots), call.server.capacity.parallel)]
    return JsonReply([*busy_slots, *free_slots])


async def status_of(engine: LoadedEngine) -> EngineStatus:
    """Return what the engine is doing: nothing, where it has gone."""
    try:
        return await asyncio.to_thread(engine.status)
    except LocalLLMError:
        return EngineStatus()


async def tokenize(call: ApiCall, body: TokenizeBody) -> JsonReply:
    served = await call.model(body.model)
    tokenizer = served.engine().tokenizer

    def tokens() -> TokensReply:
        ids = tokenizer.encode(body.content, special=body.parse_special is not False, bos=bool(body.add_special))
        if not body.with_pieces:
            return TokensReply(tokens=ids)
        pieces: list[TokenPiece] = [{"id": each, "piece": _piece(tokenizer.token_bytes(each))} for each in ids]
        return TokensReply(tokens=pieces)

    return JsonReply(await call.pool.off_loop(tokens))


def _piece(data: bytes) -> str | list[int]:
    """Return text, or the bytes of a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(call: ApiCall, body: DetokenizeBody) -> JsonReply:
    """Raises UsageError for an id that the model does not have."""
    served = await call.model(body.model)
    engine = served.engine()
    require_ids(body.tokens, engine.config.vocab_size)
    text = await call.pool.off_loop(lambda: engine.tokenizer.decode(body.tokens, skip_special=False))
    return JsonReply(ContentReply(content=text))


async def apply_template(call: ApiCall, body: TemplateBody) -> JsonReply:
    """Return the prompt of a chat, special tokens written out. Raises TemplateError."""
    asked = await call.asked(body.model)
    engine = asked.engine()
    generation = body.add_generation_prompt is not False
    given = ChatInput(chat_messages(body.messages), None, generation, body.chat_template_kwargs or {})
    prompt = under_preset(GenerationRequest(given), asked.selection.preset).prompt
    assert isinstance(prompt, ChatInput)
    tools = chosen(body.tools, None, None)
    text = await call.pool.off_loop(lambda: engine.template.render_chat(template_input(prompt, tools, engine)))
    return JsonReply(PromptReply(prompt=text))


ENDPOINTS = (
    Endpoint("GET", "/health", health, "200 once the model is loaded", reply=Health),
    Endpoint("GET", METRICS_PATH, metrics, "Metrics for Prometheus"),
    Endpoint("GET", "/props", props, "The model and its defaults", reply=Props),
    Endpoint("GET", "/slots", slots, "List the running requests", reply=list[Slot]),
    Endpoint("POST", "/tokenize", tokenize, "Tokenize a text", TokenizeBody, TokensReply),
    Endpoint("POST", "/detokenize", detokenize, "Detokenize token ids", DetokenizeBody, ContentReply),
    Endpoint(
        "POST",
        "/apply-template",
        apply_template,
        "Render messages with the chat template",
        TemplateBody,
        PromptReply,
    ),
)

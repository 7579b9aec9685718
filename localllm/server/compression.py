"""The field `compress`: the context of a conversation without what says least, as another model of the server finds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from localllm.chat.compression import HIGHEST, LOWEST, Compressible, Compression, Judge, JudgeRead, compressible
from localllm.errors import LocalLLMError
from localllm.registry import BUILT_IN
from localllm.runtime.served_model import AskedModel, ServedModel
from localllm.server.bodies import Body, ReplyBody
from localllm.server.endpoint import ApiCall
from localllm.server.errors import RequestError
from localllm.server.fields import optional
from localllm.server.generation_request import GenerationRequest
from localllm.server.model_server import ModelServer
from localllm.server.replies import collected
from localllm.text.chat_template import ChatInput
from localllm.text.tokenizer import Tokenizer


class CompressBody(Body):
    """Fields of every chat."""

    compress: float | None = optional(
        "The share of the tokens that is kept of the prose in the user's messages, before what they ask. The reply's "
        "`compression` has what was removed.",
        ge=LOWEST,
        le=HIGHEST,
    )
    compress_with: str | None = optional("The model that judges what `compress` removes. Default: tiny.")


class CompressionReply(ReplyBody):
    """What left the prompt, in runs of words. Tokens are of the text that may leave."""

    judge: str
    ratio: float
    tokens_before: int
    tokens_after: int
    removed: list[str]


async def compressed(
    call: ApiCall, body: CompressBody, model: str | None, request: GenerationRequest
) -> tuple[GenerationRequest, CompressionReply | None]:
    """Return the request with less context, and what left. model: that answers; it need not be loaded yet.

    Raises RequestError for a judge without anything to judge; else what refuses either model, or keeps the judge from
    reading.
    """
    if body.compress is None:
        if body.compress_with is not None:
            what, why = "'compress_with' cannot be honoured", "it names the judge of 'compress', which is not set"
            raise RequestError(400, what, why=why, param="compress_with", name="invalid_value")
        return request, None
    prompt, server = request.prompt, call.server
    assert isinstance(prompt, ChatInput)
    answering = (await server.named(model, call.tried)).served  # before anything is loaded
    whole = await server.pool.off_loop(partial(compressible, prompt.messages))
    try:
        asked = await server.pool.asked(body.compress_with or BUILT_IN)
        if not whole.passages:
            return request, CompressionReply(**Compression(asked.name, body.compress, 0, 0, ()).fields())
        if not call.judged:
            await server.make_ready(asked.served)
    except LocalLLMError as error:
        error.why = f"it is the judge of 'compress'; {error.why}"
        raise
    if not call.judged:
        call.judged.append(await _judged(server, asked, whole))
    (reader, read), tokenizer = call.judged[0], await server.pool.on_disk(lambda: _tokenizer_of(answering))
    messages, told = await server.pool.off_loop(partial(whole.compressed, read, body.compress, reader, tokenizer))
    request = replace(request, prompt=replace(prompt, messages=messages), compression=told)
    return request, CompressionReply(**told.fields())


async def _judged(server: ModelServer, asked: AskedModel, whole: Compressible) -> tuple[Judge, JudgeRead]:
    reader = Judge(asked.name, asked.engine().tokenizer, asked.engine().ctx)
    readings = await server.pool.off_loop(lambda: list(whole.readings(reader)))
    read = []
    for reading in readings:
        wanted = GenerationRequest(reading.ids, prompt_logprobs=0, reads_only=True, prompt_field="compress")
        (heard,) = await collected(await server.ask(asked, wanted))
        read.append((reading, [0.0 if each is None else each.logprob for each in heard.prompt_logprobs]))
    return reader, read


def _tokenizer_of(model: ServedModel) -> Tokenizer:
    engine = model.engine_if_loaded
    return Tokenizer.load(model.selection.files.directory) if engine is None else engine.tokenizer

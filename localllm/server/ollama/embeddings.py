"""POST /api/embed, and POST /api/embeddings, which came before it."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import Field, SkipValidation
from starlette.responses import Response

from localllm.server.bodies import Body, ReplyBody
from localllm.server.embeddings import MAX_INPUTS, embedded
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.fields import Count, KeepAlive, optional
from localllm.server.ollama.common import OllamaModelName
from localllm.server.ollama.prompt import Options
from localllm.server.replies import JsonReply, whole

_OPTIONS = "Only num_ctx has an effect, because no token is sampled."


class EmbedBody(Body):
    model: OllamaModelName = None
    input: Annotated[
        str | Annotated[list[str], Field(max_length=MAX_INPUTS)],
        Field(description="Without any text, the request only loads the model."),
    ]
    truncate: bool | None = optional("true: truncates a text that is too long; its beginning stays.")
    dimensions: Count | None = optional("The number of dimensions kept of each vector, which is normalized again.")
    options: Options | None = optional(_OPTIONS)
    keep_alive: KeepAlive = None


class OllamaEmbeddingsBody(Body):
    model: OllamaModelName = None
    prompt: str | None = optional("Without one, the request only loads the model.")
    options: Options | None = optional(_OPTIONS)
    keep_alive: KeepAlive = None


class EmbedReply(ReplyBody):
    """Durations are in nanoseconds."""

    model: str
    embeddings: SkipValidation[list[list[float]]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsReply(ReplyBody):
    embedding: SkipValidation[list[float]]


async def embed(call: ApiCall, body: EmbedBody) -> Response:
    """Raises RequestError, ContextOverflowError for a text that is too long."""
    started_ns = time.perf_counter_ns()
    asked = await call.asked(body.model, body.keep_alive)
    engine = asked.engine()
    given = [body.input] if isinstance(body.input, str) else body.input
    texts = [] if given == [""] else given
    num_ctx = None if body.options is None else body.options.num_ctx
    most_tokens = None
    if body.truncate:
        most_tokens, num_ctx = min(num_ctx or engine.ctx, engine.ctx), None  # into which they fit
    vectors = await embedded(
        call.server, asked, texts, num_ctx=num_ctx, dimensions=body.dimensions, most_tokens=most_tokens
    )

    def build() -> EmbedReply:
        return EmbedReply(
            model=body.model or asked.name,
            embeddings=[list(each.vector) for each in vectors],
            total_duration=time.perf_counter_ns() - started_ns,
            load_duration=0,
            prompt_eval_count=sum(each.num_tokens for each in vectors),
        )

    return await whole(build)


async def embeddings(call: ApiCall, body: OllamaEmbeddingsBody) -> JsonReply:
    """Raises as `embed`."""
    asked = await call.asked(body.model, body.keep_alive)
    prompts = [body.prompt] if body.prompt else []
    vectors = await embedded(
        call.server, asked, prompts, num_ctx=None if body.options is None else body.options.num_ctx
    )
    return JsonReply(OllamaEmbeddingsReply(embedding=list(vectors[0].vector) if vectors else []))


ENDPOINTS = (
    Endpoint("POST", "/api/embed", embed, "Embeddings of texts", EmbedBody, EmbedReply),
    Endpoint(
        "POST",
        "/api/embeddings",
        embeddings,
        "Embedding of a text",
        OllamaEmbeddingsBody,
        OllamaEmbeddingsReply,
        deprecated=True,
    ),
)

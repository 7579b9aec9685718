"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Annotated, Literal

from pydantic import Field, SkipValidation
from starlette.responses import Response

from localllm.server.bodies import Body, ReplyBody
from localllm.server.embeddings import MAX_INPUTS, embedded
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.fields import NOT_KEPT, Count, Ids, KeepAlive, Label, NonEmptyText
from localllm.server.openai.completions import prompt_list
from localllm.server.replies import whole

Inputs = (
    NonEmptyText
    | Ids
    | Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_INPUTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS)]
)


class OpenAIEmbeddingsBody(Body):
    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    keep_alive: KeepAlive = None
    user: Annotated[Label | None, NOT_KEPT] = None


class EmbeddingRow(ReplyBody):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: SkipValidation[list[float] | str]


class EmbeddingsUsage(ReplyBody):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ReplyBody):
    object: Literal["list"] = "list"
    data: list[EmbeddingRow]
    model: str
    usage: EmbeddingsUsage


async def embeddings(call: ApiCall, body: OpenAIEmbeddingsBody) -> Response:
    """Raises RequestError, ContextOverflowError, UsageError for ids that the model does not have."""
    asked = await call.asked(body.model, body.keep_alive)
    vectors = await embedded(call.server, asked, prompt_list(body.input), dimensions=body.dimensions)
    num_tokens = sum(each.num_tokens for each in vectors)
    encode = _base64 if body.encoding_format == "base64" else list

    def build() -> EmbeddingList:
        return EmbeddingList(
            data=[EmbeddingRow(index=index, embedding=encode(each.vector)) for index, each in enumerate(vectors)],
            model=body.model or asked.name,
            usage=EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )

    return await whole(build)


def _base64(vector: array[float]) -> str:
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode("ascii")


ENDPOINTS = (
    Endpoint("POST", "/v1/embeddings", embeddings, "Embeddings of texts", OpenAIEmbeddingsBody, EmbeddingList),
)

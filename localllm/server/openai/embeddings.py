"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Annotated, Literal

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from localllm.server.bodies import Body
from localllm.server.embedding import MAX_INPUTS, embedded
from localllm.server.endpoint import Call, Endpoint
from localllm.server.fields import NOT_KEPT, Count, Ids, KeepAlive, Label, NonEmptyText
from localllm.server.openai.completions import prompt_list
from localllm.server.replying import whole

Inputs = (
    NonEmptyText
    | Ids
    | Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_INPUTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS)]
)


class EmbeddingsBody(Body):
    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    keep_alive: KeepAlive = None
    user: Annotated[Label | None, NOT_KEPT] = None


class EmbeddingRow(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: EmbeddingsUsage


async def embeddings(call: Call, body: EmbeddingsBody) -> Response:
    """Raises RequestError, ContextOverflowError, UsageError for ids that the model does not have."""
    served = await call.model(body.model, body.keep_alive)
    vectors = await embedded(served, prompt_list(body.input), dimensions=body.dimensions)
    num_tokens = sum(each.num_tokens for each in vectors)

    def reply() -> EmbeddingList:
        data: list[EmbeddingRow] = [
            {"object": "embedding", "index": index, "embedding": _encoded(each.vector, body.encoding_format)}
            for index, each in enumerate(vectors)
        ]
        usage: EmbeddingsUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": body.model or served.name, "usage": usage}

    return await whole(reply)


def _encoded(vector: array[float], encoding: str | None) -> list[float] | str:
    if encoding != "base64":
        return list(vector)
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode("ascii")


ENDPOINTS = (Endpoint("POST", "/v1/embeddings", embeddings, "Texts as vectors", EmbeddingsBody, EmbeddingList),)

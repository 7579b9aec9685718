"""Texts to vectors, for every dialect."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from localllm.engine.request import SamplingParams
from localllm.runtime.served_model import AskedModel
from localllm.server.errors import RequestError
from localllm.server.generation_request import GenerationRequest
from localllm.server.model_server import ModelServer
from localllm.server.replies import collected

Prompt = str | tuple[int, ...]

MAX_INPUTS = 2048  # of one request, as OpenAI has it
_AT_ONCE = 2  # one is computed while the next is prepared


@dataclass(frozen=True)
class TextEmbedding:
    """vector: fp32, of length 1."""

    vector: array[float]
    num_tokens: int


async def embedded(
    server: ModelServer,
    asked: AskedModel,
    prompts: Sequence[Prompt],
    *,
    num_ctx: int | None = None,
    dimensions: int | None = None,
    most_tokens: int | None = None,
) -> list[TextEmbedding]:
    """Return the embedding of each prompt, in order. Raises RequestError, and what `ModelServer.ask` does.

    dimensions: as many of each vector are returned, normalised again
    most_tokens: the rest of a prompt is left out
    """
    served, engine = asked.served, asked.engine()
    size = engine.config.hidden_size
    if dimensions is not None and dimensions > size:
        why = f"the vectors of this model have {size}"
        raise RequestError(400, f"dimensions is {dimensions}", why=why, param="dimensions", name="invalid_value")
    adapters = await server.adapters_of(asked)
    capacity = server.capacity
    places = min(_AT_ONCE, len(prompts), capacity.parallel + capacity.queue)
    give_back, gate = server.take_places(served, places), asyncio.Semaphore(places)

    async def one(prompt: Prompt) -> TextEmbedding:
        async with gate:
            sampling, pooling = SamplingParams(max_tokens=1), server.pooling
            ask = GenerationRequest(
                prompt, sampling, num_ctx=num_ctx, pooling=pooling, adapters=adapters, prompt_field="input"
            )
            (piece,) = await collected(await server.answer(served, [ask], lambda: None))
        vector = piece.end.embedding
        assert vector is not None
        if dimensions is not None and dimensions < size:
            length = math.hypot(*vector[:dimensions]) or 1.0
            vector = array("f", (value / length for value in vector[:dimensions]))
        return TextEmbedding(vector, piece.end.usage.prompt_tokens)

    try:
        if most_tokens is not None:
            encode = partial(engine.tokenizer.encode, special=True, bos=True)
            prompts = await server.pool.off_loop(
                lambda: [tuple(encode(each) if isinstance(each, str) else each)[:most_tokens] for each in prompts]
            )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in prompts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        give_back()
    return [task.result() for task in tasks]

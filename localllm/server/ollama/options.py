"""The `options` object of Ollama's requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, field_validator

from localllm.engine.request import SamplingParams
from localllm.runtime.served_model import ServedModel
from localllm.server.bodies import Body, Ignored, OnlyTrue
from localllm.server.fields import (
    NUM_CTX,
    Count,
    LastN,
    Penalty,
    Seed,
    Share,
    Stop,
    Temperature,
    TopK,
    optional,
    overlaid,
)

_AT_START = Ignored("it is chosen when the server starts: --threads, --vram, --weights, --kv")
_NO_MIROSTAT = Ignored("mirostat is off")
_ANY = Field(ge=-(2**31), le=2**31 - 1)


class Options(Body):
    """Options of how the model is computed are chosen when the server starts, and change no answer here."""

    num_ctx: Count | None = optional(NUM_CTX)
    num_predict: int | None = optional("Longest answer in tokens; -1, -2: to the context's end.", ge=-2, le=2**31 - 1)
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    seed: Seed | None = optional("-1: another one each time.")
    stop: Stop | None = None
    repeat_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: LastN | None = None
    penalize_newline: OnlyTrue | None = None
    mirostat: Annotated[int | None, Field(ge=0, le=0)] = None
    mirostat_tau: Annotated[float | None, _NO_MIROSTAT] = None
    mirostat_eta: Annotated[float | None, _NO_MIROSTAT] = None
    tfs_z: Annotated[float | None, Field(ge=1, le=1)] = None
    num_keep: Annotated[int | None, _ANY, Ignored("the context is not shifted: nothing has to be kept of it")] = None
    numa: Annotated[bool | None, _AT_START] = None
    num_batch: Annotated[int | None, _ANY, _AT_START] = None
    num_gpu: Annotated[int | None, _ANY, _AT_START] = None
    main_gpu: Annotated[int | None, _ANY, _AT_START] = None
    low_vram: Annotated[bool | None, _AT_START] = None
    f16_kv: Annotated[bool | None, _AT_START] = None
    logits_all: Annotated[bool | None, _AT_START] = None
    vocab_only: Annotated[bool | None, _AT_START] = None
    use_mmap: Annotated[bool | None, _AT_START] = None
    use_mlock: Annotated[bool | None, _AT_START] = None
    embedding_only: Annotated[bool | None, _AT_START] = None
    num_thread: Annotated[int | None, _ANY, _AT_START] = None

    @field_validator("num_predict")
    @classmethod
    def _predicts_something(cls, num_predict: int | None) -> int | None:
        if num_predict == 0:
            raise ValueError("an answer has at least one token; -1: to the end of the context")
        return num_predict


def sampling_of(options: Options | None, served: ServedModel, **more: Any) -> SamplingParams:
    """Return the options over the model's own settings. Raises RequestError."""
    given = options or Options()
    names = (
        "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repeat_last_n",
    )  # fmt: skip
    known = {name: getattr(given, name) for name in names}
    known |= {
        "seed": None if given.seed == -1 else given.seed,
        "stop": given.stop or None,
        "repetition_penalty": given.repeat_penalty,
    }
    limit = given.num_predict
    sampling = overlaid(served.sampling(), {**known, "max_tokens": limit if limit and limit > 0 else None, **more})
    if limit is not None and limit < 0:
        sampling = replace(sampling, max_tokens=None)
    return sampling

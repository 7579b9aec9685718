"""What Ollama's requests say beside the prompt: the `options` object, and how long the model is to stay loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, field_validator

from localllm.engine.request import SamplingParams
from localllm.server.bodies import Body, OnlyTrue
from localllm.server.failures import RequestError
from localllm.server.fields import NUM_CTX, Count, Penalty, Seed, Share, Stop, Temperature, overlaid
from localllm.server.served import Served

_AT_START = (
    "it is chosen when the server starts, by the flags of `localllm serve` (--threads, --vram, --weights, --kv); leave "
    "it out"
)
_NO_SHIFT = "the context is not shifted; leave it out"


class Options(Body):
    """What is chosen when the server starts is refused. So is what has an effect elsewhere and none here, unless it
    says that it is to have none."""

    num_ctx: Annotated[Count | None, Field(description=NUM_CTX)] = None
    num_predict: Annotated[
        int | None, Field(ge=-2, le=2**31 - 1, description="Longest answer in tokens; -1, -2: to the context's end.")
    ] = None
    temperature: Temperature | None = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31 - 1, description="-1, 0: all.")] = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    seed: Annotated[Seed | None, Field(description="-1: another one each time.")] = None
    stop: Stop | None = None
    repeat_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: Annotated[
        int | None, Field(ge=-1, le=2**31 - 1, description="-1, the whole context, where there is a penalty.")
    ] = None
    penalize_newline: OnlyTrue | None = None
    mirostat: Annotated[int | None, Field(ge=0, le=0)] = None
    mirostat_tau: Annotated[float | None, Field(description="Without effect: mirostat is off.")] = None
    mirostat_eta: Annotated[float | None, Field(description="Without effect: mirostat is off.")] = None
    tfs_z: Annotated[float | None, Field(ge=1, le=1)] = None
    num_keep: Annotated[int | None, Field(description="-1 or 0: nothing is kept when the context is shifted.")] = None
    numa: None = None
    num_batch: None = None
    num_gpu: None = None
    main_gpu: None = None
    low_vram: None = None
    f16_kv: None = None
    logits_all: None = None
    vocab_only: None = None
    use_mmap: None = None
    use_mlock: None = None
    embedding_only: None = None
    num_thread: None = None

    @field_validator(
        "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
        "use_mlock", "embedding_only", "num_thread", mode="before",
    )  # fmt: skip
    @classmethod
    def _is_chosen_at_start(cls, value: object) -> object:
        if value is not None:
            raise ValueError(_AT_START)
        return value

    @field_validator("num_keep")
    @classmethod
    def _keeps_nothing(cls, num_keep: int | None) -> int | None:
        if num_keep not in (None, -1, 0):
            raise ValueError(_NO_SHIFT)
        return num_keep

    @field_validator("num_predict")
    @classmethod
    def _predicts_something(cls, num_predict: int | None) -> int | None:
        if num_predict == 0:
            raise ValueError("an answer has at least one token; -1: to the end of the context")
        return num_predict


def sampling_of(options: Options | None, served: Served, **more: Any) -> SamplingParams:
    """What the options say over what the model does by itself. Raises RequestError."""
    given = options or Options()
    names = ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty")
    known = {name: getattr(given, name) for name in names}
    known |= {
        "top_k": None if given.top_k is None else max(0, given.top_k),
        "seed": None if given.seed == -1 else given.seed,
        "stop": given.stop or None,
        "repetition_penalty": given.repeat_penalty,
    }
    limit = given.num_predict
    sampling = overlaid(served.sampling(), {**known, "max_tokens": limit if limit and limit > 0 else None, **more})
    if limit is not None and limit < 0:
        sampling = replace(sampling, max_tokens=None)
    _require_whole_window(given, sampling)
    return sampling


def _require_whole_window(given: Options, sampling: SamplingParams) -> None:
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if given.repeat_last_n in (None, -1) or penalties == (1, 0, 0):
        return
    what, why = "'options.repeat_last_n' cannot be honoured", "penalties look at the whole context"
    fix = "send -1"
    raise RequestError(400, what, why=why, fix=fix, param="options.repeat_last_n", name="unsupported_value")

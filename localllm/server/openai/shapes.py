"""What several of OpenAI's replies have: identity, usage, timings, log-probabilities; and fields that several requests
have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from localllm import __version__
from localllm.engine.events import FinishedEvent
from localllm.engine.request import SamplingParams
from localllm.server.answering import Answers
from localllm.server.bodies import Body, Ignored, OnlyTrue
from localllm.server.choosing import ChoosingBody
from localllm.server.endings import Timings
from localllm.server.failures import RequestError
from localllm.server.fields import (
    CACHES_ITSELF,
    NOT_KEPT,
    NUM_CTX,
    Count,
    KeepAlive,
    Label,
    Labels,
    LastN,
    LogitBias,
    Penalty,
    Seed,
    Share,
    Stop,
    Temperature,
    TopK,
    overlaid,
)
from localllm.server.logprobs import ContentLogprob
from localllm.server.served import Served
from localllm.server.structured import Pattern, StructuredOutputs, text_grammar
from localllm.text.grammar.grammar import Grammar

FINGERPRINT = f"localllm-{__version__}"
TIERS = {"flex": -1, "priority": 1, "fast": 1}  # of service_tier, as priorities


class PromptDetails(TypedDict):
    cached_tokens: int
    audio_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]


class ChoiceLogprobs(TypedDict):
    content: list[ContentLogprob]
    refusal: None


NOT_OBFUSCATED = Ignored("events are as long as what they say")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="Every chunk has the usage so far, as vLLM has it.")
    ] = None
    include_obfuscation: Annotated[bool | None, NOT_OBFUSCATED] = None


class PromptCacheOptions(Body):
    mode: Label | None = None
    ttl: Label | None = None


class GenerationBody(ChoosingBody):
    """Fields that both completions endpoints have."""

    elsewhere: ClassVar = {
        **dict.fromkeys(("n_predict", "num_predict"), "it is 'max_tokens' here"),
        "use_beam_search": "it is 'beam_width' here, the number of beams",
        "num_beams": "it is 'beam_width' here",
        **{
            f"guided_{name}": f"it is 'structured_outputs.{name}' here"
            for name in ("json", "regex", "choice", "grammar")
        },
        "json_schema": "send it as 'response_format', or as 'structured_outputs.json'",
    }

    model: Annotated[
        str | None, Field(description="A name of GET /v1/models; without one, the model that is served.")
    ] = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Count | None = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority", "fast"] | None,
        Field(description="Of requests that wait, `priority` and `fast` are answered sooner, `flex` later."),
    ] = None
    user: Annotated[Label | None, NOT_KEPT] = None
    metadata: Annotated[Labels | None, NOT_KEPT] = None
    store: Annotated[bool | None, NOT_KEPT] = None
    safety_identifier: Annotated[Label | None, NOT_KEPT] = None
    prompt_cache_key: Annotated[Label | None, CACHES_ITSELF] = None
    prompt_cache_retention: Annotated[Label | None, CACHES_ITSELF] = None
    prompt_cache_options: Annotated[PromptCacheOptions | None, CACHES_ITSELF] = None
    top_k: TopK | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    repeat_last_n: LastN | None = None
    num_ctx: Annotated[Count | None, Field(description=NUM_CTX)] = None
    keep_alive: KeepAlive = None
    structured_outputs: Annotated[StructuredOutputs | None, Field(description="What the answer has to look like.")] = (
        None
    )
    grammar: Annotated[
        Pattern | None, Field(description="What the answer has to look like, as llama.cpp has it: GBNF, or Lark.")
    ] = None
    cache_prompt: Annotated[OnlyTrue | None, Field(description="What is known of a prompt is always used.")] = None

    @property
    def text_grammar(self) -> Grammar | None:
        return None if self.grammar is None else text_grammar(self.grammar)


def refuse_stream_options(body: GenerationBody) -> None:
    """Raises RequestError where they say how a stream is that nobody asks for."""
    if body.stream_options is not None and not body.stream:
        what, why = "'stream_options' cannot be honoured", "it says how a stream is, and no stream is asked for"
        raise RequestError(400, what, why=why, param="stream_options", name="unsupported_value")


class ShownUsage:
    """What the chunks of a stream have of usage: null, or what is used so far by the answer that they are of."""

    def __init__(self, answers: Answers, options: StreamOptions | None) -> None:
        self._answers = answers
        self.comes_last = options is not None and bool(options.include_usage)
        self._is_continuous = options is not None and bool(options.continuous_usage_stats)
        self._counts: Counter[int] = Counter()

    def take(self, index: int, num_tokens: int) -> None:
        """So many more have come."""
        self._counts[index] += num_tokens

    def of(self, index: int) -> Mapping[str, Any]:
        if not self._is_continuous:
            return {"usage": None} if self.comes_last else {}
        prompt, completion = len(self._answers.asked.requests[index].prompt_ids), self._counts[index]
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {"usage": counts}


def sampling_of(body: GenerationBody, served: Served, **more: Any) -> SamplingParams:
    """What the request says over what the model does by itself. Raises RequestError."""
    names = (
        "temperature", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty", "logit_bias", "max_tokens",
        "top_k", "min_p", "typical_p", "repetition_penalty", "repeat_last_n",
    )  # fmt: skip
    given = {name: getattr(body, name) for name in names}
    return overlaid(served.sampling(), {**given, **more})


def usage_of(finished: Sequence[FinishedEvent], n: int) -> Usage:
    """Of all that was computed for a request, n answers to each prompt, which is counted once."""
    firsts = [each.usage for each in finished[::n]]
    prompt, cached = sum(each.prompt_tokens for each in firsts), sum(each.cached_tokens for each in firsts)
    completion = sum(each.usage.completion_tokens for one in finished for each in (one, *_others(one)))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
    }


def _others(finished: FinishedEvent) -> list[FinishedEvent]:
    """The ends of the answers that a search has found beside it."""
    return [event for events in finished.others for event in events if isinstance(event, FinishedEvent)]


class TimingsField(TypedDict):
    timings: NotRequired[Timings]

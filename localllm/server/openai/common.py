"""The shared parts of OpenAI's endpoints: fields of requests; usage, identity and chunks of replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from localllm.engine.events import FinishedEvent
from localllm.engine.request import SamplingParams
from localllm.runtime.served_model import AskedModel
from localllm.server import fields
from localllm.server.bodies import Absent, Body, Ignored, OnlyTrue, ReplyBody
from localllm.server.errors import Failure, RequestError, body_of
from localllm.server.fields import BestOfBody, optional
from localllm.server.replies import AnswerWriter, event, timings_of
from localllm.server.stream import GenerationStream
from localllm.text.grammar.grammar import Grammar
from localllm.version import __version__

FINGERPRINT = f"localllm-{__version__}"

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
_PRIORITIES = {"flex": -1, "priority": 1, "fast": 1}


class PromptDetails(ReplyBody):
    """reused_tokens: those of `cached_tokens` that stood at another position before."""

    cached_tokens: int
    reused_tokens: Absent[int] = None
    audio_tokens: int = 0


class OpenAIUsage(ReplyBody):
    """evicted_tokens: of prompt and answer, whose keys and values left before the end, where some did (--kv-evict)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Absent[PromptDetails] = None
    evicted_tokens: Absent[int] = None


NOT_OBFUSCATED = Ignored("events are never padded")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = optional("Every chunk has the usage so far, as in vLLM.")
    include_obfuscation: Annotated[bool | None, NOT_OBFUSCATED] = None


class PromptCacheOptions(Body):
    mode: fields.Label | None = None
    ttl: fields.Label | None = None


class OpenAISamplingBody(Body):
    """Fields that completions, chats and responses have."""

    temperature: fields.Temperature | None = None
    top_p: fields.Share | None = None
    top_k: fields.TopK | None = None
    min_p: fields.Share | None = None
    seed: fields.Seed | None = None
    frequency_penalty: fields.Penalty | None = None
    presence_penalty: fields.Penalty | None = None
    service_tier: ServiceTier | None = optional(
        "`priority` and `fast` are served before other waiting requests, `flex` after them."
    )
    keep_alive: fields.KeepAlive = None
    structured_outputs: fields.StructuredField = None
    reuse: fields.ReuseField = None
    user: Annotated[fields.Label | None, fields.NOT_KEPT] = None
    store: Annotated[bool | None, fields.NOT_KEPT] = None
    safety_identifier: Annotated[fields.Label | None, fields.NOT_KEPT] = None
    prompt_cache_key: Annotated[fields.Label | None, fields.CACHES_ITSELF] = None
    prompt_cache_retention: Annotated[fields.Label | None, fields.CACHES_ITSELF] = None
    prompt_cache_options: Annotated[PromptCacheOptions | None, fields.CACHES_ITSELF] = None

    @property
    def priority(self) -> int:
        return _PRIORITIES.get(self.service_tier or "", 0)


class OpenAIGenerationBody(OpenAISamplingBody, BestOfBody):
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

    model: fields.ModelName = None
    stream_options: StreamOptions | None = None
    stop: fields.Stop | None = None
    logit_bias: fields.LogitBias | None = None
    max_tokens: fields.Count | None = None
    metadata: Annotated[fields.Labels | None, fields.NOT_KEPT] = None
    typical_p: fields.Share | None = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    repeat_last_n: fields.LastN | None = None
    num_ctx: fields.Count | None = optional(fields.NUM_CTX)
    grammar: fields.Pattern | None = optional("The form of the answer, as in llama.cpp: GBNF or Lark.")
    cache_prompt: OnlyTrue | None = optional("The prefix cache is always used.")

    @property
    def text_grammar(self) -> Grammar | None:
        return None if self.grammar is None else fields.text_grammar(self.grammar)


def refuse_stream_options(body: OpenAIGenerationBody) -> None:
    """Raises RequestError where there are options of a stream and no stream is wanted."""
    if body.stream_options is not None and not body.stream:
        what, why = "'stream_options' cannot be honoured", "it configures a stream, and the request does not stream"
        raise RequestError(400, what, why=why, param="stream_options", name="unsupported_value")


_SAMPLING = (
    "temperature", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty", "logit_bias", "max_tokens",
    "top_k", "min_p", "typical_p", "repetition_penalty", "repeat_last_n",
)  # fmt: skip


def sampling_of(body: OpenAISamplingBody, asked: AskedModel, **more: Any) -> SamplingParams:
    """Return the request's settings over the model's own. Raises RequestError."""
    return fields.overlaid(asked.sampling(), {**{name: getattr(body, name, None) for name in _SAMPLING}, **more})


def usage_of(finished: Sequence[FinishedEvent], n: int) -> OpenAIUsage:
    """Return the usage of all that was computed for a request, n answers to each prompt, which is counted once."""
    firsts = [each.usage for each in finished[::n]]
    prompt, cached = sum(each.prompt_tokens for each in firsts), sum(each.cached_tokens for each in firsts)
    reused = sum(each.reused_tokens for each in firsts)
    others = [event for one in finished for events in one.others for event in events]  # of beam searches
    ends = [event for event in (*finished, *others) if isinstance(event, FinishedEvent)]
    completion = sum(each.usage.completion_tokens for each in ends)
    return OpenAIUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached, reused_tokens=reused or None),
        evicted_tokens=sum(each.usage.evicted_tokens for each in finished) or None,
    )


class ChunkWriter(AnswerWriter):
    """Writes the chunks of several answers, with the usage that is wanted."""

    def __init__(self, head: ReplyBody, answers: GenerationStream, options: StreamOptions | None, n: int) -> None:
        """head: a chunk without choices. n: answers to each prompt."""
        self._head = head.written  # a dict, to which each token adds: to make a chunk's model would take 1.5 us more
        self._requests = answers.prepared.requests
        self._n = n
        self._has_last_usage = options is not None and bool(options.include_usage)
        self._has_each_usage = options is not None and bool(options.continuous_usage_stats)
        self._counts: Counter[int] = Counter()
        self._ends: dict[int, FinishedEvent] = {}

    def chunk(
        self,
        index: int,
        choice: ReplyBody,
        finished: FinishedEvent | None = None,
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> bytes:
        """Write a chunk of the answer `index`; of its end, with timings where it is the only answer. more: fields."""
        chunk = {**self._head, "choices": (choice,), **more}
        if self._has_each_usage:
            prompt, said = len(self._requests[index].prompt_ids), self._counts[index]
            chunk["usage"] = OpenAIUsage(prompt_tokens=prompt, completion_tokens=said, total_tokens=prompt + said)
        elif self._has_last_usage:
            chunk["usage"] = None
        if finished is not None:
            self._ends[index] = finished
            if len(self._requests) == 1:
                chunk["timings"] = timings_of(finished)
        return event(chunk)

    def count(self, index: int, num_tokens: int) -> None:
        self._counts[index] += num_tokens

    def end(self) -> Iterator[bytes]:
        if self._has_last_usage:
            usage = usage_of([self._ends[index] for index in sorted(self._ends)], self._n)
            yield event({**self._head, "usage": usage})
        yield b"data: [DONE]\n\n"

    def fail(self, failure: Failure) -> bytes:
        return event(body_of(failure, "openai"))

"""POST /v1/completions: texts, or token ids, that go on without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from localllm.engine.events import TokenLogprob
from localllm.engine.tokenizer import Tokenizer
from localllm.server.answering import Piece
from localllm.server.asking import Ask
from localllm.server.choosing import choosing_of
from localllm.server.endings import FinishReason, finish_reason, timings_of
from localllm.server.endpoint import Call, Endpoint
from localllm.server.failures import RequestError, body_of
from localllm.server.fields import Ids, NonEmptyText
from localllm.server.openai.shapes import (
    FINGERPRINT,
    TIERS,
    GenerationBody,
    TimingsField,
    Usage,
    refuse_stream_options,
    sampling_of,
    usage_of,
)
from localllm.server.replying import EVENT_STREAM, PING, News, collected, event, new_id, streamed, whole
from localllm.server.structured import grammar_of, one_grammar

MAX_PROMPTS = 16
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16  # as OpenAI has it: whoever wants more says so

Prompts = (
    NonEmptyText
    | Ids
    | Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionBody(GenerationBody):
    why: ClassVar = {
        "suffix": "models here go on with a text; they fill no gaps",
    }
    elsewhere: ClassVar = {**GenerationBody.elsewhere, "response_format": "it is 'structured_outputs.json' here"}

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    suffix: Literal[""] | None = None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(TimingsField):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(TimingsField):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


async def completions(call: Call, body: CompletionBody) -> Response:
    """Raises what refuses the request, or ends its answers before anything was said."""
    served = await call.model(body.model, body.keep_alive)
    model = body.model or served.name
    refuse_stream_options(body)
    if body.echo and body.logprobs is not None:
        why = "the prompt's own log-probabilities are not computed"
        raise RequestError(400, "'echo' and 'logprobs' cannot go together", why=why, param="echo")
    sampling = sampling_of(body, served, max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
    choosing, sampling = choosing_of(body, sampling)
    priority, n = TIERS.get(body.service_tier or "", 0), body.n or 1
    prompts = prompt_list(body.prompt)
    tokenizer = served.engine().tokenizer
    grammar, grammar_field = one_grammar(
        structured_outputs=grammar_of(body.structured_outputs), grammar=body.text_grammar
    )
    ask = Ask("", sampling, n=n, choosing=choosing, num_ctx=body.num_ctx, priority=priority, grammar=grammar)
    ask = replace(ask, prompt_field="prompt", grammar_field=grammar_field)
    texts = await served.off_loop(lambda: [_text(each, tokenizer) if body.echo else "" for each in prompts])
    answers = await served.ask(*(replace(ask, prompt=each) for each in prompts))
    head = {"id": new_id("cmpl-"), "created": int(time.time()), "model": model, "system_fingerprint": FINGERPRINT}
    head["object"] = "text_completion"
    if not body.stream:
        pieces = await collected(answers)
        usage = usage_of([piece.ending for piece in pieces], choosing.num_requests(n))
        told = list(zip(texts, choosing.chosen(pieces, n), strict=True))
        return await whole(lambda: _completion(told, head, usage, with_logprobs=body.logprobs is not None))
    echoes = [text for text in texts for _ in range(n)]
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    speech = _Speech(head, echoes, n, with_usage=with_usage, with_logprobs=body.logprobs is not None)
    return await streamed(answers, speech.chunks, lambda failure: event(body_of(failure, "openai")), EVENT_STREAM)


def prompt_list(given: str | Sequence[Any]) -> list[str | tuple[int, ...]]:
    """Each a text or ids, in whichever of the four ways they came."""
    if isinstance(given, str):
        return [given]
    ids = tuple(item for item in given if isinstance(item, int))
    return [ids] if ids else [tuple(item) if isinstance(item, list) else item for item in given]


def _text(prompt: str | tuple[int, ...], tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special=False)


def _completion(
    told: Sequence[tuple[str, Sequence[Piece]]], head: Mapping[str, Any], usage: Usage, *, with_logprobs: bool
) -> Completion:
    """told: of each prompt, what is echoed and the answers."""
    pieces = [(echo, piece) for echo, answers in told for piece in answers]
    choices: list[CompletionChoice] = [
        {
            "index": index,
            "text": echo + piece.text,
            "logprobs": _logprobs(piece.logprobs, 0) if with_logprobs else None,
            "finish_reason": finish_reason(piece.ending),
        }
        for index, (echo, piece) in enumerate(pieces)
    ]
    timings = {"timings": timings_of(pieces[0][1].ending)} if len(pieces) == 1 else {}
    return {**head, "choices": choices, "usage": usage, **timings}  # type: ignore[typeddict-item]


def _logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs:
    """offset: of the first token in the answer's text."""
    offsets = []
    for each in logprobs:
        offsets.append(offset)
        offset += len(each.token)
    return {
        "tokens": [each.token for each in logprobs],
        "token_logprobs": [max(each.logprob, -9999.0) for each in logprobs],
        "top_logprobs": [{top.token: max(top.logprob, -9999.0) for top in each.top} for each in logprobs],
        "text_offset": offsets,
    }


class _Speech:
    """Says the answers in chunks, each with what it echoes before it, and usage at the end if it is wanted."""

    def __init__(
        self, head: Mapping[str, Any], echoes: Sequence[str], n: int, *, with_usage: bool, with_logprobs: bool
    ) -> None:
        self._head = head
        self._echoes = echoes
        self._n = n
        self._usage: dict[str, Any] = {"usage": None} if with_usage else {}
        self._with_logprobs = with_logprobs
        self._offsets = [0] * len(echoes)

    async def chunks(self, news: News) -> AsyncIterator[bytes]:
        ends = {}
        for index, echo in enumerate(self._echoes):
            if echo:
                yield self._chunk(index, echo)
        async for each in news:
            if each is None:
                yield PING
                continue
            index, piece = each
            if piece.text or piece.logprobs:
                yield self._chunk(index, piece.text, self._told(index, piece))
            if piece.finished is not None:
                ends[index] = piece.finished
                timings = {"timings": timings_of(piece.finished)} if len(self._echoes) == 1 else {}
                yield self._chunk(index, "", None, finish_reason(piece.finished), **timings)
        if self._usage:
            usage = usage_of([ends[index] for index in sorted(ends)], self._n)
            yield event({**self._head, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _told(self, index: int, piece: Piece) -> CompletionLogprobs | None:
        if not self._with_logprobs:
            return None
        told = _logprobs(piece.logprobs, self._offsets[index])
        self._offsets[index] += sum(map(len, told["tokens"]))
        return told

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        reason: FinishReason | None = None,
        **more: Any,
    ) -> bytes:
        choice: CompletionChunkChoice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head, "choices": [choice], **self._usage, **more})


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/completions",
        completions,
        "Go on with texts",
        CompletionBody,
        Completion,
        (EVENT_STREAM, CompletionChunk),
    ),
)

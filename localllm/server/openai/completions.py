"""POST /v1/completions: texts, or token ids, that go on without a chat template."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from localllm.engine.events import TokenLogprob
from localllm.server.answering import Piece
from localllm.server.asking import Ask
from localllm.server.choosing import NO_CHOICE, choosing_of
from localllm.server.endings import FinishReason, finish_reason, timings_of
from localllm.server.endpoint import Call, Endpoint
from localllm.server.failures import body_of
from localllm.server.fields import Ids, NonEmptyText
from localllm.server.openai.completion_tokens import ChoiceTeller, CompletionLogprobs, joined, logprobs_of
from localllm.server.openai.shapes import (
    FINGERPRINT,
    TIERS,
    GenerationBody,
    ShownUsage,
    TimingsField,
    Usage,
    refuse_stream_options,
    sampling_of,
    usage_of,
)
from localllm.server.replying import EVENT_STREAM, PING, News, collected, event, new_id, streamed, whole
from localllm.server.served import Served
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
    logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_LOGPROBS, description="With `echo`, of the prompt's tokens, too.")
    ] = None
    max_tokens: Annotated[
        int | None, Field(ge=0, le=2**31 - 1, description="0: the prompt is read, and nothing is said.")
    ] = None
    suffix: Literal[""] | None = None


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
    refuse_stream_options(body)
    n, prompts = body.n or 1, prompt_list(body.prompt)
    ask = _ask(body, served)
    answers = await served.ask(*(replace(ask, prompt=each) for each in prompts))
    own = answers.asked.requests[:: ask.choosing.num_requests(n)]  # the first of each prompt
    try:
        tokenizer, echoes, tells = served.engine().tokenizer, bool(body.echo), body.logprobs is not None
        tellers = await served.off_loop(
            lambda: [
                ChoiceTeller(tokenizer, prompt, request.prompt_ids, echoes=echoes, tells=tells)
                for prompt, request in zip(prompts, own, strict=True)
            ]
        )
    except BaseException:  # the client has gone, or the engine
        answers.close()
        raise
    head: dict[str, Any] = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time())}
    head |= {"model": body.model or served.name, "system_fingerprint": FINGERPRINT}
    if body.stream:
        speech = _Speech(
            head, [each.copy() for each in tellers for _ in range(n)], n, ShownUsage(answers, body.stream_options)
        )
        return await streamed(answers, speech.chunks, lambda failure: event(body_of(failure, "openai")), EVENT_STREAM)
    pieces = await collected(answers)
    usage = usage_of([piece.ending for piece in pieces], ask.choosing.num_requests(n))
    told = list(zip(tellers, ask.choosing.chosen(pieces, n), strict=True))
    return await whole(lambda: _completion(told, head, usage))


def _ask(body: CompletionBody, served: Served) -> Ask:
    """But for the prompt. Raises RequestError."""
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    choosing, sampling = choosing_of(body, sampling_of(body, served, max_tokens=limit or 1, logprobs=body.logprobs))
    grammar, grammar_field = one_grammar(
        structured_outputs=grammar_of(body.structured_outputs), grammar=body.text_grammar
    )
    ask = Ask(
        "", sampling, n=body.n or 1, choosing=choosing if limit else NO_CHOICE, num_ctx=body.num_ctx, grammar=grammar
    )
    return replace(
        ask,
        priority=TIERS.get(body.service_tier or "", 0),
        prompt_logprobs=body.logprobs if body.echo else None,
        reads_only=limit == 0,
        prompt_field="prompt",
        grammar_field=grammar_field,
    )


def prompt_list(given: str | Sequence[Any]) -> list[str | tuple[int, ...]]:
    """Each a text or ids, in whichever of the four ways they came."""
    if isinstance(given, str):
        return [given]
    ids = tuple(item for item in given if isinstance(item, int))
    return [ids] if ids else [tuple(item) if isinstance(item, list) else item for item in given]


def _completion(
    told: Sequence[tuple[ChoiceTeller, Sequence[Piece]]], head: Mapping[str, Any], usage: Usage
) -> Completion:
    """told: of each prompt, what tells its choices, and the answers."""
    choices: list[CompletionChoice] = []
    ends = [piece.ending for _, answers in told for piece in answers]
    for teller, answers in told:
        for piece in answers:
            own = teller.copy()
            logprobs = joined(own.prompt(answers[0].prompt_logprobs), own.answer(logprobs_of(piece)))
            text, reason = own.echo + piece.text, finish_reason(piece.ending)
            choices.append({"index": len(choices), "text": text, "logprobs": logprobs, "finish_reason": reason})
    timings = {"timings": timings_of(ends[0])} if len(ends) == 1 else {}
    return {**head, "choices": choices, "usage": usage, **timings}  # type: ignore[typeddict-item]


class _Speech:
    """Says the answers in chunks, each with what it echoes before it, and usage at the end if it is wanted."""

    def __init__(self, head: Mapping[str, Any], tellers: Sequence[ChoiceTeller], n: int, usage: ShownUsage) -> None:
        """tellers: of each choice."""
        self._head = head
        self._tellers = tellers
        self._n = n
        self._usage = usage

    async def chunks(self, news: News) -> AsyncIterator[bytes]:
        ends = {}
        for index, teller in enumerate(self._tellers):
            if teller.echo and not teller.tells:
                yield self._chunk(index, teller.echo)
        read: dict[int, list[TokenLogprob | None]] = defaultdict(list)
        async for each in news:
            if each is None:
                yield PING
                continue
            index, piece = each
            teller = self._tellers[index]
            self._usage.take(index, piece.num_tokens)
            read[index] += piece.prompt_logprobs
            if piece.prompt_logprobs and len(read[index]) == teller.num_prompt_tokens:
                yield self._chunk(index, teller.echo, teller.prompt(read[index]))
            found = logprobs_of(piece)
            if piece.text or found:
                yield self._chunk(index, piece.text, teller.answer(found))
            if piece.finished is not None:
                ends[index] = piece.finished
                timings = {"timings": timings_of(piece.finished)} if len(self._tellers) == 1 else {}
                yield self._chunk(index, "", None, finish_reason(piece.finished), **timings)
        if self._usage.comes_last:
            usage = usage_of([ends[index] for index in sorted(ends)], self._n)
            yield event({**self._head, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        reason: FinishReason | None = None,
        **more: Any,
    ) -> bytes:
        choice: CompletionChunkChoice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head, "choices": [choice], **self._usage.of(index), **more})


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

"""POST /v1/completions: texts, or token ids, that go on without a chat template."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SkipValidation
from starlette.responses import Response

from localllm.engine.events import TokenLogprob
from localllm.runtime.served_model import AskedModel
from localllm.server.bodies import Absent, NullOrAbsent, ReplyBody
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.fields import (
    NO_BEST_OF,
    BestOf,
    Ids,
    NonEmptyText,
    grammar_of,
    one_grammar,
    optional,
    requested_best_of,
)
from localllm.server.generation_request import GenerationRequest
from localllm.server.logprobs import CompletionLogprobs, CompletionTokens, all_logprobs, joined_logprobs
from localllm.server.openai import common
from localllm.server.replies import FinishReason, TimingsReply, finish_reason, new_id, replied, timings_of
from localllm.server.stream import GenerationStream
from localllm.server.tools.deltas import Delta

MAX_PROMPTS = 16
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16  # OpenAI's default

Prompts = (
    NonEmptyText
    | Ids
    | Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionBody(common.OpenAIGenerationBody):
    why: ClassVar = {
        "suffix": "models continue a text; they cannot fill a gap",
    }
    elsewhere: ClassVar = {
        **common.OpenAIGenerationBody.elsewhere,
        "response_format": "it is 'structured_outputs.json' here",
        **dict.fromkeys(("compress", "compress_with"), "it is a field of chats, whose messages end with the question"),
    }

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = optional("With `echo`, those of the prompt's tokens as well.", ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = optional("0: the prompt is prefilled, and nothing is generated.", ge=0, le=2**31 - 1)
    suffix: Literal[""] | None = None


class CompletionChunkChoice(ReplyBody):
    index: int
    text: str
    logprobs: SkipValidation[CompletionLogprobs | None] = None
    finish_reason: FinishReason | None = None


class CompletionChoice(CompletionChunkChoice):
    finish_reason: FinishReason


class _CompletionHead(ReplyBody):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str = common.FINGERPRINT


class Completion(_CompletionHead):
    choices: list[CompletionChoice]
    usage: common.OpenAIUsage
    timings: Absent[TimingsReply] = None


class CompletionChunk(_CompletionHead):
    choices: list[CompletionChunkChoice]
    usage: NullOrAbsent[common.OpenAIUsage] = None
    timings: Absent[TimingsReply] = None


async def completions(call: ApiCall, body: CompletionBody) -> Response:
    """Raises what refuses the request, or ends its answers before anything was emitted."""
    asked = await call.asked(body.model, body.keep_alive)
    common.refuse_stream_options(body)
    n, prompts = body.n or 1, prompt_list(body.prompt)
    requests, tokenizer = _requests(body, prompts, asked), asked.engine().tokenizer
    best_of = requests[0].best_of
    answers = await call.server.ask(asked, *requests)
    own = answers.prepared.requests[:: best_of.num_requests(n)]  # the first of each prompt
    try:
        echoes, has_logprobs = bool(body.echo), body.logprobs is not None
        tokens = await call.pool.off_loop(
            lambda: [
                CompletionTokens(tokenizer, prompt, each.prompt_ids, echoes=echoes, has_logprobs=has_logprobs)
                for prompt, each in zip(prompts, own, strict=True)
            ]
        )
    except BaseException:  # the client has gone, or the engine
        answers.close()
        raise
    head: dict[str, Any] = {"id": new_id("cmpl-"), "created": int(time.time()), "model": asked.shown(body.model)}
    writer = CompletionWriter(head, answers, body.stream_options, tokens, best_of, n)
    return await replied(answers, writer, is_streamed=body.stream)


def _requests(
    body: CompletionBody, prompts: Sequence[str | tuple[int, ...]], asked: AskedModel
) -> list[GenerationRequest]:
    """Raises RequestError."""
    usual = asked.selection.settings.max_tokens or DEFAULT_MAX_TOKENS
    limit = usual if body.max_tokens is None else body.max_tokens
    best_of, sampling = requested_best_of(
        body, common.sampling_of(body, asked, max_tokens=limit or 1, logprobs=body.logprobs)
    )
    grammar, grammar_field = one_grammar(
        structured_outputs=grammar_of(body.structured_outputs), grammar=body.text_grammar
    )
    return [
        GenerationRequest(
            prompt,
            sampling,
            n=body.n or 1,
            best_of=best_of if limit else NO_BEST_OF,
            num_ctx=body.num_ctx,
            priority=body.priority,
            reuse=body.reuse,
            grammar=grammar,
            prompt_logprobs=body.logprobs if body.echo else None,
            reads_only=limit == 0,
            prompt_field="prompt",
            grammar_field=grammar_field,
        )
        for prompt in prompts
    ]


def prompt_list(given: str | Sequence[Any]) -> list[str | tuple[int, ...]]:
    """Return texts or ids, in whichever of the four ways they came."""
    if isinstance(given, str):
        return [given]
    ids = tuple(item for item in given if isinstance(item, int))
    return [ids] if ids else [tuple(item) if isinstance(item, list) else item for item in given]


class CompletionWriter(common.ChunkWriter):
    """Streamed, it writes the echo of the prompt, the answer, why it ended, and usage if it is wanted."""

    def __init__(
        self,
        head: Mapping[str, Any],
        answers: GenerationStream,
        options: common.StreamOptions | None,
        tokens: Sequence[CompletionTokens],
        best_of: BestOf,
        n: int,
    ) -> None:
        """tokens: of each prompt. n: answers to each that are given."""
        super().__init__(CompletionChunk(**head, choices=[]), answers, options, best_of.num_requests(n))
        self._common = head
        self._best_of = best_of
        self._num_given = n
        self._tokens = [each.copy() for each in tokens for _ in range(n)]  # of each choice
        self._prompt_logprobs: dict[int, list[TokenLogprob | None]] = defaultdict(list)

    def whole(self, answers: list[Delta]) -> Completion:
        choices: list[CompletionChoice] = []
        groups = self._best_of.chosen(answers, self._num_given)
        for first, group in zip(self._tokens[:: self._num_given], groups, strict=True):
            for answer in group:
                tokens = first.copy()
                logprobs = joined_logprobs(tokens.of_prompt(group[0].prompt_logprobs), tokens.of_answer(answer))
                text, reason = tokens.echo + answer.text, finish_reason(answer.end)
                choices.append(CompletionChoice(index=len(choices), text=text, logprobs=logprobs, finish_reason=reason))
        timings = timings_of(groups[0][0].end) if len(choices) == 1 else None
        usage = common.usage_of([each.end for each in answers], self._n)
        return Completion(**self._common, choices=choices, usage=usage, timings=timings)

    def begin(self) -> Iterator[bytes]:
        for index, tokens in enumerate(self._tokens):
            if tokens.echo and not tokens.has_logprobs:
                yield self._text(index, tokens.echo)

    def write(self, index: int, delta: Delta) -> Iterator[bytes]:
        self.count(index, delta.num_tokens)
        tokens, of_prompt = self._tokens[index], self._prompt_logprobs[index]
        of_prompt += delta.prompt_logprobs
        if delta.prompt_logprobs and len(of_prompt) == tokens.num_prompt_tokens:
            yield self._text(index, tokens.echo, tokens.of_prompt(of_prompt))
        if delta.text or all_logprobs(delta):
            yield self._text(index, delta.text, tokens.of_answer(delta))
        if delta.finished is not None:
            choice = CompletionChunkChoice(index=index, text="", finish_reason=finish_reason(delta.finished))
            yield self.chunk(index, choice, delta.finished)

    def _text(self, index: int, text: str, logprobs: CompletionLogprobs | None = None) -> bytes:
        return self.chunk(index, CompletionChunkChoice(index=index, text=text, logprobs=logprobs))


ENDPOINTS = (
    Endpoint("POST", "/v1/completions", completions, "Text completion", CompletionBody, Completion, CompletionChunk),
)

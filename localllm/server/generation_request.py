"""The one internal request: every dialect's body becomes one, and this turns it into the engine's requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from localllm.chat.answer import seeded
from localllm.chat.compression import Compression, compressible, fitting
from localllm.chat.harmony import is_harmony
from localllm.chat.thoughts import (
    ALL_MARKS,
    SWITCHES,
    Splitter,
    begins_in_thought,
    closing_mark,
    effort_variables,
    has_levels,
    has_thought,
)
from localllm.engine.request import AdapterRef, Pooling, Request, Reuse, SamplingParams, require_ids
from localllm.errors import ContextOverflowError, GrammarError, UsageError
from localllm.server.errors import RequestError, too_long
from localllm.server.fields import NO_BEST_OF, BestOf
from localllm.server.tools.deltas import AnswerParser
from localllm.server.tools.output_format import OutputFormat, output_format_of
from localllm.server.tools.toolset import Toolset
from localllm.text.chat_template import ChatInput, encode_chat
from localllm.text.eviction import Fitted, fit_turns, overflow_error
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer_files import SPECIAL_ROLES

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.runtime.presets import Preset
    from localllm.text.eviction import Message

_NOT_FOR_CLIENTS = {"messages", "tools", "add_generation_prompt", "tokenize", "chat_template", *SPECIAL_ROLES}
_MOST_VARIABLES = 256 << 10  # characters of all of them as JSON: of megabytes a template makes seconds of work
_MOST_LOGPROBS = 1 << 20  # that one reply may have: each is 200 bytes while it is made


@dataclass(frozen=True)
class GenerationRequest:
    """A request as every dialect comes to have it.

    prompt: chat messages, a text to go on with, or ids
    n: answers to it, each with a seed of its own
    best_of: how they are chosen of others
    num_ctx: the context that the client wants to have
    effort: how much is to be thought: "none", "on", a level that the template knows; None: as the model does
    usual_effort: a level that asks for no more than None does
    evicts: the oldest turns leave where there are too many
    said: the beginning of the answer
    compression: what has left the prompt
    grammar: of the answer
    tools: that the answer may call
    prompt_logprobs, reads_only, is_scored, adapters, reuse: as `Request` has them
    prompt_field, effort_field, grammar_field: their names in the dialect, for errors
    """

    prompt: ChatInput | str | tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    best_of: BestOf = NO_BEST_OF
    num_ctx: int | None = None
    priority: int = 0
    pooling: Pooling | None = None
    effort: str | None = None
    usual_effort: str | None = None
    evicts: bool = False
    said: str = ""
    compression: Compression | None = None
    grammar: Grammar | None = None
    tools: Toolset | None = None
    prompt_logprobs: int | None = None
    reads_only: bool = False
    is_scored: bool = False
    adapters: tuple[AdapterRef, ...] = ()
    reuse: Reuse | None = None
    prompt_field: str = "messages"
    effort_field: str = "reasoning_effort"
    grammar_field: str = "response_format"


@dataclass(frozen=True)
class PreparedRequest:
    """The engine's requests.

    new_parser: makes the parser of one answer; None where all of it is text
    num_evicted: turns that have left the context
    """

    requests: tuple[Request, ...]
    new_parser: Callable[[], AnswerParser | None] = lambda: None
    num_evicted: int = 0


def prepare(request: GenerationRequest, engine: LoadedEngine) -> PreparedRequest:
    """Return the engine's requests; the engine is still to check one with a grammar. It takes milliseconds, more for a
    long prompt. Raises RequestError, TemplateError, UsageError."""
    _refuse_begun_form(request)
    ctx = min(request.num_ctx or engine.ctx, engine.ctx)
    output = _output_format(request, engine)
    try:
        fitted = _fitted(request, engine, ctx, output)
        ids = fitted.prompt_ids
        if len(ids) >= ctx + (request.pooling is not None):
            longest = engine.config.longest_context
            helps = ctx == engine.ctx and len(ids) < longest
            fixes = engine.fixes_for(min(longest, len(ids) + 512)) if helps else []
            raise overflow_error(len(ids), ctx, longest, fixes)
    except ContextOverflowError as error:
        raise too_long(error, request.prompt_field, _fitting_ratio(request, error, engine)) from None
    _require_room(request, len(ids), engine)
    first = _engine_request(request, ids, ctx, engine)
    is_thinking = output is not None and _begins_in_thought(request, engine, ids)
    try:
        if output is not None:
            if request.said and not is_thinking:
                output = replace(output, splits=False)  # no thought comes: all of it is the rest of what was said
            may_still_think = is_thinking or not (request.effort == "none" or has_thought(engine.tokenizer, ids))
            grammar = output.grammar(
                request.grammar, request.grammar_field, is_thinking=is_thinking, may_think=may_still_think
            )
            first = replace(first, grammar=grammar, shown_ids=output.shown_ids)
        if first.grammar is None:
            engine.check(first)
    except GrammarError as error:
        raise no_form(request, error) from None
    count = request.best_of.num_requests(request.n)
    requests = tuple(replace(first, sampling=seeded(first.sampling, index)) for index in range(count))
    if output is None:
        return PreparedRequest(requests)
    has_form = request.grammar is not None
    return PreparedRequest(
        requests, lambda: output.parser(is_thinking=is_thinking, has_form=has_form), fitted.evicted.turns
    )


def under_preset(request: GenerationRequest, preset: Preset | None) -> GenerationRequest:
    """Return the request with what the preset has in place of what it does not say: system message, effort, context.
    How tokens are sampled is in it already."""
    if preset is None:
        return request
    values, prompt, effort = preset.values, request.prompt, request.effort
    if isinstance(prompt, ChatInput):
        has_system = any(message["role"] in ("system", "developer") for message in prompt.messages)
        if (system := values.get("system")) and not has_system:
            prompt = replace(prompt, messages=[{"role": "system", "content": system}, *prompt.messages])
        if effort is None and (think := values.get("think")):
            effort = "none" if think == "off" else think
            request = replace(request, effort_field=f"think of the preset {preset.name}")
    return replace(request, prompt=prompt, effort=effort, num_ctx=request.num_ctx or values.get("ctx"))


def _engine_request(request: GenerationRequest, ids: tuple[int, ...], ctx: int, engine: LoadedEngine) -> Request:
    for given, param in ((ids, request.prompt_field), (request.sampling.logit_bias, "logit_bias")):
        try:
            require_ids(given, engine.config.vocab_size)
        except UsageError as error:
            raise RequestError(400, error.what, why=error.why, param=param, name="invalid_value") from None
    sampling, best_of = request.sampling, request.best_of
    if request.pooling is None:
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens or ctx, ctx - len(ids)))
    return Request(
        ids,
        sampling,
        opens_turn=isinstance(request.prompt, ChatInput) and request.prompt.opens_turn and not request.said,
        grammar=request.grammar,
        priority=request.priority,
        pooling=request.pooling,
        is_scored=request.is_scored or best_of.best_of > request.n,
        prompt_logprobs=request.prompt_logprobs,
        reads_only=request.reads_only,
        adapters=request.adapters,
        reuse=request.reuse,
        beams=best_of.beams,
        num_answers=request.n if best_of.beams > 1 else 1,
        length_penalty=best_of.length_penalty,
        early_stopping=best_of.early_stopping,
    )


def no_form(request: GenerationRequest, error: GrammarError) -> RequestError:
    """Return the error of a grammar that cannot be honoured."""
    param = request.grammar_field if request.grammar is not None else "tools"
    what = f"{param!r}: {error.what}"
    return RequestError(400, what, why=error.why, fix=error.fixes, param=param, name="invalid_grammar")


def prompt_ids(request: GenerationRequest, engine: LoadedEngine) -> tuple[int, ...]:
    """Return the ids of the whole prompt, however long it is. Raises RequestError, TemplateError."""
    return _fitted(replace(request, evicts=False), engine, engine.ctx, _output_format(request, engine)).prompt_ids


def template_input(chat: ChatInput, tools: Toolset | None, engine: LoadedEngine) -> ChatInput:
    """Return the chat as the model's template is given it. Raises RequestError."""
    output = output_format_of(engine.template, engine.tokenizer, chat.messages, tools, is_begun=False)
    return output.template_input(chat_of(chat, engine))


def _output_format(request: GenerationRequest, engine: LoadedEngine) -> OutputFormat | None:
    """Return None for a prompt that is not a conversation."""
    if not isinstance(request.prompt, ChatInput):
        return None
    is_said_alone = request.tools is None and (request.grammar is not None or request.effort == "none")
    is_begun = bool(request.said) or is_said_alone
    if request.effort == "none" and request.tools is not None and is_harmony(engine.template):
        raise _no_effort("none", request.effort_field, "with tools, this model always thinks")
    return output_format_of(
        engine.template, engine.tokenizer, request.prompt.messages, request.tools, is_begun=is_begun
    )


def joined(asked: Sequence[PreparedRequest]) -> PreparedRequest:
    """Return several as one, whose answers come in order. Raises RequestError for too many log-probabilities."""

    def num_logprobs(request: Request) -> int:
        of_prompt = 0 if request.prompt_logprobs is None else len(request.prompt_ids) * (1 + request.prompt_logprobs)
        sampling = request.sampling
        if sampling.logprobs is None or request.reads_only:
            return of_prompt
        return of_prompt + request.num_answers * (sampling.max_tokens or 0) * (1 + sampling.logprobs)

    requests = tuple(request for each in asked for request in each.requests)
    count = sum(map(num_logprobs, requests))
    if count > _MOST_LOGPROBS:
        why = f"there may be {count}, and one reply has at most {_MOST_LOGPROBS}"
        what, fix = "too many log-probabilities", "request fewer answers, tokens or alternatives"
        raise RequestError(400, what, why=why, fix=fix, param="logprobs", name="invalid_value")
    return replace(asked[0], requests=requests)


def _fitting_ratio(request: GenerationRequest, error: ContextOverflowError, engine: LoadedEngine) -> float | None:
    """Return the value of `compress` with which a conversation fits; None where there is none."""
    if not isinstance(request.prompt, ChatInput) or request.evicts or error.num_tokens is None or error.ctx is None:
        return None
    gone = request.compression
    if gone is None:
        return fitting(compressible(request.prompt.messages).cost(engine.tokenizer), error.num_tokens, error.ctx)
    return fitting(gone.tokens_before, error.num_tokens + gone.tokens_before - gone.tokens_after, error.ctx)


def _refuse_begun_form(request: GenerationRequest) -> None:
    """Raises RequestError where an answer that the client has begun has to have a form: the model writes the rest, and
    the rest alone would have it."""
    must_call = request.tools is not None and request.tools.must_call
    if not request.said or (request.grammar is None and not must_call):
        return
    param = "tool_choice" if must_call else request.grammar_field
    what, why = f"{param!r} cannot be honoured", "a form cannot be enforced on an answer that the client has begun"
    fix = "leave out the last message, which begins the answer"
    raise RequestError(400, what, why=why, fix=fix, param=param, name="unsupported_value")


def _require_room(request: GenerationRequest, num_tokens: int, engine: LoadedEngine) -> None:
    """Raises RequestError for a longer context than the server's, where the request needs it: clients send one with
    everything."""
    if request.num_ctx is None or num_tokens + (request.sampling.max_tokens or 1) <= engine.ctx:
        return
    if request.num_ctx <= engine.ctx or request.pooling is not None:
        return
    fixes = engine.fixes_for(request.num_ctx) if request.num_ctx <= engine.config.longest_context else []
    fix = [f"restart the server with {fix}" for fix in fixes] or "request for less"
    why = f"the prompt has {num_tokens} tokens, and this server's context has {engine.ctx}"
    raise RequestError(400, f"num_ctx is {request.num_ctx}", why=why, fix=fix, param="num_ctx", name="invalid_value")


def _fitted(request: GenerationRequest, engine: LoadedEngine, ctx: int, output: OutputFormat | None) -> Fitted:
    prompt = request.prompt
    if isinstance(prompt, tuple):
        return Fitted(prompt)
    if isinstance(prompt, str):
        return Fitted(tuple(engine.tokenizer.encode(prompt, special=True, bos=True)))
    assert output is not None
    chat = chat_of(prompt, engine, request.effort, request.effort_field, usual_effort=request.usual_effort)

    def encode(messages: Sequence[Message]) -> list[int]:
        shown = output.template_input(replace(chat, messages=messages))
        ids = [*encode_chat(engine.template, engine.tokenizer, shown), *output.tail_ids]
        if not request.said:
            return ids
        if not any(mark in request.said for mark in ALL_MARKS):
            # The begun answer goes on outside of a thought that the template has opened.
            close = closing_mark(engine.tokenizer, ids)
            ids += engine.tokenizer.encode(close and f"{close}\n\n", special=True)
        return ids + engine.tokenizer.encode(request.said)

    if request.evicts:
        return fit_turns(chat.messages, encode, ctx, request.sampling.max_tokens)
    return Fitted(tuple(encode(chat.messages)))


def _begins_in_thought(request: GenerationRequest, engine: LoadedEngine, ids: Sequence[int]) -> bool:
    """Return whether the template has opened a thought that the begun answer has not closed."""
    num_said = len(engine.tokenizer.encode(request.said)) if request.said else 0
    splitter = Splitter(is_thinking=begins_in_thought(engine.tokenizer, ids[: len(ids) - num_said]))
    splitter.feed(request.said)
    return splitter.is_thinking


def chat_of(
    chat: ChatInput,
    engine: LoadedEngine,
    effort: str | None = None,
    effort_field: str = "reasoning_effort",
    *,
    usual_effort: str | None = None,
) -> ChatInput:
    """Return the chat as the model's template knows it: few have a role for developers. Raises RequestError for
    variables that the template does not read."""
    if effort == usual_effort and not (has_levels(engine.template) or any(map(engine.template.asks_for, SWITCHES))):
        effort = None
    variables = _variables(engine, chat.variables, effort, effort_field)
    if _mentions(engine, "developer"):
        return replace(chat, variables=variables)
    messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in chat.messages]
    return replace(chat, messages=messages, variables=variables)


def _variables(engine: LoadedEngine, given: Mapping[str, Any], effort: str | None, effort_field: str) -> dict[str, Any]:
    """Return the template's variables beside the messages."""
    for name in given:
        if name in _NOT_FOR_CLIENTS:
            raise _no_variable(name, "a request may not set it")
        if not (name.isidentifier() and _mentions(engine, name)):
            raise _no_variable(name, "this model's chat template does not use it")
    if given and (size := len(json.dumps(given))) > _MOST_VARIABLES:
        why = f"as JSON it has {size} characters, and at most {_MOST_VARIABLES} are accepted"
        raise RequestError(400, "chat_template_kwargs is too large", why=why, param="chat_template_kwargs")
    if effort is None:
        return dict(given)
    wanted = "off" if effort == "none" else effort
    if wanted not in ("on", "off") and not has_levels(engine.template):
        wanted = "on" if any(map(engine.template.asks_for, SWITCHES)) else wanted
    try:
        return {**effort_variables(engine.template, wanted), **given}
    except UsageError as error:
        raise _no_effort(effort, effort_field, error.why) from None


def _no_effort(effort: str, effort_field: str, why: str) -> RequestError:
    what = f"{effort_field!r}: thinking cannot be set to {effort!r}"
    return RequestError(400, what, why=why, param=effort_field, name="unsupported_value")


def _no_variable(name: str, why: str) -> RequestError:
    param = f"chat_template_kwargs.{name}"[:200]
    return RequestError(400, f"{param!r} cannot be honoured", why=why, param=param, name="unsupported_value")


def _mentions(engine: LoadedEngine, word: str) -> bool:
    """Return whether the model's template has the word, which may be megabytes."""
    pattern = rf"(?<!\w){re.escape(word)}(?!\w)"
    return any(word in source and re.search(pattern, source) for source in engine.template.sources.values())

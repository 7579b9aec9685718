"""The one internal request: what every dialect's body comes to, and the ids that the model is given for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from localllm.chat.best_of import seeded
from localllm.chat.harmony import is_harmony
from localllm.chat.thoughts import (
    LEVEL,
    SWITCHES,
    THOUGHT_MARKS,
    Splitter,
    begins_in_thought,
    closing_mark,
    effort_variables,
    has_thought,
)
from localllm.engine.request import Pooling, Request, SamplingParams, require_ids
from localllm.errors import ContextOverflowError, GrammarError, UsageError
from localllm.server.choosing import NO_CHOICE, Choosing
from localllm.server.failures import RequestError, too_long
from localllm.server.tools.calling import Toolset
from localllm.server.tools.manner import Manner, manner_of
from localllm.server.tools.parts import Reader
from localllm.text.chat_template import ChatInput, encode_chat
from localllm.text.eviction import Fitted, fit_turns, overflow_error
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer_files import SPECIAL_ROLES

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.text.eviction import Message

_NOT_FOR_CLIENTS = {"messages", "tools", "add_generation_prompt", "tokenize", "chat_template", *SPECIAL_ROLES}
_MOST_VARIABLES = 256 << 10  # characters of all of them as JSON: of megabytes a template makes seconds of work
_MOST_LOGPROBS = 1 << 20  # that one reply may have: each is 200 bytes while it is made


@dataclass(frozen=True)
class Ask:
    """prompt: chat messages, a text to go on with, or ids. n: answers to it, each with a seed of its own. choosing: how
    they are chosen of others. num_ctx: the context that the client wants to have. effort: how much is to be thought
    before: "none", "on", a level that the template knows; None: as the model does. usual_effort: a level that asks for
    no more than that. evicts: the oldest turns leave where there are too many. said: with which the answer begins, as
    the client has it. grammar: what the answer has to look like. tools: that it may call. prompt_logprobs, reads_only:
    as `Request` has them. prompt_field, effort_field, grammar_field: what its dialect calls them.
    """

    prompt: ChatInput | str | tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    choosing: Choosing = NO_CHOICE
    num_ctx: int | None = None
    priority: int = 0
    pooling: Pooling | None = None
    effort: str | None = None
    usual_effort: str | None = None
    evicts: bool = False
    said: str = ""
    grammar: Grammar | None = None
    tools: Toolset | None = None
    prompt_logprobs: int | None = None
    reads_only: bool = False
    prompt_field: str = "messages"
    effort_field: str = "reasoning_effort"
    grammar_field: str = "response_format"


@dataclass(frozen=True)
class Asked:
    """What the engine is given. new_reader: of one answer, what it is told apart by; None: all of it is text.
    num_evicted: turns that have left."""

    requests: tuple[Request, ...]
    new_reader: Callable[[], Reader | None] = lambda: None
    num_evicted: int = 0


def prepare(ask: Ask, engine: LoadedEngine) -> Asked:
    """Milliseconds, more for a long prompt. A request that has a grammar is still to be checked by the engine.

    Raises RequestError, TemplateError, UsageError.
    """
    _refuse_begun_form(ask)
    ctx = min(ask.num_ctx or engine.ctx, engine.ctx)
    manner = _manner(ask, engine)
    try:
        fitted = _fitted(ask, engine, ctx, manner)
        ids = fitted.prompt_ids
        if len(ids) >= ctx + (ask.pooling is not None):
            raise _too_long(len(ids), ctx, engine)
    except ContextOverflowError as error:
        raise too_long(error, ask.prompt_field) from None
    _require_room(ask, len(ids), engine)
    for given, param in ((ids, ask.prompt_field), (ask.sampling.logit_bias, "logit_bias")):
        try:
            require_ids(given, engine.config.vocab_size)
        except UsageError as error:
            raise RequestError(400, error.what, why=error.why, param=param, name="invalid_value") from None
    sampling = ask.sampling
    if ask.pooling is None:
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens or ctx, ctx - len(ids)))
    is_thinking = manner is not None and _begins_in_thought(ask, engine, ids)
    first = Request(
        ids,
        sampling,
        opens_turn=isinstance(ask.prompt, ChatInput) and ask.prompt.opens_turn and not ask.said,
        grammar=ask.grammar,
        priority=ask.priority,
        pooling=ask.pooling,
        is_scored=ask.choosing.best_of > ask.n,
        prompt_logprobs=ask.prompt_logprobs,
        reads_only=ask.reads_only,
        beams=ask.choosing.beams,
        num_answers=ask.n if ask.choosing.beams > 1 else 1,
        length_penalty=ask.choosing.length_penalty,
        early_stopping=ask.choosing.early_stopping,
    )
    try:
        if manner is not None:
            if ask.said and not is_thinking:
                manner = replace(manner, splits=False)  # no thought comes: all of it is the rest of what was said
            may_still_think = is_thinking or not (ask.effort == "none" or has_thought(engine.tokenizer, ids))
            grammar = manner.grammar(ask.grammar, ask.grammar_field, is_thinking=is_thinking, may_think=may_still_think)
            first = replace(first, grammar=grammar, shown_ids=manner.shown_ids)
        if first.grammar is None:
            engine.check(first)
    except GrammarError as error:
        raise no_form(ask, error) from None
    requests = tuple(
        replace(first, sampling=seeded(sampling, index)) for index in range(ask.choosing.num_requests(ask.n))
    )
    if manner is None:
        return Asked(requests)
    has_form = ask.grammar is not None
    return Asked(requests, lambda: manner.reader(is_thinking=is_thinking, has_form=has_form), fitted.evicted.turns)


def no_form(ask: Ask, error: GrammarError) -> RequestError:
    """What an answer is to look like cannot be honoured."""
    param = ask.grammar_field if ask.grammar is not None else "tools"
    what = f"{param!r}: {error.what}"
    return RequestError(400, what, why=error.why, fix=error.fix, param=param, name="invalid_grammar")


def prompt_ids(ask: Ask, engine: LoadedEngine) -> tuple[int, ...]:
    """Of all that is asked, however long it is. Raises RequestError, TemplateError."""
    return _fitted(replace(ask, evicts=False), engine, engine.ctx, _manner(ask, engine)).prompt_ids


def told_chat(chat: ChatInput, tools: Toolset | None, engine: LoadedEngine) -> ChatInput:
    """What the model's template is given for it. Raises RequestError."""
    manner = manner_of(engine.template, engine.tokenizer, chat.messages, tools, is_begun=False)
    return manner.told(chat_of(chat, engine))


def _manner(ask: Ask, engine: LoadedEngine) -> Manner | None:
    """None for a prompt that is no conversation."""
    if not isinstance(ask.prompt, ChatInput):
        return None
    is_said_alone = ask.tools is None and (ask.grammar is not None or ask.effort == "none")
    is_begun = bool(ask.said) or is_said_alone
    if ask.effort == "none" and ask.tools is not None and is_harmony(engine.template):
        raise _no_effort("none", ask.effort_field, "with tools, this model always thinks")
    return manner_of(engine.template, engine.tokenizer, ask.prompt.messages, ask.tools, is_begun=is_begun)


def joined(asked: Sequence[Asked]) -> Asked:
    """Several as one, whose answers come in order. Raises RequestError where they would have too many numbers."""
    requests = tuple(request for each in asked for request in each.requests)
    count = sum(map(_num_logprobs, requests))
    if count > _MOST_LOGPROBS:
        why = f"{count} of them may come, and at most {_MOST_LOGPROBS} are told in one reply"
        what, fix = "these are too many log-probabilities", "ask for fewer answers, tokens or alternatives"
        raise RequestError(400, what, why=why, fix=fix, param="logprobs", name="invalid_value")
    return replace(asked[0], requests=requests)


def _num_logprobs(request: Request) -> int:
    """That may come of it."""
    of_prompt = 0 if request.prompt_logprobs is None else len(request.prompt_ids) * (1 + request.prompt_logprobs)
    sampling = request.sampling
    if sampling.logprobs is None or request.reads_only:
        return of_prompt
    return of_prompt + request.num_answers * (sampling.max_tokens or 0) * (1 + sampling.logprobs)


def _refuse_begun_form(ask: Ask) -> None:
    """Raises RequestError where an answer that the client has begun has to have a form: the model writes the rest of
    it, and held to the form the rest alone would have it."""
    must_call = ask.tools is not None and ask.tools.must_call
    if not ask.said or (ask.grammar is None and not must_call):
        return
    param = "tool_choice" if must_call else ask.grammar_field
    what, why = f"{param!r} cannot be honoured", "an answer that is begun cannot be held to a form"
    fix = "leave out the begun answer, the last message"
    raise RequestError(400, what, why=why, fix=fix, param=param, name="unsupported_value")


def _require_room(ask: Ask, num_tokens: int, engine: LoadedEngine) -> None:
    """A context that is longer than the server's is one of those that clients send with everything; it is refused where
    the request would need it. Raises RequestError."""
    if ask.num_ctx is None or num_tokens + (ask.sampling.max_tokens or 1) <= engine.ctx:
        return
    if ask.num_ctx <= engine.ctx or ask.pooling is not None:
        return
    flags = engine.flags_for(ask.num_ctx) if ask.num_ctx <= engine.config.longest_context else ""
    fix = f"restart the server with {flags}" if flags.startswith("--") else "ask for less"
    why = f"the prompt has {num_tokens} tokens, and the context of this server {engine.ctx}"
    raise RequestError(400, f"num_ctx is {ask.num_ctx}", why=why, fix=fix, param="num_ctx", name="invalid_value")


def _too_long(num_tokens: int, ctx: int, engine: LoadedEngine) -> ContextOverflowError:
    longest = engine.config.longest_context
    helps = ctx == engine.ctx and num_tokens < longest
    return overflow_error(num_tokens, ctx, longest, engine.flags_for(min(longest, num_tokens + 512)) if helps else "")


def _fitted(ask: Ask, engine: LoadedEngine, ctx: int, manner: Manner | None) -> Fitted:
    prompt = ask.prompt
    if isinstance(prompt, tuple):
        return Fitted(prompt)
    if isinstance(prompt, str):
        return Fitted(tuple(engine.tokenizer.encode(prompt, special=True, bos=True)))
    assert manner is not None
    chat = chat_of(prompt, engine, ask.effort, ask.effort_field, usual_effort=ask.usual_effort)

    def encode(messages: Sequence[Message]) -> list[int]:
        told = manner.told(replace(chat, messages=messages))
        ids = [*encode_chat(engine.template, engine.tokenizer, told), *manner.tail_ids]
        return [*ids, *engine.tokenizer.encode(_closing(ask, engine, ids), special=True), *_said_ids(ask, engine)]

    if ask.evicts:
        return fit_turns(chat.messages, encode, ctx, ask.sampling.max_tokens)
    return Fitted(tuple(encode(chat.messages)))


def _closing(ask: Ask, engine: LoadedEngine, ids: Sequence[int]) -> str:
    """Of the thought that the template has opened, where an answer was begun that goes on outside of it."""
    marks = (*THOUGHT_MARKS, *THOUGHT_MARKS.values())
    if not ask.said or any(mark in ask.said for mark in marks):
        return ""
    close = closing_mark(engine.tokenizer, ids)
    return close and f"{close}\n\n"


def _said_ids(ask: Ask, engine: LoadedEngine) -> list[int]:
    return engine.tokenizer.encode(ask.said) if ask.said else []


def _begins_in_thought(ask: Ask, engine: LoadedEngine, ids: Sequence[int]) -> bool:
    """Whether the template has opened a thought that what was said has not closed."""
    in_front = ids[: len(ids) - len(_said_ids(ask, engine))]
    splitter = Splitter(is_thinking=begins_in_thought(engine.tokenizer, in_front))
    splitter.feed(ask.said)
    return splitter.is_thinking


def chat_of(
    chat: ChatInput,
    engine: LoadedEngine,
    effort: str | None = None,
    effort_field: str = "reasoning_effort",
    *,
    usual_effort: str | None = None,
) -> ChatInput:
    """As the model's template knows it: few have a role of their own for developers. Raises RequestError for variables
    that it would not even look at."""
    if effort == usual_effort and not any(map(engine.template.asks_for, (LEVEL, *SWITCHES))):
        effort = None
    variables = _variables(engine, chat.variables, effort, effort_field)
    if _mentions(engine, "developer"):
        return replace(chat, variables=variables)
    messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in chat.messages]
    return replace(chat, messages=messages, variables=variables)


def _variables(engine: LoadedEngine, given: Mapping[str, Any], effort: str | None, effort_field: str) -> dict[str, Any]:
    """What the template is told beside the messages."""
    for name in given:
        if name in _NOT_FOR_CLIENTS:
            raise _no_variable(name, "it is not for a request to say")
        if not (name.isidentifier() and _mentions(engine, name)):
            raise _no_variable(name, "the chat template of this model does not know it")
    if given and (size := len(json.dumps(given))) > _MOST_VARIABLES:
        why = f"as JSON it has {size} characters, and at most {_MOST_VARIABLES} are taken"
        raise RequestError(400, "chat_template_kwargs is too large", why=why, param="chat_template_kwargs")
    if effort is None:
        return dict(given)
    wanted = "off" if effort == "none" else effort
    if wanted not in ("on", "off") and not engine.template.asks_for(LEVEL):
        wanted = "on" if any(map(engine.template.asks_for, SWITCHES)) else wanted
    try:
        return {**effort_variables(engine.template, wanted), **given}
    except UsageError as error:
        raise _no_effort(effort, effort_field, error.why) from None


def _no_effort(effort: str, effort_field: str, why: str) -> RequestError:
    what = f"{effort_field!r}: thinking cannot be had so ({effort!r})"
    return RequestError(400, what, why=why, param=effort_field, name="unsupported_value")


def _no_variable(name: str, why: str) -> RequestError:
    param = f"chat_template_kwargs.{name}"[:200]
    return RequestError(400, f"{param!r} cannot be honoured", why=why, param=param, name="unsupported_value")


def _mentions(engine: LoadedEngine, *words: str) -> bool:
    """Whether the model's template has one of them."""
    sources = engine.template.sources.values()
    return any(
        word in source and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", source) is not None  # a word may be megabytes
        for word in words
        for source in sources
    )

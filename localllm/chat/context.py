"""The context of a chat: the policy for a prompt that is too long, and notices about how full it is.

Knows messages and counts. Knows no terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.chat.answer import context_used, evicted_tokens_text, filled
from localllm.chat.attachments import length_of_files, typed_part
from localllm.engine.events import GrownEvent
from localllm.errors import ContextOverflowError, Fix
from localllm.text.eviction import (
    Encode,
    Evicted,
    Fitted,
    Message,
    fit_turns,
    num_in_front,
    turn_starts,
    turns_too_many,
)

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.engine.events import FinishedEvent
    from localllm.engine.request import AdapterRef, Request, SamplingParams

_WARNED = (80, 95)  # percent of the context from which on a chat says how full it is, once each
_BAR_CELLS = 40


def chat_request(
    engine: LoadedEngine,
    sampling: SamplingParams,
    messages: Sequence[Message],
    encode: Encode,
    policy: str,
    switch: str,
    *,
    floor: int = 0,
    looks: bool = False,
    opens_turn: bool = True,
    adapters: tuple[AdapterRef, ...] = (),
) -> tuple[Request, Fitted]:
    """Return the request that a policy for a context that is too short makes of the messages.

    policy: the setting `overflow`.
    switch: the words that choose a policy here, "--overflow" or "/set overflow".
    floor, looks: as in `fit_turns`.
    opens_turn, adapters: as in `Request`.
    Raises AdapterError; ContextOverflowError naming what would fit; TemplateError.
    """
    from localllm.engine.request import Request

    if policy == "evict":
        fitted = fit_turns(messages, encode, engine.ctx, sampling.max_tokens, floor, looks=looks)
    else:
        fitted = Fitted(tuple(encode(messages)))
    request = Request(
        fitted.prompt_ids,
        sampling,
        grows=policy == "grow",
        opens_turn=opens_turn,
        explains_miss=True,
        adapters=adapters,
    )
    try:
        engine.check(request)
    except ContextOverflowError as error:
        # Add how much is too much, and the policies that would help.
        limit = engine.config.longest_context if policy == "grow" else engine.ctx
        turns, helping = 0, []
        if policy == "evict":
            error.why = f"even the last question alone, with the system message, is too long; {error.why}"
        else:
            turns, total = turns_too_many(messages, encode, limit)
            helping += ["evict"] if turns else []
        if turns:
            oldest = "the oldest" if turns == 1 else f"the oldest {turns}"
            error.why += f"; without {oldest} of its {total} turns it would fit"
        else:
            front, starts = messages[: num_in_front(messages)], turn_starts(messages)
            last = [*front, *messages[starts[-1] :]] if starts else messages
            error.why += _characters_too_many(last, len(fitted.prompt_ids), limit)
        offer_policies(error, [*helping, *growing(error, policy)], switch)
        raise
    return request, fitted


def growing(error: ContextOverflowError, policy: str) -> list[str]:
    """Return the policy `grow` where a longer context fits as things are."""
    fits = [fix.words[0] for fix in error.fixes if len(fix.words) == 2] == ["--ctx"]
    return ["grow"] if policy != "grow" and fits else []


def offer_policies(error: ContextOverflowError, policies: Sequence[str], switch: str) -> None:
    """Add policies to the error's fix, as they are typed here."""
    is_typed_here = switch.startswith("/")  # a flag takes another start
    chosen = [Fix.advice(f"{switch} {policy}") if is_typed_here else Fix.flag(switch, policy) for policy in policies]
    flags = [fix for fix in error.fixes if fix.kind == "flag"]
    if not flags:
        error.fix = chosen or error.fixes
    else:
        error.fix = [*chosen, *flags] if is_typed_here else [*flags, *chosen]


def _characters_too_many(messages: Sequence[Message], num_tokens: int, ctx: int) -> str:
    length = sum(len(text_of(message)) for message in messages)
    excess = -(-length * (num_tokens - ctx + 1) // num_tokens)
    return f"; about {excess:,} of {length:,} characters are too many" if length else ""


def text_of(message: Message) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
    return content or ""


def evicted_text(evicted: Evicted) -> str:
    """Return "3 turns left the context (1,930 of 8,210 tokens), from 'Why is the sky...'"."""
    turns = "1 turn" if evicted.turns == 1 else f"{evicted.turns} turns"
    opening = f", from {evicted.opening!r}" if evicted.opening else ""
    return f"{turns} left the context ({evicted.tokens:,} of {evicted.tokens_before:,} tokens){opening}"


def evicted_fields(evicted: Evicted) -> dict[str, Any]:
    """Return the same for the JSON forms."""
    return {"evicted_turns": evicted.turns, "evicted_tokens": evicted.tokens}


def grown_text(event: GrownEvent) -> str:
    """Return the notice about a context that has grown, and its cost."""
    from localllm.config import format_figure

    moved = {"the disk": event.num_from_disk, "memory": event.num_from_memory}
    parts = [
        f"{count} block{' now comes' if count == 1 else 's now come'} from {place}"
        for place, count in moved.items()
        if count
    ]
    rate = "" if event.decode_tok_s is None else f": about {format_figure(event.decode_tok_s)} tok/s"
    grew = f"the context grew from {event.ctx_before:,} to {event.ctx:,} tokens"
    return f"{grew}; {', '.join(parts)}{rate}" if parts else grew


def grown_fields(event: GrownEvent) -> dict[str, Any]:
    """Return the same as a line of `run --jsonl`."""
    return {
        "type": "context",
        "before": event.ctx_before,
        "limit": event.ctx,
        "blocks_from_disk": event.num_from_disk,
        "blocks_from_memory": event.num_from_memory,
        "decode_tok_s": event.decode_tok_s,
    }


REMEDIES = {
    "stop": "/undo, /clear, or /set overflow evict",
    "evict": "the oldest turns leave it with the next question",
    "grow": "it grows with the next question",
}


_OUTLOOKS = {"stop": "; once it is full, answers are cut and questions refused"}


@dataclass(frozen=True)
class Fullness:
    """The notice about a context that is nearly full. is_full: the answer was cut for it."""

    text: str
    is_full: bool


@dataclass
class ContextMeter:
    """Reports how full the context is when it becomes nearly full, and again before the end.

    reported: percent of the last report; 0 before one.
    """

    reported: int = 0

    def note(self, used: int, limit: int, policy: str) -> str | None:
        """Return the notice after an answer, if there is one."""
        reached = max((each for each in _WARNED if 100 * used >= each * limit), default=0)
        before, self.reported = self.reported, reached
        if reached <= before:
            return None
        return f"the context is {filled(used, limit)}{_OUTLOOKS.get(policy, '')}: {REMEDIES[policy]}"


@dataclass(frozen=True)
class ContextUsage:
    """The tokens of a context by what they are for.

    parts: system, history, question, answer, template; files, of those in front of questions, where there are any.
    num_out: messages that have left the context.
    num_evicted: tokens whose keys and values had left memory when the last answer ended.
    """

    used: int
    limit: int
    parts: Mapping[str, int]
    num_out: int = 0
    num_evicted: int = 0


def context_usage(
    messages: Sequence[Message], used: int, limit: int, count: Callable[[str], int], num_out: int
) -> ContextUsage:
    """Return the usage by these messages, which are `used` tokens with their template. count: the tokens of a text."""
    front, starts = num_in_front(messages), turn_starts(messages)
    last = starts[-1] if starts else len(messages)
    parts = {
        "system": messages[:front],
        "history": messages[front:last],
        "question": messages[last : last + 1],
        "answer": messages[last + 1 :],
    }
    counts = {name: sum(count(_without_files(message)) for message in some) for name, some in parts.items()}
    if files := [file for message in messages for file in _files(message)]:
        counts["files"] = sum(map(count, files))
    counts["template"] = max(0, used - sum(counts.values()))
    return ContextUsage(used, limit, counts, num_out)


def _files(message: Message) -> list[str]:
    """Return the files in front of a question as one text, if there are any."""
    text = text_of(message)
    length = length_of_files(text) if message["role"] == "user" else 0
    return [text[:length]] if length else []


def _without_files(message: Message) -> str:
    return typed_part(text_of(message)) if message["role"] == "user" else text_of(message)


def usage_lines(usage: ContextUsage) -> list[str]:
    """Return the lines of `/tokens`: how full the context is, a bar, and the parts."""
    used, limit = usage.used, usage.limit
    cells = min(_BAR_CELLS, -(-_BAR_CELLS * used // limit))
    lines = [
        f"{used:,} of {limit:,} tokens of the context are used"
        if used <= limit
        else f"the conversation has {used:,} tokens, {used - limit:,} more than the context of {limit:,}",
        f"[{'#' * cells}{'.' * (_BAR_CELLS - cells)}] {used / limit:.0%}: "
        + ", ".join(f"{name} {amount:,}" for name, amount in usage.parts.items()),
    ]
    if usage.num_out:
        lines.append(f"the oldest {usage.num_out} messages have left it")
    if usage.num_evicted:
        lines.append(f"{evicted_tokens_text(usage.num_evicted)} before the last answer ended (--kv-evict)")
    return lines


def is_cut_by_context(finished: FinishedEvent, ctx: int) -> bool:
    """Return whether the answer ended because the context was full."""
    return finished.finish_reason == "length" and context_used(finished) >= ctx


def can_be_longer(engine: LoadedEngine) -> bool:
    """Return whether a larger --ctx would give this model a longer context."""
    return engine.ctx < engine.config.longest_context

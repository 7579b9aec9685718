"""Fit a conversation that has outgrown its context: the oldest turns leave, or an error says what would fit.

Knows messages and counts; its caller encodes prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from localllm.errors import ContextOverflowError, Fix, TemplateError

Message = dict[str, Any]
Encode = Callable[[Sequence[Message]], Sequence[int]]

_ANSWER_SHARE = 4  # a quarter of a context is left to the answer
# Of the tokens that a prompt may have, a quarter leaves at once, or two, or three: all but the system message is then
# prefilled anew, and until as much has been added again the next prompts find the one before in the cache. Counted from
# the conversation's beginning, so that a later process leaves out the same turns.
_STEPS = 4
_FRONT_ROLES = ("system", "developer")


@dataclass(frozen=True)
class Evicted:
    """Turns that left the context, their tokens, those of the prompt with them, and the first words of the first."""

    turns: int = 0
    tokens: int = 0
    tokens_before: int = 0
    opening: str = ""


NOTHING_EVICTED = Evicted()


@dataclass(frozen=True)
class Fitted:
    """The ids of a prompt that fits, and the number of messages that stay out of it, behind those at the front."""

    prompt_ids: tuple[int, ...]
    floor: int = 0
    evicted: Evicted = NOTHING_EVICTED


def answer_room(ctx: int, max_tokens: int | None) -> int:
    """Return the tokens of a context that a prompt has to leave for its answer."""
    most = max(1, ctx // _ANSWER_SHARE)
    return most if max_tokens is None else min(max_tokens, most)


def wanted_room(ctx: int, max_tokens: int | None) -> int:
    """Return the tokens for an answer where the context can grow for it: as many as the request asks for."""
    return answer_room(ctx, None) if max_tokens is None else max_tokens


def overflow_error(num_tokens: int, ctx: int, longest: int, fixes: Sequence[Fix] = ()) -> ContextOverflowError:
    """Return the error for a prompt that does not fit.

    num_tokens: of the prompt.
    ctx: the context.
    longest: the model's longest context.
    fixes: the flags with which a longer one would fit.
    """
    trained = "" if num_tokens < longest else f"; the model was trained for at most {longest}"
    error = ContextOverflowError(
        f"the prompt has {num_tokens} tokens, the context {ctx}",
        why=f"at least one token must remain for the answer{trained}; nothing was cut",
        fix=fixes or "shorten the prompt",
    )
    error.num_tokens, error.ctx = num_tokens, ctx
    return error


def num_in_front(messages: Sequence[Message]) -> int:
    """Return the number of messages at the front that never leave, the system's."""
    return next((i for i, message in enumerate(messages) if message["role"] not in _FRONT_ROLES), len(messages))


def turn_starts(messages: Sequence[Message]) -> list[int]:
    """Return where each turn begins: a question and all up to the next one. The first has what comes before it."""
    first = num_in_front(messages)
    starts = [i for i in range(first, len(messages)) if messages[i]["role"] == "user"]
    return [first, *starts[1:]] if starts else []


def fit_turns(
    messages: Sequence[Message],
    encode: Encode,
    ctx: int,
    max_tokens: int | None,
    floor: int = 0,
    *,
    looks: bool = False,
) -> Fitted:
    """Leave out as many of the oldest turns as have to leave for the answer.

    A prompt of which only the system message and the last turn are left is taken as it is: the engine says if it fits.

    floor: messages behind those at the front that have left before, and stay out.
    looks: take some of them in again where they fit.
    Raises TemplateError where the template refuses the whole prompt, or its last turn alone.
    """
    front, starts = num_in_front(messages), turn_starts(messages)
    limit = max(1, ctx - answer_room(ctx, max_tokens))
    before = floor if front + floor in starts else 0
    ids = encode(without(messages, before))
    if len(starts) < 2 or (len(ids) <= limit and not (looks and before)):
        return Fitted(tuple(ids), before)
    whole = len(encode(messages)) if before else len(ids)
    if whole <= limit:
        return Fitted(tuple(encode(messages)))
    step = max(1, limit // _STEPS)
    turns, fewer = _fewest(messages, encode, starts, whole - -(-(whole - limit) // step) * step, limit)
    after = starts[turns] - front
    if after <= before:
        return Fitted(tuple(fewer), after)
    gone = messages[front + before : front + after]
    content = next((message.get("content") for message in gone if message["role"] == "user"), None)
    words = " ".join(content.split()) if isinstance(content, str) else ""
    opening = words if len(words) <= 40 else f"{words[:37]}..."
    count = turns - starts.index(front + before)
    return Fitted(tuple(fewer), after, Evicted(count, len(ids) - len(fewer), len(ids), opening))


def turns_too_many(messages: Sequence[Message], encode: Encode, ctx: int) -> tuple[int, int]:
    """Return (oldest turns that would have to leave for any answer at all, all turns); 0 where that does not help."""
    starts = turn_starts(messages)
    if len(starts) > 1:
        with suppress(TemplateError):
            fewest, ids = _fewest(messages, encode, starts, ctx - 1, ctx - 1)
            return (fewest if len(ids) < ctx else 0), len(starts)
    return 0, len(starts)


def _fewest(
    messages: Sequence[Message], encode: Encode, starts: Sequence[int], target: int, limit: int
) -> tuple[int, Sequence[int]]:
    """Return the turns that have to leave, at least one, for a prompt of `target` tokens, and that prompt.

    The target is `limit` where the last turn alone has more; all but the last leave where nothing helps.
    """
    low, high = 0, len(starts) - 1  # the prompt without `low` turns is too long; without `high`, as short as it can be
    best = encode(without(messages, starts[high] - starts[0]))
    if len(best) > target:
        target = limit
    while high - low > 1:
        middle = (low + high) // 2
        ids: Sequence[int] | None = None
        with suppress(TemplateError):  # that refuses to begin there: more turns leave
            ids = encode(without(messages, starts[middle] - starts[0]))
        if ids is not None and len(ids) <= target:
            high, best = middle, ids
        else:
            low = middle
    return high, best


def without(messages: Sequence[Message], num_out: int) -> list[Message]:
    """Return the messages that stay where so many have left, of those behind the front."""
    front = num_in_front(messages)
    return [*messages[:front], *messages[front + num_out :]]

"""Prompts that begin alike are read once.

Who waits while another request reads what its own prompt begins with finds those pages when they are full. Whose prompt
is the same to its end goes on with a branch of the other's cache, and draws its first token from the same logits: what
it computes is bit for bit what it would have computed alone. Nothing is kept of who waits for whom: when the reader
ends, for whatever reason, the next look finds nobody to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.engine.runner import Chunk
from localllm.engine.sequence import Sequence
from localllm.kernels.kv_page import PAGE_TOKENS

if TYPE_CHECKING:
    from localllm.engine.drawing import Outcome, Scheduled
    from localllm.engine.scheduler import Scheduler


def reader_for(waiting: Sequence, running: Iterable[Sequence], pass_tokens: int | None) -> Sequence | None:
    """Of the running ones, the one that is reading what this prompt begins with, at least a page of it, or all of it.

    pass_tokens: that several prompts may have together in a step. Where they fit into one, to wait for anything but
    the whole prompt would cost another pass over the weights. None: prompts are read one by one, and who waits for
    another loses nothing.
    """
    reads_all = waiting.pool is not None or waiting.reads_logits
    return None if reads_all else next((r for r in running if _reads_for(r, waiting, pass_tokens)), None)


def _reads_for(reader: Sequence, waiting: Sequence, pass_tokens: int | None) -> bool:
    if not is_reading(reader):
        return False
    if has_same_prompt(reader, waiting):
        return True
    assert reader.kv is not None
    if pass_tokens is not None and reader.num_prompt_tokens - reader.kv.length < pass_tokens:
        return False
    own, theirs = waiting.request.prompt_ids, reader.request.prompt_ids
    end = (reader.kv.length // PAGE_TOKENS + 1) * PAGE_TOKENS  # of the next page that will be full
    if not end < len(own) or not end <= len(theirs):
        return False
    return own[:PAGE_TOKENS] == theirs[:PAGE_TOKENS] and own[:end] == theirs[:end]


def is_reading(sequence: Sequence) -> bool:
    """Whether others may wait for what it is about to compute of its prompt."""
    return sequence.pool is None and sequence.kv is not None and sequence.kv.length < sequence.num_prompt_tokens


def has_same_prompt(one: Sequence, other: Sequence) -> bool:
    ids, others = one.request.prompt_ids, other.request.prompt_ids
    return len(ids) == len(others) and ids == others and one.pool is other.pool is None and not one.reads_logits


def with_followers(
    scheduler: Scheduler, scheduled: Scheduled, outcomes: SequenceOf[Outcome]
) -> Iterator[tuple[Sequence, Chunk, Outcome]]:
    """What was computed, with those behind each that have waited for all of its prompt: what came of that is theirs as
    well. They branch off before anything is drawn, which may end it."""
    for (sequence, chunk), outcome in zip(scheduled, outcomes, strict=True):
        is_read = chunk.kv is sequence.kv and chunk.kv.length == sequence.num_prompt_tokens == len(sequence.token_ids)
        is_of_use = is_read and outcome.logits is not None and outcome.are_finite[0]
        followers = scheduler.follow(sequence) if is_of_use else []
        yield sequence, chunk, outcome
        for follower in followers:
            assert follower.kv is not None
            yield follower, replace(chunk, token_ids=follower.token_ids, kv=follower.kv), outcome

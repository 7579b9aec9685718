"""What a step computed of a sequence becomes part of it: how far its prompt is, or its next tokens, as many as were
guessed right and one more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from localllm.engine.drawing import Outcome
from localllm.engine.events import PrefillEvent, TokenEvent, TokenLogprob
from localllm.engine.kv_allocator import KVSupply
from localllm.engine.runner import Chunk, ModelRunner
from localllm.engine.sampler import token_logprob
from localllm.engine.sequence import Sequence


def taken(
    sequence: Sequence,
    chunk: Chunk,
    outcome: Outcome,
    kv_supply: KVSupply,
    runner: ModelRunner,
    text_of: Callable[[int], str],
    eos_ids: frozenset[int],
) -> Iterator[PrefillEvent | TokenEvent]:
    """Its keys and values are those of its tokens afterwards, and known to later prompts. Raises NonFiniteError where
    a token would have to be drawn from what is no number, and what a mask raises."""
    kv = chunk.kv  # has advanced over all of the chunk
    begin, length = kv.length - chunk.num_tokens, kv.length - chunk.num_drafted
    if not outcome.are_finite[0]:
        raise runner.locate_non_finite(_until(chunk, begin, length))
    if sequence.search is not None and sequence.search.has_begun:
        yield from sequence.search.take(outcome)
        return
    if not chunk.num_drafted:
        kv_supply.seal(sequence)
    is_first = sequence.num_completion_tokens == 0
    if is_first:
        logprobs = _prompt_logprobs(sequence, begin, outcome.all_logits, text_of) if sequence.reads_logits else ()
        yield PrefillEvent(sequence.request_id, length, sequence.num_prompt_tokens, logprobs)
    if sequence.pool is not None:
        assert outcome.states is not None
        sequence.pool.take(outcome.states, begin)
        sequence.finish_reason = "stop" if length == len(sequence.token_ids) else None
        return
    if length < len(sequence.token_ids):
        return
    if length >= sequence.max_length:
        sequence.end_reading()
        return
    if sequence.search is not None:
        yield from sequence.search.take(outcome)
        return
    own, num_accepted = chunk, 0
    for kept in range(
        length, length + max(chunk.num_drafted, 0 if chunk.branch is None else chunk.branch.num_drafted) + 1
    ):
        row = kept - length
        if not outcome.are_finite[row]:
            raise runner.locate_non_finite(_until(chunk, begin, kept))
        token_id, logprob = outcome.token(row, sequence, text_of)
        event = sequence.append(token_id, logprob, eos_ids)
        if event is not None:
            yield event
        if not row and outcome.branch is not None and not _is_guessed(chunk, row, token_id):
            assert chunk.branch is not None
            chunk, outcome = chunk.branch, outcome.branch  # whose first row is the same one
        is_right = _is_guessed(chunk, row, token_id)
        num_accepted += is_right
        if not is_right or sequence.finish_reason is not None:
            break
    if not is_first:
        num_drafted = own.num_drafted + (0 if own.branch is None else own.branch.num_drafted)
        sequence.tally.take(num_drafted, num_accepted, kept + 1 - length)
    if own.num_drafted:
        chunk.kv.trim(kept)
        if chunk is not own:
            kv.adopt(chunk.kv)
        kv_supply.seal(sequence)


def _prompt_logprobs(
    sequence: Sequence, begin: int, logits: Tensor | None, text_of: Callable[[int], str]
) -> tuple[TokenLogprob | None, ...]:
    """Of the prompt's tokens behind each from `begin` on, by fp32 logits [T, V], which those in front of its last one
    have; of its first one, none."""
    most = sequence.request.prompt_logprobs or 0
    ids = sequence.token_ids[begin + 1 :]
    rows = () if logits is None else zip(logits, ids, strict=False)
    told = (token_logprob(row, token_id, most, text_of) for row, token_id in rows)
    return (*([None] if begin == 0 else []), *told)


def _is_guessed(chunk: Chunk, row: int, token_id: int) -> bool:
    return row < chunk.num_drafted and chunk.token_ids[row - chunk.num_drafted] == token_id


def _until(chunk: Chunk, begin: int, end: int) -> Chunk:
    """What of it is computed without the guesses behind `end`; its cache has no more."""
    chunk.kv.trim(end)
    return replace(chunk, token_ids=chunk.token_ids[:end], num_tokens=end - begin, num_drafted=0)

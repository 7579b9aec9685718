"""What is told of a forward: while it runs, how far the prompts are; after it, where its time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from localllm.engine.events import Event, PrefillEvent, StepSplit
from localllm.engine.runner import Chunk
from localllm.engine.sequence import Sequence as Running
from localllm.models.load import Progress
from localllm.offload.streaming.disk_stream import StreamClock

_TELL_S = 0.2  # between two pieces of news of one forward


def tell_clocks(
    scheduled: Sequence[tuple[Running, Chunk]], seconds: float, before: StreamClock, after: StreamClock
) -> None:
    """Each request's clock hears of a forward that took so long. before, after: of what streams the blocks."""
    wait_s = after.wait_s - before.wait_s
    split = StepSplit(
        compute_s=seconds - wait_s,
        wait_s=wait_s,
        copy_s=after.reading_s - before.reading_s + after.sending_s - before.sending_s,
        copied_bytes=after.bytes_read - before.bytes_read + after.bytes_sent - before.bytes_sent,
    )
    for sequence in dict.fromkeys(sequence for sequence, _ in scheduled):
        sequence.clock.split += split
        sequence.clock.ran_alone &= len(scheduled) == 1


def untold(_event: Event) -> None:
    """Nobody listens."""


def telling(scheduled: Sequence[tuple[Running, Chunk]], tell: Callable[[Event], None]) -> Progress:
    """Tells how far a forward is through its prompts, by its share of the blocks; what came of it tells its end."""
    prompts = [
        (sequence, chunk)
        for sequence, chunk in scheduled
        if not sequence.num_completion_tokens and chunk.kv is sequence.kv  # a beam has one of its own
    ]
    told_at = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal told_at
        now = time.perf_counter()
        if done == total or now - told_at < _TELL_S:
            return
        told_at = now
        for sequence, chunk in prompts:
            so_far = chunk.kv.length + chunk.num_tokens * done // total
            tell(PrefillEvent(sequence.request_id, so_far, sequence.num_prompt_tokens))

    return progress

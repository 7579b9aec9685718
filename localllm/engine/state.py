"""What is told of an engine to who uses it from elsewhere: how its model rests, and what it is doing."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.engine.engine_info import EngineFacts, EngineStatus, SlotFacts
from localllm.engine.scheduler import Scheduler
from localllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from localllm.engine.engine import Engine


def facts_of(engine: Engine) -> EngineFacts:
    """Of this moment: blocks may have moved, and the context have grown."""
    facts = EngineFacts(
        engine.ctx,
        engine.weights,
        engine.kv_format.name,
        engine.load_s,
        host_bytes=engine.residency.host_bytes,
        contents=engine.contents,
    )
    plan = engine.current_plan
    if plan is None:
        return facts
    return replace(
        facts,
        weight_bytes=plan.shape.num_bytes,
        ledger={str(tier): dict(owners) for tier, owners in plan.ledger.items()},
        limits={str(tier): count for tier, count in plan.limits.items()},
        bound_by=plan.bound_by,
        streamed_bytes=plan.streamed_bytes,
    )


def status_of(scheduler: Scheduler) -> EngineStatus:
    idle_s = time.monotonic() - scheduler.used_at
    return EngineStatus(tuple(map(_slot, list(scheduler.running))), scheduler.num_waiting, idle_s)


def _slot(sequence: Sequence) -> SlotFacts:
    kv = sequence.kv
    num_read = 0 if kv is None else min(kv.length, sequence.num_prompt_tokens)
    return SlotFacts(sequence.request_id, sequence.num_prompt_tokens, num_read, sequence.num_completion_tokens)

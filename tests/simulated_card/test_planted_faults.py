"""Faults that a card would show once in a thousand runs, planted: on the simulated one every run shows them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from localllm.errors import NonFiniteError
from localllm.layers import gpu_tables
from localllm.models.gpu_program import Drawn, GpuProgram
from localllm.models.offloaded_model import OffloadedModel
from localllm.offload.streaming.device_stream import Lane
from tests.engine_support import generated
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.streams import Schedule
from tests.simulated_card.support import blocks
from tests.test_device_placement import Packed

PROMPT = tuple(range(3, 21))
OnCard = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True)
class Found:
    """What a run came to: its text, the lines that the engine said, the error that ended it, the driver's rules that it
    broke."""

    token_ids: list[int]
    said: list[str]
    error: Exception | None
    broken_rules: list[str]


def found(packed: Packed, simulated_card: OnCard, schedule: Schedule, placement: str) -> Found:
    said: list[str] = []
    token_ids: list[int] = []
    failure: Exception | None = None
    with simulated_card(CardConfig(schedule)) as card:
        try:
            with packed.opened(DEVICE) as placed:
                placed.place(blocks(packed, placement), 8)
                placed.wait_until_pinned()
                engine = packed.engine(placed)
                engine.runner._note = said.append
                token_ids = generated(engine, PROMPT, 6, temperature=0.9, seed=5)
        except Exception as error:
            failure = error
        rules, card.broken_rules = card.broken_rules, []
    return Found(token_ids, said, failure, rules)


def nobody_waits_for_an_arrival(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "wait", lambda _lane, _arrived: None)


def a_place_in_the_ring_is_written_early(patch: pytest.MonkeyPatch) -> None:
    copy = Lane.copy
    patch.setattr(Lane, "copy", lambda lane, content, into, _after: copy(lane, content, into, None))


def tables_have_one_stage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpu_tables, "_STAGES", 1)
    patch.setattr(gpu_tables.HostStage, "wait", lambda _stage: None)


def drawn_ids_are_read_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drawn, "tokens", lambda drawn: drawn.on_host.tolist())


# Blocks on the disk are copied by threads that wait for copies themselves: not every run shows the first one there.
FAULTS = [
    (nobody_waits_for_an_arrival, "copies-late", "streamed"),
    (a_place_in_the_ring_is_written_early, "copies-early", "streamed"),
    (tables_have_one_stage, "lazy", "resident"),
    (drawn_ids_are_read_early, "lazy", "resident"),
]


@pytest.mark.parametrize(("plant", "schedule", "placement"), FAULTS)
def test_a_wait_that_is_missing_changes_the_text(plant, schedule, placement, packed_models, simulated_card):
    packed = packed_models["int8"]
    right = found(packed, simulated_card, schedule, placement)
    assert len(right.token_ids) == 6 and not right.said and right.error is None and not right.broken_rules
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        wrong = found(packed, simulated_card, schedule, placement)
    if wrong.error is None:
        assert len(wrong.token_ids) == 6 and wrong.token_ids != right.token_ids
    else:  # memory that is read too early may hold a NaN
        assert isinstance(wrong.error, NonFiniteError)


def a_capture_also(act: Callable[[Any], object]) -> Callable[[pytest.MonkeyPatch], None]:
    """act: is called with the room behind what is launched."""
    launch = GpuProgram._launch

    def launched(program: GpuProgram, run: Any, room: Any, *arguments: Any) -> None:
        launch(program, run, room, *arguments)
        act(room)

    return lambda patch: patch.setattr(GpuProgram, "_launch", launched)


a_synchronization = a_capture_also(lambda _room: torch.cuda.synchronize())
a_number_is_read = a_capture_also(lambda room: room.drawn[0].item())


pageable_memory_is_sent = a_capture_also(
    lambda room: room.drawn.copy_(torch.zeros(len(room.drawn), dtype=torch.int64), non_blocking=True)
)


def a_kernel_reads_pageable_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GpuProgram, "_embeds", True)
    patch.setattr(OffloadedModel, "_is_read_by_device", lambda _model, _block: False)


def blocks_are_let_go_while_they_are_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "drain", lambda _lane: None)


RULES = [
    (a_synchronization, "resident", "a synchronization in a capture"),
    (a_number_is_read, "resident", "item() in a capture"),
    (pageable_memory_is_sent, "resident", "a copy of pageable memory in a capture"),
    (a_kernel_reads_pageable_memory, "resident", "embed is given pageable memory"),
    (blocks_are_let_go_while_they_are_copied, "streamed", "memory is unregistered that work on its way reads"),
]


@pytest.mark.parametrize(("plant", "placement", "rule"), RULES)
def test_what_a_driver_does_not_take_is_told(plant, placement, rule, packed_models, simulated_card):
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert rule in found(packed_models["int8"], simulated_card, "lazy", placement).broken_rules

"""What memory of the card and of the host does to an engine on a card: nothing that it cannot go on with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localllm.cache.paged_kv import PagedKV
from localllm.engine.engine import Engine
from localllm.engine.sampler import PlainDraw
from localllm.engine.step_types import Chunk
from localllm.errors import CardFaultError
from localllm.kernels.gpu import ready
from localllm.offload.placement import GRAPH_ROOMS
from tests.engine_support import generated
from tests.simulated_card.device import DEVICE, CardConfig, Faults
from tests.simulated_card.streams import SCHEDULES
from tests.simulated_card.support import blocks
from tests.test_pages import new_pages

PROMPT = tuple(range(3, 23))  # more rows than a step has
LATE = [schedule for schedule in SCHEDULES if schedule != "eager"]


@pytest.fixture(scope="module")
def packed(packed_models):
    return packed_models["int8"]


@pytest.fixture(scope="module")
def expected(packed):
    """By the CPU alone."""
    with packed.opened() as placed:
        placed.place(blocks(packed, "resident"), 8)
        return generated(packed.engine(placed), PROMPT, 6)


@pytest.mark.parametrize("placement", ["streamed", "mixed", "disk"])
@pytest.mark.parametrize("lockable", [0, 1 << 12, 9 << 20])
def test_where_no_pages_are_locked_nothing_is_given_up(lockable, placement, packed, expected, simulated_card):
    """None from the start, or none for tables any more: the card is as empty as before."""
    with simulated_card(CardConfig(lockable_bytes=lockable)), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, placement), 8)
        placed.wait_until_pinned()
        engine = packed.engine(placed)
        program, rows = engine.runner.gpu_program, engine.runner.batch_rows
        assert generated(engine, PROMPT, 6) == expected
        assert engine.runner.gpu_program is program and engine.runner.batch_rows == rows
        assert engine.residency.kv_devices == placed.decode_model.kv_devices


def test_what_was_begun_ahead_and_dropped_has_read_the_hosts_memory_before_that_is_given_back(packed, simulated_card):
    """A step reads the embedding where it rests, in locked memory of the host."""
    with simulated_card() as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        assert placed.wait_until_pinned() == 1
        engine = packed.engine(placed)
        assert generated(engine, PROMPT, 2)
        kv = engine.residency.new_kv(64)
        kv.prepare(4)
        engine.runner.forward([Chunk(PROMPT[:4], kv, 4)])
        engine.runner.draw([Chunk(PROMPT[:5], kv, 1)], [PlainDraw(1, 0.0, 0.0)], goes_on=True)
        assert engine.runner._ahead is not None
        kv.close()
        embedding, *others = blocks(packed, "resident")
        placed.place([replace(embedding, tier="disk"), *others], 8)
        assert not placed.wait_until_pinned() and not card.broken_rules


def test_graphs_go_first_where_the_card_is_full_and_their_memory_comes_back(packed, expected, simulated_card):
    """Before fewer tokens are computed at once, or anything is moved."""
    graph_bytes = 4 << 20
    with simulated_card(CardConfig(graph_bytes=graph_bytes)) as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        placed.wait_until_pinned()
        engine = packed.engine(placed)
        assert generated(engine, PROMPT, 6) == expected
        graphs, rows = engine.runner.graphs, engine.runner.batch_rows
        assert card.memory.taken_bytes["graphs"] == graphs.num_rooms * graph_bytes > 0
        card.set_faults(Faults(allocation=0))
        assert generated(engine, PROMPT[:-1], 1)
        assert engine.runner.batch_rows == rows and list(placed.blocks) == blocks(packed, "resident")
        assert card.memory.taken_bytes["graphs"] == graphs.num_rooms * graph_bytes
        assert generated(engine, PROMPT, 6) == expected and graphs.num_rooms == 2  # of the prompt, and of steps


def test_no_more_graphs_are_kept_than_a_plan_counts(packed, simulated_card):
    with simulated_card(CardConfig(graph_bytes=1 << 20)) as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        placed.wait_until_pinned()
        engine = packed.engine(placed)
        expected = {}
        for _ in range(2):
            for context in (1, 300, 1100):
                for num_rows in (1, 2, 4, 8, 16):
                    found = drawn(engine, num_rows, context)
                    assert expected.setdefault((num_rows, context), found) == found
                    assert card.memory.taken_bytes["graphs"] <= GRAPH_ROOMS << 20
        assert engine.runner.graphs.num_rooms == GRAPH_ROOMS


def drawn(engine: Engine, num_rows: int, context: int) -> list[int]:
    """A token behind each of so many sequences of one token, at the end of an empty context."""
    kvs = [engine.residency.new_kv(context + 1) for _ in range(num_rows)]
    for kv in kvs:
        kv.prepare(context)
        for page in kv.owned(0):
            for part in page.parts.values():
                part.zero_()
        kv.advance(context)
    chunks = [Chunk([row] * (context + 1), kv, 1) for row, kv in enumerate(kvs)]
    tokens = engine.runner.draw(chunks, [PlainDraw(1, 0.0, 0.0)] * num_rows, goes_on=False)
    for kv in kvs:
        kv.close()
    assert tokens is not None
    return [token for row in tokens for token in row]


def test_a_fault_of_the_card_ends_the_engine_and_the_next_one_computes_by_operators(packed, expected, simulated_card):
    with simulated_card() as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "streamed"), 8)
        placed.wait_until_pinned()
        engine = packed.engine(placed)
        assert engine.runner.gpu_program is not None and generated(engine, PROMPT, 6) == expected
        card.set_faults(Faults(illegal_access=40))
        with pytest.raises(CardFaultError, match="the GPU ended in a fault"):
            for _ in range(4):
                generated(engine, PROMPT, 6)
        engine.close()
        card.is_lost = False  # as it is for another process
        ready.why_not.cache_clear()
        assert "illegal memory access" in ready.why_not(DEVICE)
        placed.place(blocks(packed, "streamed"), 8)
        again = packed.engine(placed)
        assert again.runner.gpu_program is None and generated(again, PROMPT, 6)


@pytest.mark.parametrize("schedule", LATE)
@pytest.mark.parametrize("lockable", [None, 0])
def test_pages_come_back_on_a_card_whose_copies_run_late(lockable, schedule, simulated_card):
    """The next page is written to locked memory while the ones before are on their way from there."""
    with simulated_card(CardConfig(schedule, lockable_bytes=lockable)):
        sequence = PagedKV(new_pages("int8", (None,) * 4, device=DEVICE), 700)
        sequence.prepare(640)
        held = [page for page in sequence.tables[0] if page is not None]
        contents = [torch.randint(0, 256, (page.pool.page_bytes,), dtype=torch.uint8) for page in held]
        for page, content in zip(held, contents, strict=True):
            payload = content.clone()
            page.read_from(payload)
            payload.zero_()  # it is free for others from here on
        for page, content in zip(held, contents, strict=True):
            payload = torch.zeros_like(content)
            assert page.write_to(payload) == len(content) and torch.equal(payload, content)
        sequence.close()

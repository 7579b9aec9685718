"""Keys and values that a card has no room for rest in the host's memory: the same tokens, however late copies come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from localllm.chat import plan_text
from localllm.engine.engine import Engine
from localllm.engine.events import TokenEvent
from localllm.engine.loader import LoadedModel
from localllm.engine.request import Request, SamplingParams
from localllm.engine.runner import ModelRunner
from localllm.engine.step_types import Chunk
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer
from tests.checkpoints import write_checkpoint
from tests.engine_support import answered, generated, steps
from tests.kv_support import check_pages
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.streams import SCHEDULES
from tests.simulated_card.support import blocks
from tests.test_device_placement import CPU, Packed

LATE = [schedule for schedule in SCHEDULES if schedule != "eager"]
RESIDENT = 192  # three pages
CHOSEN = 2
LONG = tuple(3 + index * index % 90 for index in range(330))
WISH = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


@contextmanager
def offloading(
    packed: Packed, placement: str, device=DEVICE, resident: int | None = RESIDENT, chosen_pages: int | None = None
) -> Iterator[Engine]:
    with packed.opened(device) as placed:
        beside = packed.blocks(lambda index: "resident" if index else "computed")
        placed.place(beside if placement == "beside the host" else blocks(packed, placement), 8)
        loaded = LoadedModel(placed.decode_model, 640, placed=placed, resident_tokens=resident)
        engine = Engine(loaded, Tokenizer.load(packed.checkpoint), chosen_pages=chosen_pages)
        yield engine
        engine.residency.kv_pages.close()


def texts(engine: Engine) -> list[list[int]]:
    """A long text, one that goes on behind it, and two at once of which one is short."""
    first = generated(engine, LONG, 9)
    longer = (*LONG, *first, *LONG[:70])
    both = [heard.token_ids for heard in answered(engine, Request(longer, WISH), Request(LONG[:40], WISH))]
    return [first, *both]


@pytest.fixture(scope="module")
def expected(packed_models):
    with offloading(packed_models["int8"], "resident", CPU, None) as engine:
        return texts(engine)


@pytest.mark.parametrize("schedule", LATE)
def test_no_token_changes_however_late_copies_come(schedule, packed_models, expected, simulated_card):
    """Nor where the system page-locks no memory for them."""
    placement, lockable = ("mixed", 0) if schedule == "random" else ("resident", None)
    config = CardConfig(schedule, lockable_bytes=lockable)
    with simulated_card(config), offloading(packed_models["int8"], placement) as engine:
        program = engine.runner.gpu_program
        assert texts(engine) == expected
        assert engine.runner.gpu_program is program, "nothing was given up"
        pages = engine.residency.kv_pages
        check_pages(pages)
        assert pages.ring.clock.bytes_sent and not pages.host_bytes and not pages.ring.nbytes


def test_blocks_move_beside_pages_that_rest(packed_models, expected, simulated_card):
    """The host reads them where they are, in layers whose attention it computes by then."""
    packed, found = packed_models["int8"], list[int]()
    with simulated_card(CardConfig("random", seed=2)), offloading(packed, "resident") as engine:
        engine.submit(Request(LONG, replace(WISH, max_tokens=9)))
        for event in steps(engine):
            if isinstance(event, TokenEvent):
                found.append(event.token_id)
                if len(found) % 3 == 0:
                    engine.residency.move(blocks(packed, "mixed" if len(found) == 3 else "streamed"))
        assert found == expected[0] and not engine.residency.kv_pages.host_bytes


@pytest.mark.parametrize(
    ("config", "placement", "is_read_in_place"),
    [
        (CardConfig("lazy"), "resident", True),
        (CardConfig("random", seed=1), "streamed", True),
        (CardConfig("copies-late", lockable_bytes=0), "resident", False),
        (CardConfig("lazy", reads_host=False), "resident", False),
        (CardConfig("random", seed=2), "beside the host", False),
    ],
)
def test_only_chosen_pages_come_where_the_card_attends_and_reads_the_hosts_memory(
    config, placement, is_read_in_place, packed_models, simulated_card
):
    """Elsewhere all of them are copied. No token depends on it."""
    packed, request = packed_models["int8"], Request((*LONG, *LONG[:230]), replace(WISH, max_tokens=8))
    with offloading(packed, "resident", CPU, None, CHOSEN) as engine:
        (expected,) = answered(engine, request)
    with simulated_card(config), offloading(packed, placement, chosen_pages=CHOSEN) as engine:
        clock = engine.residency.kv_pages.ring.clock
        for _ in range(2):
            found, sent, before = [], [], clock.bytes_sent
            engine.submit(request)
            for event in steps(engine):
                if isinstance(event, TokenEvent):
                    found.append(event.token_id)
                    sent.append(clock.bytes_sent)
            assert found == expected.token_ids
            assert sent[1] > before
            # The first token behind the prompt makes the sketches of all pages, which pass through the ring for that.
            assert (sent[-1] == sent[3]) == is_read_in_place


def test_rows_that_choose_more_than_rests_elsewhere_have_it_copied(packed_models, simulated_card):
    packed, text = packed_models["int8"], (LONG * 2)[:600]
    with offloading(packed, "resident", CPU, None, CHOSEN) as engine:
        expected = logits(engine, text)[0]
    with simulated_card(CardConfig("lazy")), offloading(packed, "resident", chosen_pages=CHOSEN) as engine:
        found, sent = logits(engine, text)
    assert (found - expected).norm() < 0.03 * expected.norm()  # a code falls on a step's other side
    is_copied = [after > before for before, after in pairwise(sent)]
    assert is_copied == [True, False, False, True, False]  # the first one makes sketches


def logits(engine: Engine, text: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Of a few chunks behind a prompt, and what was sent by the end of each."""
    kv, found, sent = engine.residency.new_kv(len(text)), list[torch.Tensor](), list[int]()
    kv.attend_from = 578
    for size in (578, 1, 1, 2, 15, 1):  # all in one page
        found.append(engine.runner.forward([Chunk(text, kv, size)]).cpu())
        ring = engine.residency.kv_pages.ring
        sent.append(0 if ring is None else ring.clock.bytes_sent)
    kv.close()
    return torch.cat(found), sent


@pytest.mark.parametrize(
    ("ctx", "attend", "said"),
    [
        (256, "all", "in memory; behind 256 tokens a step copies"),
        (1024, "top:1", "in memory; behind 1,024 tokens a step reads what is chosen, about"),
    ],
)
def test_memory_is_what_the_plan_says(ctx, attend, said, tmp_path, simulated_card):
    write_checkpoint(tmp_path, "llama", layers=2, max_position_embeddings=1024)
    offload = f"keep:{RESIDENT}"
    config = EngineConfig(device="cuda", weights="int8", dtype="fp32", ctx=ctx, kv_offload=offload, attend=attend)
    with simulated_card(CardConfig()), closing(Engine.load(tmp_path, config)) as engine:
        pages, plan, seen = engine.residency.kv_pages, engine.plan, list[tuple[int, int]]()
        engine.submit(Request((LONG * 4)[: ctx - 6], WISH))
        for _ in steps(engine):
            seen.append((pages.nbytes, pages.host_bytes))
        on_card, on_host = map(max, zip(*seen, strict=True))
        forward = min(ctx, 512) * (plan.shape.kv_bytes_per_token + plan.shape.row_bytes)
        assert 0 < on_card <= plan.ledger["vram"]["kv"] + forward
        assert on_host == plan.ledger["ram"]["kv"] and not plan.ledger["disk"].get("kv")
        assert said in plan_text.long_texts(plan)
        assert [group.spill.resident_tokens for group in pages.groups] == [RESIDENT]


def test_texts_that_choose_are_the_same_beside_others_and_where_blocks_move(packed_models, simulated_card):
    """Some of them have all of their pages in the card's memory."""
    packed, requests = packed_models["int8"], [Request(text, WISH) for text in (LONG, LONG[:40], LONG[10:])]
    with offloading(packed, "resident", CPU, None, CHOSEN) as engine:
        expected = [answered(engine, request)[0].token_ids for request in requests]
    with simulated_card(CardConfig("random", seed=3)), offloading(packed, "resident", chosen_pages=CHOSEN) as engine:
        found = {engine.submit(request): list[int]() for request in requests}
        for event in steps(engine):
            if isinstance(event, TokenEvent):
                found[event.request_id].append(event.token_id)
                placement = {7: "mixed", 11: "streamed"}.get(sum(map(len, found.values())))
                if placement is not None:
                    engine.residency.move(blocks(packed, placement))
        assert [*found.values()] == expected
        pages = engine.residency.kv_pages
        check_pages(pages)
        assert not pages.host_bytes and not pages.ring.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("chosen_pages", [None, 1])
def test_a_step_has_the_bits_that_it_has_with_all_pages_in_the_cards_memory(
    chosen_pages, packed_models, simulated_card
):
    """By the true kernels, which share a long text out over programs; they read what is chosen where it rests."""
    found = []
    with simulated_card(CardConfig("lazy"), "interpreted"):
        for resident in (None, RESIDENT):
            with offloading(packed_models["int8"], "resident", resident=resident, chosen_pages=chosen_pages) as engine:
                kv, operators = engine.residency.new_kv(len(LONG)), ModelRunner(engine.model)
                kv.attend_from, operators.gpu_program = 326, None
                operators.forward([Chunk(LONG, kv, 326)])
                rows = [engine.runner.forward([Chunk(LONG, kv, count)]) for count in (1, 2, 1)]
                found.append((kv.num_spilled, torch.cat(rows).tolist()))
                kv.close()
    assert [count for count, _ in found] == [0, 3] and found[0][1] == found[1][1]

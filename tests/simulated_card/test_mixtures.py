"""Mixtures of experts on a card whose streams run late: the text is the CPU's wherever the records lie."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from localllm import Engine
from localllm.engine.placement import model_shape
from localllm.engine.request import Request
from localllm.layers.moe import MoE
from localllm.models import host_experts
from localllm.models.gpu_capabilities import is_ours
from localllm.offload.placement import BlockPlacement, ExpertSlots, demoted
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.engine_support import answered, generated
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.support import FORMATS, PROMPT, packed_in_formats, text, texts_of_the_cpu
from tests.simulated_card.test_placements import wish
from tests.test_device_placement import Packed
from tests.thinning import one_in, thinned

SCHEDULES = ["lazy", "copies-early", "copies-late", "random"]
HELD: dict[str, tuple[str, ...]] = {
    **{kind: (kind,) for kind in ("resident", "streamed", "disk")},
    "some": ("resident", "streamed", "disk", "computed"),
}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """With a shared expert that has a gate, and a layer without experts."""
    folder, sizes = tmp_path_factory.mktemp("mixture"), {"moe_intermediate_size": 64, "head_dim": 32}
    sizes |= {"shared_expert_intermediate_size": 64, "intermediate_size": 128}
    write_checkpoint(folder, "qwen2_moe", layers=3, mlp_only_layers=[1], **sizes)
    return packed_in_formats(folder, folder)


@pytest.fixture(scope="module")
def expected(mixtures):
    return texts_of_the_cpu(mixtures, 6)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    write_checkpoint(folder, "gpt_oss", layers=2, intermediate_size=64)
    models = packed_in_formats(folder, folder)
    return models, texts_of_the_cpu(models, 6)


@pytest.mark.parametrize(
    ("schedule", "placement", "weights"), one_in(3, product(SCHEDULES, HELD, ["int4-g32", "int8"]))
)
def test_the_text_is_that_of_the_cpu(schedule, placement, weights, mixtures, expected, simulated_card):
    packed = mixtures[weights]
    with simulated_card(CardConfig(schedule)) as card, packed.opened(DEVICE) as placed:
        placed.place(packed.blocks(lambda index: HELD[placement][index % len(HELD[placement])]), 8)
        ours = [is_ours(block, DEVICE) for block in placed.prefill_model.blocks if isinstance(block.body, MoE)]
        assert ours == [True, True]
        assert text(packed, placed, 6) == expected[weights]
        assert card.counts["replays"]


def slotted(packed: Packed, slots: int) -> list[BlockPlacement]:
    """All in the card's memory but the experts, of which so many of each block have room there."""
    experts = {
        block.name: of for block, of in model_shape(packed.config, RECIPES[packed.weights], "fp32", "it").mixtures
    }
    return [
        replace(block, tier="ram", experts=ExpertSlots(of.count, of.num_bytes, slots))
        if (of := experts.get(block.name)) is not None
        else block
        for block in packed.blocks(lambda _index: "resident")
    ]


@pytest.mark.parametrize(
    ("schedule", "slots", "weights"), one_in(3, product(SCHEDULES, [2, 3, 6], ["int4-g32", "int8"]))
)
def test_experts_that_are_in_slots_and_those_that_are_not_write_the_text_of_the_cpu(
    schedule, slots, weights, mixtures, expected, simulated_card
):
    """Six experts of each of two blocks, of which two compute a token: as many have room at least, or all."""
    packed = mixtures[weights]
    with simulated_card(CardConfig(schedule)) as card, packed.opened(DEVICE) as placed:
        placed.place(slotted(packed, slots), 17)
        assert text(packed, placed, 6) == expected[weights]
        assert card.counts["replays"]
        held = placed._slots
        assert held is not None and held.num_slots == 2 * slots
        uses = placed.expert_uses
        assert uses.wanted == 2 * 2 * 5 and 0 < uses.hits < uses.wanted


@pytest.mark.parametrize(("schedule", "slots"), [("lazy", 3), ("random", 2), ("copies-late", 0)])
@pytest.mark.parametrize("weights", thinned(FORMATS, "int4-g32".__eq__))
def test_gpt_oss_writes_the_text_of_the_cpu(schedule, slots, weights, gpt_oss, simulated_card):
    """Sinks, biases of routers and experts, and clamped gates; no slots: where the experts of all blocks are there."""
    models, expected = gpt_oss
    packed = models[weights]
    with simulated_card(CardConfig(schedule)) as card, packed.opened(DEVICE) as placed:
        placed.place(slotted(packed, slots) if slots else packed.blocks(lambda _index: "resident"), 17)
        assert all(is_ours(block, DEVICE) for block in placed.prefill_model.blocks)
        assert text(packed, placed, 6) == expected[weights]
        assert card.counts["replays"]


def test_experts_that_no_native_step_knows_are_left_to_operators(mixtures, expected, simulated_card, monkeypatch):
    monkeypatch.setattr(host_experts, "is_available", lambda: False)
    with simulated_card(CardConfig("lazy")), mixtures["int8"].opened(DEVICE) as placed:
        placed.place(slotted(mixtures["int8"], 2), 17)
        assert text(mixtures["int8"], placed, 6) == expected["int8"]


def test_what_is_prepared_serves_the_first_answer(mixtures, expected, simulated_card):
    """Also a prompt's rows by the program of steps, which makes rooms of their own for them."""
    with simulated_card(CardConfig("random")) as card, mixtures["int8"].opened(DEVICE) as placed:
        placed.place(slotted(mixtures["int8"], 3), 17)
        engine = mixtures["int8"].engine(placed)
        engine.residency.warm_up(lambda _text: None)
        assert generated(engine, PROMPT, 6, temperature=0.9, seed=5) == expected["int8"]
        assert card.counts["replays"] and engine.runner.gpu_program is not None


def test_no_graph_copies_to_memory_that_is_not_page_locked(mixtures, expected, simulated_card):
    with simulated_card(CardConfig("copies-late", lockable_bytes=0)), mixtures["int8"].opened(DEVICE) as placed:
        placed.place(slotted(mixtures["int8"], 3), 17)
        assert text(mixtures["int8"], placed, 6) == expected["int8"]


@pytest.mark.parametrize("schedule", ["lazy", "random"])
def test_answers_that_share_steps_share_slots(schedule, mixtures, simulated_card):
    """Steps of three tokens want more experts than have room; what is alone writes the same."""
    packed = mixtures["int4-g32"]
    requests = [Request(tuple(range(3, 3 + length)), wish(5, length)) for length in (5, 18, 30)]
    with simulated_card(CardConfig(schedule)), packed.opened(DEVICE) as placed:
        placed.place(packed.blocks(lambda _index: "resident"), 17)
        alone = [answered(packed.engine(placed), request)[0].token_ids for request in requests]
        placed.place(slotted(packed, 2), 17)
        assert [heard.token_ids for heard in answered(packed.engine(placed), *requests)] == alone


def test_slots_are_given_up_before_blocks_pass_through_the_ring(mixtures):
    packed, found = mixtures["int8"], []
    placed = slotted(packed, 4)
    for _ in range(3):
        found.append([block.experts.slots if block.experts else 0 for block in placed if block.is_slotted])
        placed = demoted(placed, "vram", is_tied=False)
    assert found == [[4, 4], [2, 2], []]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4-g32", "int8"])
@pytest.mark.parametrize("has_slots", [False, True])
def test_the_true_kernels_write_it_too(has_slots, weights, mixtures, expected, simulated_card):
    packed = mixtures[weights]
    with simulated_card(CardConfig("lazy"), "interpreted") as card, packed.opened(DEVICE) as placed:
        placed.place(slotted(packed, 2) if has_slots else packed.blocks(lambda _index: "streamed"), 17)
        assert text(packed, placed, 3) == expected[weights][:3]
        assert card.counts["replays"]


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 2])
def test_the_true_kernels_write_what_gpt_oss_does(slots, gpt_oss, simulated_card):
    (packed, expected), num_tokens = (each["int4-g32"] for each in gpt_oss), 3
    with simulated_card(CardConfig("lazy"), "interpreted") as card, packed.opened(DEVICE) as placed:
        placed.place(slotted(packed, slots) if slots else packed.blocks(lambda _index: "resident"), 17)
        assert text(packed, placed, num_tokens) == expected[:num_tokens]
        assert card.counts["replays"]


def test_a_model_too_large_for_the_card_is_planned_with_slots_and_writes_the_same_text(tmp_path, simulated_card):
    """Within what torch may take of the card then; of experts large enough for the allocator's steps to be small."""
    sizes = {"moe_intermediate_size": 4096, "head_dim": 32, "num_experts": 24}
    write_checkpoint(tmp_path, "qwen3_moe", layers=4, **sizes)
    wanted = EngineConfig(weights="int8", dtype="fp32", ctx=128, speculate="off")
    host = Engine.load(tmp_path, replace(wanted, device="cpu"))
    right = generated(host, PROMPT, 8, temperature=0.9, seed=5)
    host.close()
    with simulated_card(CardConfig("lazy")):
        engine = Engine.load(tmp_path, replace(wanted, device="cuda", vram=164_000 << 10))
        assert [block.experts.slots for block in engine.residency.blocks if block.is_slotted] == [6] * 4
        assert generated(engine, PROMPT, 8, temperature=0.9, seed=5) == right
        facts = engine.facts()
        assert (facts.experts_in_memory, facts.num_experts, facts.experts_tier) == (24, 96, "vram")
        assert 0 < facts.expert_hits < facts.experts_wanted
        engine.close()

"""Layers that keep states on a card whose streams run late: the text is the CPU's wherever blocks and states are."""

from __future__ import annotations

from itertools import product

import pytest

from localllm.engine.request import Request
from localllm.layers.delta_net import DeltaNet
from localllm.layers.short_conv import ShortConv
from localllm.models.gpu_capabilities import is_ours
from tests.checkpoints import linear, write_checkpoint
from tests.engine_support import answered, generated
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.support import (
    PLACEMENTS,
    PROMPT,
    blocks,
    packed_in_formats,
    text,
    texts_of_the_cpu,
    written_while_moved,
)
from tests.simulated_card.test_placements import wish
from tests.thinning import every_other, one_in

HYBRID = linear(1, 2, 16, 32, head_dim=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)
SMALLEST = {
    "qwen3_5": HYBRID | {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 48,
    },
    "rwkv7": {"hidden_size": 32, "head_dim": 16, "intermediate_size": 64},
}
SCHEDULES = ["lazy", "copies-early", "copies-late", "random"]


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    write_checkpoint(folder, "qwen3_5", layers=4, **linear(2, 4, 16, 32, head_dim=32, intermediate_size=64))
    return packed_in_formats(folder, folder)


@pytest.fixture(scope="module")
def expected(hybrids):
    return texts_of_the_cpu(hybrids, 6)


@pytest.mark.parametrize(
    ("schedule", "placement", "weights"), one_in(3, product(SCHEDULES, PLACEMENTS, ["int4-g32", "int8"]))
)
def test_the_text_is_that_of_the_cpu(schedule, placement, weights, hybrids, expected, simulated_card):
    packed = hybrids[weights]
    with simulated_card(CardConfig(schedule)) as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, placement), 8)
        ours = [is_ours(block, DEVICE) for block in placed.prefill_model.blocks if isinstance(block.body, DeltaNet)]
        assert ours == [True] * 3
        assert text(packed, placed, 6) == expected[weights]
        assert card.counts["replays"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["lfm2", "lfm3"])
def test_the_text_of_short_convolutions_is_that_of_the_cpu(family, placement, tmp_path, simulated_card):
    """Of heads that have one gate each, too."""
    write_checkpoint(tmp_path, family, layers=4, head_dim=32, num_attention_heads=16, hidden_size=128)
    packed = packed_in_formats(tmp_path, tmp_path)
    expected = texts_of_the_cpu(packed, 6)
    for weights, each in packed.items():
        with simulated_card(CardConfig("random")) as card, each.opened(DEVICE) as placed:
            placed.place(blocks(each, placement), 8)
            ours = [is_ours(b, DEVICE) for b in placed.prefill_model.blocks if isinstance(b.body, ShortConv)]
            assert all(ours) and text(each, placed, 6) == expected[weights]
            assert card.counts["replays"]


@pytest.mark.parametrize("schedule", one_in(2, SCHEDULES))
def test_states_move_with_their_blocks_while_an_answer_is_written(schedule, hybrids, simulated_card):
    packed = hybrids["int8"]
    with packed.opened() as placed:
        placed.place(blocks(packed, "resident"), 8)
        expected = generated(packed.engine(placed), PROMPT, 12, temperature=0.9, seed=5)
    with simulated_card(CardConfig(schedule, seed=1)), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        assert written_while_moved(packed, placed, ["streamed", "mixed", "resident"], wish(12)) == expected


def test_answers_that_share_steps_are_those_that_they_are_alone(hybrids, simulated_card):
    packed = hybrids["int4-g32"]
    requests = [Request(tuple(range(3, 3 + length)), wish(length % 7 + 3, length)) for length in (5, 18, 70)]
    with simulated_card(CardConfig("lazy")), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        alone = [answered(packed.engine(placed), request)[0].token_ids for request in requests]
        assert [heard.token_ids for heard in answered(packed.engine(placed), *requests)] == alone


MAMBAS = {
    "falcon_h1": {"head_dim": 32, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "intermediate_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 32},
    "falcon_mamba": {},
}


@pytest.mark.parametrize(("family", "placement"), one_in(2, product(MAMBAS, PLACEMENTS)))
def test_the_text_of_models_with_mamba_is_that_of_the_cpu(family, placement, tmp_path, simulated_card):
    """Mamba 2 beside attention in one block, and without any; Mamba."""
    write_checkpoint(tmp_path, family, layers=4, seed=3, **MAMBAS[family])  # of seed 0 two tokens are as likely
    packed = packed_in_formats(tmp_path, tmp_path)["int4-g32"]
    expected = texts_of_the_cpu({"int4-g32": packed}, 6)["int4-g32"]
    with simulated_card(CardConfig("lazy")) as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, placement), 8)
        assert text(packed, placed, 6) == expected
        assert bool(card.counts["replays"]) == (family != "falcon_mamba")  # of which operators compute every layer


@pytest.mark.parametrize("placement", every_other(PLACEMENTS))
def test_the_text_of_kimi_delta_attention_is_that_of_the_cpu(placement, tmp_path, simulated_card):
    write_checkpoint(tmp_path, "kimi_linear", layers=4, moe_intermediate_size=48)
    packed = packed_in_formats(tmp_path, tmp_path)["int4-g32"]
    expected = texts_of_the_cpu({"int4-g32": packed}, 6)["int4-g32"]
    with simulated_card(CardConfig("lazy")) as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, placement), 8)
        ours = [is_ours(block, DEVICE) for block in placed.prefill_model.blocks if isinstance(block.body, DeltaNet)]
        assert ours == [True] * 3 and text(packed, placed, 6) == expected
        assert card.counts["replays"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_text_of_rwkv7_is_that_of_the_cpu(placement, tmp_path, simulated_card):
    """Also where the first values are made on one device and read on the other one."""
    write_checkpoint(tmp_path, "rwkv7", layers=3, seed=1)
    packed = packed_in_formats(tmp_path, tmp_path)
    expected = texts_of_the_cpu(packed, 6)
    for weights, each in packed.items():
        with simulated_card(CardConfig("random")) as card, each.opened(DEVICE) as placed:
            placed.place(blocks(each, placement), 8)
            assert any(is_ours(block, DEVICE) for block in placed.prefill_model.blocks)
            assert text(each, placed, 6) == expected[weights]
            assert card.counts["replays"]


def test_first_values_are_found_while_blocks_move(tmp_path, simulated_card):
    write_checkpoint(tmp_path, "rwkv7", layers=3, seed=1)
    packed = packed_in_formats(tmp_path, tmp_path)["int8"]
    with packed.opened() as placed:
        placed.place(blocks(packed, "resident"), 8)
        expected = generated(packed.engine(placed), PROMPT, 12, temperature=0.9, seed=5)
    with simulated_card(CardConfig("random", seed=1)), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        assert written_while_moved(packed, placed, ["streamed", "mixed", "resident"], wish(12)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["resident", "mixed"])
@pytest.mark.parametrize("family", SMALLEST)
def test_the_kernels_themselves_write_the_text_of_the_cpu(family, placement, tmp_path, simulated_card):
    write_checkpoint(tmp_path, family, layers=2, **SMALLEST[family])
    packed = packed_in_formats(tmp_path, tmp_path)["int8"]
    expected = texts_of_the_cpu({"int8": packed}, 3)
    with simulated_card(CardConfig("lazy"), "interpreted") as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, placement), 8)
        placed.wait_until_pinned()
        assert text(packed, placed, 3) == expected["int8"]
        assert card.counts["replays"]

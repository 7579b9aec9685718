"""Layers of latent attention on a card whose streams run late: the text is the CPU's wherever blocks are."""

from __future__ import annotations

from itertools import product

import pytest

from localllm.engine.request import Request
from localllm.layers.latent_attention import LatentAttention
from localllm.models.gpu_capabilities import is_ours
from tests.checkpoints import write_checkpoint
from tests.engine_support import answered
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.support import PLACEMENTS, blocks, packed_in_formats, text, texts_of_the_cpu
from tests.simulated_card.test_placements import wish
from tests.thinning import one_in

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 64,
    "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
SCHEDULES = ["lazy", "copies-early", "copies-late", "random"]


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latents")
    write_checkpoint(folder, "minicpm3", layers=4, **SIZES)
    return packed_in_formats(folder, folder)


@pytest.fixture(scope="module")
def expected(latents):
    return texts_of_the_cpu(latents, 6)


@pytest.mark.parametrize(
    ("schedule", "placement", "weights"), one_in(3, product(SCHEDULES, PLACEMENTS, ["int4-g32", "int8"]))
)
def test_the_text_is_that_of_the_cpu(schedule, placement, weights, latents, expected, simulated_card):
    packed = latents[weights]
    with simulated_card(CardConfig(schedule)) as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, placement), 8)
        bodies = [block for block in placed.prefill_model.blocks if isinstance(block.body, LatentAttention)]
        assert [is_ours(block, DEVICE) for block in bodies] == [True] * 4
        assert text(packed, placed, 6) == expected[weights]
        assert card.counts["replays"]


def test_answers_that_share_steps_are_those_that_they_are_alone(latents, simulated_card):
    packed = latents["int4-g32"]
    requests = [Request(tuple(range(3, 3 + length)), wish(length % 7 + 3, length)) for length in (5, 18, 70)]
    with simulated_card(CardConfig("lazy")), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        alone = [answered(packed.engine(placed), request)[0].token_ids for request in requests]
        assert [heard.token_ids for heard in answered(packed.engine(placed), *requests)] == alone


@pytest.mark.slow
def test_the_kernels_themselves_write_the_text_of_the_cpu(tmp_path, simulated_card):
    write_checkpoint(tmp_path, "minicpm3", layers=2, **SIZES)
    packed = packed_in_formats(tmp_path, tmp_path)["int8"]
    expected = texts_of_the_cpu({"int8": packed}, 3)
    with simulated_card(CardConfig("lazy"), "interpreted") as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "mixed"), 8)
        placed.wait_until_pinned()
        assert text(packed, placed, 3) == expected["int8"]
        assert card.counts["replays"]

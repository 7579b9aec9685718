"""Mixtures of experts on a card whose streams run late: the text is the CPU's wherever the records lie."""

from __future__ import annotations

from itertools import product

import pytest

from localllm.layers.moe import MoE
from localllm.models.gpu_program import is_ours
from tests.checkpoints import write_checkpoint
from tests.packed_support import pack
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.support import text, texts_of_the_cpu
from tests.test_device_placement import Packed
from tests.thinning import one_in

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
    return {
        weights: Packed(folder, pack(folder, folder / weights, weights), weights) for weights in ("int4-g32", "int8")
    }


@pytest.fixture(scope="module")
def expected(mixtures):
    return texts_of_the_cpu(mixtures, 6)


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


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4-g32", "int8"])
def test_the_true_kernels_write_it_too(weights, mixtures, expected, simulated_card):
    packed = mixtures[weights]
    with simulated_card(CardConfig("lazy"), "interpreted") as card, packed.opened(DEVICE) as placed:
        placed.place(packed.blocks(lambda _index: "streamed"), 8)
        assert text(packed, placed, 3) == expected[weights][:3]
        assert card.counts["replays"]

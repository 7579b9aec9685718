"""Gemma 4 on a card: torch's operators compute what no kernel knows, wherever its parts rest."""

from __future__ import annotations

import pytest

from tests.checkpoints import write_checkpoint
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.support import blocks, packed_in_formats, text

SIZES = {"hidden_size": 128, "head_dim": 32, "global_head_dim": 64, "intermediate_size": 64}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma4")
    write_checkpoint(folder, "gemma4-shared-keys", **SIZES, hidden_size_per_layer_input=64)
    return packed_in_formats(folder, folder)["int8"]


@pytest.mark.parametrize("schedule", ["random"])
def test_blocks_that_pass_compute_what_those_do_that_stay(schedule, packed, simulated_card):
    texts = []
    for placement in ("resident", "streamed", "disk"):
        with simulated_card(CardConfig(schedule)), packed.opened(DEVICE) as placed:
            placed.place(blocks(packed, placement), 8)
            texts.append(text(packed, placed, 6))
    assert texts[0] == texts[1] == texts[2]

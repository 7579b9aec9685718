"""On a card whose streams run late a model writes the text that it writes anywhere: wherever its blocks rest."""

from __future__ import annotations

import pytest

from tests.engine_support import generated
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.streams import SCHEDULES
from tests.simulated_card.support import PLACEMENTS, blocks

PROMPT = tuple(range(3, 21))  # more rows than a step has


def text(packed, placed):
    engine = packed.engine(placed)
    program = engine.runner.gpu_program
    token_ids = generated(engine, PROMPT, 6, temperature=0.9, seed=5)
    assert engine.runner.gpu_program is program, "nothing was given up"
    return token_ids


@pytest.fixture(scope="module")
def expected(packed_models):
    """By the CPU alone."""
    texts = {}
    for weights, packed in packed_models.items():
        with packed.opened() as placed:
            placed.place(blocks(packed, "resident"), 8)
            texts[weights] = text(packed, placed)
    return texts


@pytest.mark.parametrize("weights", ["int4-g32", "int8"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule != "eager"])
def test_the_text_is_that_of_the_cpu(schedule, placement, weights, packed_models, expected, simulated_card):
    packed = packed_models[weights]
    with simulated_card(CardConfig(schedule)) as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, placement), 8)
        assert placed.wait_until_pinned() or placement == "resident"
        assert text(packed, placed) == expected[weights]
        assert card.counts["replays"]

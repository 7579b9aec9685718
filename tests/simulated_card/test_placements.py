"""On a card whose streams run late a model writes the text that it writes anywhere: wherever its blocks rest."""

from __future__ import annotations

import itertools

import pytest

from localllm.engine.request import Request, SamplingParams
from localllm.engine.step_types import Chunk
from tests.engine_support import answered, generated
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.streams import SCHEDULES
from tests.simulated_card.support import PLACEMENTS, PROMPT, blocks, text, texts_of_the_cpu, written_while_moved
from tests.thinning import one_in, thinned

LATE = [schedule for schedule in SCHEDULES if schedule != "eager"]


def in_turn(schedules, placements, weights):
    """Every case; slow but for one format of each schedule and placement, the formats in turn."""
    numbered = itertools.product(enumerate(schedules), enumerate(placements), enumerate(weights))
    cases = [(a, b, c, (i + j) % len(weights) == k) for (i, a), (j, b), (k, c) in numbered]
    return [pytest.param(a, b, c, marks=[] if runs else pytest.mark.slow) for a, b, c, runs in cases]


def wish(max_tokens, seed=5):
    return SamplingParams(max_tokens=max_tokens, temperature=0.9, seed=seed, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(packed_models):
    return texts_of_the_cpu(packed_models, 6)


@pytest.mark.parametrize(("schedule", "placement", "weights"), in_turn(LATE, PLACEMENTS, ["int4-g32", "int8"]))
def test_the_text_is_that_of_the_cpu(schedule, placement, weights, packed_models, expected, simulated_card):
    packed = packed_models[weights]
    with simulated_card(CardConfig(schedule)) as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, placement), 8)
        assert placed.wait_until_pinned() or placement == "resident"
        assert text(packed, placed, 6) == expected[weights]
        assert card.counts["replays"]


@pytest.mark.parametrize("schedule", one_in(2, LATE))
def test_blocks_are_moved_while_an_answer_is_written(schedule, packed_models, simulated_card):
    """Every few tokens, while the step behind the last one is on its way already."""
    packed = packed_models["int8"]
    with packed.opened() as placed:
        placed.place(blocks(packed, "resident"), 8)
        expected = generated(packed.engine(placed), PROMPT, 16, temperature=0.9, seed=5)
    with simulated_card(CardConfig(schedule, seed=1)), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        assert written_while_moved(packed, placed, ["streamed", "mixed", "disk", "resident"], wish(16)) == expected


@pytest.mark.parametrize("schedule", thinned(LATE, "random".__eq__))
def test_answers_that_share_steps_are_those_that_they_are_alone(schedule, packed_models, simulated_card):
    """Of prompts of other lengths, one within a step's rows, that end after one another."""
    packed = packed_models["int4-g32"]
    requests = [Request(tuple(range(3, 3 + length)), wish(length % 7 + 3, length)) for length in (5, 18, 70)]
    with simulated_card(CardConfig(schedule)), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "streamed"), 8)
        alone = [answered(packed.engine(placed), request)[0].token_ids for request in requests]
        together = [heard.token_ids for heard in answered(packed.engine(placed), *requests)]
        assert together == alone and [len(ids) for ids in alone] == [8, 7, 3]


@pytest.mark.parametrize("schedule", LATE)
def test_a_prompts_chunks_are_computed_from_tables_of_their_own_though_nobody_reads_between(
    schedule, packed_models, simulated_card
):
    """As a draft model reads a prompt: nothing waits for a chunk before the next one's tables are written."""
    packed, found = packed_models["int8"], []
    token_ids = [3 + index % 50 for index in range(20 * 9)]
    with simulated_card(CardConfig(schedule)), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        engine = packed.engine(placed)
        for reads in (False, True):
            kv = engine.residency.new_kv(len(token_ids))
            for _ in range(9):
                logits = engine.runner.forward([Chunk(token_ids, kv, 20)])
                if reads:
                    logits.tolist()
            found.append(logits.tolist())
            kv.close()
    assert found[0] == found[1]

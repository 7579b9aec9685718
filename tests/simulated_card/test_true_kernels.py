"""The kernels themselves, in Triton's interpreter, on a card whose streams run late: one text for a format, everywhere.

A text takes ten seconds: the model is the smallest in which every kernel is launched, as a prompt of more rows than a
step has and as steps that are captured, replayed, and begun ahead.
"""

from __future__ import annotations

import pytest

from localllm.engine.events import FinishedEvent, TokenEvent
from localllm.engine.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.support import FORMATS, PLACEMENTS, blocks, packed_in_formats, text, texts_of_the_cpu

pytestmark = pytest.mark.slow
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}


@pytest.fixture(scope="module")
def small_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("true_kernels")
    write_checkpoint(folder, "llama", layers=2, **SIZES)
    return packed_in_formats(folder, folder)


@pytest.fixture(scope="module")
def expected(small_models):
    return texts_of_the_cpu(small_models, 3)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("schedule", ["lazy", "copies-early", "copies-late"])
def test_the_text_is_that_of_the_cpu(schedule, placement, weights, small_models, expected, simulated_card):
    packed = small_models[weights]
    with simulated_card(CardConfig(schedule), "interpreted") as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, placement), 8)
        placed.wait_until_pinned()
        assert text(packed, placed, 3) == expected[weights]
        assert card.counts["replays"]


def answer(engine, token_ids):
    """Return (tokens that were found in the cache, tokens and their log-probabilities) of a short answer."""
    wish = SamplingParams(max_tokens=3, temperature=0.9, seed=5, ignore_eos=True, logprobs=4)
    events = list(engine.generate(token_ids, wish))
    (end,) = [event for event in events if isinstance(event, FinishedEvent)]
    tokens = [(event.token_id, event.logprob) for event in events if isinstance(event, TokenEvent)]
    return end.usage.cached_tokens, tokens


@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize("length", [66, 97])
@pytest.mark.parametrize("weights", FORMATS)
def test_a_prefix_that_is_found_gives_the_bits_of_one_that_is_computed(weights, length, small_models, simulated_card):
    packed, prompt = small_models[weights], tuple(3 + index * 7 % 200 for index in range(length))
    with simulated_card(CardConfig("lazy"), "interpreted") as card, packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        missed, expected = answer(packed.engine(placed), prompt)
        engine = packed.engine(placed)
        answer(engine, (*prompt[:65], 201))
        found, tokens = answer(engine, prompt)
        assert missed == 0 < found and tokens == expected and len(tokens) == 3
        assert card.counts["replays"]
